// Constants of the activation functions, shared by the SIMD code and its scalar twin so that both give the same bits.
// Reproduced by scripts/fit_activation_constants.py.
#ifndef LAYERD_LIB_KERNELS_ACTIVATION_CONSTANTS_H_
#define LAYERD_LIB_KERNELS_ACTIVATION_CONSTANTS_H_

#include <cstdint>

namespace layerd {

// e^y for y ≤ 0: y = k·ln 2 + r with k = round(y / ln 2), |r| ≤ ½ ln 2; e^y = 2ᵏ·eʳ.
//
// Below −708 the argument is held there: 2ᵏ stays a normal float64, and e^−708 ≈ 3.3e−308 times the largest products of
// two float32 is still far below half of the least float32.
inline constexpr double kExpLowest = -708.0;
inline constexpr double kLog2E = 1.4426950408889634;
inline constexpr double kLn2High = 0.6931471805599453;
inline constexpr double kLn2Low = 2.3190468138462996e-17;
// Adding 1.5·2⁵² rounds to an integer, and leaves it in the low bits of the sum in two's complement.
inline constexpr double kRoundToInteger = 0x1.8p52;
inline constexpr int64_t kExponentBias = 1023;
inline constexpr int kMantissaBits = 52;

// eʳ on |r| ≤ ½ ln 2, highest power first. The last two are exactly 1; the rest is the Chebyshev fit of
// (eʳ − 1 − r)/r². Relative error 1.6e-17, before rounding.
inline constexpr double kExpPolynomial[] = {
    2.5100375832561234e-08,
    2.7620075879983367e-07,
    2.7557268480310024e-06,
    2.4801521322368692e-05,
    0.00019841269863040545,
    0.0013888888917196719,
    0.008333333333330065,
    0.041666666666624164,
    0.16666666666666669,
    0.5000000000000001,
    1.0,
    1.0,
};

// Φ(−t) = e^(−t²/2)·M(t) for t ≥ 0, M being half the scaled complementary error function of t/√2 (Mills' ratio but for
// a factor). (t + K)·M(t) is nearly flat in u = (t − K)/(t + K), and fitted there (Chebyshev, 0 ≤ t ≤ 20) with a
// relative error of 2.8e-15; M(t) is the polynomial times 1/(t + K), which u needs anyway. From t = 20 on,
// e^(−t²/2) < 2^−288 makes even the product with FLT_MAX vanish in float32, so M may stay at M(20).
inline constexpr double kMillsK = 5.0;
inline constexpr double kMillsLargest = 20.0;
inline constexpr double kMillsPolynomial[] = {
    1.0900161248368612e-07, 3.899148206753062e-07,  -4.3524571561921714e-07, -2.7806457055687273e-06,
    4.035156174857615e-06,  1.6700702680578257e-05, -4.977769613250105e-05,  -5.938326527396511e-05,
    0.0005449012235652598,  -0.0007978680325979122, -0.00299337693012494,    0.020795066677837894,
    -0.06911863870108097,   0.16502036617514032,    -0.31353315667135206,    0.4953056159699226,
    -0.665382502890057,     0.769193049750063,
};

// gelu_tanh(x) = x·σ(x·(linear + cubic·x²)): 2√(2/π), and that times 0.044715.
inline constexpr double kGeluTanhLinear = 1.5957691216057308;
inline constexpr double kGeluTanhCubic = 0.07135481627260025;

inline constexpr double kQuickGeluSlope = 1.702;

}  // namespace layerd

#endif  // LAYERD_LIB_KERNELS_ACTIVATION_CONSTANTS_H_
