"""Simulated ranks: one process plays a whole mesh, so that a lowering may communicate without a process group.

Every rank is a thread, and exactly one runs at a time. A rank runs until it asks for a collective. When all ranks of
its group have asked for the same, they get their answers and continue; other groups may communicate more or less. If
no group is complete, ranks ask for different collectives, or only some ask. That is an error here; a real mesh would
hang.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from shardwise.errors import RankDisagreementError
from shardwise.kernel.mesh import coordinates
from shardwise.kernel.reductions import reduce_pieces
from shardwise.rng.generator import get_state, set_state
from shardwise.rule.lowering import MeshDims

__all__ = ["Coordinate", "RankError", "SilentComm", "SimulatedComm", "run_ranks"]

Coordinate = tuple[int, ...]


class RankError(Exception):
    """What a simulated rank raised; the cause is chained."""

    def __init__(self, coordinate: Coordinate, cause: BaseException) -> None:
        super().__init__(f"rank {coordinate} raised {type(cause).__name__}: {cause}")
        self.coordinate = coordinate


@frozen(eq=False)
class _Request:
    """One collective as one rank asks for it."""

    name: str
    mesh_dims: tuple[int, ...]
    option: Any
    tensors: tuple[Tensor, ...]

    def __str__(self) -> str:
        shapes = ", ".join(str(tuple(t.shape)) for t in self.tensors)
        return f"{self.name}({shapes}; mesh dims {self.mesh_dims}, {self.option})"

    @property
    def kind(self) -> tuple[Any, ...]:
        """What must be the same on every rank of a group, so that they meet."""
        return self.name, self.mesh_dims, self.option, len(self.tensors)

    @property
    def form(self) -> tuple[Any, ...]:
        """What must be the same, too, when the ranks of a group have met."""
        shapes = tuple(t.shape for t in self.tensors) if self.name == "all_reduce" else ()
        return shapes, tuple(t.dtype for t in self.tensors)


@define(eq=False)
class _Started:
    """The result of a started shift, and its tensor, which must not change before the wait: it may still be sent."""

    request: _Request
    sent: Tensor
    answer: Tensor
    waited: bool = field(default=False, init=False)

    def wait(self) -> Tensor:
        """See :class:`shardwise.rule.lowering.AsyncResult`."""
        before = self.request.tensors[0]
        if not self.waited and not torch.allclose(self.sent, before, rtol=0, atol=0, equal_nan=True):
            raise _misuse(self.request, "the tensor that it sends was changed before it was waited for")
        self.waited = True
        return self.answer


class SimulatedComm:
    """The communication handle that a simulated rank gives to a lowering."""

    def __init__(self, ask: Callable[[_Request], Any]) -> None:
        self._ask = ask
        self._started: list[_Started] = []

    def all_reduce(self, tensor: Tensor, kind: str, mesh_dims: Sequence[int]) -> Tensor:
        """See :class:`shardwise.rule.lowering.Comm`."""
        reduced: Tensor = self._ask(_Request("all_reduce", tuple(mesh_dims), kind, (tensor.clone(),)))
        return reduced

    def all_gather(self, tensor: Tensor, mesh_dim: MeshDims, *, same_shape: bool = False) -> list[Tensor]:
        """See :class:`shardwise.rule.lowering.Comm`."""
        request = _Request("all_gather", _dims(mesh_dim), same_shape, (tensor.clone(),))
        gathered: list[Tensor] = self._ask(request)
        if same_shape:
            _check_shapes(request, [tensor.shape] * len(gathered), gathered)
        return gathered

    def all_to_all(
        self, tensors: Sequence[Tensor], mesh_dim: MeshDims, shapes: Sequence[Sequence[int]] | None = None
    ) -> list[Tensor]:
        """See :class:`shardwise.rule.lowering.Comm`."""
        request = _Request("all_to_all", _dims(mesh_dim), shapes is None, tuple(t.clone() for t in tensors))
        received: list[Tensor] = self._ask(request)
        if shapes is not None:
            _check_shapes(request, shapes, received)
        return received

    def shift(self, tensor: Tensor, mesh_dim: MeshDims, by: int = 1, shape: Sequence[int] | None = None) -> Tensor:
        """See :class:`shardwise.rule.lowering.Comm`."""
        return self.start_shift(tensor, mesh_dim, by, shape).wait()

    def start_shift(
        self, tensor: Tensor, mesh_dim: MeshDims, by: int = 1, shape: Sequence[int] | None = None
    ) -> _Started:
        """See :class:`shardwise.rule.lowering.Comm`."""
        request = _Request("shift", _dims(mesh_dim), by, (tensor.clone(),))
        answer: Tensor = self._ask(request)
        _check_shapes(request, [tensor.shape if shape is None else shape], [answer])
        self._started.append(_Started(request, tensor, answer))
        return self._started[-1]

    def agree_on_draw(self, seed: int, number: int) -> tuple[int, int]:
        """See :class:`shardwise.rule.lowering.Comm`: simulated ranks draw the same numbers."""
        return seed, number

    def compare_generators(self) -> None:
        """See :class:`shardwise.rule.lowering.Comm`: each simulated rank has its own state, and all start the same."""

    def check_waited(self) -> None:
        """Raise for a shift that was started and never waited for."""
        for one in self._started:
            if not one.waited:
                raise _misuse(one.request, "it was started and never waited for")


def _dims(mesh_dim: MeshDims) -> tuple[int, ...]:
    return (mesh_dim,) if isinstance(mesh_dim, int) else tuple(mesh_dim)


def _check_shapes(request: _Request, shapes: Sequence[Sequence[int]], answers: Sequence[Tensor]) -> None:
    expected, shapes_found = [tuple(s) for s in shapes], [tuple(t.shape) for t in answers]
    if expected != shapes_found:
        raise _misuse(request, f"what comes is of shape {_one(shapes_found)} and {_one(expected)} is expected")


def _one(shapes: Sequence[tuple[int, ...]]) -> Any:
    return shapes[0] if len(shapes) == 1 else shapes


def _misuse(request: _Request, found: str) -> RankDisagreementError:
    return RankDisagreementError(
        asked=f"run the collective {request}",
        found=found,
        do="Say the shape of what comes where it differs, wait for each shift, and leave what is sent alone meanwhile.",
    )


def _no_collective(request: _Request) -> Any:
    raise RankDisagreementError(
        asked=f"run the collective {request}",
        found="only a lowering may communicate",
        do="Mark the row as lowered, or do without communication.",
    )


class SilentComm(SimulatedComm):
    """The handle for code that must not communicate: ``local_args`` runs while a plan is made."""

    def __init__(self) -> None:
        super().__init__(_no_collective)


@cache
def _threads() -> ThreadPoolExecutor:
    """Threads that serve one rank after another: kernels of convolutions keep in their thread what they prepared for a
    shape, and that takes longer than what ranks do.
    """
    return ThreadPoolExecutor(max_workers=sys.maxsize, thread_name_prefix="shardwise-rank")


# A forked process has none of the threads.
os.register_at_fork(after_in_child=_threads.cache_clear)


class _CancelledError(BaseException):
    """Ends a rank's thread after another rank failed."""


@define(eq=False)
class _Rank:
    """One rank: its thread, two semaphores that pass the turn, and its own states of the two generators."""

    coordinate: Coordinate
    work: Callable[[SimulatedComm], Any]
    rng: Tensor
    draws: Tensor
    turn: threading.Semaphore = field(factory=lambda: threading.Semaphore(0), init=False)
    back: threading.Semaphore = field(factory=lambda: threading.Semaphore(0), init=False)
    done: Future[None] = field(init=False)
    request: _Request | None = field(default=None, init=False)
    answer: Any = field(default=None, init=False)
    result: Any = field(default=None, init=False)
    error: BaseException | None = field(default=None, init=False)
    cancelled: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self.done = _threads().submit(self._main)

    def _main(self) -> None:
        self.turn.acquire()
        try:
            if not self.cancelled:
                comm = SimulatedComm(self._ask)
                self.result = self.work(comm)
                comm.check_waited()
        except _CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001  whatever a rule raises is evidence against it
            self.error = error
        self.request = None
        self.back.release()

    def _ask(self, request: _Request) -> Any:
        self.request = request
        self.back.release()
        self.turn.acquire()
        if self.cancelled:
            raise _CancelledError
        return self.answer

    def resume(self) -> None:
        """Let the rank run until it asks for a collective or ends."""
        torch.set_rng_state(self.rng)
        set_state(self.draws)
        self.turn.release()
        self.back.acquire()
        self.rng = torch.get_rng_state()
        self.draws = get_state()

    def cancel(self) -> None:
        self.cancelled = True
        self.turn.release()
        self.done.result()


def run_ranks(mesh_shape: Sequence[int], work: Callable[[Coordinate, SimulatedComm], Any]) -> dict[Coordinate, Any]:
    """Run ``work(coordinate, comm)`` on every rank of a mesh and return the results by coordinate.

    All ranks start with the same states of torch's generator and of shardwise's. Raises :class:`RankError` for an error
    of a rank, and :class:`RankDisagreementError` if the ranks of a group do not ask for the same collectives in the
    same order.
    """
    rng, draws = torch.get_rng_state(), get_state()
    ranks = {c: _Rank(c, partial(work, c), rng, draws) for c in coordinates(mesh_shape)}
    ready = list(ranks)
    try:
        while ready:
            for rank in (ranks[at] for at in ready):
                rank.resume()
                if rank.error is not None:
                    raise RankError(rank.coordinate, rank.error) from rank.error
            requests = {c: rank.request for c, rank in ranks.items() if rank.request is not None}
            answers = _answers(tuple(mesh_shape), requests)
            ready = list(answers)
            for at, answer in answers.items():
                ranks[at].answer = answer
    finally:
        for rank in ranks.values():
            if not rank.done.done():
                rank.cancel()
    return {c: rank.result for c, rank in ranks.items()}


def _disagreement(
    at: Coordinate, request: _Request | None, other_at: Coordinate, other: _Request | None
) -> RankDisagreementError:
    return RankDisagreementError(
        asked="run a collective on every rank",
        found=f"rank {at} asks for {request or 'none'} and rank {other_at} for {other or 'none'}",
        do="Issue the same collectives in the same order on every rank.",
    )


def _answers(mesh_shape: tuple[int, ...], requests: dict[Coordinate, _Request]) -> dict[Coordinate, Any]:
    """The answers to the ranks whose groups have met; if there are requests and no group has, the ranks disagree."""
    answers: dict[Coordinate, Any] = {}
    missed: RankDisagreementError | None = None
    for at, request in requests.items():
        # The ranks whose coordinates differ from ``at`` only on these mesh dims, in row-major order of these.
        group = []
        for place in product(*(range(mesh_shape[m]) for m in request.mesh_dims)):
            on_dims = dict(zip(request.mesh_dims, place, strict=True))
            group.append(tuple(on_dims.get(m, c) for m, c in enumerate(at)))
        others = {other: requests.get(other) for other in group}
        absent = [(c, other) for c, other in others.items() if other is None or other.kind != request.kind]
        if absent:
            missed = missed or _disagreement(at, request, *absent[0])
            continue
        for other in group:
            if requests[other].form != request.form:
                raise _disagreement(at, request, other, requests[other])
        answers[at] = _answer(group.index(at), request, [requests[c] for c in group])
    if missed and not answers:
        raise missed
    return answers


def _answer(index: int, request: _Request, of_group: list[_Request]) -> Any:
    """What the rank at ``index`` of its group gets."""
    if request.name == "all_reduce":
        return reduce_pieces([r.tensors[0] for r in of_group], request.option)
    if request.name == "all_gather":
        return [r.tensors[0].clone() for r in of_group]
    if request.name == "all_to_all":
        return [r.tensors[index].clone() for r in of_group]
    return of_group[(index - request.option) % len(of_group)].tensors[0].clone()
