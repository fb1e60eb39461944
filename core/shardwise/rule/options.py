"""What the functions that make rules are given, each option of its kind.

A text may stand for a list: of the names in it, ``replicate="m k"``, or of one row, ``partial="sum, R -> sum"``.
Anything else is refused when the rule is made, at the author's line: a program that runs by the rule has no part in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from shardwise.errors import RuleArgumentError
from shardwise.kernel.arguments import kind_of
from shardwise.rule.facts import Facts

__all__ = ["checked_functions", "checked_replaces", "names_of", "reductions_of", "rows_of"]


def names_of(option: str, value: Any) -> tuple[str, ...]:
    """The names of an option: of a list of them, or of a text with spaces between them."""
    if isinstance(value, str):
        return tuple(value.split())
    names = tuple(value) if isinstance(value, Iterable) else None
    if names is None or not all(isinstance(name, str) for name in names):
        _refuse(option, value, f'Write names, as in {option}=["k"].')
    return names


def rows_of(option: str, value: Any) -> tuple[str | Facts, ...]:
    """Rows as they are written, or facts: of a list of them, or one alone."""
    if isinstance(value, (str, Facts)):
        return (value,)
    rows = tuple(value) if isinstance(value, Iterable) else None
    if rows is None or not all(isinstance(row, (str, Facts)) for row in rows):
        _refuse(option, value, f'Write rows, as in {option}=["sum, R -> sum"].')
    return rows


def reductions_of(value: Any) -> dict[str, str]:
    """The reductions of the dims that vanish, by dim."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        _refuse("reduce", value, 'Say for each dim which reduction its shards need, as in reduce={"k": "sum"}.')
    return dict(value)


def checked_functions(**functions: Any) -> None:
    """Refuse an option that must be a function, or be left out, and is something else."""
    for option, value in functions.items():
        if value is not None and (isinstance(value, type) or not callable(value)):
            _refuse(option, value, "Pass a function, or leave it out.")


def checked_replaces(value: Any) -> str | None:
    """The name in ``replaces=``."""
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        _refuse("replaces", value, 'Name one plugin or distribution, as in replaces="shardwise-matmul".')
    return value


def _refuse(option: str, value: Any, do: str) -> NoReturn:
    raise RuleArgumentError(
        asked=f"make a rule with {option}={value!r}",
        found=f"it is {kind_of(value)}" if not isinstance(value, (str, list, tuple)) else "it does not say which",
        do=do,
        argument=option,
    )
