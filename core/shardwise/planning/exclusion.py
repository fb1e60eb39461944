"""Why choices are not legal: rows on one mesh dim, and combinations of rows over several.

For tools that explain a choice. A :class:`Problem` decides; this module writes its reasons as sentences.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from attrs import frozen

from shardwise.kernel.placements import show
from shardwise.planning.problem import Choice, Problem

__all__ = ["Exclusion", "ChoiceCount", "count_choices"]

MOST_CHECKED = 50_000
"""The most combinations that are checked, in some 0.2 s. With many mesh dims there are millions."""


@frozen
class Exclusion:
    """Some rows of a mesh dim, or combinations of rows (``mesh_dim`` is None), and why they are not considered."""

    reason: str
    mesh_dim: int | None
    rows: tuple[str, ...]
    count: int


@frozen
class ChoiceCount:
    """How many combinations of rows there are over the mesh dims, how many are legal, and why the others are not.

    ``complete`` is false when there are too many to check each. Then ``legal`` and the counts of the exclusions are
    lower bounds.
    """

    combinations: int
    legal: int
    complete: bool
    exclusions: tuple[Exclusion, ...]


def count_choices(problem: Problem) -> ChoiceCount:
    """Check every combination of the rows of a call, up to a limit.

    Raises :class:`NoStrategyError`, as the planner does, when no row is legal on some mesh dim.
    """
    ndim = len(problem.mesh_shape)
    rows = [problem.candidates(m) for m in range(ndim)]
    exclusions = []
    for m in range(ndim):
        reasons: dict[str, list[str]] = {}
        for r, obstacle in enumerate(problem.obstacles(m)):
            if r not in rows[m] and obstacle is not None:
                reasons.setdefault(_obstacle_text(problem, r, m, *obstacle), []).append(problem.rows[r].name)
        exclusions += [Exclusion(reason, m, tuple(names), len(names)) for reason, names in reasons.items()]
    walk = _Walk(problem, rows)
    walk.extend(())
    for reason, count in walk.refused.items():
        example = tuple(problem.rows[r].name for r in walk.examples[reason])
        exclusions.append(Exclusion(reason, None, example, count))
    return ChoiceCount(len(problem.rows) ** ndim, walk.legal, walk.left > 0, tuple(exclusions))


def _obstacle_text(problem: Problem, row: int, mesh_dim: int, what: str, operand: int) -> str:
    """One of :meth:`Problem.obstacles` as a sentence."""
    name, spec, placements = problem.operand_names[operand], problem.call_specs[operand], problem.rows[row]
    here = show(None if spec is None else spec.placements[mesh_dim])
    if what == "moves":
        why = "the op writes it" if operand in problem.written else "it is a number"
        there = show(problem.as_in_call(operand, placements.inputs[operand]))
        return f"{name} would have to move from {here} to {there}, but {why}"
    if what == "changes":
        output = next(o for i, o in problem.same if i == operand)
        there = show(problem.as_in_call(operand, placements.outputs[output]))
        return f"{name} would change from {here} to {there} in place"
    return f"{name} is {here} there; to make it partial only puts communication off"


class _Walk:
    """A depth-first walk over all combinations. A refused prefix counts for all combinations that begin with it."""

    def __init__(self, problem: Problem, rows: Sequence[Sequence[int]]) -> None:
        self._problem = problem
        self._rows = rows
        # By length, how many combinations begin with a prefix of it.
        self._behind = [math.prod(map(len, rows[n:])) for n in range(len(rows) + 1)]
        self.left = MOST_CHECKED
        self.legal = 0
        self.refused: Counter[str] = Counter()
        self.examples: dict[str, Choice] = {}

    def extend(self, prefix: Choice) -> None:
        """Check every combination that begins with a legal prefix."""
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
            pieces = math.prod(self._problem.splits(choice, operand, dim)) if what == "divides" else 0
            reason = {
                "reductions": "reductions that do not commute would meet in one tensor",
                "apart": "the lowering of one row may ask where the strided shards of another start",
                "divides": f"dim {dim} of {name} would be in {pieces} pieces, and {n} does not divide by {pieces}",
                "nonempty": f"some rank would hold nothing of dim {dim} of {name}",
            }[what]
            self.refused[reason] += self._behind[len(choice)]
            self.examples.setdefault(reason, choice)
