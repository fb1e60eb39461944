"""Rules for ops that do the same elementwise work at each position of their tensor lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from attrs import evolve

from shardwise.rule import Call, Facts, Kind, Op, Row, Rows, Rule, einop, rule_from

__all__ = ["at_each_position", "overloads"]

aten = torch.ops.aten


def overloads(names: str) -> Iterator[Op]:
    """All overloads of some ATen ops and of their in-place forms; a name that this torch lacks is left out."""
    for name in names.split():
        for packet in (getattr(aten, name, None), getattr(aten, f"{name}_", None)):
            if packet is not None:
                yield from (getattr(packet, tag) for tag in packet.overloads())


def at_each_position(
    ops: Iterable[Op], facts: Mapping[int, Sequence[Facts]] | None = None, whole: Sequence[str] = ()
) -> Rule:
    """One rule for elementwise ops over tensor lists: each position has a placement of its own.

    Tensors beside the lists, and the lists named in ``whole``, are whole. ``facts`` maps the number of the other lists
    to the facts of the ops that have so many. They hold only if all tensors are floating-point and of one dtype:
    integers wrap around, and a cast rounds.
    """
    stated = facts or {}
    # Long because the notation depends on which arguments are lists, and the facts on the dtypes of a position.

    def describe(call: Call) -> Rows:
        bound = evolve(call, outputs=call.outputs or call.out_operands or call.operands[:1])
        free = [a.kind is Kind.TENSORS and a.name not in whole for a in call.signature.tensor_args if not a.is_out]
        notation = ", ".join("..." if is_free else "R" for is_free in free) + " -> ..."
        dtypes = {meta.dtype for meta in (*bound.operands, *bound.outputs) if meta is not None}
        are_floats = len(dtypes) == 1 and all(dtype.is_floating_point for dtype in dtypes)
        rows = einop(notation, partial=stated.get(sum(free), ()) if are_floats else ())(bound).bind(bound).rows
        return Rows(rows if call.outputs else tuple(_without_result(call, rows)))

    describe.__doc__ = "; ".join(("[...], [...] -> [...]", *map(str, stated[max(stated)] if stated else ())))
    return rule_from(list(ops), zip_lists=True)(describe)


def _without_result(call: Call, rows: Iterable[Row]) -> Iterator[Row]:
    """The rows of an op that returns nothing; in place, those that leave the first operand its placement."""
    for row in rows:
        if call.out_operands or row.inputs[0] == row.outputs[0]:
            yield evolve(row, outputs=())
