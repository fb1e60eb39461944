"""What to write in a program so that a call sends nothing by itself: the last sentence of a policy's error."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from shardwise.engine.make_plan import DescribedCall
from shardwise.engine.sends import WRITTEN_BACK, Moved, Sends, sends_of
from shardwise.errors import ShardingError
from shardwise.kernel.placements import REPLICATE, Partial, Placement, Replicate
from shardwise.kernel.precedence import Entry
from shardwise.kernel.schema import OpSchema
from shardwise.kernel.spec import TensorSpec
from shardwise.planning.results import output_metas
from shardwise.planning.strategies import cheapest, merged

__all__ = ["to_move", "to_send_nothing_in_lowering"]

_MOST_WRITTEN = 3  # operands that a message tells to redistribute one by one


def to_move(move: Moved, phase: str) -> str:
    """The call that makes a move explicit."""
    if phase == "gradients":
        return 'Leave "gradients" out of the policy, or place the leaf so that its gradient needs no sum.'
    if move.is_of_result:
        return (
            "The program has learned to move this result: allow it, or choose by operator with shardwise.learn(False)."
        )
    name = move.name.removesuffix(WRITTEN_BACK)
    there = _written((move.dst if name == move.name else move.src).placements)
    if phase == "backward":
        return (
            f"Give the forward tensor whose gradient this is a layout for it, as in "
            f"y.redistribute(placements=y.placements, grad_placements={there}), or allow it where the forward op runs."
        )
    if re.fullmatch(r"\w+(\[\d+\])*", name) is None:
        return f"Redistribute {name} to {there} before the call, or allow it."
    return f"Write {name} = {name}.redistribute(placements={there}) before the call, or allow it."


def to_send_nothing_in_lowering(sends: Sends, entry: Entry, mesh_dims: Sequence[int], phase: str) -> str:
    """Which operands to redistribute, tried out on the rule, so that its lowering sends nothing."""
    if phase == "backward":  # the op and its operands are autograd's, so no line of the program can redistribute them
        return "Redistribute the operands of the forward op to whole tensors before it, or allow it where that op runs."
    for schema in _with_whole_operands(sends.schema, mesh_dims):
        if _lowering_is_silent(entry, schema):
            return _rewritten(sends.schema, schema)
    return "Allow it where the call is made."


def _with_whole_operands(schema: OpSchema, mesh_dims: Sequence[int]) -> Iterator[OpSchema]:
    """The call with one operand whole over some mesh dims, with all of them, and with all whole over all mesh dims;
    first without those that it writes, of which a redistributed one is another tensor.
    """

    def whole(spec: TensorSpec | None, mesh_dims: Sequence[int]) -> TensorSpec | None:
        if spec is None:
            return None
        return spec.with_placements([REPLICATE if m in mesh_dims else p for m, p in enumerate(spec.placements)])

    specs, read = schema.specs, set(range(len(schema.specs))) - set(schema.written)
    here, everywhere = ([whole(spec, dims) for spec in specs] for dims in (mesh_dims, range(schema.mesh.ndim)))
    changed = [i for i, (old, new) in enumerate(zip(specs, here, strict=True)) if old is not new]
    for places in (*({i} for i in sorted(changed, key=lambda i: i not in read)), read, set(changed)):
        yield schema.with_specs(
            [new if i in places else old for i, (old, new) in enumerate(zip(specs, here, strict=True))]
        )
    yield schema.with_specs(everywhere)


def _lowering_is_silent(entry: Entry, schema: OpSchema) -> bool:
    try:
        metas = output_metas(schema.op, schema.values, entry.rule.meta)
        described = DescribedCall.of(entry, schema, metas)
        chosen = cheapest(entry.rule, schema, described.call)
    except ShardingError:
        return False
    inputs, results = merged(schema, chosen)
    is_lowered = any(strategy.lowered for strategy in chosen)
    sends = sends_of(described, inputs, results, is_lowered=is_lowered, is_shared=False, is_explicit=False)
    return sends is None or (sends.lowering.complete and not sends.lowering.collectives)


def _rewritten(before: OpSchema, after: OpSchema) -> str:
    """The lines of the program that make one call another."""
    pairs = zip(before.operand_names, before.specs, after.specs, strict=True)
    lines = [
        f"{name} = {name}.redistribute(placements={_written(new.placements)})"
        for name, old, new in pairs
        if old is not None and new is not None and old.placements != new.placements
    ]
    if not lines:  # the lowering sends something whatever the operands are
        return "Allow it where the call is made."
    if len(lines) > _MOST_WRITTEN:
        return "Redistribute all operands to whole tensors before the call, or allow it."
    return f"Write {' and '.join(lines)} before the call, or allow it."


def _written(placements: Sequence[Placement]) -> str:
    """Placements as a program writes them."""

    def one(placement: Placement) -> str:
        if isinstance(placement, Replicate):
            return "Replicate()"
        if isinstance(placement, Partial):
            return f'Partial("{placement.reduce_op}")'
        return str(placement) if "_Strided" in type(placement).__name__ else f"Shard({placement.dim})"  # type: ignore[attr-defined]

    return f"[{', '.join(map(one, placements))}]"
