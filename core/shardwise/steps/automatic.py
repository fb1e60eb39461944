"""Learn a program that has not asked for it, from its first ``distribute_module`` on.

It must not stop a program that runs without it. So it raises nothing of its own, and the ranks meet in the store at
optimizer steps that all of them know: after the steps that are recorded, and after step 1, 2, 4, 8 and so on. They go
on as one of them can go on: what a rank alone has seen changes nothing. If a rank does not come, nothing more is
learned (:mod:`shardwise.comm.free_meeting`).
"""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from attrs import define, field
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.free_meeting import meet
from shardwise.comm.policy import in_force as policies
from shardwise.engine.decided import in_force
from shardwise.errors import MemoryPlanError, NoPlanError
from shardwise.kernel.recording import recording as recorded
from shardwise.kernel.world import world_number
from shardwise.private_torch.dispatch import in_backward, leave_out_of_graphs
from shardwise.private_torch.fake import is_rehearsing
from shardwise.private_torch.modes import outside_modes
from shardwise.settings import read_settings
from shardwise.steps.agreement import recording_digest
from shardwise.steps.learning import (
    MOST_ROUNDS,
    Learning,
    is_settled,
    learn,
    running,
    start,
)
from shardwise.steps.memory_limit import MemoryLimit
from shardwise.steps.recording import Recording, Trial
from shardwise.steps.step_decision import Learned, decided_by_all, has_ranks

__all__ = ["Automatic", "is_worth_it", "learn_by_itself"]

_log = logging.getLogger(__name__)

_MOST_CALLS = 50_000
"""Calls that are recorded of a step."""

_UNTRAINED = 2_000, 20_000, 16
"""Calls without gradients and calls in all before the first backward pass, and backward passes, until a program that
has had no optimizer's step is taken for one that does not train. Calls are slower while they are recorded.
"""

_TRIES_IN_A_ROW, _MOST_TRIES = 3, 8
"""Steps that are recorded until one can be learned: the first ones, and then some at which the ranks meet."""

_MOST_MODULES = 8
"""How often a module that is placed later begins all anew: a program may place one in each step."""

_WORTH = 0.95
"""What a step by decisions may cost, of one without them. Less is not worth another order of sums."""

_MOST_IN_VAIN = 2
"""Steps in a row that are decided on again and would gain little, until no more are: each takes seconds, and a program
that makes other calls in every step would have them for ever.
"""

_PART_OF_A_STEP = "its optimizer steps in the backward pass, of which only a part has run"


@define(eq=False, repr=False)
class Automatic(Learning):
    """Learning that a program has not asked for."""

    times: int = 0
    """How often another module has begun it anew."""
    _steps: int = field(default=0, init=False)
    _tries: int = field(default=0, init=False)
    _in_vain: int = field(default=0, init=False)
    _is_wanted: bool = field(default=True, init=False)
    """Whether the step that runs is one to be learned, whether or not this rank still records it."""
    _has_parted: bool = field(default=False, init=False)
    """Whether a rank did not come to a meeting: there are no more of them."""
    _world: int = field(factory=world_number, init=False)
    _judged: WeakSet[torch.optim.Optimizer] = field(factory=WeakSet, init=False)
    """Those whose steps would gain little. A program may have several, as for two models against each other."""

    @property
    def may_begin_anew(self) -> bool:
        """Whether another module that is placed makes another program, which what was decided is not for."""
        return not (self._is_wanted or self._has_parted) and self.times < _MOST_MODULES

    @property
    def is_of_this_world(self) -> bool:
        """Whether the process group is the one in which this began."""
        return self._world == world_number()

    def resume(self, decisions: Any) -> None:
        """Run by decisions of an earlier run."""
        super().resume(decisions)
        self._is_wanted = False

    def _record(self) -> None:
        self._is_wanted = True
        trial = None if self._steps else Trial(*_UNTRAINED)
        self._recording = Recording(_MOST_CALLS, self._give_up, trial=trial, follows_modules=False)
        self._running.enter_context(self._recording.running())

    def _give_up(self) -> None:
        # On this rank, perhaps alone: the ranks hear of it when they meet.
        self._stop_recording()
        _log.info("too many calls without an optimizer's step: they are not recorded any more")

    def _step_ended(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or _is_captured() or not self.is_of_this_world or self._has_parted:
            return
        mesh = next(filter(_has_all_ranks, self._meshes_of(optimizer)), None)
        if mesh is None:  # the optimizer of a model that is on no mesh, or not on one of all ranks
            self._go_on_recording()
            return
        self._steps += 1
        if self._is_wanted:
            self._is_wanted = False
            recording = self._stop_recording()
            if optimizer not in self._judged:
                with outside_modes(), torch.no_grad():
                    self._meet(recording, optimizer, mesh)
        elif self._steps & (self._steps - 1) == 0:
            if self.learned is None:
                self._record()
            elif self.rounds < MOST_ROUNDS:
                self._ask_for_unknown_calls(mesh)

    leave_out_of_graphs(_step_ended)

    def _ask_for_unknown_calls(self, mesh: DeviceMesh) -> None:
        """Record the next step if a rank has met many calls that the decisions do not know."""
        unknown = in_force.unknown - self._unknown
        has_many = self._has_many(unknown)
        is_same = _all_say(mesh, "many unknown calls" if has_many else "")
        if is_same is None:
            self._part()
        elif has_many or not is_same:
            self._known_steps, self._wanted = 0, unknown
            self._record()

    def _part(self) -> None:
        """A rank did not come to a meeting. The decisions are kept, since they may be those of all ranks."""
        self._has_parted = True
        self._tell("a rank has not come to where the ranks compare their steps, and no more of them are learned")

    def _meet(self, recording: Recording | None, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> None:
        """Decide for a recorded step, if all ranks recorded the same one and each of them can."""
        said, news, graph, limit = "", False, None, None
        reason = _PART_OF_A_STEP if in_backward() else _refusal(recording, mesh, self.learned)
        if not reason and recording is not None:
            try:
                graph = recording.graph()
                reason = "" if graph.calls else "no calls were recorded"
                news, limit = self._is_news(recording), self._limit(graph, optimizer)
                said = f"{recording_digest(graph)} {news}"
            except Exception as error:  # noqa: BLE001  # the program has not asked for this, and other ranks wait
                reason = f"{type(error).__name__}: {error}"
        is_same = _all_say(mesh, reason or said)
        if is_same is None:
            self._part()
        elif reason or not is_same:
            self._tries += 1
            self._tell(reason or "the ranks recorded different calls, or one of them cannot learn it")
            if self._tries < _TRIES_IN_A_ROW:
                self._record()
            elif self._tries == _MOST_TRIES:
                self.freeze()
        elif not news:
            self._wait_for_calls()
        else:
            self._decide_on(recording, graph, limit, optimizer)

    def _decide_on(
        self, recording: Any, graph: Any, limit: MemoryLimit | None, optimizer: torch.optim.Optimizer
    ) -> None:
        try:
            learned = decided_by_all(graph, limit, self.earlier)
        except (NoPlanError, MemoryPlanError) as error:
            self._tell(str(error))
            self.freeze()
            return
        if is_worth_it(learned):
            self._in_vain = 0
            self._take(learned, recording, graph)
            return
        self._tell(f"it would gain little: {learned}")
        if self.learned is None:
            self._judged.add(optimizer)
            self._record()  # perhaps the next step is another optimizer's
        else:
            self._unknown = in_force.unknown
            self._in_vain += 1
            if self._in_vain == _MOST_IN_VAIN:
                self.freeze()

    def _tell(self, why: str) -> None:
        _log.info("optimizer step %d is not learned: %s", self._steps, why)


def _refusal(recording: Recording | None, mesh: DeviceMesh, learned: Learned | None) -> str:
    """Why a step is not learned, as far as this rank knows; empty if it may be."""
    if recording is None or not recording.calls:
        return "no calls were recorded"
    if recorded.has_compiled:
        return "it has compiled code, which would be compiled again"
    if policies.is_on:
        return "the program has a policy on communication"
    if in_force.decisions is not None and (learned is None or in_force.decisions is not learned.decisions):
        return "the program has a plan"
    if recording.meshes != [mesh]:
        return "it has several meshes"
    return ""


def is_worth_it(learned: Learned) -> bool:
    """Whether a program that has not asked to be learned runs by what was decided."""
    return learned.before is None or learned.after is None or learned.after <= _WORTH * learned.before


def _all_say(mesh: DeviceMesh, text: str) -> bool | None:
    """Whether all ranks of the mesh say the same; ``None`` on each of them where one does not come to say it."""
    return meet(text, sorted(mesh.mesh.flatten().tolist())) if has_ranks(mesh) else True


def _has_all_ranks(mesh: Any) -> bool:
    return isinstance(mesh, DeviceMesh) and dist.is_initialized() and mesh.size() == dist.get_world_size() > 1


def _is_captured() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def learn_by_itself(mesh: Any) -> None:
    """A module was placed on a mesh: learn the program from here on, unless it or the settings say otherwise."""
    if is_settled() or is_rehearsing():
        return
    if read_settings().learn:
        learn()
        return
    if not _has_all_ranks(mesh):
        return
    active, times = running(), 0
    if isinstance(active, Automatic) and active.is_of_this_world:
        if not active.may_begin_anew:
            return
        times = active.times + 1
    if active is not None:
        active.close()
    if in_force.decisions is None:
        start(Automatic(times=times))
