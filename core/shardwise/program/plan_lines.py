"""The moves of a plan as lines that a person reads: what does not stay where its rule leaves it, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product

from attrs import define, evolve

from shardwise.kernel.placements import REPLICATE, show
from shardwise.kernel.signature import op_name
from shardwise.program.amounts import milliseconds
from shardwise.program.cost_graph import FORBIDDEN, NANOSECONDS
from shardwise.program.plan_file import Line, starred
from shardwise.program.step_graph import Places
from shardwise.program.step_problem import Assignment, StepProblem

__all__ = ["lines_of", "place_of_line"]

_USERS = 3  # ops that a reason names
_OTHER_ROWS = 256  # combinations of rows that a reason compares with


def lines_of(
    problem: StepProblem, assignment: Assignment, mesh_names: Sequence[str]
) -> tuple[tuple[Line, ...], tuple[Line, ...]]:
    """The moves of results and those of operands, those of equal layers as one line, in the order of the step."""
    lines = _Lines(problem, assignment, tuple(mesh_names))
    return _merged(lines.of_results()), _merged(lines.of_operands())


def place_of_line(problem: StepProblem, place: int) -> tuple[str, str, str]:
    """How a line calls a call: the module with its numbers as ``*``, the op and the phase."""
    call = problem.graph.calls[place]
    return starred(call.module), op_name(call.schema.op), call.phase


def _merged(lines: Iterator[tuple[Line, str, int | None]]) -> tuple[Line, ...]:
    by_key: dict[object, tuple[Line, str, int | None]] = {}
    for line, why, gain in lines:
        key = (line.key, why)
        known = by_key.get(key)
        if known is not None:
            total = None if gain is None or known[2] is None else known[2] + gain
            by_key[key] = (evolve(line, times=known[0].times + 1), why, total)
        else:
            by_key[key] = (line, why, gain)
    return tuple(evolve(line, why=_reason(why, gain)) for line, why, gain in by_key.values())


def _reason(why: str, gain: int | None) -> str:
    if gain is None:
        return why
    return f"{milliseconds(gain / NANOSECONDS)} cheaper than {why}" if gain > 0 else f"as cheap as {why}"


@define
class _Lines:
    problem: StepProblem
    assignment: Assignment
    mesh_names: tuple[str, ...]

    def of_results(self) -> Iterator[tuple[Line, str, int | None]]:
        problem, assignment = self.problem, self.assignment
        for place, call in enumerate(problem.graph.calls):
            for t in call.results:
                if t is None or t not in problem.resting:
                    continue
                made, rests = problem.made(assignment, t), assignment.rests[t]
                if made != rests:
                    yield (self._line(place, made, rests), *self._why_rests(t, made, rests))

    def _why_rests(self, t: int, made: Places, rests: Places) -> tuple[str, int | None]:
        """Against a result that stays where its row leaves it, so that each use moves it for itself."""
        problem, assignment = self.problem, self.assignment
        uses = problem.graph.uses.get(t, [])

        def cost(layout: Places) -> int:
            moves = (problem.operand_cost(p, i, layout, problem.used(assignment, p, i)) for p, i in uses)
            return sum(moves) + problem.end_cost(t, layout, assignment)

        ops = list(dict.fromkeys(op_name(problem.graph.calls[p].schema.op) for p, _ in uses))
        users = ", ".join(ops[:_USERS]) + (", ..." if len(ops) > _USERS else "")
        stays = cost(made)
        left = self._change(rests, made)
        if stays >= FORBIDDEN:
            return f"{users} cannot take it as {left}", None
        gain = stays - cost(rests) - problem.move(t, made, rests)
        return f"{left}, which {users} would fetch {len(uses)} times", gain

    def of_operands(self) -> Iterator[tuple[Line, str, int | None]]:
        problem, assignment = self.problem, self.assignment
        for place, call in enumerate(problem.graph.calls):
            for i, t in enumerate(call.operands):
                if t is None:
                    continue
                source, used = problem.rests(assignment, t), problem.used(assignment, place, i)
                if source != used:
                    # A whole operand of which the op takes a shard costs nothing and is no move.
                    if all(a in (REPLICATE, b) for a, b in zip(source, used, strict=True)):
                        continue
                    line = evolve(self._line(place, source, used), operand=self.problem.operand_names(place)[i])
                    yield (line, *self._why_moves(place, i, source, used))

    def _why_moves(self, place: int, i: int, source: Places, used: Places) -> tuple[str, int | None]:
        """Against the cheapest rows that take the operand as it is, all else held."""
        choices, rows = self.problem.choices[place], self.assignment.rows[place]
        changed = [m for m, (a, b) in enumerate(zip(source, used, strict=True)) if a != b]
        fitting = [
            [r for r in choices.legal[m] if choices.rows[r].inputs[i] == source[m]] if m in changed else [rows[m]]
            for m in range(len(rows))
        ]
        others = (list(choice) for choice in islice(product(*fitting), _OTHER_ROWS) if choices.allows(choice))
        best = min((self._cost(place, choice) for choice in others), default=FORBIDDEN)
        left = self._change(used, source)
        if best >= FORBIDDEN:
            return f"it takes no {left} here", None
        return f"taking it as {left}", best - self._cost(place, rows)

    def _cost(self, place: int, rows: list[int]) -> int:
        """Nanoseconds of a call under rows, with the moves to it and from it to where its results are used."""
        problem = self.problem
        held = self.assignment.rows[place]
        self.assignment.rows[place] = rows
        try:
            total = problem.own_cost(place, rows)
            call = problem.graph.calls[place]
            for i, t in enumerate(call.operands):
                if t is not None:
                    source, used = problem.rests(self.assignment, t), problem.used(self.assignment, place, i)
                    total += problem.operand_cost(place, i, source, used)
            for t in call.results:
                if t is None:
                    continue
                rests = problem.rests(self.assignment, t)
                total += problem.end_cost(t, rests, self.assignment)
                if t in problem.resting:
                    total += problem.move(t, problem.made(self.assignment, t), rests)
                    continue
                for p, i in problem.graph.uses.get(t, ()):
                    total += problem.operand_cost(p, i, rests, problem.used(self.assignment, p, i))
            return min(total, FORBIDDEN)
        finally:
            self.assignment.rows[place] = held

    # -- text ----------------------------------------------------------------------------------------------------

    def _line(self, place: int, source: Places, target: Places) -> Line:
        to = {name: show(b) for name, a, b in zip(self.mesh_names, source, target, strict=True) if a != b}
        return Line(*place_of_line(self.problem, place), to)

    def _change(self, target: Places, source: Places) -> str:
        """The layout of the source on the mesh dims where it differs."""
        return ", ".join(
            f"{show(a)} over {name}" for name, a, b in zip(self.mesh_names, source, target, strict=True) if a != b
        )
