"""Learn a program: record its first step, decide for all of its calls, and run by the decisions from then on.

The first step runs as it would. It ends with the first ``optimizer.step()``. Then the ranks compare what they recorded,
one of them solves, and all take its decisions. A call that the decisions do not know is chosen as it always was.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from attrs import define, evolve, field
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardwise.engine.decided import in_force, use_decisions
from shardwise.errors import MemoryPlanError, NoPlanError, PlanError, warn_user
from shardwise.kernel.arguments import check_flag
from shardwise.kernel.placements import Placement
from shardwise.kernel.plurals import counted
from shardwise.kernel.tags import Tag
from shardwise.private_torch.dispatch import leave_out_of_graphs
from shardwise.private_torch.modes import outside_modes
from shardwise.program.decisions import Decisions
from shardwise.program.step_graph import StepGraph
from shardwise.steps.agreement import agree_on_recording
from shardwise.steps.memory_limit import MemoryLimit
from shardwise.steps.recording import Recording
from shardwise.steps.step_decision import Learned, decided_by_all, has_ranks
from shardwise.tensor.learned_layouts import remember_layouts
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tensor.optimizer_step import first_told

__all__ = [
    "MOST_ROUNDS",
    "Learning",
    "is_settled",
    "learn",
    "none_by_itself",
    "running",
    "start",
]

_log = logging.getLogger(__name__)

#: The part of calls that may be unknown before the next steps are recorded, and how often that may happen.
_MANY, MOST_ROUNDS = 0.05, 8

_MOST_CALLS = 250_000
"""Calls that are recorded of one step, some 2 KB each. A program that has no optimizer would never end its step."""

#: How many steps in a row are recorded, if all calls of each are known, until the unknown ones come again.
_PATIENCE = 8


@define(eq=False, repr=False)
class Learning:
    """Learning that is on, from the first call after :func:`learn` until it is closed.

    After a step with many unknown calls (another branch, other shapes) the next steps are recorded until they come
    again. The decisions keep the limit of ``memory`` bytes on a rank, or what its device has.
    """

    memory: int | None = None
    learned: Learned | None = field(default=None, init=False)
    rounds: int = field(default=0, init=False)
    """How many steps were recorded and decided on."""
    _recording: Recording | None = field(default=None, init=False)
    _running: ExitStack = field(factory=ExitStack, init=False)
    _hooks: list[Any] = field(factory=list, init=False)
    _unknown: int = field(default=0, init=False)
    #: Unknown calls of a step that were recorded and are not known any better.
    _accepted: int = field(default=0, init=False)
    _wanted: int = field(default=0, init=False)
    _unknown_in_step: int = field(default=0, init=False)
    _known_steps: int = field(default=0, init=False)
    _is_first_step: bool = field(default=True, init=False)
    _has_placed: bool = field(default=False, init=False)
    #: Optimizers of plain parameters that are trained beside placed ones, and the mesh of these.
    _of_plain: WeakKeyDictionary[torch.optim.Optimizer, Any] = field(factory=WeakKeyDictionary, init=False)

    def __repr__(self) -> str:
        state = "recording a step" if self.records else "nothing yet" if self.learned is None else str(self.learned)
        return f"<Learning after {counted(self.rounds, 'round')}: {state}>"

    def start(self) -> None:
        """Record from now on, until the first optimizer's step has run."""
        first_told.append(self._step_begins)
        self._hooks = [register_optimizer_step_post_hook(self._step_ended)]
        in_force.learner = self.resume
        self._record()

    @property
    def records(self) -> bool:
        """Whether the step that runs is recorded."""
        return self._recording is not None

    @property
    def earlier(self) -> Decisions | None:
        """What was decided before."""
        return None if self.learned is None else self.learned.decisions

    def resume(self, decisions: Decisions) -> None:
        """Run by decisions of an earlier run, without recording a step. :func:`shardwise.checkpoint.load` calls this.

        Every rank must call this at the same point of the program, with the same decisions.
        """
        self._stop_recording()
        use_decisions(decisions)
        self.learned, self._unknown = Learned(decisions, None, None, 0, 0, 0.0), 0
        _log.info("go on by %s", self.learned)

    def freeze(self) -> None:
        """Keep the decisions, and record no more steps. Every rank must call this at the same point of the program."""
        self._stop_recording()
        if in_force.learner == self.resume:
            in_force.learner = None
        if self._step_begins in first_told:
            first_told.remove(self._step_begins)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def close(self) -> None:
        """Choose op by op again. Every rank must call this at the same point of the program."""
        self.freeze()
        if self.learned is not None and in_force.decisions is self.learned.decisions:
            use_decisions(None)
            remember_layouts({})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _record(self) -> None:
        self._recording = Recording(_MOST_CALLS, self._give_up, follows_modules=False)
        self._running.enter_context(self._recording.running())

    def _go_on_recording(self) -> None:
        """After the step of the optimizer of a model that is on no mesh, which ends nothing."""
        if self._recording is not None:
            self._running.enter_context(self._recording.running())

    def _stop_recording(self) -> Recording | None:
        self._running.close()
        recording, self._recording = self._recording, None
        return recording

    def _give_up(self) -> None:
        # The same call on every rank, as all of them record the same ones.
        self._stop_recording()
        _log.warning("%d calls without an optimizer's step: the program is not learned", _MOST_CALLS)

    def _step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        if torch.compiler.is_compiling():
            return
        self._is_first_step = not optimizer.state
        # What an optimizer does to a parameter moves nothing: parameter, gradient and states have one layout.
        self._running.close()
        self._unknown_in_step = in_force.unknown - self._unknown

    def _step_ended(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        fresh, self._unknown = self._unknown_in_step, in_force.unknown
        if self._recording is not None and not any(self._meshes_of(optimizer)):
            self._go_on_recording()
            return
        recording = self._stop_recording()
        if recording is not None:
            self._decide(recording, optimizer)
        elif self._has_many(fresh):
            self._known_steps, self._wanted = 0, fresh
            self._record()

    leave_out_of_graphs(_step_ended)

    def _meshes_of(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        """The meshes of an optimizer's parameters. Where no optimizer has any, that of the gradients of its plain ones.

        Beside an optimizer of placed parameters, one of plain ones ends no step.
        """
        if meshes := list(_meshes_of(optimizer)):
            self._has_placed = True
        if self._has_placed:
            return meshes
        recording = self._recording
        if recording is not None and recording.meshes:
            trained = recording.plain_leaves.keys()
            if any(id(parameter) in trained for parameter in _parameters(optimizer)):
                self._of_plain[optimizer] = recording.meshes[0]
        own = self._of_plain.get(optimizer)
        return [] if own is None else [own]

    def _has_many(self, unknown: int) -> bool:
        """Whether so many unknown calls are a reason to record steps, and decide again."""
        learned = self.learned
        return (
            learned is not None
            and in_force.decisions is learned.decisions
            and unknown - self._accepted > _MANY * len(learned.decisions)
            and self.rounds < MOST_ROUNDS
        )

    def _decide(self, recording: Recording, optimizer: torch.optim.Optimizer) -> None:
        if len(recording.meshes) > 1:
            _log.warning("the program uses %d meshes; it is not planned as a whole", len(recording.meshes))
            return
        if not recording.meshes:  # as where learning began between a backward pass and the step
            self._wait_for_calls()
            return
        with outside_modes(), torch.no_grad():
            graph = recording.graph()
            if has_ranks(graph.mesh):
                agree_on_recording(graph)
            if not graph.calls or not self._is_news(recording):
                self._wait_for_calls()
                return
            limit = self._limit(graph, optimizer)
            try:
                learned = decided_by_all(graph, limit, self.earlier)
            except (NoPlanError, MemoryPlanError) as error:
                warn_user(f"{error} The program goes on as before.", UserWarning)
                return
            self._take(learned, recording, graph)

    def _is_news(self, recording: Recording) -> bool:
        """Whether a recorded step is worth deciding on: the first one, or one with many unknown calls."""
        return self.learned is None or self._has_many(len(recording.schemas & in_force.unknown_calls))

    def _wait_for_calls(self) -> None:
        """Record the next step, too, unless enough of them had no calls that are wanted.

        Unknown ones were another step's: a branch that every other step takes, for example.
        """
        self._known_steps += 1
        if self._known_steps < _PATIENCE:
            self._record()

    def _limit(self, graph: StepGraph, optimizer: torch.optim.Optimizer) -> MemoryLimit | None:
        device = graph.mesh.device_type
        return MemoryLimit.after(optimizer, device, self.memory, is_first=self._is_first_step)

    def _take(self, learned: Learned, recording: Recording, graph: StepGraph) -> None:
        """Run by what was decided for a recorded step."""
        if self.learned is not None:
            before = self.learned.decisions
            learned = evolve(learned, decisions=before.updated(learned.decisions))
            if len(learned.decisions) - len(before) < self._wanted / 2:
                # Recording once more would change as little, and each recording makes all plans anew.
                self._accepted = self._wanted
        recording.tag_leaves(learned.decisions.depth)
        use_decisions(learned.decisions)
        if self.rounds == 0:
            remember_layouts(_layouts_of_results(graph, learned.decisions.depth))
        self.learned, self._unknown = learned, 0
        self.rounds += 1
        _log.info("learned the program: %s", learned)


def _layouts_of_results(graph: StepGraph, depth: int) -> dict[Tag, tuple[Placement, ...]]:
    """By tag, how the results of a recorded step lie; without tags that several layouts have."""
    layouts: dict[Tag, set[tuple[Placement, ...]]] = {}
    for tag, node in zip(graph.tags(depth), graph.tensors, strict=True):
        if tag is not None and node.maker is not None:
            layouts.setdefault(tag, set()).add(node.spec.placements)
    return {tag: next(iter(of_tag)) for tag, of_tag in layouts.items() if len(of_tag) == 1}


def _meshes_of(optimizer: torch.optim.Optimizer) -> Iterator[DeviceMesh]:
    """The mesh of each parameter of an optimizer that is on one."""
    return (parameter.device_mesh for parameter in _parameters(optimizer) if isinstance(parameter, MeshTensor))


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


@define
class _Process:
    """The learning that is on in this process, and whether none may begin by itself, for example since the program has
    said what it wants.
    """

    active: Learning | None = None
    is_settled: bool = False


_process = _Process()


def running() -> Learning | None:
    """The learning that is on, if any."""
    return _process.active


def is_settled() -> bool:
    """Whether no learning may begin by itself: the program has called :func:`learn`, to switch it on or off."""
    return _process.is_settled


@contextmanager
def none_by_itself() -> Iterator[None]:
    """No learning begins by itself while the context lasts: a step is looked at as it runs without."""
    before, _process.is_settled = _process.is_settled, True
    try:
        yield
    finally:
        _process.is_settled = before


def start(learning: Learning) -> None:
    """Have this be the learning that is on."""
    _process.active = learning
    learning.start()


def learn(enabled: bool = True, *, memory: int | None = None) -> Learning:
    """Record the first training step from here on, decide for all of its calls together, and run by the decisions.

    The decisions take effect after the first ``optimizer.step()``. They change layouts of intermediate tensors and so
    the collectives; numbers differ by the order of sums only. Every rank must call this at the same point of the
    program. As a context, it ends with the context; ``learn(False)`` ends what is on.

    ``memory`` is a limit on the bytes that are alive on a rank at any time. Without one, a step on an accelerator takes
    no more than the recorded one and what that has left free on the device of the first rank of the mesh.

    Raises :class:`RankDisagreementError` on every rank, after the first step, if the ranks ran different calls. Where
    no plan is found, or none within the limit, every rank warns, and the program goes on as before.
    """
    if memory is not None and (type(memory) is not int or memory <= 0):
        raise PlanError(
            asked=f"learn a program within memory={memory!r}",
            found="a limit on memory is a number of bytes above 0",
            do="Give memory=64 * 2**30 for 64 GiB, or leave it out.",
        )
    check_flag("learn the steps of a program", enabled, "enabled")
    _process.is_settled = True
    if _process.active is not None:
        _process.active.close()
        _process.active = None
    learning = Learning(memory)
    if enabled:
        start(learning)
    return learning
