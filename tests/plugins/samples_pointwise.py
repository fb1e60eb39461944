"""Samples of elementwise ops where those made from the schema are illegal, or leave mixed dtypes and shapes out."""

import math
from itertools import product

import cuda_kernels
import torch

from shardwise.testing.samples import generic_samples
from shardwise.testing.values import made

aten = torch.ops.aten
F32, F64, BF16, I64, I32, I8, U8, BOOL, C64 = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
SHAPES = ((5, 7), (8, 6), (4, 1, 3), (1, 2), (0, 3), (9,), ())
PAIRS = (((5, 7), (5, 7)), ((5, 7), (7,)), ((6,), (4, 6)), ((5, 1), (1, 7)), ((3, 5), ()), ((0, 3), (1, 3)))
MIXED = (
    *((F32, BF16), (BF16, F32), (F32, F64), (F32, I64), (I64, F32), (BOOL, F32), (F32, BOOL), (I8, F32), (I8, I64)),
    *((I32, I64), (U8, U8), (I8, I8), (BOOL, BOOL), (BOOL, I64), (C64, F32), (F32, C64), (C64, C64), (F64, F64)),
)


def unary(dtypes, *more, **named):
    """One tensor of each shape and dtype, then further arguments."""
    return [((made(shape, dtype), *more), named) for shape in SHAPES for dtype in dtypes]


def pairs(dtypes, *more, **named):
    """Two tensors that broadcast, of each pair of dtypes."""
    return [((made(a, one), made(b, other, 1), *more), named) for (a, b), (one, other) in product(PAIRS, dtypes)]


def on_grids(shape, *more, dtype=I32):
    """Tensors of each shape with the step and the zero point of a grid."""
    step, zero = torch.full(shape, 0.1), torch.full(shape, 3, dtype=dtype)
    return [(made(s), step, zero, *more, -8, 7) for s in SHAPES]


def by_channel(dtype):
    """The same with a grid for each channel."""
    shapes = [(s, axis) for s in SHAPES for axis in range(len(s)) if 0 not in s]
    return [(made(s), made((s[a],), F32).abs() + 0.1, made((s[a],), I64).to(dtype), a, -8, 7) for s, a in shapes]


def grid(channels):
    """Running extremes, steps and zero points."""
    zeros = torch.zeros(channels)
    return zeros - 1, zeros + 1, zeros + 0.1, zeros.to(I32)


def integers(*more):
    return [
        *(((made(s, dtype), *more), {}) for s in SHAPES for dtype in (I64, U8)),
        ((made((6, 8), I32).t(), *more), {}),
    ]


def shifts():
    return [((made(a, I64), made(b, I64, 1).abs()), {}) for a, b in PAIRS]


def mixed(op):
    """What the schema gives, and tensors of two dtypes."""
    count = sum(str(a.type) == "Tensor" and not a.is_out for a in op._schema.arguments)
    alike = [((made((5, 7), one), *(made((5, 7), other, i) for i in range(1, count))), {}) for one, other in MIXED]
    return [*generic_samples(op), *alike]


def leaning():
    """``lerp`` by weights on both sides of its branch, 1/2: from infinity, only smaller ones give NaN."""
    weight = torch.linspace(0.1, 0.9, 9)
    ends = (torch.full((9,), math.inf), made((9,))), (made((9,)), torch.full((9,), -math.inf))
    return [*mixed(aten.lerp.Tensor), *(((*pair, weight), {}) for pair in ends)]


def scalars(op):
    """What the schema gives, and every kind of number on every kind of tensor."""
    return [
        *generic_samples(op),
        *(
            ((made((5, 7), dtype), number), {})
            for dtype in (F32, BF16, I64, I8, BOOL, C64)
            for number in (3, -2, 0.5, 1j, 0)
        ),
        ((made((5, 7), BOOL), True), {}),
    ]


def alphas(op):
    """:func:`mixed`, with alpha of either sign."""
    return [*mixed(op), *((args, {"alpha": alpha}) for args, _ in pairs([(F32, F32), (I64, I64)]) for alpha in (-2, 3))]


def chosen():
    """``where``: the condition broadcasts too."""
    return [
        ((made(c, BOOL, 2), made(a, one), made(b, other, 1)), {})
        for (a, b), c, (one, other) in product(
            PAIRS[:3], ((), (6, 1, 1)), ((F32, F32), (F32, I64), (I64, I64), (BOOL, BOOL))
        )
    ] + [((made((5, 7), BOOL, 2), made((5, 7), one), made((5, 7), other, 1)), {}) for one, other in MIXED]


def bounded():
    """``clamp`` with either bound or both, of either type of number."""
    return [
        ((made(shape, dtype), low, high), {})
        for shape in SHAPES
        for dtype in (F32, BF16, I64)
        for low, high in ((-1, None), (None, 1), (-0.5, 0.5), (1, -1))
    ]


def bounded_by_tensors():
    return [
        ((made((5, 7)), made(a, F32, 1), made(b, F32, 2)), {})
        for a, b in (((5, 7), (7,)), ((5, 1), ()), ((7,), (5, 7)))
    ] + [((made((5, 7)), made((7,), F32, 1), None), {}), ((made((5, 7)), None, made((5, 1), F32, 1)), {})]


def rounded(samples):
    """The same calls under each rounding mode."""
    return [(args, {"rounding_mode": mode}) for args, _ in samples for mode in (None, "trunc", "floor")]


def with_out(samples, dtype):
    """The same calls with an ``out=`` of the right shape in a dtype that the generic samples do not try."""
    calls = []
    for args, named in samples:
        shape = torch.broadcast_shapes(*(a.shape for a in args if isinstance(a, torch.Tensor)))
        calls.append((args, {**named, "out": torch.full(shape, 3, dtype=dtype)}))
    return calls


def fractions():
    return [
        ((made(shape),), {"mantissa": torch.full(shape, 2.0), "exponent": torch.full(shape, 9, dtype=I32)})
        for shape in SHAPES
    ]


FLOATS = [(F32, F32), (F64, F64)]
OPERATORS = (aten.__lshift__, aten.__rshift__, aten.__ilshift__, aten.__irshift__)
HALVES = (((5, 6), 1), ((6, 5), 0), ((2, 3, 4), -1), ((0, 4), 1), ((8,), 0))
HALVED = (((5, 3), (5, 6), 1), ((3, 5), (6, 5), 0), ((2, 3, 2), (2, 3, 4), -1), ((0, 2), (0, 4), 1))
# (batch, width of the hidden state): even and uneven shards of the batch, and more ranks than sequences
CELLS = [(8, 3), (5, 2), (1, 4)]


def states(batch, width, *times):
    """Tensors of ``batch`` rows, so many times as wide as the hidden state."""
    return [made((batch, n * width), seed=seed) for seed, n in enumerate(times)]


def biases(width, gates):
    return [[None, None], [made((gates * width,), seed=5), made((gates * width,), seed=6)]]


def lstm_backwards():
    samples = []
    for number, (batch, width) in enumerate([*CELLS, *CELLS]):
        *gates, cx, grad_hy, grad_cy = states(batch, width, 4, 4, 1, 1, 1)
        _, cy, workspace = cuda_kernels.lstm_cell(*gates, cx)
        grads = ([grad_hy, grad_cy], [None, grad_cy], [grad_hy, None])[number % 3]
        samples.append(((*grads, cx, cy, workspace, True), {}))
    return samples


def gru_backwards():
    return [
        ((states(*sizes, 1)[0].cos(), cuda_kernels.gru_cell(*states(*sizes, 3, 3, 1))[1], has_bias), {})
        for sizes in CELLS
        for has_bias in (True, False)
    ]


SAMPLES = {
    aten._thnn_fused_lstm_cell.default: lambda: [
        ((*states(b, w, 4, 4, 1), *of_gates), {}) for b, w in CELLS for of_gates in biases(w, 4)
    ],
    aten._thnn_fused_lstm_cell_backward_impl.default: lstm_backwards,
    aten._thnn_fused_gru_cell.default: lambda: [
        ((*states(b, w, 3, 3, 1), *of_gates), {}) for b, w in CELLS for of_gates in biases(w, 3)
    ],
    aten._thnn_fused_gru_cell_backward.default: gru_backwards,
    **{op: (lambda op=op: alphas(op)) for op in (aten.add.Tensor, aten.sub.Tensor)},
    **{
        op: (lambda op=op: mixed(op))
        for op in (
            *(aten.mul.Tensor, aten.div.Tensor, aten.rsub.Tensor, aten.maximum.default, aten.minimum.default),
            *(aten.lerp.Scalar, aten.addcmul.default, aten.addcdiv.default),
        )
    },
    aten.lerp.Tensor: leaning,
    **{
        op: (lambda op=op: scalars(op))
        for op in (aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar, aten.mul.Scalar, aten.div.Scalar)
    },
    aten.where.self: chosen,
    aten.div.Tensor_mode: lambda: rounded(pairs([(F32, F32), (I64, I64)])),
    aten.div.Scalar_mode: lambda: rounded([*unary([F32, BF16, I64], 2), *unary([F32], 0)]),
    aten.clamp.default: bounded,
    aten.clip.default: bounded,
    aten.clamp.Tensor: bounded_by_tensors,
    aten.clip.Tensor: bounded_by_tensors,
    **{op: lambda: pairs([(I64, I64), (I32, I64)]) for op in (aten.gcd.default, aten.lcm.default)},
    **dict.fromkeys(
        (aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor),
        lambda: pairs([(I64, I64), (BOOL, BOOL), (U8, I32)]),
    ),
    aten.bitwise_not.default: lambda: unary([I64, U8, BOOL]),
    **dict.fromkeys((aten.bitwise_left_shift.Tensor, aten.bitwise_right_shift.Tensor), shifts),
    **dict.fromkeys((p.Tensor for p in OPERATORS), shifts),
    **dict.fromkeys((p.Scalar for p in OPERATORS), lambda: integers(2)),
    **dict.fromkeys(
        (aten.bitwise_left_shift.Tensor_Scalar, aten.bitwise_right_shift.Tensor_Scalar), lambda: integers(2)
    ),
    aten.polygamma.default: lambda: [((n, made(shape).abs() + 0.5), {}) for n in (0, 1, 2) for shape in SHAPES],
    aten.polygamma_.default: lambda: [((made(shape).abs() + 0.5, n), {}) for n in (0, 1, 2) for shape in SHAPES],
    aten.mvlgamma.default: lambda: [((made(shape).abs() + 1.5, 2), {}) for shape in SHAPES],
    aten.float_power.Tensor_Tensor_out: lambda: with_out(pairs([(F32, F32), (I64, F32)]), F64),
    aten.float_power.Tensor_Scalar_out: lambda: with_out(unary([F32, I64], 2), F64),
    aten.float_power.Scalar_out: lambda: [((2, *args), named) for args, named in with_out(unary([F32, I64]), F64)],
    aten.float_power_.Tensor: lambda: pairs([(F64, F32), (F64, I64)]),
    aten.float_power_.Scalar: lambda: unary([F64], 3),
    aten.polar.default: lambda: pairs(FLOATS),
    aten.polar.out: lambda: with_out(pairs([(F32, F32)]), C64),
    aten.complex.default: lambda: pairs(FLOATS),
    aten.complex.out: lambda: with_out(pairs([(F32, F32)]), C64),
    aten.conj_physical.default: lambda: unary([F32, C64]),
    aten.frexp.Tensor_out: fractions,
    aten.isin.Tensor_Tensor: lambda: [
        ((made(s, I64), made(t, I64, 1)), {}) for s in SHAPES for t in ((4,), (2, 3), (0,))
    ],
    aten.isin.Tensor_Scalar: lambda: unary([I64, F32], 2),
    aten.fake_quantize_per_tensor_affine_cachemask.default: lambda: unary([F32], 0.1, 3, -8, 7),
    aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default: lambda: [
        (args, {}) for n in ((1,), ()) for args in on_grids(n, torch.ones(n, dtype=I64))
    ],
    aten._fake_quantize_learnable_per_tensor_affine.default: lambda: [(args, {}) for args in on_grids((1,), dtype=F32)],
    aten.fake_quantize_per_channel_affine_cachemask.default: lambda: [(args, {}) for args in by_channel(I32)],
    aten._fake_quantize_learnable_per_channel_affine.default: lambda: [(args, {}) for args in by_channel(F32)],
    aten._fake_quantize_learnable_per_tensor_affine_backward.default: lambda: [
        ((args[0].cos(), *args), {}) for args in on_grids((1,), dtype=F32)
    ],
    aten._fake_quantize_learnable_per_channel_affine_backward.default: lambda: [
        ((args[0].cos(), *args), {})
        for args in by_channel(F32)
        if args[0].ndim > 1  # torch adds up the gradients of all channels where there is no other dim
    ],
    aten._fused_moving_avg_obs_fq_helper.default: lambda: [
        ((made((5, 6)), *(torch.ones(1, dtype=I64),) * 2, *observed, 0.1, -8, 7, axis, by_row), {})
        for observed, axis, by_row in ((grid(1), -1, False), (grid(5), 0, True), (grid(6), 1, True))
    ],
    aten.glu.default: lambda: [((made(s), d), {}) for s, d in HALVES],
    aten.glu_backward.default: lambda: [((made(half), made(s, F32, 1), d), {}) for half, s, d in HALVED],
    aten.glu_jvp.default: lambda: [((made(half), made(s, F32, 1), made(s, F32, 2), d), {}) for half, s, d in HALVED],
    aten.glu_backward_jvp.default: lambda: [
        ((made(s), made(half, F32, 1), made(s, F32, 2), made(half, F32, 3), made(s, F32, 4), d), {})
        for half, s, d in HALVED
    ],
}
