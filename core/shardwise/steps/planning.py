"""Plan a whole step ahead of a run: record it without data, decide for all of its calls together, and verify that.

All of it runs in this one process, as one rank of a fake process group, on tensors without data. The plan is verified
by a rehearsal under it: the collectives that really run are compared with those that the solver counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from hashlib import sha256
from typing import Any

from attrs import evolve, frozen
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.comm.policy import no_policies
from shardwise.engine.decided import in_force, use_decisions
from shardwise.errors import ArgumentError, PlanError
from shardwise.kernel.arguments import check_flag, refuse_argument
from shardwise.kernel.mesh import Mesh
from shardwise.planning.cost import are_chosen, links_of, links_of_wires, use_links
from shardwise.private_torch.absent_card import as_on
from shardwise.private_torch.fake import fake_tensors
from shardwise.program.amounts import size_text
from shardwise.program.collection import no_collection
from shardwise.program.plan_file import Layout, PlanFile, patterns_of, placements_in
from shardwise.program.plan_lines import lines_of
from shardwise.program.step_graph import Places
from shardwise.program.step_plan import StepPlan
from shardwise.program.step_problem import Assignment, StepProblem
from shardwise.steps.costs import WorkCosts
from shardwise.steps.recorded_step import RecordedStep, RecordingWatch
from shardwise.steps.search import PlanSearch, Request
from shardwise.steps.sent import sent_by
from shardwise.steps.solving import Solved
from shardwise.tools.program import PHASES
from shardwise.tools.rehearse import RankWatch, Rehearsal, check_program, fake_ranks, follow, refuse_in_a_group

__all__ = ["Difference", "PLAN_PHASES", "Planned", "Use", "communication_of", "plan", "uses_of"]

PLAN_PHASES = ("record", "solve", "verify")
"""What :func:`plan` does, in order."""

_RECORDED = ("forward", "backward")


@frozen(order=True)
class Use:
    """A kind of collective over some mesh dims in a phase."""

    phase: str
    kind: str
    mesh_dims: tuple[int, ...]


Uses = Mapping[Use, tuple[int, int]]
"""How often each runs in a step, and how many bytes a rank hands in."""


@frozen
class Difference:
    """A collective that a rehearsal issues otherwise than predicted: times and bytes of both."""

    use: Use
    predicted: tuple[int, int]
    rehearsed: tuple[int, int]


@frozen(eq=False)
class Planned(StepPlan):
    """A plan, and what it costs.

    ``cost`` and ``recorded_cost`` are seconds of forward and backward by the cost model: of the plan, and of the choice
    op by op, which is None where the solver cannot count it. ``recorded`` and ``rehearsal`` are rehearsals of the two.
    ``bound`` is a number of seconds that no plan undercuts, where a proof was asked for.
    ``recipe_costs`` are seconds of the best plan with the placements of each recipe; None where that does not fit.
    ``differences`` are the collectives of the rehearsal that were not predicted so; a plan is verified if there are
    none. ``torn`` is the number of calls that look the same and were decided on differently. ``seconds`` are what each
    of :data:`PLAN_PHASES` took, and the proof.
    """

    cost: float
    recorded_cost: float | None
    bound: float | None
    recipe_costs: Mapping[str, float | None]
    recorded: Rehearsal
    rehearsal: Rehearsal
    predicted: Uses
    differences: tuple[Difference, ...]
    calls: int
    torn: int
    seconds: Mapping[str, float]

    @property
    def gap(self) -> float | None:
        """How far the best plan there is could be below this one, as a part of its cost."""
        return None if self.bound is None else (self.cost - self.bound) / self.cost if self.cost else 0.0

    @cached_property
    def collectives(self) -> Uses:
        """What the rehearsal of the plan issues."""
        return uses_of(self.rehearsal)

    @cached_property
    def recorded_collectives(self) -> Uses:
        """What the choice op by op issues."""
        return uses_of(self.recorded)


def plan(  # noqa: PLR0913  # keyword-only options of one value
    program: Callable[[DeviceMesh], Any],
    mesh_shape: Sequence[int],
    mesh_names: Sequence[str] | None = None,
    *,
    fixed: Sequence[str] = (),
    memory: int | None = None,
    recipes: Mapping[str, PlanFile] | None = None,
    keep: PlanFile | None = None,
    loose: bool = False,
    prove: bool = False,
    device: str = "cpu",
    wires: Sequence[str] | None = None,
    name: str = "",
    tell: Callable[[str, int], None] | None = None,
) -> Planned:
    """Choose the layouts of all parameters, activations and gradients of a step together, for the least cost by the
    cost model.

    ``program(mesh)`` places its parameters and inputs, and runs a step or returns one, as for
    :func:`shardwise.tools.rehearse.rehearse`. Inputs stay where it places them, and so do buffers. Parameters that
    ``distribute_module`` places are free, unless ``fixed`` is ``("parameters",)``. It runs once to be recorded, and
    under each plan that is tried.

    - ``memory``: a limit on the bytes that are alive on a rank at any time, from the second step on;
    - ``recipes``: plan files for mesh dims of the same names. The plan costs no more than the best that can be made of
      the placements of their parameters, and of their moves without a reason;
    - ``keep``: a plan file, as a rule an earlier plan that was edited. Parameters lie as it says, and its moves without
      a reason are made;
    - ``loose``: a line to keep that fits nothing is a :class:`PlanFitWarning`, not an error;
    - ``prove``: find a bound that no plan undercuts. On a mesh with one dim it is as a rule the cost of the plan;
      on several it is a weaker one, and takes several times as long as to solve the step;
    - ``wires``: the connection of each mesh dim (``"nvlink"``, ``"infiniband"``, ``"ethernet"``, ``"loopback"``), whose
      written figures are used. The default is that of ranks of ``device`` on one host;
    - ``tell``: called with one of :data:`PLAN_PHASES` (and ``"prove"``) and the number of ops so far.

    Raises what the program raises, :class:`PlanError` for a program that cannot be planned,
    :class:`MemoryPlanError` where no plan within ``memory`` is found, :class:`PlanMeshError` for a recipe for mesh dims
    of other names, :class:`PlanFitError` for a line to keep that fits nothing, and :class:`MeshMismatchError` where
    this process has a process group already.
    """
    given: Any = fixed
    if not isinstance(given, (tuple, list, set, frozenset)) or not {*given} <= {"parameters"}:
        raise PlanError(
            asked=f"plan a step with fixed={given!r}",
            found="inputs and buffers always stay where the program places them, and parameters may",
            do='Give fixed=("parameters",) or fixed=().',
        )
    check_program("plan a step", program, mesh_shape, mesh_names, device, tell)
    _check_options(memory=memory, recipes=recipes, keep=keep, loose=loose, prove=prove, wires=wires, name=name)
    refuse_in_a_group("plan a step")
    say = tell or (lambda _phase, _ops: None)
    names = tuple(mesh_names) if mesh_names else tuple(f"dim{i}" for i in range(len(mesh_shape)))
    before = in_force.now
    request = Request(not fixed, memory, recipes or {}, keep, prove, loose)
    request.check_names(names)
    try:
        with fake_ranks(math.prod(mesh_shape), 0), no_policies():
            mesh = init_device_mesh(device, tuple(mesh_shape), mesh_dim_names=names)
            with _wired(mesh, wires), fake_tensors(), as_on(device):
                return _planned(program, mesh, name or _name_of(program), wires, request, say)
    finally:
        use_decisions(*before)


def _check_options(**options: Any) -> None:
    """Raise :class:`ArgumentError` for an option of :func:`plan` that is of another kind."""
    asked, memory, recipes, keep = "plan a step", options["memory"], options["recipes"], options["keep"]
    if memory is not None and (type(memory) is not int or memory < 1):
        raise ArgumentError(
            asked=asked,
            found=f"its argument 'memory' is {memory!r}",
            do="Give a number of bytes above 0, such as 64 * 2**30, or leave it out.",
            argument="memory",
        )
    do = "Give plan files that are read: shardwise.program.plan_file.parse(Path(name).read_text(), name)."
    if keep is not None and not isinstance(keep, PlanFile):
        refuse_argument(asked, "keep", keep, do)
    if recipes is not None and not isinstance(recipes, Mapping):
        refuse_argument(asked, "recipes", recipes, f"Give a dict of names to plan files. {do}")
    for name, recipe in (recipes or {}).items():
        if not isinstance(recipe, PlanFile):
            refuse_argument(asked, f"recipes[{name!r}]", recipe, do)
    check_flag(asked, options["loose"], "loose")
    check_flag(asked, options["prove"], "prove")
    if options["loose"] and keep is None:
        raise PlanError(
            asked="plan a step with loose=True",
            found="there is no plan to keep whose lines could fit nothing",
            do="Give keep= too, or leave loose out.",
        )
    wires = options["wires"]
    if wires is not None and not (isinstance(wires, (tuple, list)) and all(isinstance(w, str) for w in wires)):
        do = 'Give the connection of each mesh dim, as in ("infiniband", "nvlink").'
        refuse_argument(asked, "wires", wires, do)
    if not isinstance(options["name"], str):
        refuse_argument(asked, "name", options["name"], "Give text: what the file calls the program.")


@contextmanager
def _wired(mesh: DeviceMesh, wires: Sequence[str] | None) -> Iterator[None]:
    """The written figures of wires, for as long as the context lasts: equal meshes of the process have the same."""
    if wires is None:
        yield
        return
    before = links_of(mesh) if are_chosen(mesh) else None
    use_links(mesh, links_of_wires(mesh, wires))
    try:
        yield
    finally:
        use_links(mesh, before)


def _planned(
    program: Callable[[DeviceMesh], Any],
    mesh: DeviceMesh,
    name: str,
    wires: Sequence[str] | None,
    request: Request,
    say: Callable[[str, int], None],
) -> Planned:
    spent: dict[str, float] = {}
    with _timed(spent, "record"):
        step, recorded = _record(program, mesh, say)
    say("solve", 0)
    with _timed(spent, "solve"), no_collection():
        search = PlanSearch(step.graph, request, recorded.memory)
    while True:
        with _timed(spent, "solve"), no_collection():
            solved = search.solved()
            placed = {**step.parameters, **search.placements(solved)}
        with _timed(spent, "verify"):
            rehearsal = _rehearse(program, mesh, solved, placed, say)
        with _timed(spent, "solve"):
            is_accepted = search.accepts(solved, rehearsal.memory)
        if is_accepted:
            break
        say("solve", 0)
    bound = None
    if request.prove:
        say("prove", 0)
        with _timed(spent, "prove"), no_collection():
            bound = search.bound()
    predicted = _predicted(solved.problem, solved.best, solved.costs)
    differences = tuple(_differences(predicted, uses_of(rehearsal)))
    return Planned(
        file=_file(name, wires, evolve(step, parameters=placed), solved, rehearsal, differences, bound),
        decisions=solved.decisions,
        cost=solved.seconds,
        recorded_cost=solved.recorded_seconds,
        bound=bound,
        recipe_costs=search.recipe_seconds,
        recorded=recorded,
        rehearsal=rehearsal,
        predicted=predicted,
        differences=differences,
        calls=len(step.graph.calls),
        torn=solved.torn,
        seconds=spent,
    )


@contextmanager
def _timed(spent: dict[str, float], phase: str) -> Iterator[None]:
    """Add the seconds of what runs inside to those of a phase."""
    begin = time.perf_counter()
    yield
    spent[phase] = spent.get(phase, 0.0) + time.perf_counter() - begin


def _record(
    program: Callable[[DeviceMesh], Any], mesh: DeviceMesh, say: Callable[[str, int], None]
) -> tuple[RecordedStep, Rehearsal]:
    """The step as the choice op by op runs it."""
    use_decisions(None)
    watch = RecordingWatch(lambda _, ops: say("record", ops))
    with watch.installed(), watch.recorded():
        recorded = follow(program, mesh, watch)
    return watch.step(), recorded


def _rehearse(
    program: Callable[[DeviceMesh], Any],
    mesh: DeviceMesh,
    solved: Solved,
    placed: Mapping[str, Layout],
    say: Callable[[str, int], None],
) -> Rehearsal:
    """The step by the decisions of a plan, with its parameters placed as the plan says."""
    use_decisions(solved.decisions, partial(_places, placed, tuple(mesh.mesh_dim_names or ())))
    watch = RankWatch(lambda _, ops: say("verify", ops))
    with watch.installed():
        return follow(program, mesh, watch)


def _places(layouts: Mapping[str, Layout], mesh_names: Sequence[str], name: str) -> Places | None:
    return placements_in(layouts[name], mesh_names) if name in layouts else None


def _name_of(program: Callable[..., Any]) -> str:
    name = getattr(program, "__qualname__", None)
    return f"{program.__module__}:{name}" if name else type(program).__qualname__


# -- verifying -------------------------------------------------------------------------------------------------------


def uses_of(rehearsal: Rehearsal) -> dict[Use, tuple[int, int]]:
    """The collectives of a rehearsal, phase by phase."""
    return {Use(use.phase, use.kind, use.mesh_dims): (times, nbytes) for use, times, nbytes in rehearsal.collectives}


def _predicted(problem: StepProblem, assignment: Assignment, costs: WorkCosts) -> dict[Use, tuple[int, int]]:
    totals: dict[Use, tuple[int, int]] = {}
    for sent, count in sorted(sent_by(problem, assignment, costs).items()):
        use = Use(problem.graph.calls[sent.call].phase, sent.kind, sent.mesh_dims)
        times, nbytes = totals.get(use, (0, 0))
        totals[use] = times + count, nbytes + count * sent.nbytes
    return totals


def _differences(predicted: Uses, rehearsed: Uses) -> Iterator[Difference]:
    for use in sorted({*predicted, *rehearsed}, key=lambda use: (PHASES.index(use.phase), use)):
        if use.phase in _RECORDED and predicted.get(use) != rehearsed.get(use):
            yield Difference(use, predicted.get(use, (0, 0)), rehearsed.get(use, (0, 0)))


# -- the file --------------------------------------------------------------------------------------------------------


def _file(
    name: str,
    wires: Sequence[str] | None,
    step: RecordedStep,
    solved: Solved,
    rehearsal: Rehearsal,
    differences: Sequence[Difference],
    bound: float | None,
) -> PlanFile:
    rests, moves = lines_of(solved.problem, solved.best, rehearsal.mesh_names)
    memory = rehearsal.memory
    predicted: dict[str, str | float | int] = {
        "step_ms": round(solved.seconds * 1e3, 6),
        "model_state": size_text(memory.state),
        "kept": size_text(memory.kept),
        "peak": size_text(memory.later_peak),
    }
    if bound is not None:
        predicted["bound_ms"] = round(bound * 1e3, 6)
    if solved.recorded_seconds is not None:
        predicted["op_by_op_ms"] = round(solved.recorded_seconds * 1e3, 6)
    if differences:
        predicted["differences"] = len(differences)
    return PlanFile(
        program=name,
        mesh_names=rehearsal.mesh_names,
        mesh_shape=rehearsal.mesh_shape,
        figures=_figures(solved.problem.graph.mesh, wires),
        predicted=predicted,
        parameters=patterns_of(step.parameters),
        inputs=step.inputs,
        rests=rests,
        moves=moves,
        communication=communication_of(rehearsal),
    )


def communication_of(rehearsal: Rehearsal) -> dict[str, Sequence[str]]:
    """The collectives of a rehearsal by phase, as a plan file has them."""
    communication: dict[str, Sequence[str]] = dict.fromkeys(_RECORDED, ())
    for use, (times, nbytes) in uses_of(rehearsal).items():
        over = ",".join(rehearsal.mesh_names[m] for m in use.mesh_dims)
        ranks = math.prod(rehearsal.mesh_shape[m] for m in use.mesh_dims)
        text = f"{use.kind} {over} {ranks} ranks x{times} {nbytes} B ({size_text(nbytes)})"
        communication[use.phase] = (*communication.get(use.phase, ()), text)
    return communication


def _figures(mesh: Mesh, wires: Sequence[str] | None) -> str:
    """Which figures the costs come from, and a digest of them."""
    links = links_of(mesh)
    if wires is not None and links == links_of_wires(mesh, wires):
        kind = ", ".join(wires)
    else:
        kind = "those of the program" if are_chosen(mesh) else "defaults"
    return f"{kind} ({sha256(repr(links).encode()).hexdigest()[:12]})"
