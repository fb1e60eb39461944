"""Functions that the author of a rule wrote: what they raise or return by mistake is an error that names the rule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from shardwise.errors import RuleError, ShardingError
from shardwise.kernel.signature import Op, op_name

__all__ = ["authored", "noted", "refuse_answer"]


@contextmanager
def authored(op: Op, source: str, what: str) -> Iterator[None]:
    """Run an author's function, named by ``what``: what it raises becomes a :class:`RuleError` with the rule's line."""
    try:
        yield
    except ShardingError:
        raise
    except Exception as error:  # noqa: BLE001  # an author's code may raise anything
        _refuse(op, source, f"its {what} raised {type(error).__name__}: {error}", "Correct it", error)


@contextmanager
def noted(op: Op, source: str) -> Iterator[None]:
    """Run a lowering: what it raises may be the answer to a wrong call, so it stays as it is, with a note."""
    try:
        yield
    except Exception as error:
        error.add_note(f"It was raised in the lowering of {op_name(op)}, of the rule at {source}.")
        raise


def refuse_answer(op: Op, source: str, what: str, answer: str, do: str) -> NoReturn:
    """Raise :class:`RuleError` for what an author's function returned."""
    _refuse(op, source, f"its {what} returned {answer}", do)


def _refuse(op: Op, source: str, found: str, do: str, cause: Exception | None = None) -> NoReturn:
    name = op_name(op)
    raise RuleError(
        asked=f"apply the rule of {name} at {source}",
        found=found,
        do=f"{do}; `shardwise why {name}` names the plugin that has the rule",
        op=name,
        source=source,
    ) from cause
