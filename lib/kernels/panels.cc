#include "lib/kernels/panels.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "lib/kernels/matmul_internal.h"

namespace layerd {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

// Moves the weights [rows][cols] of `part`, whose rows are `stride` elements apart, to where they belong in panels, or
// back. Pieces of 32 by 32, so that neither side is read or written at strides that share few lines of the cache.
template <typename T, typename Move>
void ForEachWeight(const WeightView& part, int64_t stride, const Move& move) {
  const bool out_in = part.layout == WeightLayout::kOutIn;
  constexpr int64_t kPiece = 32;
  for (int64_t n0 = 0; n0 < part.out; n0 += kPiece) {
    const int64_t n1 = std::min(part.out, n0 + kPiece);
    for (int64_t k0 = 0; k0 < part.in; k0 += kPiece) {
      const int64_t k1 = std::min(part.in, k0 + kPiece);
      if (out_in) {
        for (int64_t n = n0; n < n1; ++n) {
          for (int64_t k = k0; k < k1; ++k) move(n, k, n * stride + k);
        }
      } else {
        for (int64_t k = k0; k < k1; ++k) {
          for (int64_t n = n0; n < n1; ++n) move(n, k, k * stride + n * part.step);
        }
      }
    }
  }
}

// Where the weights of elements of type T lie in the panels.
template <typename T>
struct Place {
  std::byte* data;
  int64_t panel_bytes;
  // The weight w(n, k).
  T* At(int64_t n, int64_t k) const {
    std::byte* const panel = data + n / kPanelOutputs * panel_bytes;
    if constexpr (sizeof(T) == 1) {
      return reinterpret_cast<T*>(panel + k / kScaleBlock * kInt8BlockBytes + kInt8ScaleBytes +
                                  k % kScaleBlock * kPanelOutputs + n % kPanelOutputs);
    } else {
      return reinterpret_cast<T*>(panel) + k * kPanelOutputs + n % kPanelOutputs;
    }
  }
  // What is kept of an element's bits, and the reverse.
  static T Kept(T bits) { return sizeof(T) == 1 ? static_cast<T>(bits ^ kInt8Offset) : bits; }
  // The scale of w(n, 32 · block) and those that follow it.
  uint16_t* ScaleAt(int64_t n, int64_t block) const {
    return reinterpret_cast<uint16_t*>(data + n / kPanelOutputs * panel_bytes + block * kInt8BlockBytes) +
           n % kPanelOutputs;
  }
};

template <typename T>
void PackAs(const WeightView& part, int64_t first_in, int64_t first_out, const Place<T>& place) {
  const T* const from = reinterpret_cast<const T*>(part.data);
  ForEachWeight<T>(part, RowStride(part), [&](int64_t n, int64_t k, int64_t index) {
    *place.At(first_out + n, first_in + k) = place.Kept(from[index]);
  });
}

template <typename T>
void UnpackAs(const WeightView& part, int64_t first_in, int64_t first_out, const Place<T>& place) {
  T* const to = reinterpret_cast<T*>(const_cast<std::byte*>(part.data));
  ForEachWeight<T>(part, RowStride(part), [&](int64_t n, int64_t k, int64_t index) {
    to[index] = place.Kept(*place.At(first_out + n, first_in + k));
  });
}

// Calls as(Place<T>()) with T as wide as the dtype.
template <typename As>
void ByWidth(DType dtype, const As& as) {
  switch (SizeOf(dtype)) {
    case 1:
      return as(Place<uint8_t>());
    case 2:
      return as(Place<uint16_t>());
    default:
      return as(Place<uint32_t>());
  }
}

}  // namespace

int64_t Panels::InputsBytes(DType dtype, int64_t in) {
  if (dtype == DType::kInt8) return (in + kScaleBlock - 1) / kScaleBlock * kInt8BlockBytes;
  return in * kPanelOutputs * static_cast<int64_t>(SizeOf(dtype));
}

int64_t Panels::BytesOf(DType dtype, int64_t in, int64_t out) {
  return (out + kPanelOutputs - 1) / kPanelOutputs * InputsBytes(dtype, in);
}

std::shared_ptr<std::byte> MapHugePages(int64_t bytes) {
  // What is large begins at a huge page; the slack that this takes is given back.
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t size = (static_cast<size_t>(bytes) + page - 1) / page * page;
  const size_t slack = size >= kHugePage ? kHugePage : 0;
  void* const mapped = mmap(nullptr, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  std::byte* begin = static_cast<std::byte*>(mapped);
  if (slack > 0) {
    const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(begin) % kHugePage) % kHugePage;
    if (before > 0) munmap(begin, before);
    begin += before;
    if (slack > before) munmap(begin + size, slack - before);
    madvise(begin, size, MADV_HUGEPAGE);  // where the system has none, small pages do as well
  }
  return {begin, [size](std::byte* memory) { munmap(memory, size); }};
}

Panels::Panels(DType dtype, int64_t in, int64_t out) : Panels(dtype, in, out, MapHugePages(BytesOf(dtype, in, out))) {}

Panels::Panels(DType dtype, int64_t in, int64_t out, std::shared_ptr<std::byte> memory)
    : dtype_(dtype), in_(in), out_(out), panel_bytes_(InputsBytes(dtype, in)), data_(std::move(memory)) {}

void Panels::Pack(const WeightView& part, int64_t first_in, int64_t first_out) {
  if (part.data != nullptr) {
    ByWidth(dtype_, [&](auto place) {
      place.data = data_.get();
      place.panel_bytes = panel_bytes_;
      PackAs(part, first_in, first_out, place);
    });
  }
  if (part.scale == nullptr) return;
  const Place<uint8_t> place{data_.get(), panel_bytes_};
  const int64_t blocks = (part.in + kScaleBlock - 1) / kScaleBlock;
  for (int64_t n = 0; n < part.out; ++n) {
    const std::byte* const row = part.scale + n * ScaleStride(part) * 2;
    for (int64_t block = 0; block < blocks; ++block) {
      std::memcpy(place.ScaleAt(first_out + n, first_in / kScaleBlock + block), row + block * 2, 2);
    }
  }
}

void Panels::Unpack(const WeightView& part, int64_t first_in, int64_t first_out) const {
  if (part.data != nullptr) {
    ByWidth(dtype_, [&](auto place) {
      place.data = data_.get();
      place.panel_bytes = panel_bytes_;
      UnpackAs(part, first_in, first_out, place);
    });
  }
  if (part.scale == nullptr) return;
  const Place<uint8_t> place{data_.get(), panel_bytes_};
  const int64_t blocks = (part.in + kScaleBlock - 1) / kScaleBlock;
  for (int64_t n = 0; n < part.out; ++n) {
    std::byte* const row = const_cast<std::byte*>(part.scale) + n * ScaleStride(part) * 2;
    for (int64_t block = 0; block < blocks; ++block) {
      std::memcpy(row + block * 2, place.ScaleAt(first_out + n, first_in / kScaleBlock + block), 2);
    }
  }
}

}  // namespace layerd
