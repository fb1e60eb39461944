"""Random ops on plain tensors, answered as a mesh answers them: what a program on one device is compared with.

The rules' own lowerings draw, on a mesh without dims, whose only rank holds everything.
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
from shardwise.kernel.placements import Replicate
from shardwise.kernel.precedence import Entry
from shardwise.kernel.rule import Rule
from shardwise.kernel.schema import RuntimeSchemaInfo
from shardwise.kernel.signature import Call, Op, signature
from shardwise.kernel.spec import AbstractMesh, TensorSpec
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
        if not draws(op) or not _is_ours(op, args, kwargs):
            return op(*args, **kwargs)
        if _has_rule(op, args, kwargs):
            # Where no lowering draws, a mesh leaves the op alone, too.
            local = _local_call(op, args, kwargs)
            return op(*args, **kwargs) if local is None else _lowered(local, args, kwargs)
        opened = composite_kernel(op)
        if opened is None:
            return _seeded(op, args, kwargs)
        with mode:
            return opened(*args, **kwargs)

    mode = watching(run, lambda _: False)
    with generator.using("counter" if generator.mode() == "torch" else generator.mode()), mode:
        yield


def _is_ours(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call has plain tensors only, with data, and no generator of its own."""
    for value in signature(op).bind(args, kwargs):
        if isinstance(value, torch.Generator):
            return False
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(part, torch.Tensor) and (type(part) not in _PLAIN or part.device.type == "meta"):
                return False
    return kwargs.get("device") != torch.device("meta")


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _has_rule(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the op would be run by a rule on a mesh, where a tensor brings it."""
    return op in default_registry() and any(isinstance(v, torch.Tensor) for v in (*args, *kwargs.values()))


def _local_call(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Entry, LocalCall] | None:
    """The op's rule and its call on a mesh without dims, when that runs a lowering; ``None`` otherwise."""
    entry = default_registry().lookup(op)
    rule = entry.rule
    if not isinstance(rule, Rule) or rule.lowering is None:
        return None
    values = signature(op).bind(args, kwargs)
    info = RuntimeSchemaInfo.of(op, rule.static, rule.writes)
    schema, described = describe_call(_NoTensor, entry, info, _ALONE, values)
    call = DescribedCall.of(entry, schema, output_metas(op, described, rule.meta)).call
    if not _draws_whole(rule, call):
        return None
    outputs = tuple(None if meta is None else TensorSpec(_ALONE, (), meta) for meta in call.outputs)
    return entry, LocalCall(call, schema.specs[: len(call.operands)], outputs, (), _COMM)


class _NoTensor:
    """Stands for the tensor class where no tensor is of it."""


def _draws_whole(rule: Rule, call: Call) -> bool:
    """Whether the lowering runs where everything is whole."""
    whole = (Replicate(), None)
    return any(r.lowered for r in rule.rows(call) if all(p in whole for p in (*r.inputs, *r.outputs)))


def _lowered(found: tuple[Entry, LocalCall], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    entry, local = found
    described = signature(entry.op)
    assert entry.rule.lowering is not None
    positional, named = described.unbind(described.bind(args, kwargs))
    return entry.rule.lowering(local, *positional, **named)


def _seeded(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an op that nobody wrote a rule for under torch's generators, seeded for this draw."""
    draw = generator.next_draw(_COMM.agree_on_draw)
    assert draw is not None
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
    with draw.seeding(tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")):
        return op(*args, **kwargs)
