"""Rules for ops that act on each element alone: any dim may be sharded, and some pass a partial tensor on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from shardwise.rule import Call, Facts, Kind, Lowering, Op, Partial, Row, Rows, Rule, einop, rule_from, signature
from shardwise_pointwise.resolving import RESOLVED, resolve

__all__ = ["PartialRows", "elementwise", "elementwise_of", "overloads"]

aten = torch.ops.aten

# Rows with a partial operand that no fact states, by the number of tensors in the call.
PartialRows = Mapping[int, Sequence[str | Facts]]
Condition = Callable[[Call], bool]


def elementwise(
    names: str,
    *facts: Facts,
    partial: PartialRows | None = None,
    when: Condition | None = None,
    lowering: tuple[PartialRows, Lowering] | None = None,
    resolves: bool = False,
) -> Rule:
    """:func:`elementwise_of` all overloads of some ops, in place and ``out=`` included; ATen names between blanks."""
    ops = [op for name in names.split() for op in overloads(name)]
    return elementwise_of(ops, *facts, partial=partial, when=when, lowering=lowering, resolves=resolves)


def elementwise_of(
    ops: Sequence[Op],
    *facts: Facts,
    partial: PartialRows | None = None,
    when: Condition | None = None,
    lowering: tuple[PartialRows, Lowering] | None = None,
    resolves: bool = False,
) -> Rule:
    """One rule for ops that act on each element alone.

    ``facts`` and ``partial`` rows hold for all finite values, in calls for which ``when`` holds; rows that the dtypes
    of a call make wrong are left out of it. ``lowering`` is the function with rows that it runs. ``resolves``, in place
    of one, lets the in-place ops among them take every partial tensor (see ``resolving``).
    """
    plain, (own, function) = partial or {}, lowering or ({}, None)
    for op in ops:
        for fact in facts:
            fact.check(op)

    def describe(call: Call) -> Rows:
        present = sum(meta is not None for meta in call.operands)
        holds = when is None or when(call)
        rows = (*facts, *plain.get(present, ())) if holds else ()
        lowered = own.get(present, ()) if holds else ()
        more: tuple[str | Facts, ...] = (*facts, *RESOLVED) if resolves and call.signature.args[0].written else ()
        flow = einop("... -> ...", partial=rows, lowered=(*lowered, *more))(call)
        return Rows(tuple(row for row in flow.bind(call).rows if _stays(row, call) and _is_exact(row, call)))

    texts = dict.fromkeys(str(row) for rows in (facts, *plain.values(), *own.values()) for row in rows)
    describe.__doc__ = "..., ... -> ..." + (f" | {'; '.join(texts)}" if texts else "")
    return rule_from(ops, lowering=resolve if resolves else function)(describe)


# -- which ops ---------------------------------------------------------------------------------------------------


def overloads(name: str) -> Iterator[Op]:
    """The overloads of an ATen op and of its in-place form that take and return plain tensors."""
    for packet in (getattr(aten, name, None), getattr(aten, f"{name}_", None)):
        if packet is not None:
            yield from (op for tag in packet.overloads() if _is_of_tensors(op := getattr(packet, tag)))


def _is_of_tensors(op: Op) -> bool:
    described = signature(op)
    tensors = described.tensor_args
    return (
        bool(tensors)
        and all(a.kind is Kind.TENSOR for a in tensors)
        and all(r.is_tensor and not r.is_list for r in described.results)
    )


# -- which rows --------------------------------------------------------------------------------------------------


def _stays(row: Row, call: Call) -> bool:
    """Whether the operand that an in-place op writes can become the result where it lies."""
    return not call.signature.args[0].written or row.inputs[0] == row.outputs[0]


def _is_exact(row: Row, call: Call) -> bool:
    """Whether a row's partial operands pass through this call's dtypes unharmed."""
    partials = [
        (placement.reduce_op, meta.dtype)
        for placement, meta in zip(row.inputs, call.operands, strict=False)
        if isinstance(placement, Partial) and meta is not None
    ]
    made = [meta.dtype for meta in call.outputs if meta is not None]
    return all(_passes(kind, dtype, result) for kind, dtype in partials for result in made)


def _passes(kind: str, dtype: torch.dtype, result: torch.dtype) -> bool:
    """Whether reducing and then computing in the result's dtype is computing and then reducing.

    Integers wrap around in a sum, cut in an average and may overflow past a maximum; a sum of bools is an or. So they
    pass only as sums and products in their own dtype.
    """
    if kind in ("max", "min"):
        return dtype.is_floating_point and result.is_floating_point
    if dtype.is_floating_point or dtype.is_complex:
        return result.is_floating_point or result.is_complex
    return kind in ("sum", "product") and dtype == result
