// How a layer gets from its files into memory: norms as they are, feed-forward layers by pieces into panels.
#ifndef LAYERD_LIB_RESIDENT_LAYER_PREPARATION_H_
#define LAYERD_LIB_RESIDENT_LAYER_PREPARATION_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "lib/base/parallel.h"
#include "lib/resident/layer_memory.h"
#include "lib/resident/layer_source.h"
#include "lib/weights/layer_record.h"

namespace layerd {

// Bytes that the layer takes once it is prepared. `info` must be usable. Threads: any.
int64_t PreparedBytes(const LayerInfo& info);

// Reads the weights of `record`, which must be usable; the work is divided over the arena. While it lasts, it takes
// PreparedBytes() and a piece of a weight (ReadPieces) for each thread. What it gives holds `claim` until the last of the
// layer's weights is let go. The content hash is the record's, or computed where that knows none. Errors: those of
// LayerRecord::Read(). Threads: any.
absl::StatusOr<std::shared_ptr<const PreparedLayer>> PrepareLayer(const LayerRecord& record, const Arena& arena,
                                                                  LayerMemory::Claim claim);

}  // namespace layerd

#endif  // LAYERD_LIB_RESIDENT_LAYER_PREPARATION_H_
