"""Sample calls of the matmul plugin: even, uneven and empty shards, addends, grouped heads, masks, other strides."""

from itertools import product

import cuda_kernels
import torch

from shardwise.testing.values import made
from shardwise_matmul import flex as flex_attention
from shardwise_matmul import math_attention

aten = torch.ops.aten
F32, BF16, I64, C64 = torch.float32, torch.bfloat16, torch.int64, torch.complex64


def turned(shape, dtype=F32, seed=0):
    """A matrix (or a batch of them) that lies transposed in memory."""
    return made((*shape[:-2], shape[-1], shape[-2]), dtype, seed).transpose(-1, -2)


# -- products ----------------------------------------------------------------------------------------------------

SIZES = [(8, 6, 4), (5, 7, 3), (1, 9, 2), (6, 1, 5), (0, 3, 4), (3, 0, 4), (2, 5, 1)]  # m, k, n


def factors(shapes, dtypes=(F32,)):
    return [tuple(made(s, dtype, i) for i, s in enumerate(pair)) for pair in shapes for dtype in dtypes]


def matrices():
    pairs = factors([((m, k), (k, n)) for m, k, n in SIZES])
    pairs += factors([((8, 6), (6, 5))], (BF16, I64, C64))
    return [*pairs, (turned((8, 6)), turned((6, 4), seed=1))]


def batches():
    pairs = factors([((b, m, k), (b, k, n)) for (m, k, n), b in zip(SIZES, (4, 3, 1, 8, 2, 5, 0), strict=True)])
    return [*pairs, *factors([((4, 8, 6), (4, 6, 5))], (BF16, I64)), (turned((4, 3, 6)), turned((4, 6, 5), seed=1))]


def plain(pairs):
    return lambda: [(list(pair), {}) for pair in pairs()]


def wide(pairs):
    """Of low-precision factors, with the result's dtype."""
    return lambda: [([a.to(BF16), b.to(BF16), F32], {}) for a, b in pairs() if a.dtype == F32]


def mv():
    return [([a, made((a.shape[1],), a.dtype, 5)], {}) for a, _ in matrices()]


def dot():
    return [([made((n,), d), made((n,), d, 1)], {}) for n, d in product((8, 5, 1, 0), (F32, BF16, I64, C64))]


def matmul():
    shapes = [
        ((5, 7), (7, 3)),
        ((7,), (7,)),
        ((8, 6), (6,)),
        ((6,), (6, 5)),
        ((4, 5, 6), (6, 3)),
        ((5, 6), (4, 6, 3)),
        ((2, 1, 5, 6), (4, 6, 3)),
        ((4, 5, 6), (6,)),
        ((3, 0, 4), (4, 2)),
    ]
    return [(list(pair), {}) for pair in factors(shapes)]


# -- products with an addend -------------------------------------------------------------------------------------


def scalars(dtype, i):
    if i % 3 == 0:
        return {}
    return {"beta": 2, "alpha": -3} if not dtype.is_floating_point or i % 3 == 1 else {"beta": 0.5, "alpha": -1.5}


def added(pairs, result, addends):
    """Calls with addends of the shapes that ``addends(result shape)`` lists."""
    calls = []
    for i, (a, b) in enumerate(pairs):
        shapes = addends(tuple(result(a, b).shape))
        calls += [([made(shape, a.dtype, 7), a, b], scalars(a.dtype, i)) for shape in shapes]
    # beta=0 says that the addend is not read, so what it holds must not spread.
    (addend, *rest), _ = calls[0]
    return [*calls, ([torch.full_like(addend, float("nan")), *rest], {"beta": 0})]


def rows_and_more(shape):
    m, n = shape[-2:]
    return [shape, (n,), (m, 1)]


def one(shape):
    return [shape]


def addmm():
    return added(matrices(), torch.mm, lambda s: [*rows_and_more(s), (1, s[1]), ()])


def addmm_in_place():
    return added(matrices(), torch.mm, one)


def baddbmm():
    return added(batches(), torch.bmm, lambda s: [*rows_and_more(s), (s[0], 1, s[2])])


def baddbmm_in_place():
    return added(batches(), torch.bmm, one)


def summed(a, b):
    return torch.einsum("bmk,bkn->mn", a, b)


def addbmm():
    return added(batches(), summed, rows_and_more)


def addbmm_in_place():
    return added(batches(), summed, one)


def vectors():
    return [(a, made((a.shape[1],), a.dtype, 5)) for a, _ in matrices()]


def addmv():
    # Without anything to sum over, torch forgets to broadcast the addend: no sample has that.
    broadcast = [(a, v) for a, v in vectors() if len(v)]
    return [*added(vectors(), torch.mv, one), *added(broadcast, torch.mv, lambda _: [(1,), ()])]


def addmv_in_place():
    return added(vectors(), torch.mv, one)


def outer():
    return factors([((m,), (n,)) for m, _, n in SIZES], (F32, I64))


def addr():
    return added(outer(), torch.outer, lambda s: [s, (s[1],), (s[0], 1)])


def addr_in_place():
    return added(outer(), torch.outer, one)


def activated():
    kinds = [(a, b, gelu) for a, b in matrices()[:5] for gelu in (False, True)]
    return [([made((b.shape[1],), F32, 7), a, b], {"use_gelu": gelu}) for a, b, gelu in kinds]


def linear():
    shapes = [((5, 6), 4), ((4, 3, 6), 5), ((2, 3, 4, 8), 6), ((6,), 4), ((0, 6), 3), ((1, 9), 2)]
    calls = []
    for (shape, n), dtype in product(shapes, (F32, BF16)):
        x, weight = made(shape, dtype), made((n, shape[-1]), dtype, 1)
        calls += [([x, weight], {}), ([x, weight, made((n,), dtype, 2)], {})]
    return calls


def trilinear():
    """As bilinear layers call it, and with a dim summed over that all operands have."""
    x, w, y = made((5, 1, 3, 1)), made((1, 4, 3, 2), seed=1), made((5, 1, 1, 2), seed=2)
    plain = [made((5, 4), seed=i) for i in range(3)]
    return [
        ([x[:, 0, :, 0], w[0], y[:, 0, 0], [1, 3], [0], [1, 2], [2, 3]], {}),
        ([x, w, y, [], [], [], [1]], {}),
        ([*plain, [], [], [], [1]], {}),
        ([*plain, [], [], [], []], {}),
    ]


def blocks():
    return [([[made((2, 3)), made((3,), seed=1), made((), seed=2)]], {}), ([[made((0, 3)), made((5, 8), seed=1)]], {})]


# Depths and widths that are multiples of 8, as the whole op wants them; ends of the groups, one of them empty.
ENDS = ([2, 5, 11], [0, 8, 8], [3, 3, 11])


def groups():
    calls = [([made((g, m, 8), BF16), made((g, 8, 16), BF16, 1)], {}) for g, m in ((4, 5), (5, 1), (2, 8))]
    for ends in ENDS:
        offs = torch.tensor(ends, dtype=torch.int32)
        # What no group has is left unset: whole ends only.
        long = ends[-1]
        calls += [
            ([made((long, 8), BF16), made((3, 8, 16), BF16, 1), offs], {}),
            ([made((3, 5, 8), BF16), padded_last(made((8, long), BF16, 1)), offs], {}),
            ([padded_last(made((5, long), BF16)), made((long, 16), BF16, 1), offs], {}),
        ]
    return calls


def padded_last(x):
    """The same numbers with rows a multiple of 16 elements apart."""
    return torch.nn.functional.pad(x, (0, 16 - x.shape[-1]))[:, : x.shape[-1]]


def scaled():
    f8 = torch.float8_e4m3fn
    a, b = made((5, 16)).to(f8), made((16, 32), seed=1).to(f8)
    one, rows, columns = torch.tensor(0.5), made((5, 1)).abs(), made((1, 32), seed=1).abs()
    return [([a, b, one, one], {"out_dtype": BF16}), ([a, b, rows, columns], {"out_dtype": BF16})]


def scaled_v2():
    return [([a, b, [s], [0], [0], [t], [0], [0], None, BF16], {}) for (a, b, s, t), _ in scaled()[:1]]


def integers():
    return [([made((m, 8), torch.int8), made((8, 16), torch.int8, 1)], {}) for m in (32, 5)]


# -- padding -----------------------------------------------------------------------------------------------------


def padded():
    pads = [
        ((5, 7), [1, 2]),
        ((8, 6), [0, 0, 1, 0]),
        ((4, 3, 5), [-1, 2]),
        ((0, 3), [1, 1]),
        ((6,), [0, 0]),
        ((1, 8), [2, 0]),
    ]
    return [([made(s, d), pad, v], {}) for (s, pad), d, v in product(pads, (F32, I64), (0, 1, -2))]


# -- attention ---------------------------------------------------------------------------------------------------

# batch, query heads, key heads, query positions, key positions
HEADS = [(4, 4, 4, 5, 6), (3, 8, 2, 4, 4), (5, 6, 1, 8, 3), (1, 3, 3, 7, 7), (2, 4, 4, 64, 3)]


def operands(sizes, dtype=F32):
    batch, heads, few, length, keys = sizes
    return (
        made((batch, heads, length, 8), dtype),
        made((batch, few, keys, 8), dtype, 1),
        made((batch, few, keys, 8), dtype, 2),
    )


def masks(sizes):
    batch, heads, _, length, keys = sizes
    return [None, *(made(s, seed=3) for s in ((length, keys), (batch, 1, length, keys), (1, heads, 1, keys)))]


def biases(sizes):
    batch, heads, _, length, keys = sizes
    return [None, made((batch, heads, length, keys), seed=3), made((batch, 1, length, keys), seed=4)]


def turned_heads(sizes):
    """Heads beside positions in memory, as a model makes them of one projection."""
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in operands(sizes))


def attention_for_cpu():
    calls = [(list(operands(s)), {"attn_mask": mask}) for s in HEADS for mask in masks(s)]
    calls += [([*operands(s)], {"is_causal": True}) for s in HEADS]
    calls += [(list(operands(HEADS[0], BF16)), {"scale": 0.5}), (list(turned_heads(HEADS[1])), {})]
    calls.append((list(operands(HEADS[0], torch.float64)), {}))
    return calls


def attention_for_cpu_backward():
    calls = []
    for (q, k, v), kwargs in attention_for_cpu():
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, **kwargs)
        causal = kwargs.pop("is_causal", False)
        calls.append(([made(out.shape, out.dtype, 9), q, k, v, out, lse, 0.0, causal], kwargs))
    return calls


def attention_math():
    calls = attention_for_cpu()
    calls = [(args, {**kwargs, "enable_gqa": args[0].shape[1] != args[1].shape[1]}) for args, kwargs in calls]
    flat = [([x[0] for x in operands(s)], {}) for s in HEADS if s[1] == s[2]]
    return [*calls, *flat, ([made((5, 8)), made((6, 8), seed=1), made((6, 4), seed=2)], {})]


def attention_math_as_one():
    """The same calls as the op of the plugin takes them, and keys and values that are broadcast."""
    broadcast = [made((2, 4, 8, 6)), made((1, 4, 5, 6), seed=1), made((2, 1, 5, 6), seed=2)]
    defaults = {"attn_mask": None, "is_causal": False, "scale": None, "enable_gqa": False}
    calls = [*attention_math(), (broadcast, {}), (list(operands(HEADS[0])), {"scale": -0.5})]
    return [([*args, *(defaults | kwargs).values()], {}) for args, kwargs in calls]


def attention_math_backward():
    calls = []
    for (q, k, v, mask, causal, scale, grouped), _ in attention_math_as_one():
        out, weights = math_attention.FORWARD(q, k, v, mask, causal, scale, grouped)
        calls.append(([made(out.shape, out.dtype, seed=9), q, k, v, weights, causal, scale], {}))
    return calls


def flash():
    return [([*operands(s), 0.0, causal], {}) for s in HEADS for causal in (False, True)]


def flash_backward():
    calls = []
    for (q, k, v, p, causal), kwargs in flash():
        out, lse, _, _, lq, lk, seed, offset, _ = cuda_kernels.flash(q, k, v, p, causal, **kwargs)
        calls.append(
            ([made(out.shape, seed=9), q, k, v, out, lse, None, None, lq, lk, p, causal, seed, offset], kwargs)
        )
    return calls


def efficient():
    settings = [(s, bias, causal) for s in HEADS for bias in biases(s) for causal in (False, True)]
    calls = [([*operands(s), bias, True, 0.0, causal], {}) for s, bias, causal in settings if s[1] == s[2]]
    return [*calls, ([*operands(HEADS[0]), None, False], {})]


def efficient_backward():
    calls = []
    for (q, k, v, bias, wanted, *rest), _ in efficient():
        if wanted:
            out, lse, seed, offset = cuda_kernels.efficient(q, k, v, bias, True, *rest)
            mask = [True, True, True, bias is not None]
            calls.append(([made(out.shape, seed=9), q, k, v, bias, out, lse, seed, offset, 0.0, mask, rest[1]], {}))
    return calls


def cudnn():
    return [
        ([*operands(s), bias, True, 0.0, causal], {})
        for s in HEADS
        for bias in biases(s)[:2]
        for causal in (False, True)
    ]


def cudnn_backward():
    calls = []
    for (q, k, v, bias, _, p, causal), _ in cudnn():
        out, lse, _, _, lq, lk, seed, offset, _ = cuda_kernels.cudnn(q, k, v, bias, True, p, causal)
        args = [made(out.shape, seed=9), q, k, v, out, lse, seed, offset, bias, None, None, lq, lk, p, causal]
        calls.append((args, {}))
    return calls


def projections(width):
    sizes = ((3 * width, width), (3 * width,), (width, width), (width,))
    return [made(size, seed=i + 1) / width**0.5 for i, size in enumerate(sizes)]


def layers():
    samples = []
    for batch, first in ((4, True), (5, False)):
        norms = [made((6,), seed=i + 7) for i in range(4)]
        inner = [made((8, 6), seed=12) / 3, made((8,), seed=13), made((6, 8), seed=14) / 3, made((6,), seed=15)]
        samples.append(([made((batch, 3, 6)), 6, 2, *projections(6), False, first, 1e-5, *norms, *inner], {}))
    padding = torch.tensor([[False, False, True]] * 5)
    return [*samples, ([*samples[1][0], padding, 1], {})]


def many_headed():
    x, samples = made((5, 3, 6)), []
    for wanted, average in ((True, True), (True, False), (False, True)):
        samples.append(([x, x, x, 6, 2, *projections(6), None, wanted, average], {}))
    return samples


FLEX, FLEX_BACKWARD = (op for rule in flex_attention.RULES for op in rule.ops)


def flexible():
    """With the functions that change nothing; tests/plugins/test_flex.py has others."""
    shapes = [(2, 4, 6, 3, 4), (3, 4, 4, 5, 2), (2, 4, 8, 5, 1), (1, 5, 3, 2, 5), (0, 2, 4, 3, 2), (2, 2, 0, 3, 2)]
    for (batch, heads, queries, keys, key_heads), block in product(shapes, (None, 2, 0)):
        query = made((batch, heads, queries, 4), F32, 0)
        key, value = made((batch, key_heads, keys, 4), F32, 1), made((batch, key_heads, keys, 3), F32, 2)
        if block == 0:
            query = query.transpose(1, 2).contiguous().transpose(1, 2)
        yield query, key, value, [made((3,), F32, 3)], [], 0.5, block


def flex():
    return [(list(args), {}) for args in flexible()]


def flex_backward():
    calls = []
    for query, key, value, captured, blocks, scale, block in flexible():
        out, logsumexp, _ = FLEX(query, key, value, captured, blocks, scale, block)
        grads = made(tuple(out.shape), F32, 4), made(tuple(logsumexp.shape), F32, 5)
        calls.append(([query, key, value, out, logsumexp, *grads, captured, blocks, scale, block, [0]], {}))
    return calls


# Some releases have these kernels for CUDA only.
UNSAMPLED = {
    getattr(aten, name).default: "no kernel on the CPU"
    for name in ("_scaled_mm_v2",)
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CPU")
}
SAMPLES = {
    math_attention.FORWARD: attention_math_as_one,
    math_attention.BACKWARD: attention_math_backward,
    FLEX: flex,
    FLEX_BACKWARD: flex_backward,
    aten._transformer_encoder_layer_fwd.default: layers,
    aten._native_multi_head_attention.default: many_headed,
    aten.mm.default: plain(matrices),
    aten.mm.dtype: wide(matrices),
    aten.bmm.default: plain(batches),
    aten.bmm.dtype: wide(batches),
    aten.mv.default: mv,
    aten.dot.default: dot,
    aten.vdot.default: dot,
    aten.matmul.default: matmul,
    aten.addmm.default: addmm,
    aten.addmm_.default: addmm_in_place,
    aten.baddbmm.default: baddbmm,
    aten.baddbmm_.default: baddbmm_in_place,
    aten.addbmm.default: addbmm,
    aten.addbmm_.default: addbmm_in_place,
    aten.addmv.default: addmv,
    aten.addmv_.default: addmv_in_place,
    aten.addr.default: addr,
    aten.addr_.default: addr_in_place,
    aten._addmm_activation.default: activated,
    aten.linear.default: linear,
    aten._trilinear.default: trilinear,
    aten.block_diag.default: blocks,
    aten._grouped_mm.default: groups,
    aten._scaled_mm.default: scaled,
    aten._scaled_mm_v2.default: scaled_v2,
    aten._int_mm.default: integers,
    aten._int_mm.out: lambda: [(args, {"out": torch._int_mm(*args)}) for args, _ in integers()],
    aten.constant_pad_nd.default: padded,
    aten._scaled_dot_product_flash_attention_for_cpu.default: attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention_for_cpu_backward,
    aten._scaled_dot_product_attention_math.default: attention_math,
    aten._scaled_dot_product_flash_attention.default: flash,
    aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    aten._scaled_dot_product_efficient_attention.default: efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
    aten._scaled_dot_product_cudnn_attention.default: cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: cudnn_backward,
}
