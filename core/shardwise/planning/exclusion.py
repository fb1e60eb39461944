"""What the planner does not even weigh, and why: rows on one mesh dim, and combinations of rows over several.

For tools that explain a choice; the planner itself only asks a :class:`Problem` what is allowed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from attrs import frozen

from shardwise.kernel.placements import show
from shardwise.planning.problem import Choice, Problem

__all__ = ["Exclusion", "ChoiceCount", "count_choices"]

MOST_CHECKED = 50_000
"""Combinations that are looked at, at most: some 0.2 s. With many mesh dims there are millions."""


@frozen
class Exclusion:
    """Some rows of a mesh dim, or combinations of rows (``mesh_dim`` is None), and why they are not considered."""

    reason: str
    mesh_dim: int | None
    rows: tuple[str, ...]
    count: int


@frozen
class ChoiceCount:
    """How many combinations of rows there are over the mesh dims, how many of those are legal, and what is not.

    ``complete`` is false where there are too many to look at each; then ``legal`` and the counts of combinations are
    lower bounds.
    """

    combinations: int
    legal: int
    complete: bool
    exclusions: tuple[Exclusion, ...]


def count_choices(problem: Problem) -> ChoiceCount:
    """Look at every combination of the rows of a call, up to a limit; raises what the planner raises for no row."""
    ndim = len(problem.mesh_shape)
    rows = [problem.candidates(m) for m in range(ndim)]
    found = [e for m in range(ndim) for e in _dropped_rows(problem, m, rows[m])]
    walk = _Walk(problem, rows)
    walk.extend(())
    names = [row.name for row in problem.rows]
    for reason, count in walk.refused.items():
        example = tuple(names[r] for r in walk.examples[reason])
        found.append(Exclusion(reason, None, example, count))
    return ChoiceCount(len(problem.rows) ** ndim, walk.legal, walk.left > 0, tuple(found))


# -- rows of one mesh dim --------------------------------------------------------------------------------------------


def _dropped_rows(problem: Problem, mesh_dim: int, kept: Sequence[int]) -> Iterator[Exclusion]:
    reasons: dict[str, list[str]] = {}
    for r, row in enumerate(problem.rows):
        if r not in kept:
            reasons.setdefault(_why_dropped(problem, r, mesh_dim), []).append(row.name)
    for reason, names in reasons.items():
        yield Exclusion(reason, mesh_dim, tuple(names), len(names))


def _why_dropped(problem: Problem, row: int, mesh_dim: int) -> str:
    wanted = problem.rows[row]
    names = problem.operand_names
    here = [None if s is None else s.placements[mesh_dim] for s in problem.specs]
    codes = [None if source is None else source[mesh_dim] for source in problem.sources]
    for i in (*problem.written, *problem.fixed):
        if codes[i] is not None and problem.table.inputs[row][i] != codes[i]:
            what = "the op writes it" if i in problem.written else "it is a number"
            return f"{names[i]} would have to move from {show(here[i])} to {show(wanted.inputs[i])}, but {what}"
    for i, o in problem.same:
        if wanted.inputs[i] != wanted.outputs[o]:
            return f"{names[i]} would change from {show(here[i])} to {show(wanted.outputs[o])} in place"
    deferred = next(i for i, c in enumerate(codes) if c is not None and c > 0 and _is_partial(problem, row, i))
    return f"{names[deferred]} is {show(here[deferred])} there; to make it partial only puts communication off"


def _is_partial(problem: Problem, row: int, operand: int) -> bool:
    code = problem.table.inputs[row][operand]
    return code is not None and code < 0


# -- combinations ----------------------------------------------------------------------------------------------------


class _Walk:
    """All combinations, depth first; a refused prefix counts for all that begin with it."""

    def __init__(self, problem: Problem, rows: Sequence[Sequence[int]]) -> None:
        self._problem = problem
        self._rows = rows
        # How many combinations a prefix of each length stands for.
        self._behind = [math.prod(map(len, rows[n:])) for n in range(len(rows) + 1)]
        self.left = MOST_CHECKED
        self.legal = 0
        self.refused: Counter[str] = Counter()
        self.examples: dict[str, Choice] = {}

    def extend(self, prefix: Choice) -> None:
        if len(prefix) == len(self._rows):
            self.legal += 1
            return
        for r in self._rows[len(prefix)]:
            if self.left <= 0:
                return
            self.left -= 1
            choice = (*prefix, r)
            if self._problem.allowed(choice):
                self.extend(choice)
            else:
                self._refuse(choice)

    def _refuse(self, choice: Choice) -> None:
        reason = self._why_refused(choice)
        self.refused[reason] += self._behind[len(choice)]
        self.examples.setdefault(reason, choice)

    def _why_refused(self, choice: Choice) -> str:
        problem = self._problem
        barred = problem.table.barred[choice[-1]]
        if any(barred >> r & 1 for r in choice):
            return "reductions that do not commute would meet in one tensor"
        names = problem.operand_names
        for r in dict.fromkeys(choice):
            for i, d, n in problem.rows[r].divides:
                if not problem.divides(choice, i, d, n):
                    return f"the pieces of dim {d} of {names[i]} must number a divisor of {n}"
        i, d = next((i, d) for r in choice for i, d in problem.rows[r].nonempty if not problem.nonempty(choice, i, d))
        return f"some rank would hold nothing of dim {d} of {names[i]}"
