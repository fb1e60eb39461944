"""Sample calls of the views plugin: even, uneven and empty shards, size-1 and size-0 dims, other strides."""

import torch

from shardwise.testing.values import made

aten = torch.ops.aten
BF16, I64, BOOL = torch.bfloat16, torch.int64, torch.bool


def turned(shape, dtype=torch.float32):
    """A tensor with its first two dims swapped in memory."""
    return made((shape[1], shape[0], *shape[2:]), dtype).transpose(0, 1)


# (shape of the operand, size asked for)
REGROUPED = [
    ((8, 6), (48,)),
    ((48,), (8, 6)),
    ((8, 6), (6, 8)),
    ((2, 6), (4, 3)),
    ((5, 8), (5, 2, 4)),
    ((5, 7), (5, 1, 7)),
    ((4, 1, 3), (12,)),
    ((1, 12), (1, 3, 4)),
    ((6, 5, 8), (30, 8)),
    ((6, 5, 8), (6, 40)),
    ((6, 4, 5), (4, 6, 5)),
    ((12, 35), (4, 3, 5, 7)),
    ((4, 6, 10), (24, 5, 2)),
    ((1,), ()),
    ((), (1, 1)),
    ((0, 6), (0, 2, 3)),
    ((4, 0), (4, 0, 3)),
    ((4, 0, 3), (0,)),
    ((8, 6), (-1, 3)),
    ((7,), (7,)),
]


def regrouped():
    calls = [([made(shape), size], {}) for shape, size in REGROUPED]
    calls += [([made((8, 6), dtype), (2, 4, 6)], {}) for dtype in (BF16, I64, BOOL)]
    return [*calls, ([turned((8, 6)), (8, 2, 3)], {}), ([turned((4, 6, 5)), (4, 6, 5, 1)], {})]


def aliased():
    return [
        ([x, size, made(size).stride()], {})
        for x, size in (
            (made((8, 6)), (48,)),
            (made((8, 6)), (2, 4, 6)),
            (made((5, 7)), (5, 7, 1)),
            (made((0, 6)), (0, 3, 2)),
        )
    ]


def expanded():
    sizes = [
        ((5, 7), (5, 7)),
        ((5, 1), (5, 4)),
        ((1, 6), (-1, 6)),
        ((4, 1, 8), (2, 4, 3, -1)),
        ((), (3, 4)),
        ((1,), (0,)),
        ((0, 1), (0, 5)),
        ((3,), (2, 8, 3)),
    ]
    return [([made(shape, dtype), size], {}) for shape, size in sizes for dtype in (torch.float32, I64)]


def repeated():
    counts = [
        ((5, 7), (1, 1)),
        ((5, 6), (2, 1)),
        ((8,), (3, 1)),
        ((4, 1, 3), (1, 2, 1)),
        ((), (2,)),
        ((6, 4), (0, 1)),
        ((0, 3), (1, 2)),
    ]
    return [([made(shape, dtype), count], {}) for shape, count in counts for dtype in (torch.float32, BF16)]


def unsqueezed():
    return [([made(s), d], {}) for s, d in (((5, 8), 0), ((5, 8), 1), ((5, 8), -1), ((), 0), ((0, 3), -2), ((1, 6), 1))]


SQUEEZED = [(1, 6), (4, 3), (1, 1), (5, 1, 8), (2, 1, 4, 1), (), (0, 1), (1, 7, 3)]


def squeezed():
    return [([made(shape, dtype)], {}) for shape in SQUEEZED for dtype in (torch.float32, BOOL)]


def squeezed_dim():
    return [([made(shape), d], {}) for shape in SQUEEZED for d in ({0, len(shape) // 2, -1} if shape else {0})]


def squeezed_dims():
    return [([made(shape), d], {}) for shape in SQUEEZED if len(shape) > 1 for d in ([0], [0, -1], [1], [])]


def permuted():
    orders = [((5, 8), (1, 0)), ((5, 8), (0, -1)), ((4, 1, 6), (2, 0, 1)), ((0, 3, 7), (-1, 0, 1)), ((), ())]
    calls = [([made(shape, dtype), order], {}) for shape, order in orders for dtype in (torch.float32, BOOL)]
    return [*calls, ([turned((6, 8)), (1, 0)], {})]


def transposed():
    pairs = [((5, 8), 0, 1), ((5, 8), -1, -2), ((4, 6, 7), 0, -1), ((4, 6, 7), 1, 1), ((0, 3), 0, 1), ((), 0, -1)]
    return [([made(shape), a, b], {}) for shape, a, b in pairs]


def flipped():
    return [
        ([made(shape, dtype)], {}) for shape in ((5, 8), (1, 6), (7,), (), (0, 4)) for dtype in (torch.float32, I64)
    ]


DIAGONALS = [
    ((6, 6), ()),
    ((4, 7), (1,)),
    ((5, 8, 3), (0, 0, 2)),
    ((8, 3, 5), (-1, -2, -1)),
    ((0, 4), ()),
    ((2, 3, 9), (4, 0, 1)),
]


def diagonal():
    return [([made(shape), *args], {}) for shape, args in DIAGONALS]


def diagonal_backward():
    calls = []
    for shape, args in DIAGONALS:
        full = [*args, *(0, 0, 1)[len(args) :]]
        calls.append(([made(aten.diagonal(made(shape), *args).shape), list(shape), *full], {}))
    return calls


def diag_embed():
    return [
        ([made(s), *a], {})
        for s, a in (((6,), ()), ((5, 8), (1,)), ((4, 3), (0, 0, 2)), ((8, 1, 2), (-2, 1, 3)), ((0, 2), ()))
    ]


WINDOWS = [((5, 9), 1, 3, 2), ((8, 6), 0, 2, 1), ((4, 3, 7), -1, 7, 3), ((6,), 0, 4, 4), ((0, 5), 1, 2, 2)]


def windows():
    return [([made(shape), *args], {}) for shape, *args in WINDOWS] + [([made(()), 0, 1, 1], {})]


def windows_backward():
    return [([made(aten.unfold(made(shape), *args).shape), list(shape), *args], {}) for shape, *args in WINDOWS]


def complex_tensors():
    return [([made(shape, torch.complex64)], {}) for shape in ((5, 8), (4, 1, 3), (7,), (), (0, 3))]


def pairs():
    return [([made((*shape, 2))], {}) for shape in ((5, 8), (4, 1, 3), (7,), (), (0, 3))]


def negated():
    return [([made(shape, dtype)], {}) for shape in ((5, 8), (1, 3), ()) for dtype in (torch.float32, torch.complex64)]


def retyped():
    kinds = [(torch.float32, torch.int32), (torch.float32, BF16), (BF16, torch.float32), (I64, I64)]
    return [([made(shape, a), b], {}) for shape in ((5, 8), (4, 1, 6), (0, 2)) for a, b in kinds]


def strided():
    x, wide = made((5, 8)), made((4, 1, 6))
    return [
        ([x, (5, 8), (8, 1)], {}),
        ([x, (8, 5), (1, 8)], {}),
        ([x, (5, 3, 8), (8, 0, 1)], {}),
        ([wide, (4, 6), (6, 1)], {}),
        ([wide, (6, 1, 4), (1, 1, 6)], {}),
        ([turned((6, 8)), (6, 8), (1, 6)], {}),
        ([x, (5, 3, 4), (8, 2, 1)], {}),
        ([x, (3, 8), (8, 1)], {}),
        ([wide, (4, 2), (6, 3)], {}),
        *in_memory(),
    ]


def in_memory(is_view=True):
    """Overlapping, partial, with an offset; over transposed memory, too, where the result may be a copy.

    Scattered, such a tensor may lie otherwise than on one device, and a view of it is then refused.
    """
    geometries = [((3, 3), (1, 2), None), ((2, 2, 2), (7, 0, 1), 3), ((), (), 5), ((0, 3), (1, 1), 2), ((35,), (1,), 0)]
    samples = [
        ([x, *geometry], {}) for x in (made((5, 7)), turned((7, 5)).clone())[: 2 - is_view] for geometry in geometries
    ]
    return [*samples, ([made((4, 1, 6), I64), (3, 4), (1, 6)], {}), ([made(()), (2,), (0,)], {})]


def scattered_in_memory():
    return [
        ([x, made(size, x.dtype, 4), size, stride, *offset], {})
        for (x, size, stride, *offset), _ in in_memory(is_view=False)
        if len(set(aten.as_strided(torch.arange(x.numel()), size, stride, *offset).flatten().tolist())) == _count(size)
    ]


def _count(size):
    return torch.Size(size).numel()


def resized():
    sizes = [((5, 7), (5, 7)), ((5, 7), (3, 4)), ((8, 6), (48,)), ((4, 1, 3), (2, 6)), ((6,), (0,))]
    return [([made(shape), size], {}) for shape, size in sizes]


# The ops with results of their own get the calls that those with views have.
COPYING = {
    aten.view_copy.default: regrouped,
    aten._reshape_copy.default: regrouped,
    aten.expand_copy.default: expanded,
    aten.unsqueeze_copy.default: unsqueezed,
    aten.squeeze_copy.default: squeezed,
    aten.squeeze_copy.dim: squeezed_dim,
    aten.squeeze_copy.dims: squeezed_dims,
    aten.permute_copy.default: permuted,
    aten.transpose_copy.int: transposed,
    aten.t_copy.default: flipped,
    aten.diagonal_copy.default: diagonal,
    aten.unfold_copy.default: windows,
    aten.view_as_real_copy.default: complex_tensors,
    aten.view_as_complex_copy.default: pairs,
    aten._conj_copy.default: complex_tensors,
    aten._neg_view_copy.default: negated,
    aten.view_copy.dtype: retyped,
}

SAMPLES = {
    **{op: (lambda make=make: make()[::2]) for op, make in COPYING.items()},
    aten.transpose_.default: transposed,
    aten.squeeze_.dim: squeezed_dim,
    aten.squeeze_.dims: squeezed_dims,
    aten.squeeze_copy.dims_out: lambda: [
        ((x, dims), {"out": torch.zeros_like(x.squeeze(dims))}) for (x, dims), _ in squeezed_dims()
    ],
    aten.view_as_complex_copy.out: lambda: [
        ((x,), {"out": torch.zeros(x.shape[:-1], dtype=torch.complex64)}) for (x,), _ in pairs()
    ],
    aten.view.default: regrouped,
    aten._unsafe_view.default: regrouped,
    aten._reshape_alias.default: aliased,
    aten.expand.default: expanded,
    aten.repeat.default: repeated,
    aten.unsqueeze.default: unsqueezed,
    aten.squeeze.default: squeezed,
    aten.squeeze.dim: squeezed_dim,
    aten.squeeze.dims: squeezed_dims,
    aten.permute.default: permuted,
    aten.transpose.int: transposed,
    aten.t.default: flipped,
    aten.diagonal.default: diagonal,
    aten.diagonal_backward.default: diagonal_backward,
    aten.diag_embed.default: diag_embed,
    aten.unfold.default: windows,
    aten.unfold_backward.default: windows_backward,
    aten.view_as_real.default: complex_tensors,
    aten.view_as_complex.default: pairs,
    aten._conj.default: complex_tensors,
    aten._neg_view.default: negated,
    aten.view.dtype: retyped,
    aten.as_strided.default: strided,
    aten.as_strided_copy.default: lambda: in_memory(is_view=False),
    aten.as_strided_scatter.default: scattered_in_memory,
    aten.resize_.default: resized,
    aten.resize.default: resized,
    aten.resize_as.default: lambda: [([x, made(size)], {}) for (x, size), _ in resized()],
    aten.resize_as_.default: lambda: [([x, made(size)], {}) for (x, size), _ in resized()],
}
