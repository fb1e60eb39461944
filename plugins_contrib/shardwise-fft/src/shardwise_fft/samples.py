"""Sample calls for the oracle."""

from itertools import cycle

import torch

from shardwise.testing.values import made

aten = torch.ops.aten
C64, C128 = torch.complex64, torch.complex128

# (shape, dims): even and uneven over 4, 2 and 3 ranks, empty shards, size one, one dim alone, dims in any order.
CALLS = [
    ((8, 6), [0]),
    ((8, 6), [1]),
    ((5, 7), [1, 0]),
    ((8,), [0]),
    ((7,), [0]),
    ((2,), [0]),
    ((1, 9), [1]),
    ((3, 1, 5), [1, 2]),
    ((4, 6, 8), [0, 1, 2]),
    ((5, 3, 6), [0, 2, 1]),
    ((2, 5, 3), [2, 0]),
    ((3, 4, 2, 5), [1, 2, 3]),
    ((4, 4, 3, 2), [2]),
    ((16,), [0]),
    ((36,), [0]),
    ((2, 32), [1]),
]
FEW = CALLS[2], CALLS[7], CALLS[9]


def _norms():
    return cycle([0, 1, 2])


def _strided(x):
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def complex_samples():
    found = []
    for (shape, dims), norm, forward in zip(CALLS, _norms(), cycle([True, False]), strict=False):
        found.append(((made(shape, C128), dims, norm, forward), {}))
    found += [((made(shape, C64), dims, 1, False), {}) for shape, dims in FEW]
    found += [((_strided(made(shape, C128)), dims, 0, True), {}) for shape, dims in FEW]
    return [*found, ((made((4, 3), C128), [], 0, True), {}), ((made((6, 5), C128).conj(), [0], 0, True), {})]


def real_samples():
    found = []
    for (shape, dims), norm, onesided in zip(CALLS, _norms(), cycle([True, True, False]), strict=False):
        found.append(((made(shape, torch.float64), dims, norm, onesided), {}))
    found += [((made(shape, torch.float32), dims, 1, one), {}) for shape, dims in FEW for one in (True, False)]
    found += [((made(shape, torch.float64), dims, 2, True), {}) for shape, dims in CALLS if len(shape) == 1]
    return [*found, ((_strided(made((5, 3, 6), torch.float64)), [0, 2], 0, True), {})]


def half_spectrum_samples():
    found = []
    for (shape, dims), norm, odd in zip(CALLS, _norms(), cycle([0, 1]), strict=False):
        size = 2 * (shape[dims[-1]] - 1) + odd or 1
        found.append(((made(shape, C128), dims, norm, size), {}))
    found += [((made(shape, C64), dims, 1, 2 * shape[dims[-1]] - 1), {}) for shape, dims in FEW]
    return [*found, ((_strided(made((5, 3, 6), C128)), [0, 2], 0, 10), {})]


def _given(op, samples):
    """The samples with a tensor to fill, of the dtype that the op makes."""
    return lambda: [(args, {"out": torch.ones_like(op(*args))}) for args, _ in samples()]


SAMPLES = {
    aten._fft_c2c.default: complex_samples,
    aten._fft_c2c.out: _given(aten._fft_c2c.default, complex_samples),
    aten._fft_r2c.default: real_samples,
    aten._fft_r2c.out: _given(aten._fft_r2c.default, real_samples),
    aten._fft_c2r.default: half_spectrum_samples,
    aten._fft_c2r.out: _given(aten._fft_c2r.default, half_spectrum_samples),
}
