"""Random ops on plain tensors draw the same numbers as on a mesh, so that a program on one device can be compared.

The lowerings of the rules draw the numbers. They run on a mesh without dims, whose only rank holds everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shardwise.comm.mesh_comm import MeshComm
from shardwise.discovery.process import default_registry
from shardwise.engine.make_plan import DescribedCall
from shardwise.engine.plan_call import describe_call
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import Replicate
from shardwise.kernel.precedence import Entry
from shardwise.kernel.rule import Rule
from shardwise.kernel.schema import RuntimeSchemaInfo
from shardwise.kernel.signature import Op, signature
from shardwise.kernel.spec import TensorSpec
from shardwise.planning.results import output_metas
from shardwise.private_torch.dispatch import watching
from shardwise.private_torch.ops import composite_kernel, draws
from shardwise.rng import generator
from shardwise.rule.lowering import LocalCall

__all__ = ["on_one_device"]

_ALONE = AbstractMesh(())
_COMM = MeshComm(_ALONE)


@contextmanager
def on_one_device() -> Iterator[None]:
    """Let random ops on plain tensors draw from shardwise's generator while the context lasts.

    After the same :func:`shardwise.manual_seed` a program draws the same numbers here as on a mesh. A backward that
    recomputes a forward belongs inside. Ops on MeshTensors draw from it, too; an op that is given a ``generator`` draws
    from that one.
    """

    def run(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not draws(op) or not _has_plain_operands(op, args, kwargs):
            return op(*args, **kwargs)
        if op in default_registry() and any(isinstance(v, torch.Tensor) for v in (*args, *kwargs.values())):
            # A rule would run the op on a mesh. Without a lowering, the op draws there as it does here.
            local_call = _local_call(op, args, kwargs)
            if local_call is None:
                return op(*args, **kwargs)
            entry, local = local_call
            assert entry.rule.lowering is not None
            described = signature(op)
            positional, named = described.unbind(described.bind(args, kwargs))
            return entry.rule.lowering(local, *positional, **named)
        opened = composite_kernel(op)
        if opened is None:
            # Run an op without a rule under torch's generators, seeded for this draw.
            draw = generator.next_draw(_COMM.agree_on_draw)
            assert draw is not None
            tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
            with draw.seeding(tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")):
                return op(*args, **kwargs)
        with mode:
            return opened(*args, **kwargs)

    mode = watching(run, lambda _: False)
    with generator.using("counter" if generator.mode() == "torch" else generator.mode()), mode:
        yield


def _has_plain_operands(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether all tensors of a call are plain and have data, and the call has no generator of its own."""
    for value in signature(op).bind(args, kwargs):
        if isinstance(value, torch.Generator):
            return False
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(part, torch.Tensor) and (type(part) not in _PLAIN or part.device.type == "meta"):
                return False
    return kwargs.get("device") != torch.device("meta")


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _local_call(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Entry, LocalCall] | None:
    """The op's rule and its call on a mesh without dims; None if no lowering runs there."""
    entry = default_registry().lookup(op)
    rule = entry.rule
    if not isinstance(rule, Rule) or rule.lowering is None:
        return None
    values = signature(op).bind(args, kwargs)
    info = RuntimeSchemaInfo.of(op, rule.static, rule.writes)
    schema, described = describe_call(_NoTensor, entry, info, _ALONE, values)
    call = DescribedCall.of(entry, schema, output_metas(op, described, rule.meta)).call
    whole = (Replicate(), None)
    if not any(r.lowered for r in rule.rows(call) if all(p in whole for p in (*r.inputs, *r.outputs))):
        return None
    outputs = tuple(None if meta is None else TensorSpec(_ALONE, (), meta) for meta in call.outputs)
    return entry, LocalCall(call, schema.specs[: len(call.operands)], outputs, (), _COMM)


class _NoTensor:
    """The tensor class of a call that has no MeshTensor."""
