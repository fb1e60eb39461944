"""Lines of a plan file that are held while the rest of a step is solved anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from shardwise.errors import PlanFitError, PlanFitWarning, warn_user
from shardwise.kernel.placements import Placement, parse_placement
from shardwise.program.plan_file import Line, PlanFile
from shardwise.program.plan_lines import place_of_line
from shardwise.program.step_problem import Assignment, StepProblem

__all__ = ["hold_lines"]

_MOST_CHOICES = 10_000  # combinations of rows that are tried for a call to begin with


def hold_lines(
    problem: StepProblem, start: Assignment, file: PlanFile, mesh_names: Sequence[str], loose: bool = False
) -> None:
    """Hold the moves of a plan that give no reason: results rest, and operands are used, as they say.

    ``start`` is changed to do so. Raises :class:`PlanFitError` for a line that fits no call, or that no row of its
    calls can do; with ``loose`` it is a :class:`PlanFitWarning`, and the line is left out.
    """
    for line in (*file.rests, *file.moves):
        if line.why:
            continue
        to = {mesh_names.index(name): parse_placement(text) for name, text in line.to.items()}
        places = [place for place in range(len(problem.graph.calls)) if place_of_line(problem, place) == line.place]
        held = [
            _hold_operands(problem, start, p, line, to) if line.operand else _hold_results(problem, start, p, to)
            for p in places
        ]
        if not any(held):
            what = (
                f"no call of {line.op} in {line.at or 'the program'}, {line.phase},"
                if not places
                else "none of its calls"
            )
            error = PlanFitError(
                asked=f"keep the lines of the plan {file.source or file.program}",
                found=f"{what} can have its {line.operand or 'result'} as "
                + ", ".join(f"{name} {text}" for name, text in line.to.items()),
                do="Correct the line, or delete it.",
                name=line.at,
            )
            if not loose:
                raise error
            warn_user(str(error), PlanFitWarning)
    start.cost = problem.cost(start)


def _hold_results(problem: StepProblem, start: Assignment, place: int, to: dict[int, Placement]) -> bool:
    held = [t for t in problem.graph.calls[place].results if t is not None and t in problem.resting]
    for t in held:
        problem.held_rests[t] = to
        start.rests[t] = tuple(to.get(m, p) for m, p in enumerate(start.rests[t]))
    return bool(held)


def _hold_operands(problem: StepProblem, start: Assignment, place: int, line: Line, to: dict[int, Placement]) -> bool:
    operands = [i for i, name in enumerate(problem.operand_names(place)) if name == line.operand]
    choices, held = problem.choices[place], problem.held_rows.get(place)  # by lines of other operands

    def fitting(m: int) -> Iterator[int]:
        for r in choices.legal[m] if held is None else sorted(held[m]):
            if m not in to or all(choices.rows[r].inputs[i] == to[m] for i in operands):
                yield r

    legal = [list(fitting(m)) for m in range(len(choices.legal))]
    for count, rows in enumerate(product(*legal)):
        if count == _MOST_CHOICES:
            break
        if choices.allows(rows):
            start.rows[place] = list(rows)
            problem.held_rows[place] = tuple(map(frozenset, legal))
            return True
    return False
