#include "lib/weights/layer_record.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <utility>

#include "lib/base/errors.h"

namespace layerd {
namespace {

// Packed layers are filled by so many rows at a time, as far as pieces stay small (lib/layers/packed_feed_forward.h).
constexpr int64_t kBlockRows = 64;
constexpr int64_t kMaxBlockBytes = 4 * kPieceBytes;

int64_t RowsOf(const Tensor& weight) { return weight.rank() == 0 ? 1 : weight.dim(0); }

// Reads one weight; gives up once `failed` is set, which a failure of its own does too.
absl::Status ReadWeight(LayerReader& reader, std::string_view role, const Tensor& outline, std::atomic<bool>& failed,
                        absl::FunctionRef<void(const WeightPiece& piece)> take) {
  const int64_t rows = RowsOf(outline);
  if (rows == 0) return absl::OkStatus();
  const int64_t row_bytes = static_cast<int64_t>(outline.num_bytes()) / rows;
  const int64_t piece_rows = std::min(rows, RowsOfPiece(outline));
  // No exception may leave a part of the arena's work.
  const std::unique_ptr<std::byte[]> buffer(new (std::nothrow) std::byte[piece_rows * row_bytes]);
  absl::Status status = buffer ? absl::OkStatus() : OutOfMemory();
  for (int64_t first = 0; status.ok() && first < rows && !failed; first += piece_rows) {
    const int64_t count = std::min(piece_rows, rows - first);
    const auto bytes = absl::MakeSpan(buffer.get(), static_cast<size_t>(count * row_bytes));
    status = reader.Next(role, bytes);
    if (status.ok()) take({role, first, count, bytes});
  }
  if (!status.ok()) failed = true;
  return status;
}

}  // namespace

absl::StatusOr<Layer> LayerRecord::Read() const {
  try {
    const auto reader = Open();
    if (!reader.ok()) return reader.status();
    Layer layer = info().outline;
    for (const auto& [role, outline] : WeightsOf(info().outline)) {
      Tensor weight = Tensor::Allocate(outline.dtype(), outline.shape());
      auto read = (*reader)->Next(role, absl::MakeSpan(weight.mutable_data(), weight.num_bytes()));
      if (!read.ok()) return read;
      if (auto status = SetWeight(layer, role, std::move(weight)); !status.ok()) return status;
    }
    if (auto status = (*reader)->Finish(); !status.ok()) return status;
    return layer;
  } catch (const std::bad_alloc&) {
    return OutOfMemory();
  }
}

int64_t RowsOfPiece(const Tensor& outline) {
  const int64_t row_bytes =
      std::max<int64_t>(1, static_cast<int64_t>(outline.num_bytes()) / std::max<int64_t>(1, RowsOf(outline)));
  const int64_t rows = std::max<int64_t>(1, kPieceBytes / row_bytes);
  if (rows >= kBlockRows) return rows / kBlockRows * kBlockRows;
  return kBlockRows * row_bytes <= kMaxBlockBytes ? kBlockRows : rows;
}

absl::Status ReadPieces(const LayerRecord& record, const Arena& arena,
                        absl::FunctionRef<void(const WeightPiece& piece)> take) {
  try {
    const auto reader = record.Open();
    if (!reader.ok()) return reader.status();
    const auto weights = WeightsOf(record.info().outline);
    std::vector<absl::Status> statuses(weights.size());
    std::atomic<bool> failed = false;
    arena.For(static_cast<int64_t>(weights.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const auto& [role, outline] = weights[i];
        statuses[i] = ReadWeight(**reader, role, outline, failed, take);
      }
    });
    for (absl::Status& status : statuses) {
      if (!status.ok()) return std::move(status);
    }
    return (*reader)->Finish();
  } catch (const std::bad_alloc&) {
    return OutOfMemory();
  }
}

}  // namespace layerd
