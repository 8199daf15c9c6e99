// What the kernels' own code needs of the activation functions beyond activation.h.
#ifndef LAYERD_LIB_KERNELS_ACTIVATION_INTERNAL_H_
#define LAYERD_LIB_KERNELS_ACTIVATION_INTERNAL_H_

#include <cstdint>

#include "lib/kernels/activation.h"

namespace layerd {

// out[i] = act(in[i]) before it is rounded to float32.
void ActivateFloat64(const ActivationFunction& act, const float* in, double* out, int64_t n);

// The scalar twins. `up` may be null: then only the gate is limited and activated.
void ApplyGatingScalar(const Gating& gating, const float* gate, const float* up, float* out, int64_t n);
void ActivateFloat64Scalar(const ActivationFunction& act, const float* in, double* out, int64_t n);

}  // namespace layerd

#endif  // LAYERD_LIB_KERNELS_ACTIVATION_INTERNAL_H_
