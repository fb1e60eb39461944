"""Samples of optimizer ops: lists of unlike shapes, states, and every order of a norm."""

import math
from itertools import product

import torch

from shardwise.testing.samples import generic_samples
from shardwise.testing.values import made

aten = torch.ops.aten
F32, BF16, F64, I64, C64 = torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.complex64
# Even, uneven, empty shards; a 0-dim tensor; one list of each.
LISTS = (((8, 6), (5, 7), (3,)), ((), (1, 2), (9,)), ((0, 3), (4, 1, 3)))


def listed(shapes, dtype=F32, seed=0):
    return [made(shape, dtype, seed + i) for i, shape in enumerate(shapes)]


def broadcast(op):
    """What the schema gives, lists that broadcast position by position, and lists of unlike dtypes."""
    lists = [a for a in op._schema.arguments if str(a.type) == "List[Tensor]" and not a.is_out]
    if len(lists) != len([a for a in op._schema.arguments if not a.has_default_value()]):
        return generic_samples(op)
    shapes = ((5, 7), (4, 6)), ((7,), (4, 1)), ((5, 1), ())
    unlike = [listed(shapes[min(i, 2)], F32, 3 * i) for i in range(len(lists))]
    dtypes = [listed(((5, 7), (5, 7)), dtype, 3 * i) for i, dtype in enumerate((F32, BF16, F32)[: len(lists)])]
    return [*generic_samples(op), (unlike, {}), (dtypes, {})]


def leaning():
    """``lerp`` by weights on both sides of its branch, 1/2: from infinity, only smaller ones give NaN."""
    lists = [torch.full((9,), math.inf)], [made((9,))], [torch.linspace(0.1, 0.9, 9)]
    return [*broadcast(aten._foreach_lerp.List), (lists, {})]


def shared(shape, dtype=F32):
    """A list, and a tensor that all its positions share."""
    return [((listed(shapes), made(shape, dtype, 5)), {}) for shapes in LISTS]


def three_and_scalars():
    """``addcmul`` and ``addcdiv`` with a tensor that holds one scalar per position."""
    return [((*(listed(shapes, F32, 4 * i) for i in range(3)), made((len(shapes),), F32, 9)), {}) for shapes in LISTS]


def into(calls, op):
    """Calls with a list of tensors that take the results."""
    return [(args, {**named, "out": [torch.zeros_like(r) for r in op(*args, **named)]}) for args, named in calls]


def norms():
    orders = (2, 1, 0, 3, 0.5, math.inf)
    samples = [((listed(LISTS[0], dtype), order), {}) for dtype in (F32, BF16) for order in (*orders, -math.inf, -2)]
    samples += [((listed(shapes), order), {}) for shapes in LISTS[1:] for order in orders[:5]]
    samples += [
        ((listed(((5, 7), (3,)), C64), 2), {}),
        ((listed(LISTS[0], BF16), 2, F32), {}),
        ((listed(LISTS[0], F64),), {}),
    ]
    # The squares of these are no single-precision numbers.
    return [*samples, (([made((6, 3)) * 1e18, made((5,), seed=1) * 1e-18],), {})]


def maxima():
    return [((listed(shapes, dtype),), {}) for shapes in LISTS[:2] for dtype in (F32, BF16, I64, torch.bool)]


def matrices():
    return [
        ((listed(((5, 7), (8, 6), (3, 0)), dtype), listed(((7, 3), (6, 4), (0, 5)), dtype, 7)), {})
        for dtype in (F32, BF16)
    ]


# -- fused steps -------------------------------------------------------------------------------------------------


def steps(count):
    return [torch.tensor(float(3 + i)) for i in range(count)]


def scaled():
    """No loss scale, a scale, and a scale with an overflow, which skips the step."""
    samples = ((None, None), (2.0, 0.0), (2.0, 1.0))
    return [
        {"grad_scale": s and torch.tensor(s), "found_inf": None if f is None else torch.tensor(f)} for s, f in samples
    ]


def adam(lr):
    options = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-6, "maximize": False}
    samples = []
    for shapes, amsgrad, scale in product(LISTS, (False, True), scaled()):
        lists = [listed(shapes), listed(shapes, seed=3), listed(shapes, seed=6)]
        squares = [[t.square() for t in listed(shapes, seed=9 + i)] for i in range(2)]
        states = [*lists, squares[0], squares[1] if amsgrad else [], steps(len(shapes))]
        samples.append((states, {"lr": lr, "amsgrad": amsgrad, **options, **scale}))
    return samples


def sgd(lr):
    options = {"weight_decay": 0.1, "lr": lr, "dampening": 0.0, "maximize": False}
    samples = []
    for shapes, momentum, scale in product(LISTS, (0.0, 0.9), scaled()):
        states = [listed(shapes), listed(shapes, seed=3), listed(shapes, seed=6) if momentum else []]
        named = {"momentum": momentum, "nesterov": momentum > 0, "is_first_step": False}
        samples.append((states, {**named, **options, **scale}))
    return samples


def adagrad(lr):
    options = {"lr": lr, "lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-6, "maximize": False}
    samples = []
    for shapes in LISTS:
        sums = [t.square() for t in listed(shapes, seed=6)]
        samples.append(([listed(shapes), listed(shapes, seed=3), sums, steps(len(shapes))], options))
    return samples


# -- loss scaling ------------------------------------------------------------------------------------------------


def checked():
    """Clean gradients, and one overflow in the last tensor; torch writes 1 where it finds one, and else nothing."""
    samples = []
    for shapes, overflow, before in product(LISTS, (False, True), (0.0, 1.0, 4.0)):
        grads = listed(shapes)
        if overflow:
            grads[-1].view(-1)[-1] = math.inf
        samples.append(((grads, torch.tensor(before), torch.tensor(0.5)), {}))
    return samples


def updated():
    return [
        ((torch.tensor([8.0]), torch.tensor([grown], dtype=torch.int32), torch.tensor([inf]), 2.0, 0.5, 3), {})
        for grown, inf in ((0, 0.0), (2, 0.0), (1, 1.0))
    ]


def _fused(name, calls):
    packets = (getattr(aten, name), getattr(aten, f"{name}_"))
    plain = {p.default: lambda: calls(0.01) for p in packets}
    return plain | {p.tensor_lr: lambda: calls(torch.tensor(0.01)) for p in packets}


def _existing(name, calls, overload="default"):
    packet = getattr(aten, name, None)
    return {} if packet is None else {getattr(packet, overload): calls}


ZIPPED = (
    *(aten._foreach_add.List, aten._foreach_sub.List, aten._foreach_mul.List, aten._foreach_div.List),
    *(aten._foreach_maximum.List, aten._foreach_minimum.List, aten._foreach_pow.List, aten._foreach_copy_.default),
)
SAMPLES = {
    **{op: (lambda op=op: broadcast(op)) for op in ZIPPED},
    **dict.fromkeys((aten._foreach_lerp.List, aten._foreach_lerp_.List), leaning),
    **{
        getattr(aten, name).Tensor: lambda: [*shared(()), *shared((), F64)]
        for name in ("_foreach_add", "_foreach_mul", "_foreach_div")
    },
    **{getattr(aten, name).Tensor: three_and_scalars for name in ("_foreach_addcmul", "_foreach_addcdiv")},
    aten._foreach_norm.Scalar: norms,
    aten._foreach_norm.Scalar_out: lambda: into(norms()[::3], aten._foreach_norm.Scalar),
    aten._foreach_max.default: maxima,
    aten._foreach_max.out: lambda: into(maxima(), aten._foreach_max.default),
    **_existing("_foreach_powsum", norms, "Scalar"),
    **_existing("_foreach_mm", matrices),
    **_fused("_fused_adam", adam),
    **_fused("_fused_adamw", adam),
    **_fused("_fused_sgd", sgd),
    **_fused("_fused_adagrad", adagrad),
    aten._amp_foreach_non_finite_check_and_unscale_.default: checked,
    aten._amp_update_scale_.default: updated,
    aten._amp_update_scale.default: updated,
}
