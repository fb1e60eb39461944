"""Ops without a rule on whole tensors, if the program asks for it: ``with replicate_unknown():``, or a setting.

Each rank gathers the operands, runs the op on the whole tensors and holds the whole results. That is right for every op
that computes the same results from the same operands. But it costs the time and memory that sharding saves, so it
happens only on request.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.engine.call_site import users_line
from shardwise.errors import UnknownOpWarning
from shardwise.kernel.arguments import check_flag
from shardwise.kernel.mesh import Mesh
from shardwise.kernel.placements import REPLICATE
from shardwise.kernel.precedence import Entry, Origin
from shardwise.kernel.registry import Registry
from shardwise.kernel.rule import FullMeshRule
from shardwise.kernel.schema import OpSchema, OpStrategy
from shardwise.kernel.signature import Op, op_name
from shardwise.planning.results import schema_metas
from shardwise.planning.strategies import strategy

__all__ = ["is_asked_for", "replicate_unknown", "replicated_entry", "warn_once"]

# One entry per context in force, the innermost last. One list for the process: a backward pass may run in other threads
# than its forward pass.
_enabled: list[bool] = []
_warned: set[tuple[str, str, int]] = set()


@contextmanager
def replicate_unknown(enabled: bool = True) -> Iterator[None]:
    """Run ops without a rule, and without a decomposition, on whole tensors on every rank while the context lasts.

    Operands are gathered, the op runs on whole tensors, and its results are replicated. Operands that the op writes
    keep their placements and get the new values. The first such op at each line of the program gives an
    :class:`UnknownOpWarning`. With ``enabled`` false such ops are refused, whatever the setting says.

    The context holds for all threads of the process. Every rank must enter and leave it at the same point. Ops that
    draw random numbers are still refused, since each rank would draw its own.
    """
    check_flag("choose what becomes of ops without a rule", enabled, "enabled")
    _enabled.append(enabled)
    try:
        yield
    finally:
        _enabled.pop()


def is_asked_for(registry: Registry) -> bool:
    """Whether ops without a rule run replicated now: the innermost context decides, else the settings."""
    return _enabled[-1] if _enabled else registry.unknown_ops == "replicate"


def replicated_entry(op: Op) -> Entry:
    """A rule for an op without one: every operand and every result is replicated."""
    rule = FullMeshRule(
        (op,), _replicated_strategy, "shardwise.replicate_unknown", text="no rule: everything replicated, as asked for"
    )
    return Entry(op, rule, Origin("replicate_unknown"))


def _replicated_strategy(mesh: Mesh, schema: OpSchema) -> OpStrategy:
    replicated = (REPLICATE,) * mesh.ndim
    metas = schema_metas(schema)
    if metas is None:
        metas = (None,) * sum(r.is_tensor for r in schema.signature.results)
    inputs = [None if spec is None else replicated for spec in schema.specs]
    outputs = [None if meta is None else replicated for meta in metas]
    return OpStrategy((strategy(schema, inputs, outputs, metas),))


# -- warning ---------------------------------------------------------------------------------------------------------


def warn_once(schema: OpSchema) -> None:
    """Warn of an op that runs replicated, once for each line of the program that calls it."""
    file, line = users_line()
    site = op_name(schema.op), file, line
    if site in _warned:
        return
    _warned.add(site)
    nbytes = sum(s.tensor_meta.nbytes for s in schema.specs if s is not None and not s.is_replicated)
    warnings.warn_explicit(
        f"{op_name(schema.op)} has no rule, so it runs on whole tensors on every rank, as asked for by "
        f"replicate_unknown: {nbytes:,} bytes are gathered on each rank, here at each call like this one",
        UnknownOpWarning,
        file,
        line,
    )
