/* What a plain C program writes, compiled with -O3 -march=native -ffast-math -fopenmp: this file alone, and not linked
   with -ffast-math, which would turn denormals off for the whole process. */
#include <math.h>
#include <stdint.h>

void PlainGating(const float* gate, const float* up, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

static void NormRow(const float* restrict in, const float* restrict gamma, float* restrict out, int64_t dim,
                    float epsilon) {
  float sum = 0;
  for (int64_t i = 0; i < dim; ++i) sum += in[i] * in[i];
  const float inverse = 1.0f / sqrtf(sum / (float)dim + epsilon);
  for (int64_t i = 0; i < dim; ++i) out[i] = in[i] * inverse * gamma[i];
}

void PlainRmsNorm(const float* in, const float* gamma, float* out, int64_t rows, int64_t dim, float epsilon,
                  int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 1 && threads > 1)
  for (int64_t row = 0; row < rows; ++row) NormRow(in + row * dim, gamma, out + row * dim, dim, epsilon);
}
