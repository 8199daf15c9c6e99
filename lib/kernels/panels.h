// A weight matrix packed for the products of matmul.h: in panels that stream through the caches from one end to the
// other, in its own dtype, so that narrow weights stay narrow in memory.
//
// A panel holds 32 outputs: for each input k in order, the 32 weights w(n, k) side by side. The last panel is filled up
// with zeros. Int8 panels go by blocks of 32 inputs: 32 scales in float16, then the block's 32 · 32 values, each as
// q + 128; the last block is filled up with zeros. A panel does not depend on the CPU it was packed on.
//
// Memory is mapped for itself, in huge pages where the system grants them, and goes back to the system with its last user.
// Matrices that are used together share one mapping, so that more of it is in huge pages.
//
// Threads: const access from any number of threads; Pack…() from several at once for different panels.
#ifndef LAYERD_LIB_KERNELS_PANELS_H_
#define LAYERD_LIB_KERNELS_PANELS_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "lib/base/dtype.h"
#include "lib/kernels/matmul.h"

namespace layerd {

inline constexpr int64_t kPanelOutputs = 32;
// A block of an int8 panel: its scales, then its values.
inline constexpr int64_t kInt8ScaleBytes = kPanelOutputs * 2;
inline constexpr int64_t kInt8BlockBytes = kInt8ScaleBytes + kScaleBlock * kPanelOutputs;
// q + 128 in q's bits: what is unsigned is put into a float's mantissa without arithmetic.
inline constexpr uint8_t kInt8Offset = 0x80;

// So many bytes of zeros. Throws std::bad_alloc.
std::shared_ptr<std::byte> MapHugePages(int64_t bytes);

class Panels {
 public:
  // Empty: no inputs, no outputs.
  Panels() = default;
  // For a matrix of `in` × `out`, both positive, in memory of its own, or in BytesOf() bytes of zeros at `memory`,
  // which is aligned to 64 bytes. Throws std::bad_alloc.
  Panels(DType dtype, int64_t in, int64_t out);
  Panels(DType dtype, int64_t in, int64_t out, std::shared_ptr<std::byte> memory);

  // Bytes that such a matrix takes in panels.
  static int64_t BytesOf(DType dtype, int64_t in, int64_t out);

  DType dtype() const { return dtype_; }
  int64_t in() const { return in_; }
  int64_t out() const { return out_; }
  int64_t panels() const { return (out_ + kPanelOutputs - 1) / kPanelOutputs; }
  int64_t panel_bytes() const { return panel_bytes_; }
  int64_t num_bytes() const { return panels() * panel_bytes_; }
  bool empty() const { return data_ == nullptr; }

  const std::byte* panel(int64_t p) const { return data_.get() + p * panel_bytes_; }
  // Where input k, a multiple of 32, begins in a panel.
  int64_t OffsetOf(int64_t k) const { return InputsBytes(dtype_, k); }

  // Puts the weights of `part`, of this dtype, at inputs first_in … first_in + part.in − 1 and outputs first_out … .
  // Values are put where part.data is given, scales of int8 weights where part.scale is.
  void Pack(const WeightView& part, int64_t first_in, int64_t first_out);

  // The reverse: takes such weights out again, exactly as they were packed, into `part`'s memory (its data and scale are
  // written where they are given).
  void Unpack(const WeightView& part, int64_t first_in, int64_t first_out) const;

 private:
  // Bytes that so many inputs take in a panel.
  static int64_t InputsBytes(DType dtype, int64_t in);

  DType dtype_ = DType::kFloat32;
  int64_t in_ = 0;
  int64_t out_ = 0;
  int64_t panel_bytes_ = 0;
  std::shared_ptr<std::byte> data_;
};

}  // namespace layerd

#endif  // LAYERD_LIB_KERNELS_PANELS_H_
