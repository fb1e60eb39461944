"""The search for the plan of a recorded step: free parameters, a limit on memory, and recipes to begin from."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial

from attrs import define, field, frozen

from shardwise.errors import MemoryPlanError, NoPlanError, PlanFitError, PlanFitWarning, PlanMeshError
from shardwise.kernel.placements import REPLICATE, Placement, Shard
from shardwise.program.amounts import size_text
from shardwise.program.cheap_moves import Floats
from shardwise.program.cost_graph import FORBIDDEN, NANOSECONDS
from shardwise.program.plan_file import Layout, PlanFile, layout_text
from shardwise.program.short_solution import ShortProblem
from shardwise.program.step_graph import Places, StepGraph
from shardwise.program.step_holds import hold_lines
from shardwise.program.step_limit import PricedSearch
from shardwise.program.step_memory import StepMemory
from shardwise.program.step_problem import Assignment, StepProblem
from shardwise.program.step_solution import solve_step
from shardwise.steps.costs import WorkCosts
from shardwise.steps.solving import Solved, with_decisions
from shardwise.tools.rehearse import Memory

__all__ = ["PlanSearch", "Request"]

_ROUNDS = 4  # of solving and measuring, until a plan keeps its limit
_OF_ADAM = Fraction(4)  # parameter, gradient and two states; for a program that runs its step itself


@frozen(eq=False)
class Request:
    """What is asked of a plan: whether parameters are free, the bytes that a rank may hold, recipes by name, a plan
    whose parameters and own moves are kept, whether a bound is asked for, and whether lines of the kept plan may fit
    nothing.
    """

    frees_parameters: bool = False
    memory: int | None = None
    recipes: Mapping[str, PlanFile] = field(factory=dict)
    keep: PlanFile | None = None
    prove: bool = False
    loose: bool = False

    def check_names(self, mesh_names: Sequence[str]) -> None:
        """Raise :class:`PlanMeshError` for a recipe or a kept plan that has mesh dims of other names."""
        for file in (*self.recipes.values(), *([self.keep] if self.keep is not None else [])):
            if file.mesh_names != tuple(mesh_names):
                raise PlanMeshError(
                    asked=f"plan a step by the placements of {file.source or file.program}",
                    found=f"its mesh dims are {', '.join(file.mesh_names)}, and those of this mesh "
                    f"{', '.join(mesh_names)}",
                    do="Name the mesh dims alike, in the same order; their sizes may differ.",
                    path=file.source,
                )


@define(eq=False)
class PlanSearch:
    """The search for the plan of one step; ``recorded`` is the memory of the step as it was recorded.

    The memory of a plan is counted call by call, and measured when it is rehearsed. What a rehearsal holds beyond what
    was counted, in the lowering of a rule for instance, is taken off the limit, and the step is solved again.
    """

    graph: StepGraph
    request: Request
    recorded: Memory
    #: Seconds of the best plan with the placements of each recipe; None where it does not fit.
    recipe_seconds: dict[str, float | None] = field(factory=dict, init=False)
    _problem: StepProblem = field(init=False)
    _short: ShortProblem | None = field(init=False)
    _costs: WorkCosts = field(init=False)
    _as_recorded: Assignment = field(init=False)
    #: The same, or whole tensors where it has rows that a plan may not take.
    _first: Assignment = field(init=False)
    _limit: int | None = field(init=False)
    _priced: PricedSearch = field(init=False)
    _rounds: int = field(default=0, init=False)
    #: The best plans of the recipes.
    _recipes: list[Solved] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        of, graph = self.recorded, self.graph
        state = Fraction(of.parameters + of.gradients + of.optimizer, of.parameters) if of.parameters else _OF_ADAM
        memory = StepMemory(graph, state)
        self._costs = WorkCosts(graph)
        free = frozenset(self._parameters() if self.request.frees_parameters else ())
        self._problem = StepProblem(graph, self._costs, free, memory)
        self._short = ShortProblem.of(self._problem, partial(_problem_of, free, state))
        self._as_recorded = self._problem.as_recorded()
        self._first = self._problem.as_replicated() if self._problem.has_lost else self._as_recorded
        self._limit = self.request.memory
        starts = self._first_starts() if self.request.keep is None else self._kept(self.request.keep)
        self._priced = PricedSearch(self._problem, starts, self._lean if free else None, self._short)

    def _parameters(self) -> list[int]:
        """The leaves with a gradient that ``distribute_module`` has named, and that nothing writes."""
        graph = self.graph
        leaves = {sink.leaf for sink in graph.sinks if sink.leaf is not None}
        return [t for t in sorted(leaves) if graph.tensors[t].name and graph.tensors[t].root not in graph.written]

    # -- where the search begins ---------------------------------------------------------------------------------

    def _first_starts(self) -> list[Assignment]:
        problem = self._problem
        whole = problem.as_replicated()
        starts = [self._first]
        # What was chosen op by op may move a tensor that is written later. From there descent may find nothing.
        if self._first.cost >= FORBIDDEN or problem.free:
            starts.append(whole)
        if problem.free:
            if any(p != REPLICATE for t in problem.free for p in self._first.rests[t]):
                starts.insert(0, self._as_placed())
            for name, recipe in self.request.recipes.items():
                starts.append(self._of_recipe(name, recipe, whole))
        return [start for i, start in enumerate(starts) if not any(map(start.is_same, starts[:i]))]

    def _as_placed(self) -> Assignment:
        """What is reached with the parameters where the program has placed them."""
        problem = self._problem
        problem.pinned = problem.free
        try:
            return solve_step(problem, [self._first])
        except NoPlanError:
            return self._first
        finally:
            problem.pinned = frozenset()

    def _placed(self, start: Assignment, places: Mapping[int, Places]) -> Assignment:
        placed = start.copy()
        placed.rests.update(places)
        placed.cost = self._problem.cost(placed)
        return placed

    def _lean(self) -> Assignment:
        """Every parameter over all ranks."""
        return self._placed(self._problem.as_replicated(), {t: self._spread(t) for t in self._problem.free})

    def _spread(self, leaf: int) -> Places:
        """A parameter over as many ranks as its largest dim has room for."""
        spec = self.graph.tensors[leaf].spec
        if not spec.ndim:
            return (REPLICATE,) * spec.mesh.ndim
        dim = max(range(spec.ndim), key=lambda d: spec.shape[d])
        placements: list[Placement] = [REPLICATE] * spec.mesh.ndim
        left = spec.shape[dim]
        for m in sorted(range(spec.mesh.ndim), key=lambda m: -spec.mesh_shape[m]):
            if left % spec.mesh_shape[m] == 0:
                placements[m], left = Shard(dim), left // spec.mesh_shape[m]
        return tuple(placements)

    def _kept(self, file: PlanFile) -> list[Assignment]:
        """Starts that have what a plan file says, and will have it from then on."""
        problem = self._problem
        places = {t: file.placements_of(self.graph.tensors[t].name) for t in problem.free}
        kept = {t: known[1] for t, known in places.items() if known is not None}
        problem.pinned = frozenset(kept)
        starts = [self._placed(start, kept) for start in (self._first, problem.as_replicated())]
        names = self.graph.mesh.mesh_dim_names or ()
        for i, start in enumerate(starts):
            with warnings.catch_warnings():
                if i:
                    warnings.simplefilter("ignore", PlanFitWarning)  # the same lines
                hold_lines(problem, start, file, names, self.request.loose)
        return starts

    def _of_recipe(self, name: str, recipe: PlanFile, whole: Assignment) -> Assignment:
        """The best plan with the parameters of a recipe, and with those of its moves that give no reason."""
        problem = self._problem
        places = {t: recipe.placements_of(self.graph.tensors[t].name) for t in problem.free}
        start = self._placed(whole, {t: known[1] for t, known in places.items() if known is not None})
        problem.pinned = frozenset(t for t, known in places.items() if known is not None)
        try:
            held = start.copy()
            hold_lines(problem, held, recipe, self.graph.mesh.mesh_dim_names or ())
            best = PricedSearch(problem, [held], short=self._short).best(self._limit)
        except (NoPlanError, MemoryPlanError, PlanFitError):
            self.recipe_seconds[name] = None
            return start
        finally:
            problem.pinned = frozenset()
            problem.let_go()
        # As a run does it: calls that look the same do the same.
        solved = with_decisions(problem, self._costs, self._as_recorded, best)
        self._recipes.append(solved)
        self.recipe_seconds[name] = solved.seconds
        return solved.best

    # -- solving -------------------------------------------------------------------------------------------------

    def solved(self) -> Solved:
        """The best plan under the limit as it stands. Raises :class:`MemoryPlanError` where none is found."""
        try:
            best = self._priced.best(self._limit)
        except MemoryPlanError as error:
            wanted, limit = self.request.memory, self._limit
            if wanted is None or limit is None or limit == wanted:
                raise
            raise MemoryPlanError(
                asked=f"plan a step in {size_text(wanted)} a rank",
                found=f"{error.found}, and a rehearsal holds {size_text(wanted - limit)} more than is counted",
                do=error.do,
                limit=wanted,
            ) from error
        solved = with_decisions(self._problem, self._costs, self._as_recorded, best)
        # What a run makes of the best may cost more than what it makes of a recipe.
        within = [of for of in self._recipes if self._limit is None or self._priced.peak(of.best) <= self._limit]
        return min((solved, *within), key=lambda of: of.best.cost)

    def bound(self) -> float:
        """Seconds of forward and backward that no plan within the limit undercuts."""
        problem, costs = self._problem, self._costs

        def work(place: int, rows: Sequence[Sequence[int]]) -> Floats:
            return costs.at_least(problem.graph.calls[place], problem.choices[place], rows) * NANOSECONDS

        bound = self._priced.bound(self.request.memory, work)
        problem.forget_searches()
        return bound / NANOSECONDS

    def accepts(self, solved: Solved, measured: Memory) -> bool:
        """Whether a rehearsal of a plan keeps the limit. If not, the next plan gets what this one held too much less.

        Raises :class:`MemoryPlanError` when that has not helped often enough.
        """
        wanted = self.request.memory
        if wanted is None or measured.later_peak <= wanted:
            return True
        self._rounds += 1
        counted = self._priced.peak(solved.best)
        beyond = measured.later_peak - counted
        if self._rounds == _ROUNDS or beyond >= wanted:
            raise MemoryPlanError(
                asked=f"plan a step in {size_text(wanted)} a rank",
                found=f"the best of {self._rounds} plans holds {size_text(measured.later_peak)} at a time: "
                f"{size_text(counted)} of operands, results and what is kept, and {size_text(beyond)} more inside of "
                "ops",
                do="Use a larger mesh or a smaller batch, or compute the largest results in parts.",
                limit=wanted,
            )
        self._limit = wanted - max(beyond, 0)
        return False

    def placements(self, solved: Solved) -> dict[str, Layout]:
        """Where the free parameters lie, by name."""
        names = self.graph.mesh.mesh_dim_names or ()
        return {
            self.graph.tensors[t].name: layout_text(names, solved.best.rests[t]) for t in sorted(self._problem.free)
        }


def _problem_of(free: frozenset[int], state: Fraction, graph: StepGraph) -> StepProblem:
    """The problem of a part of a step, with the free parameters that it has."""
    used = {t for call in graph.calls for t in call.operands}
    return StepProblem(graph, WorkCosts(graph), free & used, StepMemory(graph, state))
