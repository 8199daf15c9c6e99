// Stands in for OpenBLAS where a test wants a library that is broken: FAKE_WRONG multiplies wrongly; FAKE_INCOMPLETE has no
// products at all; otherwise it is right, but sums in another order than ours.
#include <stddef.h>

char* openblas_get_config(void) { return "OpenBLAS fake"; }
char* openblas_get_corename(void) { return "Fake"; }
void openblas_set_num_threads(int n) { (void)n; }

#ifndef FAKE_INCOMPLETE
void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a, int lda,
                 const float* b, int ldb, float beta, float* c, int ldc) {
  (void)order;
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      double sum = 0;
      for (int p = k; p-- > 0;) {
        const float left = trans_a == 112 ? a[(size_t)p * lda + i] : a[(size_t)i * lda + p];
        const float right = trans_b == 112 ? b[(size_t)j * ldb + p] : b[(size_t)p * ldb + j];
        sum += (double)left * right;
      }
      float* to = &c[(size_t)i * ldc + j];
      *to = alpha * (float)sum + (beta == 0 ? 0 : beta * *to);
#ifdef FAKE_WRONG
      if (i == 8 && j == 16) *to += 1;  // one element of a larger product
#endif
    }
  }
}
#endif
