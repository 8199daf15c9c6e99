// Products of rows of x with one or two weight matrices, whose values go through a tail before they leave the cache.
//
// Every output is a sum in the order of matmul.h, whatever the form of the weights, and then its bias. The tail is
// called once for every tile of the outputs, on the thread that made it; a tile is a rectangle of y, of both matrices'
// where there are two. What a tail does is up to the layer: activation and gating, narrowing, storing.
//
// Threads: any number at once; the work is divided over the arena. Each thread uses its own Scratch, at most 4 MiB.
#ifndef LAYERD_LIB_KERNELS_PRODUCT_H_
#define LAYERD_LIB_KERNELS_PRODUCT_H_

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "lib/base/parallel.h"
#include "lib/kernels/matmul.h"
#include "lib/kernels/panels.h"
#include "lib/kernels/row_blocks.h"

namespace layerd {

// A matrix and what is added to its outputs.
struct Factor {
  const Panels* panels = nullptr;  // packed; else
  WeightView view{};               // as it came
  const float* bias = nullptr;     // [out], or null

  DType dtype() const { return panels != nullptr ? panels->dtype() : view.dtype; }
  int64_t in() const { return panels != nullptr ? panels->in() : view.in; }
  int64_t out() const { return panels != nullptr ? panels->out() : view.out; }
};

// Rows [row, row + rows) and outputs [col, col + cols) of y. `first` and `second` (null: one matrix only) hold them
// row by row, `stride` ≥ cols floats apart; what is there beyond cols, up to rows · stride floats in all, may be read
// and written, and means nothing.
struct ProductTile {
  int64_t row;
  int64_t rows;
  int64_t col;
  int64_t cols;
  int64_t stride;
  float* first;
  float* second;
};

using ProductTail = absl::FunctionRef<void(const ProductTile&)>;

// Calls `tail` for tiles that cover all rows of x and all outputs once. `second` has the sizes of `first`, or is null.
// Tiles are whole groups of x's rows, and columns that begin at a multiple of 32. No rows and no outputs do nothing;
// without inputs y is the bias. The tail must not use the thread's Scratch.
//
// x is in groups of ProductGroupRows(): OpenBLAS does large float32 products of weights as they came where
// AllowOpenBlas(true) was called, and our own kernels the rest, and everything where a SIMD target was forced.
void Product(const Arena& arena, const RowBlocks& x, const Factor& first, const Factor* second, ProductTail tail);

// The size of the groups in which Product() wants so many rows for these factors.
int64_t ProductGroupRows(int64_t rows, const Factor& first, const Factor* second);

// Only once its self-test has passed. Threads: any.
void AllowOpenBlas(bool allowed);

}  // namespace layerd

#endif  // LAYERD_LIB_KERNELS_PRODUCT_H_
