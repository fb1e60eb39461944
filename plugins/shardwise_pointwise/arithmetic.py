"""Sums, products, quotients, powers and choices of numbers, by the partial tensors that pass through them.

A partial row stands in the modules of this plugin only if it is exact for every finite value. Sums and averages pass
linear ops, averages also affine ones. Maxima and minima pass an op that never falls on the whole real line and returns
NaN for NaN; an op that never rises swaps the two. The modules are apart because each is imported at the first op of it:
most programs add and multiply, few have a Bessel function.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.rule import (
    UNMOVED,
    ByType,
    Call,
    Facts,
    TensorMeta,
    affine,
    decreasing,
    iterated,
    iterated_over,
    iterates_over,
    linear,
    monotone,
    moves,
    multiply,
    row_major,
)
from shardwise_pointwise.addition import ADDED_ONCE, add_once
from shardwise_pointwise.elementwise import elementwise
from shardwise_pointwise.scaling import by_one_number, divide

__all__ = ["RULES"]

# x + y and x - y, where `alpha` may have either sign: only the first operand is sure to rise.
ADDITIVE = linear("self other") + affine("self", "other")

# x + w (y - x): linear in x and y together, affine in each. Affine in w, too, but from w = 1/2 on torch computes
# y - (y - x) (1 - w), which for infinite x or y is infinite where the other is NaN, and parts of w are on either side.
LERP = linear("self end") + affine("self", "end")
# x + v y z: linear in x with one of y and z, affine in each of the three.
ADDCMUL = linear("self tensor1", "self tensor2") + affine("self", "tensor1", "tensor2")
# A whole value may stand beside one that is partial under avg, max or min, since equal pieces reduce to themselves. No
# fact says that, so these rows are written out.
WHERE: tuple[str | Facts, ...] = (
    moves("self other"),
    *(row for kind in UNMOVED for row in (f"R, {kind}, R -> {kind}", f"R, R, {kind} -> {kind}")),
)


def _powers(call: Call, device_type: str) -> Sequence[TensorMeta | None]:
    """Powers of a number are row-major."""
    is_of_number = isinstance(call.args["self"], ByType)
    return row_major(call, device_type) if is_of_number else iterated(call, device_type)


def _other_first(call: Call, device_type: str) -> Sequence[TensorMeta | None]:
    """The kernel subtracts ``self`` from ``other``."""
    return iterated_over(call, iterates_over(call)[::-1])


RULES = (
    elementwise("pow float_power", results=_powers),
    elementwise("square rsqrt reciprocal exp2 hypot"),
    # torch's composites run it in place on sums that they have just computed.
    elementwise("sqrt", resolves=True),
    elementwise("clamp clip clamp_min clamp_max", monotone("self"), resolves=True),
    elementwise("neg", linear("self"), decreasing("self")),
    elementwise("positive conj_physical _conj_physical", linear("self"), results=None),
    elementwise("add sub", ADDITIVE, monotone("self"), lowering=(ADDED_ONCE, add_once)),
    elementwise("rsub", ADDITIVE, monotone("other"), lowering=(ADDED_ONCE, add_once), results=_other_first),
    elementwise(
        "mul",
        partial={2: ("product, product -> product",)},
        lowering=({1: (linear("self"),), 2: (linear("self"), linear("other"))}, multiply),
    ),
    elementwise("div true_divide", when=by_one_number, lowering=(dict.fromkeys((1, 2), (linear("self"),)), divide)),
    elementwise("maximum", partial={2: ["max, max -> max", monotone("self"), monotone("other")]}),
    elementwise("minimum", partial={2: ["min, min -> min", monotone("self"), monotone("other")]}),
    elementwise("lerp", lowering=({2: (LERP,), 3: (LERP,)}, multiply)),
    elementwise("addcmul", lowering=({3: (ADDCMUL,)}, multiply)),
    # x + v y / z: if z is zero, an infinity is added. An average passes it on; parts of y would have both signs.
    elementwise("addcdiv", affine("self")),
    elementwise("where", partial={3: WHERE}),
)
