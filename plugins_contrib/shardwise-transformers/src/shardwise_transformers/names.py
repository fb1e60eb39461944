"""Names of parameters as plans write them, with ``*`` for the number of a layer, and as shell patterns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

__all__ = ["entry_for", "generic", "owner", "patterns_for"]

T = TypeVar("T")


def generic(name: str) -> str:
    """``layers.3.mlp.up_proj`` as ``layers.*.mlp.up_proj``: how transformers looks a name up in a plan."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def owner(name: str) -> str:
    """The module of a parameter, by name."""
    return name.rpartition(".")[0]


def entry_for(name: str, plan: Mapping[str, T]) -> str | None:
    """The key of a plan that says something of a parameter: its own, or else that of its module."""
    keys = (name, generic(name), owner(name), generic(owner(name)))
    return next((key for key in keys if key and key in plan), None)


def patterns_for(wanted: Mapping[str, T], default: T) -> dict[str, T]:
    """Shell patterns, the first that fits holds, that give every name what is wanted; names without one, ``default``.

    A pattern has ``*`` for layer numbers. Where such a pattern would take a name that wants something else, the names
    are written out.
    """
    patterns = {_pattern(name): value for name, value in wanted.items() if value != default}
    for pattern, value in list(patterns.items()):
        fitting = [name for name in wanted if fnmatchcase(name, pattern)]
        if any(wanted[name] != value for name in fitting):
            del patterns[pattern]
    exact = {
        _literal(name): value for name, value in wanted.items() if value != default and _pattern(name) not in patterns
    }
    return exact | _without_covered(patterns, wanted)


def _without_covered(patterns: Mapping[str, T], wanted: Mapping[str, T]) -> dict[str, T]:
    """The patterns that take a name which no earlier one takes; ``*`` crosses dots, so one may take another's names."""
    left = list(wanted)
    kept = {}
    for pattern, value in patterns.items():
        if any(fnmatchcase(name, pattern) for name in left):
            kept[pattern] = value
        left = [name for name in left if not fnmatchcase(name, pattern)]
    return kept


def _pattern(name: str) -> str:
    return generic(_literal(name))


def _literal(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)
