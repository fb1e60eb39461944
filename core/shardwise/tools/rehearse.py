"""Rehearsals: a program for a mesh of any size runs in this one process, without data.

The process plays one rank of a fake process group. The program runs as it would there: with the same plans, the same
local ops on fake tensors (shapes and dtypes, no memory), and the same collectives, which are counted and not carried
out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.comm.events import Event, observe
from shardwise.engine.decided import in_force, use_decisions
from shardwise.engine.shutdown import let_go
from shardwise.errors import ArgumentError, CallError, MeshMismatchError
from shardwise.kernel import dispatcher
from shardwise.kernel.arguments import check_arity, check_function, check_mesh_shape, refuse_argument
from shardwise.kernel.nested import tensors_in
from shardwise.kernel.plan import Plan
from shardwise.kernel.signature import Op, op_name
from shardwise.private_torch.absent_card import as_on
from shardwise.private_torch.dispatch import memory_of, watching
from shardwise.private_torch.fake import fake_store, fake_tensors, is_unknowable, rehearsing
from shardwise.program.decisions import Decisions
from shardwise.program.step_plan import StepPlan
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tools.program import (
    PHASES,
    Phases,
    run_returned,
    running_compiled_code_eagerly,
    stand_in_number,
)
from shardwise.tools.sites import Site, Sites

__all__ = [
    "CollectiveUse",
    "Memory",
    "NO_OP",
    "RankWatch",
    "Rehearsal",
    "dim_names",
    "fake_ranks",
    "follow",
    "refuse_empty",
    "refuse_in_a_group",
    "rehearse",
]

NO_OP = "redistribute"
"""The name for collectives that no op needs: the program asks for them, or the layout of a gradient does."""


@frozen(order=True)
class CollectiveUse:
    """A kind of collective over some mesh dims, in one phase, for one op (or ``redistribute``).

    ``op`` is ``aten.mm.default, its result`` for what moves a result to where it rests by a plan for the whole step.
    """

    phase: str
    kind: str
    mesh_dims: tuple[int, ...]
    ranks: int
    op: str


@frozen
class Memory:
    """Bytes of this rank: what the model and the optimizer hold, and the most that was alive at a time in each phase.

    ``kept`` is what the forward pass leaves alive for the backward pass, beyond what was there before.
    """

    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    kept: int = 0
    peaks: Mapping[str, int] = field(factory=dict)

    @property
    def peak(self) -> int:
        """The most that was alive at any time."""
        return max(self.peaks.values(), default=0)

    @property
    def state(self) -> int:
        """What training holds of the model: parameters, buffers, gradients and the optimizer's states."""
        return self.parameters + self.buffers + self.gradients + self.optimizer

    @property
    def later_peak(self) -> int:
        """The most that is alive at any time of later steps, which begin with the optimizer's states."""
        model = max((size for phase, size in self.peaks.items() if phase != "optimizer"), default=0)
        return max(self.peak, model + self.optimizer)

    @property
    def activations(self) -> int:
        """The most that was alive beyond what the model and the optimizer held when the forward pass began."""
        return max(self.peak - self.parameters - self.buffers - self.optimizer, 0)


@frozen(eq=False)
class Rehearsal:
    """What one rank of a mesh would hold and send in one step; ``sites`` if they were asked for, in order."""

    mesh_shape: tuple[int, ...]
    mesh_names: tuple[str, ...]
    coordinate: tuple[int, ...]
    whole_parameters: int
    whole_parameter_bytes: int
    memory: Memory
    counts: Counter[CollectiveUse]
    nbytes: Counter[CollectiveUse]
    ops: Counter[str]
    sites: tuple[Site, ...] = ()

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh_shape)

    @cached_property
    def collectives(self) -> list[tuple[CollectiveUse, int, int]]:
        """For each use, all ops together: how often, and how many bytes this rank sends in; phase by phase."""
        counts: Counter[CollectiveUse] = Counter()
        nbytes: Counter[CollectiveUse] = Counter()
        for use, times in self.counts.items():
            whole = CollectiveUse(use.phase, use.kind, use.mesh_dims, use.ranks, "")
            counts[whole] += times
            nbytes[whole] += self.nbytes[use]
        return [
            (use, counts[use], nbytes[use]) for use in sorted(counts, key=lambda use: (PHASES.index(use.phase), use))
        ]

    @cached_property
    def by_op(self) -> list[tuple[CollectiveUse, int, int]]:
        """As :attr:`collectives`, for each op; most bytes first within a phase."""
        uses = sorted(self.counts, key=lambda use: (PHASES.index(use.phase), -self.nbytes[use], use))
        return [(use, self.counts[use], self.nbytes[use]) for use in uses]


def rehearse(
    program: Callable[[DeviceMesh], Any],
    mesh_shape: Sequence[int],
    mesh_names: Sequence[str] | None = None,
    *,
    rank: int = 0,
    device: str = "cpu",
    plan: StepPlan | Decisions | None = None,
    tell: Callable[[str, int], None] | None = None,
    sites: bool = False,
) -> Rehearsal:
    """Run ``program(mesh)`` as one rank of a mesh would run it, without data and without other ranks.

    The program gets the mesh and makes its MeshTensors on it. It runs a step, or it returns a step to run: a tensor
    (its backward pass follows), ``(model, inputs)`` or ``(model, inputs, optimizer)``. ``inputs`` is a tensor, a tuple
    of arguments or a dict of them. Without an optimizer the step is that of AdamW, fused. The gradient of a result that
    is not a scalar starts from ones.

    Rank 0 has the largest part of whatever is sharded unevenly, so it stands for all. Under a ``plan`` for the whole
    step all calls go by its decisions, and ``distribute_module`` places parameters and buffers as it says. By decisions
    alone all else is as the program says: so runs a program that was learned
    (:func:`shardwise.steps.learned_step.learned_step`). ``tell`` is called with the phase and the number of ops so far.
    With ``sites`` the result says of each collective where in the program it is issued, and why.

    Raises what the program raises, :class:`PlanMeshError` for a plan for another mesh, and :class:`MeshMismatchError`
    where this process has a process group already.
    """
    refuse_in_a_group("rehearse a program")
    check_program("rehearse a program", program, mesh_shape, mesh_names, device, tell)
    if type(rank) is not int or not 0 <= rank < math.prod(mesh_shape):
        raise ArgumentError(
            asked="rehearse a program",
            found=f"its argument 'rank' is {rank!r}",
            do=f"Give a rank of the mesh, from 0 to {math.prod(mesh_shape) - 1}.",
            argument="rank",
        )
    names = dim_names(mesh_shape, mesh_names)
    before = in_force.now
    if isinstance(plan, StepPlan):
        plan.check_mesh("rehearse a program by a plan", mesh_shape, names)
        use_decisions(plan.decisions, plan.placements_of, is_written=True)
    elif plan is not None:
        use_decisions(plan)
    try:
        watch = RankWatch(tell or (lambda _phase, _ops: None), Sites(names) if sites else None)
        return _rehearsed(program, mesh_shape, names, rank, device, watch)
    finally:
        if plan is not None:
            use_decisions(*before)


def _rehearsed(
    program: Callable[[DeviceMesh], Any],
    mesh_shape: Sequence[int],
    names: Sequence[str],
    rank: int,
    device: str,
    watch: RankWatch,
) -> Rehearsal:
    with fake_ranks(math.prod(mesh_shape), rank):
        mesh = init_device_mesh(device, tuple(mesh_shape), mesh_dim_names=tuple(names))
        with fake_tensors(), as_on(device), watch.installed():
            return follow(program, mesh, watch)


def dim_names(mesh_shape: Sequence[int], mesh_names: Sequence[str] | None) -> tuple[str, ...]:
    """The names of the mesh dims in a rehearsal: ``dim0``, ``dim1`` where none are given."""
    return tuple(mesh_names) if mesh_names else tuple(f"dim{i}" for i in range(len(mesh_shape)))


def check_program(asked: str, program: Any, mesh_shape: Any, mesh_names: Any, device: Any, tell: Any) -> None:
    """Raise :class:`ArgumentError` unless this is a function of a mesh, and a mesh that there may be."""
    if not callable(program):
        refuse_argument(asked, "program", program, "Pass a function of the mesh that runs a step or returns one.")
    check_arity(asked, program, "program", (("mesh",),))
    check_mesh_shape(asked, mesh_shape, mesh_names)
    check_function(asked, tell, "tell")
    if device not in ("cpu", "cuda"):
        raise ArgumentError(
            asked=asked, found=f"its argument 'device' is {device!r}", do='Give "cpu" or "cuda".', argument="device"
        )


def refuse_in_a_group(asked: str) -> None:
    """Raise :class:`MeshMismatchError` where this process has a process group: a fake one would take its place."""
    if dist.is_initialized():
        raise MeshMismatchError(
            asked=asked,
            found="this process has a process group of its own already",
            do="Do it in a process without a process group.",
        )


@contextmanager
def fake_ranks(count: int, rank: int) -> Iterator[None]:
    """A fake process group in which only this rank exists."""
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=count)
    try:
        with rehearsing():
            yield
    finally:
        let_go()  # plans that were made here must not serve real ranks
        dist.destroy_process_group()


def follow(program: Callable[[DeviceMesh], Any], mesh: DeviceMesh, watch: RankWatch) -> Rehearsal:
    """Run a program, and the step that it returns, under a watch that is installed."""
    with watch.watching():
        returned = program(mesh)
    step = run_returned(returned, "rehearse the program", watch, fused=True)
    parameters = list(step.model.parameters()) if step is not None else []
    buffers = list(step.model.buffers()) if step is not None else []
    optimizer = step.optimizer if step is not None else None
    states = [] if optimizer is None else [t for s in optimizer.state.values() for t in tensors_in(s)]
    memory = Memory(
        parameters=_bytes(parameters),
        buffers=_bytes(buffers),
        gradients=watch.gradients,
        optimizer=_bytes(states),
        kept=watch.kept,
        peaks=dict(watch.peaks),
    )
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return Rehearsal(
        mesh_shape=tuple(mesh.shape),
        mesh_names=tuple(mesh.mesh_dim_names or ()),
        coordinate=tuple(coordinate),
        whole_parameters=sum(p.numel() for p in parameters),
        whole_parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        memory=memory,
        counts=watch.counts,
        nbytes=watch.nbytes,
        ops=watch.ops,
        sites=tuple(watch.seen),
    )


def refuse_empty(rehearsal: Rehearsal) -> None:
    """Raise :class:`CallError` where a program did nothing on its mesh: there is nothing to show of it."""
    if not rehearsal.ops and not rehearsal.counts:
        raise CallError(
            asked="rehearse the program",
            found="it ran no op on the mesh",
            do="Place the model and its inputs on the mesh that the program gets, and run a step or return one.",
        )


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of this rank's parts, of each memory once."""
    local = [t.to_local() if isinstance(t, MeshTensor) else t for t in tensors]
    return sum({memory_of(t): t.untyped_storage().nbytes() for t in local}.values())


# -- watching --------------------------------------------------------------------------------------------------------


@define(eq=False)
class RankWatch:
    """Counts the memory that is alive on this rank, its ops, and the collectives that it issues for each op."""

    tell: Callable[[str, int], None]
    sites: Sites | None = None
    seen: list[Site] = field(factory=list)
    counts: Counter[CollectiveUse] = field(factory=Counter)
    nbytes: Counter[CollectiveUse] = field(factory=Counter)
    ops: Counter[str] = field(factory=Counter)
    peaks: dict[str, int] = field(factory=dict)
    gradients: int = 0
    kept: int = 0
    phases: Phases = field(factory=Phases)
    _before: int = 0
    _alive: dict[int, int] = field(factory=dict)
    _total: int = 0
    _op: str = NO_OP
    _running: Op | None = None
    _planned: str = ""

    def begins(self, model: nn.Module, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> None:
        """Forget ops and collectives; memory that is alive stays counted."""
        self.counts.clear()
        self.nbytes.clear()
        self.ops.clear()
        self.seen.clear()
        if self.sites is not None:
            self.sites.name_modules(model)
        self.peaks = {"forward": self._total}
        self._before, self.phases.saw_backward = self._total, False

    def first_gradients(self, roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Ones, which take memory too. What is alive before them is kept for the backward pass."""
        self.kept = self._total - self._before
        with self.watching():
            return [torch.ones_like(t) for t in roots]

    def backward_ended(self, parameters: Sequence[nn.Parameter]) -> None:
        """Note the bytes of the gradients."""
        self.gradients = _bytes(p.grad for p in parameters if p.grad is not None)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Observe plans, collectives and optimizer steps while the context lasts."""
        with (
            running_compiled_code_eagerly(),
            self.phases.followed(),
            dispatcher.observe(self._saw_plan),
            observe(self._saw_collective),
        ):
            if self.sites is None:
                yield
                return
            self.sites.phases = self.phases
            with self.sites.following():
                yield

    def watching(self) -> Any:
        """A context whose memory is counted."""
        return watching(self._see, lambda _: False, self._see)

    def _saw_plan(self, plan: Plan) -> None:
        self._op = op_name(plan.schema.op)
        lowered = any(strategy.lowered for strategy in plan.strategies)
        self._running = None if lowered else plan.schema.op
        self._planned = self._op
        self.ops[self._op] += 1
        self.tell(self.phases.of_op(), self.ops.total())
        if self.sites is not None:
            self.sites.saw_call()

    def _saw_collective(self, event: Event) -> None:
        op = f"{self._planned}, its result" if event.reason else self._op
        use = CollectiveUse(self.phases.current, event.kind, event.mesh_dims, event.group_size, op)
        self.counts[use] += 1
        self.nbytes[use] += event.nbytes
        if self.sites is not None:
            self.seen.append(self.sites.of(event))

    def _see(self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if any(isinstance(t, MeshTensor) for t in tensors_in([args, kwargs])):
            # Its own dispatcher runs the op, and the local ops of that are observed here.
            return NotImplemented
        try:
            result = op(*args, **kwargs)
        except Exception as error:
            if not is_unknowable(error):
                raise
            result = stand_in_number(op, args, kwargs)
            if result is None:
                raise CallError(
                    asked=f"rehearse {op_name(op)}",
                    found="the shape of its result depends on data, which is not there",
                    do="Give the program a branch without it.",
                    op=op_name(op),
                ) from error
        for tensor in tensors_in(result):
            key = memory_of(tensor)
            if key not in self._alive:
                storage = tensor.untyped_storage()
                self._alive[key] = size = storage.nbytes()
                self._total += size
                finalize(storage, self._uncount_memory, key)
                phase = self.phases.current
                self.peaks[phase] = max(self.peaks.get(phase, 0), self._total)
        if op is self._running:
            # Collectives from here to the next op belong to no op: the program asks for them, or a gradient's layout.
            self._op, self._running = NO_OP, None
        return result

    def _uncount_memory(self, key: int) -> None:
        self._total -= self._alive.pop(key)
