#!/usr/bin/env python3
"""Reproduces the polynomials of lib/kernels/activation_constants.h, and prints their errors.

Needs python3-mpmath; nothing in the build or the tests does. Run: /usr/bin/python3 scripts/fit_activation_constants.py
"""

from mpmath import chebyfit, cos, erfc, exp, log, mp, mpf, pi, polyval, sqrt

mp.dps = 40

MILLS_K = mpf(5)  # of 2 … 5, the one with the smallest error at this degree
MILLS_MAX = mpf(20)  # beyond it x·Φ(x)·FLT_MAX is below half the least float32
MILLS_DEGREE = 17
EXP_DEGREE = 11


def mills(t):
    """Φ(−t) · e^(t²/2), half the scaled complementary error function of t/√2."""
    return exp(t * t / 2) * erfc(t / sqrt(mpf(2))) / 2


def mills_of_u(u):
    """(t + K)·M(t) as a function of u = (t − K)/(t + K): smooth and nearly flat, so a polynomial in u fits it."""
    t = MILLS_K * (1 + u) / (1 - u)
    return (t + MILLS_K) * mills(t)


def exp_rest(r):
    """(eʳ − 1 − r)/r², by its series: the first two coefficients of the exponential stay exactly 1."""
    return sum(r**k / mp.factorial(k + 2) for k in range(30))


def points(low, high, count=500):
    return [(low + high) / 2 + (high - low) / 2 * cos(pi * i / (count - 1)) for i in range(count)]


def show(name, highest_first):
    print(f"inline constexpr double {name}[] = {{")
    for c in highest_first:
        print(f"    {float(c)!r},")
    print("};")


def rounded(coefficients):
    return [mpf(float(c)) for c in coefficients]


def main():
    half_ln2 = log(mpf(2)) / 2
    rest = rounded(chebyfit(exp_rest, [-half_ln2, half_ln2], EXP_DEGREE - 1))
    show("kExpPolynomial", rest)
    error = max(abs((1 + r + r * r * polyval(rest, r)) / exp(r) - 1) for r in points(-half_ln2, half_ln2))
    print("// exp: greatest relative error of the polynomial", mp.nstr(error, 3))

    u_max = (MILLS_MAX - MILLS_K) / (MILLS_MAX + MILLS_K)
    fit = rounded(chebyfit(mills_of_u, [-1, u_max], MILLS_DEGREE + 1))
    show("kMillsPolynomial", fit)
    error = max(abs(polyval(fit, u) / mills_of_u(u) - 1) for u in points(mpf(-1), u_max))
    print("// Mills ratio: greatest relative error of the polynomial", mp.nstr(error, 3))

    ln2_high = mpf(float(log(mpf(2))))
    print("// ln 2 in two doubles:", repr(float(ln2_high)), repr(float(log(mpf(2)) - ln2_high)))
    print("// log2(e):", repr(float(1 / log(mpf(2)))))
    root = sqrt(2 / pi)
    print("// 2√(2/π), and that times 0.044715:", repr(float(2 * root)), repr(float(2 * root * mpf("0.044715"))))


if __name__ == "__main__":
    main()
