"""Sample calls of the Fourier transforms: one dim and several, shards even, uneven and empty."""

import torch

from shardwise.testing.samples import out_variants
from shardwise.testing.values import made

aten = torch.ops.aten
F64, C128 = torch.float64, torch.complex128

SHAPES = [((8, 6), [1]), ((5, 4), [0]), ((4, 3, 5), [1, 2]), ((7,), [0]), ((2, 6, 1), [1])]


def complex_to_complex():
    return [([made(s, C128), dims, norm, norm == 0], {}) for s, dims in SHAPES for norm in (0, 1)]


def real_to_complex():
    return [([made(s, F64), dims, 0, onesided], {}) for s, dims in SHAPES for onesided in (True, False)]


def complex_to_real():
    # The last transformed dim is half a spectrum; of odd and of even sizes.
    return [
        ([made(s, C128), dims, 2, 2 * s[dims[-1]] - odd], {}) for s, dims in SHAPES for odd in (1, 2) if s[dims[-1]] > 1
    ]


SAMPLES = {
    aten._fft_c2c.default: complex_to_complex,
    aten._fft_r2c.default: real_to_complex,
    aten._fft_c2r.default: complex_to_real,
}


SAMPLES |= out_variants(SAMPLES)
