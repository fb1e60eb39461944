"""A call as somebody asks about it: its arguments by its op's schema, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from shardwise.errors import CallError
from shardwise.kernel.signature import Op, op_name, signature
from shardwise.planning.results import output_metas
from shardwise.private_torch.dispatch import recorded_ops
from shardwise.private_torch.modes import outside_modes
from shardwise.private_torch.ops import schema_of

__all__ = ["bind_call", "call_error", "composite_error"]


def bind_call(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """One value per schema argument; raises :class:`CallError` for what the op's schema does not allow."""
    declared = signature(op).args
    names = [a.name for a in declared]
    positional = [a.name for a in declared if not a.kwarg_only]
    passed = {*positional[: len(args)], *kwargs}
    optional = {a.name for a in schema_of(op).arguments if str(a.type).startswith("Optional[")}
    missing = [a.name for a in declared if a.name not in passed and not a.has_default and a.name not in optional]
    unknown = [name for name in kwargs if name not in names]
    if len(args) > len(positional):
        raise call_error(op, f"{len(args)} positional arguments are given and it takes {len(positional)}")
    if unknown:
        raise call_error(op, f"it has no argument {', '.join(map(repr, unknown))}", argument=unknown[0])
    if missing:
        raise call_error(op, f"{', '.join(map(repr, missing))} must be given", argument=missing[0])
    return signature(op).bind(args, kwargs)


def call_error(op: Op, found: str, **fields: Any) -> CallError:
    """The error for a call that does not fit an op's schema, which it shows."""
    return CallError(
        asked=f"explain a call of {op_name(op)}",
        found=found,
        do=f"Its schema is {schema_of(op)}",
        op=op_name(op),
        **fields,
    )


def composite_error(op: Op, values: Sequence[Any]) -> CallError:
    """The error for an op that torch splits before anything is dispatched; it names the parts."""
    parts: list[str] = []

    def run() -> None:
        output_metas(op, values)

    with outside_modes(), suppress(Exception):
        parts += dict.fromkeys(op_name(part) for part, _, _ in recorded_ops(run, (), {}) if signature(part).tensor_args)
    return CallError(
        asked=f"explain a call of {op_name(op)}",
        found=f"torch runs it as {', '.join(parts)}" if parts else "torch runs it as other ops",
        do="Explain those.",
        op=op_name(op),
        parts=tuple(parts),
    )
