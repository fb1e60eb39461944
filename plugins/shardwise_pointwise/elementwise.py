"""Rules for ops that act on each element alone: any dim may be sharded, and some pass a partial tensor on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from shardwise.rule import (
    Call,
    Facts,
    Flow,
    Lowering,
    Op,
    Partial,
    Row,
    Rows,
    Rule,
    TensorMeta,
    einop,
    is_of_tensors,
    iterated,
    rule_from,
)
from shardwise_pointwise.resolving import RESOLVED, resolve

__all__ = ["PartialRows", "elementwise", "elementwise_of", "overloads"]

aten = torch.ops.aten

# Rows with a partial operand that no fact states, by the number of tensors in the call.
PartialRows = Mapping[int, Sequence[str | Facts]]
Condition = Callable[[Call], bool]
Results = Callable[[Call, str], Sequence[TensorMeta | None]]


def elementwise(
    names: str,
    *facts: Facts,
    partial: PartialRows | None = None,
    when: Condition | None = None,
    lowering: tuple[PartialRows, Lowering] | None = None,
    lowered_when: Condition | None = None,
    resolves: bool = False,
    meta: Callable[..., Any] | None = None,
    results: Results | None = iterated,
) -> Rule:
    """:func:`elementwise_of` all overloads of some ops, in place and ``out=`` included; ATen names between blanks."""
    ops = [op for name in names.split() for op in overloads(name)]
    options: dict[str, Any] = {"when": when, "lowering": lowering, "lowered_when": lowered_when, "resolves": resolves}
    return elementwise_of(ops, *facts, partial=partial, meta=meta, results=results, **options)


def elementwise_of(
    ops: Sequence[Op],
    *facts: Facts,
    partial: PartialRows | None = None,
    when: Condition | None = None,
    lowering: tuple[PartialRows, Lowering] | None = None,
    lowered_when: Condition | None = None,
    resolves: bool = False,
    meta: Callable[..., Any] | None = None,
    results: Results | None = iterated,
) -> Rule:
    """One rule for ops that act on each element alone.

    ``facts`` and ``partial`` rows hold for all finite values, in calls for which ``when`` holds. Rows that are wrong
    for the dtypes of a call are left out. ``lowering`` is a function and the rows that it runs, in calls for which
    ``lowered_when`` holds; in other calls these rows run the op. With ``resolves`` instead, the in-place ops take every
    partial tensor (see ``resolving``). ``meta`` runs on the meta device in place of the op, and
    ``results`` says what a device's kernel returns; with ``None`` that is what the meta device says.

    It is long because the rows of one table entry differ by the number of tensors, in place or not, and by dtype.
    """
    plain, (own, function) = partial or {}, lowering or ({}, None)
    for op in ops:
        for fact in facts:
            fact.check(op)

    @cache
    def dims(present: int, *, holds: bool, written: bool, lower: bool) -> Callable[[Call], Flow]:
        rows = (*facts, *plain.get(present, ())) if holds else ()
        lowered = own.get(present, ()) if holds else ()
        rows, lowered = (rows, lowered) if lower else ((*lowered, *rows), ())
        more: tuple[str | Facts, ...] = (*facts, *RESOLVED) if resolves and written else ()
        return einop("... -> ...", partial=rows, lowered=(*lowered, *more))

    def describe(call: Call) -> Rows:
        present = len([meta for meta in call.operands if meta is not None])
        written = call.signature.args[0].written
        lower = lowered_when is None or lowered_when(call)
        flow = dims(present, holds=when is None or when(call), written=written, lower=lower)(call)
        # An operand that is written in place keeps its placement, so the result must have the same one.
        rows = [row for row in flow.bind(call).rows if not written or row.inputs[0] == row.outputs[0]]
        return Rows(tuple([row for row in rows if _is_exact(row, call)]))

    texts = dict.fromkeys(str(row) for rows in (facts, *plain.values(), *own.values()) for row in rows)
    describe.__doc__ = "..., ... -> ..." + (f" | {'; '.join(texts)}" if texts else "")
    return rule_from(ops, lowering=resolve if resolves else function, meta=meta, results=results)(describe)


# -- which ops ---------------------------------------------------------------------------------------------------


def overloads(name: str) -> Iterator[Op]:
    """The overloads of an ATen op and of its in-place form that take and return plain tensors."""
    for packet in (getattr(aten, name, None), getattr(aten, f"{name}_", None)):
        if packet is not None:
            yield from (op for tag in packet.overloads() if is_of_tensors(op := getattr(packet, tag)))


# -- which rows --------------------------------------------------------------------------------------------------


def _is_exact(row: Row, call: Call) -> bool:
    """Whether a row's partial operands pass through this call's dtypes unharmed."""
    for placement, meta in zip(row.inputs, call.operands, strict=False):
        # By type: isinstance asks torch's metaclass, and every miss of an elementwise op runs this.
        if type(placement) is Partial and meta is not None:
            for result in call.outputs:
                if result is not None and not _passes(placement.reduce_op, meta.dtype, result.dtype):
                    return False
    return True


def _passes(kind: str, dtype: torch.dtype, result: torch.dtype) -> bool:
    """Whether the op commutes with the reduction, given the dtypes of operand and result.

    Integers wrap around in a sum, are truncated in an average and may overflow past a maximum; a sum of bools is an or.
    So they pass only as sums and products in their own dtype.
    """
    if kind in ("max", "min"):
        return dtype.is_floating_point and result.is_floating_point
    if dtype.is_floating_point or dtype.is_complex:
        return result.is_floating_point or result.is_complex
    return kind in ("sum", "product") and dtype == result
