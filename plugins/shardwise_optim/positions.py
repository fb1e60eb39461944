"""Rules for ops that do the same elementwise work at each position of their tensor lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from attrs import evolve

from shardwise.rule import Call, Kind, Op, Row, Rows, Rule, einop, rule_from

__all__ = ["at_each_position", "overloads"]

aten = torch.ops.aten


def overloads(names: str) -> Iterator[Op]:
    """All overloads of some ATen ops and of their in-place forms; a name that this torch lacks is left out."""
    for name in names.split():
        for packet in (getattr(aten, name, None), getattr(aten, f"{name}_", None)):
            if packet is not None:
                yield from (getattr(packet, tag) for tag in packet.overloads())


def at_each_position(ops: Iterable[Op], partials: Sequence[str] = (), whole: Sequence[str] = ()) -> Rule:
    """One rule for elementwise ops over tensor lists: each position is free to lie as it likes.

    Tensors beside the lists, and the lists named in ``whole``, are whole. ``partial`` rows have a word per other list;
    those for another number of lists do not count, and none does unless all tensors are floating-point and of one
    dtype: others wrap around or are rounded on the way.
    """

    def describe(call: Call) -> Rows:
        seen = evolve(call, outputs=call.outputs or call.out_operands or call.operands[:1])
        free = [a.kind is Kind.TENSORS and a.name not in whole for a in call.signature.tensor_args if not a.is_out]
        notation = ", ".join("..." if is_free else "R" for is_free in free) + " -> ..."
        rows = [_spread(row, free) for row in partials if row.count(",") + 1 == sum(free)] if _are_floats(seen) else []
        bound = einop(notation, partial=rows)(seen).bind(seen).rows
        return Rows(bound if call.outputs else tuple(_without_result(call, bound)))

    describe.__doc__ = "; ".join(("[...], [...] -> [...]", *partials))
    return rule_from(list(ops), zip_lists=True)(describe)


def _spread(row: str, free: Sequence[bool]) -> str:
    """A row over the free lists as one over all tensor arguments."""
    left, _, right = row.partition("->")
    words = iter(left.split(","))
    return ", ".join(next(words).strip() if is_free else "R" for is_free in free) + " ->" + right


def _are_floats(call: Call) -> bool:
    dtypes = {meta.dtype for meta in (*call.operands, *call.outputs) if meta is not None}
    return len(dtypes) == 1 and all(dtype.is_floating_point for dtype in dtypes)


def _without_result(call: Call, rows: Iterable[Row]) -> Iterator[Row]:
    """The rows of an op that returns nothing; in place, those in which the first operand lies as what it becomes."""
    for row in rows:
        if call.out_operands or row.inputs[0] == row.outputs[0]:
            yield evolve(row, outputs=())
