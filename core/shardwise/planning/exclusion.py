"""Which choices are not legal, and why: rows on one mesh dim, and combinations of rows over several.

For tools that explain a choice. A :class:`Problem` decides what is legal; here its answers become sentences.
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
    for r, obstacle in enumerate(problem.obstacles(mesh_dim)):
        if r not in kept and obstacle is not None:
            reasons.setdefault(_in_words(problem, r, mesh_dim, *obstacle), []).append(problem.rows[r].name)
    for reason, names in reasons.items():
        yield Exclusion(reason, mesh_dim, tuple(names), len(names))


def _in_words(problem: Problem, row: int, mesh_dim: int, what: str, operand: int) -> str:
    name, spec, placements = problem.operand_names[operand], problem.specs[operand], problem.rows[row]
    here = show(None if spec is None else spec.placements[mesh_dim])
    if what == "moves":
        why = "the op writes it" if operand in problem.written else "it is a number"
        return f"{name} would have to move from {here} to {show(placements.inputs[operand])}, but {why}"
    if what == "changes":
        output = next(o for i, o in problem.same if i == operand)
        return f"{name} would change from {here} to {show(placements.outputs[output])} in place"
    return f"{name} is {here} there; to make it partial only puts communication off"


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
            conflict = self._problem.conflict(choice)
            if conflict is None:
                self.extend(choice)
                continue
            what, operand, dim, n = conflict
            name = self._problem.operand_names[operand]
            reason = {
                "reductions": "reductions that do not commute would meet in one tensor",
                "divides": f"the pieces of dim {dim} of {name} must number a divisor of {n}",
                "nonempty": f"some rank would hold nothing of dim {dim} of {name}",
            }[what]
            self.refused[reason] += self._behind[len(choice)]
            self.examples.setdefault(reason, choice)
