"""Writes to partial tensors for which no row is legal: the op runs on the reduced tensor, and a part of it is written.

The written tensor stays partial, because its views, its base and whoever else holds it have that layout. On one rank
of a partial sum the part is the new value, on the others it is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from shardwise.comm.redistribute import runner
from shardwise.kernel.placements import REPLICATE, Partial
from shardwise.kernel.plan import Plan
from shardwise.kernel.schema import OpSchema
from shardwise.kernel.signature import Kind, Signature
from shardwise.kernel.spec import TensorSpec

__all__ = ["reduced_writes", "writing_parts"]

Run = Callable[[torch.Tensor], torch.Tensor]
# The argument, the position in a list or None, and how its local tensor is reduced and becomes a part again.
Write = tuple[int, int | None, Run, Run]


def reduced_writes(schema: OpSchema) -> OpSchema | None:
    """The same call with reduced tensors in place of the partial ones that it writes; ``None`` where it writes none."""
    specs = list(schema.specs)
    for i in schema.written:
        spec = specs[i]
        if spec is not None and spec.reductions and not spec.is_copy:
            specs[i] = spec.with_placements([REPLICATE if isinstance(p, Partial) else p for p in spec.placements])
    changed = any(old is not new for old, new in zip(schema.specs, specs, strict=True))
    return schema.with_specs(specs) if changed else None


def writing_parts(schema: OpSchema, plan: Plan) -> Plan:
    """The plan of a call, from that of the call with reduced tensors."""
    writes: list[Write] = []
    pairs = iter(zip(schema.specs, plan.schema.specs, strict=True))
    for k, (arg, value) in enumerate(zip(schema.signature.args, schema.values, strict=True)):
        if arg.kind is Kind.TENSOR:
            writes += _write(k, None, *next(pairs))
        elif arg.kind is Kind.TENSORS:
            for i in range(len(value or ())):
                writes += _write(k, i, *next(pairs))
    run = partial(_run, schema.signature, plan.call, writes)
    return Plan(schema, plan.entry, plan.strategies, plan.redistributes, plan.static, run, plan.full, plan.outs)


def _write(k: int, i: int | None, part: TensorSpec | None, whole: TensorSpec | None) -> list[Write]:
    if part is None or whole is None or part is whole:
        return []
    return [(k, i, runner(part, whole), runner(whole, part))]


def _run(signature: Signature, call: Callable[..., Any], writes: Sequence[Write], *args: Any, **kwargs: Any) -> Any:
    values = signature.bind(args, kwargs)
    back = []
    reduced: dict[int, torch.Tensor] = {}  # one tensor may be given twice, and is one tensor then, too
    for k, i, reduce, keep_part in writes:
        local = values[k] if i is None else values[k][i]
        if id(local) not in reduced:
            reduced[id(local)] = reduce(local)
        whole = reduced[id(local)]
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
