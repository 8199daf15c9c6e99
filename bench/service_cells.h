// The cells of service_bench, each family in a file of its own. Their calls begin when they are measured: `services` must
// have been started by then.
#ifndef LAYERD_BENCH_SERVICE_CELLS_H_
#define LAYERD_BENCH_SERVICE_CELLS_H_

#include <vector>

#include "absl/time/time.h"
#include "bench/cell.h"
#include "bench/services.h"

namespace layerd::bench {

void AddServiceNormCells(const Services& services, int threads, std::vector<Cell>& cells);
void AddServiceStreamCells(const Services& services, int threads, std::vector<Cell>& cells);
void AddServiceFeedForwardCells(const Services& services, int threads, std::vector<Cell>& cells);
void AddServiceOverloadCell(const Services& services, int threads, std::vector<Cell>& cells);

// What that cell measures, for so long in one piece, printed. Answers the exit status of a program: 1 where the cell would
// be wrong.
int RunOverload(const Services& services, int threads, absl::Duration time);

}  // namespace layerd::bench

#endif  // LAYERD_BENCH_SERVICE_CELLS_H_
