// Error reports between their message and lib. Threads: pure functions.
#ifndef LAYERD_WIRE_REPORT_CODEC_H_
#define LAYERD_WIRE_REPORT_CODEC_H_

#include "layerd/v1/layer_service.pb.h"
#include "lib/reference/error_report.h"

namespace layerd::wire {

void EncodeReport(const ErrorReport& report, v1::ErrorReport& message);
ErrorReport DecodeReport(const v1::ErrorReport& message);

}  // namespace layerd::wire

#endif  // LAYERD_WIRE_REPORT_CODEC_H_
