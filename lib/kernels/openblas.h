// OpenBLAS, opened at run time: the only file that knows it.
//
// It is not linked, since the core type that it runs with is chosen while it is loaded, from OPENBLAS_CORETYPE, and its
// own choice on CPUs newer than it is Prescott (docs/numerics.md); what is linked is loaded before any code of ours.
//
// Threads: Load() sets environment variables for a moment, so call it while no other thread reads the environment; the
// rest from any number of threads.
#ifndef LAYERD_LIB_KERNELS_OPENBLAS_H_
#define LAYERD_LIB_KERNELS_OPENBLAS_H_

#include <cstdint>
#include <string>

namespace layerd::openblas {

struct Library {
  bool loaded = false;
  std::string error;      // why it was not loaded
  std::string version;    // what openblas_get_config() says
  std::string core;       // what openblas_get_corename() says
  std::string requested;  // the core type that we asked for, or empty
};

// Loads the library once, with one thread of its own; every call returns the same. A library that the process had
// loaded before keeps its core type, and is set to one thread.
const Library& Load();

// y[m][n] (+)= Σₖ x[k][m] · w(k, n), for k < depth: added to y if `accumulate`, or put there. w is [depth, cols], or
// [cols, depth] if `w_transposed`; the strides are between rows, in elements. Runs on the calling thread; waits while
// as many callers as there are CPUs are inside, since the library breaks down under very many. Needs Load().loaded.
void Sgemm(int64_t rows, int64_t cols, int64_t depth, const float* x, int64_t x_stride, const float* w,
           int64_t w_stride, bool w_transposed, bool accumulate, float* y, int64_t y_stride);

// How often Sgemm() was called: a test that means to test OpenBLAS can see that it did.
int64_t Calls();

}  // namespace layerd::openblas

#endif  // LAYERD_LIB_KERNELS_OPENBLAS_H_
