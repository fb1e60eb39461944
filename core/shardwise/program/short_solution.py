"""The solution of a long step, found on a shortened one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import define

from shardwise.errors import NoPlanError
from shardwise.program.cost_graph import FORBIDDEN
from shardwise.program.layer_fold import LayerFold
from shardwise.program.moment_prices import MomentPrices
from shardwise.program.short_step import ShortStep, shortened
from shardwise.program.step_graph import StepGraph
from shardwise.program.step_problem import Assignment, StepProblem
from shardwise.program.step_solution import solve_step

__all__ = ["ShortProblem"]


@define(eq=False)
class ShortProblem:
    """The problem of a shortened step, beside that of the whole one."""

    step: ShortStep
    problem: StepProblem
    whole: StepProblem

    @classmethod
    def of(cls, whole: StepProblem, problem_of: Callable[[StepGraph], StepProblem]) -> ShortProblem | None:
        """That of a step of many layers on several mesh dims; on one, the whole step is solved at once."""
        step = shortened(whole.graph) if whole.graph.mesh.ndim > 1 else None
        if step is None:
            return None
        problem = problem_of(step.graph)
        rows = [whole.choices[place].rows for place in step.places]
        # The rows of a call depend on those before it: on strided shards that they may make.
        is_alike = problem.resting <= whole.resting and [of.rows for of in problem.choices] == rows
        if not is_alike:
            return None
        problem.share_moves(whole)
        whole.fold = LayerFold(whole, step.of_whole)
        return cls(step, problem, whole)

    def _prices(self, prices: MomentPrices) -> MomentPrices:
        """Those of a layer that stands for others are the mean of theirs."""
        return MomentPrices(self.problem.moments, [self.step.means(life, of) for life, of in enumerate(prices.by_life)])

    def repeats(self, found: Assignment) -> bool:
        """Whether each layer that was left out costs what the one costs that stands for it. What was found is then as
        good for the whole step as it is for the shortened one.
        """
        costs: dict[int, int] = {}
        for place, layer in enumerate(self.step.layers):
            if layer is not None:
                costs[layer] = costs.get(layer, 0) + self.whole.cost_of_call(found, place)
        gap = self.step.gap
        return all(costs[layer] == costs[gap.start - 1] for layer in gap)

    def solved(self, starts: Sequence[Assignment], *, exchanges: bool) -> Assignment | None:
        """The best assignment of the whole step that has all layers alike, or a start where that is better. At prices
        on moments its cost is left open.

        None where none is legal, or where the whole step has something held.
        """
        problem, whole = self.problem, self.whole
        if whole.held_rows or whole.held_rests:
            return None
        problem.price, problem.pinned = whole.price, whole.pinned & problem.free
        problem.prices = None if whole.prices is None else self._prices(whole.prices)
        parts = [self.step.part_of(start, problem.resting) for start in starts]
        for part in parts:
            part.cost = problem.cost(part)
        try:
            short = solve_step(problem, parts, exchanges=exchanges)
        except NoPlanError:
            return None
        found = self.step.whole(short, starts[0])
        if whole.prices is not None:
            return found  # in what it holds the layers differ: at prices on moments all of it takes long to count
        found.cost = whole.cost(found)
        best = min((found, *starts), key=lambda one: one.cost)
        return best if best.cost < FORBIDDEN else None
