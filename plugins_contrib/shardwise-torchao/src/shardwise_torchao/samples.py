"""Sample calls for the oracle: one scale for all, for each row, for each column, and for blocks."""

import torch

# Defines the operators.
import torchao.quantization  # noqa: F401

from shardwise.testing.samples import made

ao = torch.ops.torchao

# Shapes of tensors and of their scales.
SHAPES = [
    ((8, 6), (1, 1)),
    ((8, 6), ()),
    ((8, 6), (8, 1)),
    ((5, 7), (5, 1)),
    ((5, 7), (1, 7)),
    ((8, 24), (8, 12)),
    ((24, 8), (12, 2)),
    ((3, 12, 8), (3, 12, 2)),
    ((4, 4), (4, 4)),
    ((0, 4), (1, 1)),
    ((9,), (1,)),
]


def scales(shape):
    return made(shape, seed=1).abs() + 0.25


def quantize():
    calls = []
    for shape, of_scale in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            args = [made(shape, dtype), scales(of_scale)]
            calls += [(args, {}), ([*args, torch.float8_e5m2], {})]
    return calls


def dequantize():
    calls = []
    for shape, of_scale in SHAPES:
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            args = [made(shape).to(dtype), scales(of_scale)]
            calls += [(args, {}), ([*args, torch.bfloat16], {})]
    return calls


SAMPLES = {
    ao.quantize_affine_float8_non_decomposed.default: quantize,
    ao.dequantize_affine_float8_non_decomposed.default: dequantize,
}
