"""The arguments of a local op that a rule replaces: the sizes that this rank's shards have, for example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import RuleArgumentError
from shardwise.kernel.arguments import kind_of
from shardwise.kernel.authored import authored, refuse_answer
from shardwise.kernel.precedence import Entry
from shardwise.kernel.schema import OpSchema
from shardwise.kernel.signature import op_name
from shardwise.rule.lowering import LocalCall

__all__ = ["local_statics"]


def local_statics(entry: Entry, schema: OpSchema, local: LocalCall | None) -> tuple[Any, ...] | None:
    """By-value arguments of the local op in schema order if the rule replaces any, else ``None``.

    Raises :class:`RuleArgumentError` when the rule replaces an argument that is not keyed by value.
    """
    if entry.rule.local_args is None or local is None:
        return None
    with authored(schema.op, entry.rule.source, "local_args="):
        replaced = entry.rule.local_args(local)
    if not isinstance(replaced, Mapping):
        do = "Return a dict from names of arguments to their local values"
        refuse_answer(schema.op, entry.rule.source, "local_args=", kind_of(replaced), do)
    keyed = [
        (a.name, v) for a, v in zip(schema.signature.args, schema.values, strict=True) if a.name in schema.info.by_value
    ]
    unknown = set(replaced) - {name for name, _ in keyed}
    if unknown:
        raise RuleArgumentError(
            asked=f"localise the arguments of {op_name(schema.op)}",
            found=f"the rule at {entry.rule.source} replaces {sorted(unknown)}, which are not keyed by value",
            do="Name them in static=, or correct the names.",
            op=op_name(schema.op),
            argument=min(unknown),
        )
    local_values = tuple(replaced.get(name, value) for name, value in keyed)
    return None if local_values == tuple(v for _, v in keyed) else local_values
