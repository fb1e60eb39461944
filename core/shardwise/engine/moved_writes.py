"""Writes for which no row is legal: the op runs on the reduced or gathered tensor, and each rank writes its part back.

The written tensor keeps its layout, because its views, its base and whoever else holds it have that layout. On one rank
of a partial sum the part is the new value, on the others it is zero. Where the op reads nothing of what it writes (an
``out=``, ``fill_``), nothing is reduced or gathered: it writes to new memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from shardwise.comm.policy import in_force as policies
from shardwise.comm.redistribute import runner
from shardwise.engine.sends import WRITTEN_BACK, Moved, move_of, together
from shardwise.engine.view_copies import writable
from shardwise.kernel.local_strides import in_order
from shardwise.kernel.placements import REPLICATE, Partial
from shardwise.kernel.plan import Plan
from shardwise.kernel.schema import OpSchema
from shardwise.kernel.signature import Kind, Op, Signature
from shardwise.kernel.spec import TensorSpec
from shardwise.private_torch.ops import overwritten_arg

__all__ = ["moved_writes", "overwritten", "writing_back"]

Run = Callable[[torch.Tensor], torch.Tensor]
# The argument, the position in a list or None, and how its local tensor is moved and becomes this rank's part again.
Write = tuple[int, int | None, Run, Run]


def moved_writes(schema: OpSchema) -> Iterator[OpSchema]:
    """The same call with other tensors in place of those it writes: partial ones reduced, then plainly sharded, too,
    then all whole.
    """
    before = schema.specs
    for ease in (_reduced, lambda spec: _reduced(spec).without_strides(), _whole):
        specs = list(schema.specs)
        for i in schema.written:
            spec = specs[i]
            if spec is not None and (eased := ease(spec)).placements != spec.placements:
                specs[i] = eased
        if any(old is not new for old, new in zip(before, specs, strict=True)):
            before = tuple(specs)
            yield schema.with_specs(specs)


def _reduced(spec: TensorSpec) -> TensorSpec:
    return spec.with_placements([REPLICATE if isinstance(p, Partial) else p for p in spec.placements])


def _whole(spec: TensorSpec) -> TensorSpec:
    return spec.with_placements([REPLICATE] * len(spec.placements))


def overwritten(schema: OpSchema) -> frozenset[str]:
    """The names of the arguments of which a call replaces all elements and reads none."""
    if not overwritten_arg(schema.op):
        return frozenset()
    args = schema.signature.args
    return frozenset(a.name for a in args if (a.is_out if schema.signature.has_outs else a.written))


def writing_back(schema: OpSchema, plan: Plan) -> Plan:
    """The plan of a call, from that of the call with moved tensors."""
    writes: list[Write] = []
    not_read = overwritten(schema)
    pairs = iter(zip(schema.specs, plan.schema.specs, strict=True))
    for k, (arg, value) in enumerate(zip(schema.signature.args, schema.values, strict=True)):
        is_read = arg.name not in not_read
        if arg.kind is Kind.TENSOR:
            writes += _write(schema.op, k, None, *next(pairs), is_read)
        elif arg.kind is Kind.TENSORS:
            for i in range(len(value or ())):
                writes += _write(schema.op, k, i, *next(pairs), is_read)
    run = partial(_run, schema.signature, plan.call, writes)
    written = Plan(schema, plan.entry, plan.strategies, plan.redistributes, plan.static, run, plan.full, plan.outs)
    written.after = plan.after
    if policies.is_on:
        named = zip(schema.operand_names, schema.specs, plan.schema.specs, strict=True)
        written.sends = together([plan.sends], schema, _moves(not_read, named))
    return written


def _moves(not_read: Collection[str], pairs: Iterable[Any]) -> Iterator[Moved | None]:
    """What is sent to bring written tensors to where they are written, and back."""
    for name, part, whole in pairs:
        if part is None or whole is None or part.placements == whole.placements:
            continue
        if name.partition("[")[0] not in not_read:
            yield move_of(name, part, whole)
        yield move_of(f"{name}{WRITTEN_BACK}", whole, part)


def _write(
    op: Op, k: int, i: int | None, part: TensorSpec | None, whole: TensorSpec | None, is_read: bool
) -> list[Write]:
    if part is None or whole is None or part.placements == whole.placements:
        return []
    move, keep_part = runner(part, whole) if is_read else _new(whole), runner(whole, part)
    if not part.is_copy:
        return [(k, i, move, keep_part)]
    up_to_date = writable(op)
    return [(k, i, lambda local: move(up_to_date(local)), keep_part)]


def _new(whole: TensorSpec) -> Run:
    shape = whole.local_shape()
    return lambda local: in_order(local.new_empty(shape), whole.tensor_meta)


def _run(signature: Signature, call: Callable[..., Any], writes: Sequence[Write], *args: Any, **kwargs: Any) -> Any:
    values = signature.bind(args, kwargs)
    back = []
    moved: dict[int, torch.Tensor] = {}  # one tensor may be given twice, and is one tensor then, too
    for k, i, move, keep_part in writes:
        local = values[k] if i is None else values[k][i]
        if id(local) not in moved:
            moved[id(local)] = move(local)
        whole = moved[id(local)]
        if i is None:
            values[k] = whole
        else:
            values[k] = [*values[k][:i], whole, *values[k][i + 1 :]]
        back.append((local, whole, keep_part))
    positional, named = signature.unbind(values)
    out = call(*positional, **named)
    for local, whole, keep_part in back:
        local.copy_(keep_part(whole))
    return out
