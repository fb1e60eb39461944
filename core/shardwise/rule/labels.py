"""Labels of dims, for rules that are functions of a call, and rows that stand for several reductions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from shardwise.errors import RuleError
from shardwise.kernel.plurals import counted
from shardwise.kernel.signature import Call
from shardwise.rule.flow import Flow

__all__ = ["ANY", "UNMOVED", "Labels", "dim_of", "each", "labels", "replaced", "whole"]

#: The names of the dims of one tensor; ``None`` is a dim that is never sharded.
Labels = tuple[str | None, ...]

#: Each element of a result is one element of the operands, which are all partial; so are all results.
ANY = ("* -> *, ...",)
#: Reductions under which equal pieces reduce to themselves: a whole value may join a tensor that is so partial.
UNMOVED = ("avg", "max", "min")


def dim_of(dim: int, ndim: int) -> int:
    """A dim counted from the front; a tensor without dims has dim 0, as in torch."""
    return dim % ndim if ndim else 0


def labels(ndim: int, whole: int | Iterable[int] = (), letter: str = "d") -> Labels:
    """``d0 d1 ...`` with ``None`` for the dims that must be whole, which may be counted from the back."""
    unsharded = {_checked_dim(d, ndim) for d in (whole if isinstance(whole, Iterable) else (whole,))}
    return tuple(None if d in unsharded else f"{letter}{d}" for d in range(ndim))


def _checked_dim(dim: Any, ndim: int) -> int:
    if not isinstance(dim, int) or not -max(ndim, 1) <= dim < max(ndim, 1):
        raise RuleError(
            asked=f"keep dim {dim!r} of a tensor of {counted(ndim, 'dim')} whole",
            found="it is not the number of one of its dims",
            do="Name dims from the front, or from the back by negative numbers.",
        )
    return dim_of(dim, ndim)


def replaced(names: Labels, dim: int, *by: str | None) -> Labels:
    """The labels with one dim replaced by others, or dropped."""
    return (*names[:dim], *by, *names[dim + 1 :])


def each(kinds: Iterable[str], *rows: str) -> tuple[str, ...]:
    """The row texts once for each reduction, which stands in them as ``k``."""
    return tuple(re.sub(r"\bk\b", kind, row) for kind in kinds for row in rows)


def whole(call: Call) -> Flow:
    """Every operand and every result whole: the row that any op has."""
    return Flow([None] * len(call.operands), [None] * len(call.outputs))
