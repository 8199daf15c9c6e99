"""The layers' formulas in numpy's long double or float64, the bounds of docs/numerics.md, and seeded tensors made from
the comment of lib/layers/seeded.h alone: what golden_test.py holds the daemon to. Nothing here is layerd's code.
"""
import math

import numpy as np

import harness

# Binary digits, and the exponent of the least positive number.
FORMATS = {harness.FLOAT32: (24, -149), harness.FLOAT16: (11, -24), harness.BFLOAT16: (8, -133)}


def ulp(exact, dtype=harness.FLOAT32):
    """The distance of neighbouring numbers of `dtype` around `exact`; below the normal numbers, the least one."""
    digits, least = FORMATS[dtype]
    exact = np.asarray(exact, np.float64)
    exponent = np.where(exact == 0, -2000, np.frexp(exact)[1])  # |exact| = m · 2^exponent with m in [½, 1)
    return np.ldexp(1.0, np.maximum(exponent - digits, least))


class Norm:
    """RMSNorm or LayerNorm of the last `axes` axes of x: output, mean and r = 1/√(mean(…²) + ε), in long double."""

    def __init__(self, kind, x, gamma=None, beta=None, epsilon=0.0, axes=1, gamma_offset=0.0):
        self.kind = kind
        x = np.asarray(x, np.longdouble)
        over = tuple(range(x.ndim - axes, x.ndim))
        self.width = math.prod(x.shape[i] for i in over)
        self.gamma = np.longdouble(1)
        if gamma is not None:
            self.gamma = np.asarray(gamma, np.longdouble) + np.longdouble(gamma_offset)
        self.beta = np.longdouble(0) if beta is None else np.asarray(beta, np.longdouble)
        self.greatest = np.abs(x).max(axis=over, keepdims=True)
        self.mean = x.mean(axis=over, keepdims=True)
        centred = x - self.mean if kind == 'layer_norm' else x
        square = (centred * centred).mean(axis=over, keepdims=True) + np.longdouble(epsilon)
        self.r = np.where(square == 0, 0, 1 / np.sqrt(np.where(square == 0, 1, square)))
        self.output = centred * self.r * self.gamma + self.beta

    def bound(self, dtype=harness.FLOAT32):
        """N3: one rounding, and for LayerNorm what float64 loses where the mean cancels."""
        bound = 0.501 * ulp(self.output, dtype)
        if self.kind == 'layer_norm':
            terms = self.greatest * self.r * np.abs(self.gamma) + np.abs(self.beta)
            bound = bound + (self.width / 16 + 8) * 2.0**-52 * terms
        return bound


def sigmoid(x):
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


ACTIVATIONS = {
    'identity': lambda x: x,
    'sigmoid': sigmoid,
    'relu': lambda x: np.maximum(x, 0),  # keeps NaN
    'gelu': lambda x: x * 0.5 * np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2)),
    # ½(1 + tanh u) = σ(2u), which does not cancel.
    'gelu_tanh': lambda x: x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
    'silu': lambda x: x * sigmoid(x),
}


def activation(name, x):
    return ACTIVATIONS[name](np.asarray(x, np.float64))


def product_bound(x, weight):
    """N4 for x·Wᵀ, weight [out, in]."""
    depth = weight.shape[1]
    sums = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(weight, np.float64)).T
    return (256 + math.ceil(depth / 256)) * 2.0**-24 * sums + depth * 2.0**-150


MASK = (1 << 64) - 1


def seeded(seed, name, shape, scale, offset=0.0):
    """float32(offset + unit · scale)."""
    key = 14695981039346656037
    for byte in name.encode():
        key = ((key ^ byte) * 1099511628211) & MASK
    i = np.arange(1, math.prod(shape) + 1, dtype=np.uint64)
    with np.errstate(over='ignore'):
        z = np.uint64((seed ^ key) & MASK) + i * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    unit = ((z >> np.uint64(40)).astype(np.int64) - 2**23) / 2.0**23
    return (offset + unit * scale).astype(np.float32).reshape(shape)
