"""Observing collectives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from attrs import evolve, field, frozen
from torch import Tensor

__all__ = ["Event", "ObservedWork", "because", "new_event", "observe", "observers", "waited", "emit", "is_observed"]


@frozen
class Event:
    """One collective: its kind, the bytes of this rank's input, the group's size and mesh dims.

    ``phase`` is ``issued``, ``finished`` when the backend is done with it, ``waiting`` when the program begins to wait
    for its result, and ``waited`` when it has it. ``finished`` comes from a thread of the backend, perhaps before
    ``issued``. ``number`` is the same in all of them, and so is ``at``: when it was issued, by ``time.perf_counter``.
    ``reused`` is the phase of a collective that is not issued, because an op before got its result. ``reason`` says why
    a result is moved to where it rests; it is empty for any other collective. ``in_graph`` says that a compiled graph
    issued it.
    """

    kind: str
    nbytes: int
    group_size: int
    mesh_dims: tuple[int, ...]
    phase: str = "issued"
    number: int = field(default=0, eq=False, repr=False)
    reason: str = field(default="", eq=False)
    at: float = field(default=0.0, eq=False, repr=False)
    in_graph: bool = field(default=False, eq=False)


# Empty in ordinary runs. A collective only tests that.
Observer = tuple[Callable[[Event], None], frozenset[str], bool]
observers: list[Observer] = []
numbers = count()


class _Reason(threading.local):
    """The reason of the collectives that are issued now."""

    text = ""


_reason = _Reason()


@contextmanager
def because(reason: str) -> Iterator[None]:
    """Give the collectives that are issued meanwhile a reason."""
    before, _reason.text = _reason.text, reason
    try:
        yield
    finally:
        _reason.text = before


def new_event(kind: str, nbytes: int, group_size: int, mesh_dims: tuple[int, ...], *, in_graph: bool = False) -> Event:
    """The event of a collective that is issued now."""
    now = time.perf_counter()
    number = next(numbers)
    return Event(kind, nbytes, group_size, mesh_dims, number=number, reason=_reason.text, at=now, in_graph=in_graph)


@contextmanager
def observe(
    callback: Callable[[Event], None], *, phases: Sequence[str] = ("issued",), in_graphs: bool = False
) -> Iterator[None]:
    """Call ``callback`` with an :class:`Event` for each collective of this process in the block, in these phases.

    ``in_graphs`` adds those that compiled graphs issue.
    """
    observer = callback, frozenset(phases), in_graphs
    observers.append(observer)
    try:
        yield
    finally:
        observers.remove(observer)


def is_observed(phase: str) -> bool:
    """Whether an observer observes a phase."""
    return any(phase in phases for _, phases, _ in observers)


def emit(event: Event, phase: str) -> None:
    """Call the observers of a phase."""
    for callback, phases, in_graphs in tuple(observers):
        if phase in phases and (in_graphs or not event.in_graph):
            callback(evolve(event, phase=phase))


def waited(event: Event, out: Tensor) -> Tensor:
    """Emit that a result was waited for, and return it."""
    emit(event, "waited")
    return out


@frozen(eq=False)
class ObservedWork:
    """The work of a collective; emits when the program begins to wait for it. Only while somebody observes that."""

    work: Any
    event: Event

    def get_future(self) -> Any:
        return self.work.get_future()

    def wait(self) -> Any:
        emit(self.event, "waiting")
        return self.work.wait()
