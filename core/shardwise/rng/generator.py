"""The state of this process's generator: its seed, and the number of its next draw.

A draw is one random op. Its values depend on the seed, the draw's number and the places of the elements
(:mod:`shardwise.rng.sampling`). So the state is two integers. The ranks of a mesh have the same state: they agree on it
at the mesh's first draw and compare it from time to time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from shardwise.errors import ArgumentError, LayoutError, SettingsError, TracingError
from shardwise.private_torch.dispatch import in_backward
from shardwise.private_torch.tracing import is_traced
from shardwise.rng.sampling import Draw
from shardwise.settings import RANDOM_MODES, read_settings

__all__ = [
    "Agree",
    "asked_seed",
    "get_state",
    "manual_seed",
    "mode",
    "next_draw",
    "preserved_state",
    "set_state",
    "using",
]

# (seed, number) of this rank -> (seed, number) that all ranks of the mesh use.
Agree = Callable[[int, int], tuple[int, int]]

# How many draws a recomputation can repeat. With more draws between a forward and its recomputation it draws anew.
_REMEMBERED = 1 << 17
_VERSION = 1
_FIELDS = 4
# Who set the seed: nobody, the program, or the ranks at a first draw.
_UNSEEDED, _ASKED, _AGREED = range(3)


@define
class _Generator:
    """The generator of this process.

    ``seed`` is ``None`` until a program or the first draw sets it; ``is_asked`` says that a program did. ``modes`` are
    the modes of the active contexts, the innermost last. ``draws`` maps a number from torch's CPU generator to the draw
    that followed it.
    """

    seed: int | None = None
    is_asked: bool = False
    number: int = 0
    modes: list[str] = field(factory=list)
    draws: dict[int, tuple[int, int]] = field(factory=dict)


_here = _Generator()


def manual_seed(seed: int) -> None:
    """Seed the generator of this process, and torch's generators as :func:`torch.manual_seed` does.

    From then on random ops on MeshTensors draw from it, unless a setting or :func:`using` says otherwise. Every rank
    must call this with the same seed, an integer that torch accepts: at the next draw on a mesh, ranks with different
    seeds raise :class:`RankDisagreementError`.
    """
    given: Any = seed
    if isinstance(given, (torch.Tensor, bool)) or not hasattr(given, "__index__"):
        raise ArgumentError(
            asked="seed the generator",
            found=f"the seed is {seed!r}, and not a whole number",
            do="Give a whole number, the same on every rank.",
            argument="seed",
        )
    if not -(1 << 63) <= given.__index__() < 1 << 64:
        raise ArgumentError(
            asked="seed the generator",
            found=f"the seed is {seed}, which torch does not take: it has more than 64 bits",
            do="Give a whole number below 2**64, the same on every rank.",
            argument="seed",
        )
    torch.manual_seed(seed)
    _here.seed, _here.is_asked, _here.number = seed % (1 << 64), True, 0


def asked_seed() -> int | None:
    """The seed that the program gave :func:`manual_seed`; None if it gave none."""
    return _here.seed if _here.is_asked else None


def get_state() -> Tensor:
    """The state, as an int64 tensor on the CPU. It can be saved as any tensor can. See :func:`set_state`."""
    seed = 0 if _here.seed is None else _here.seed
    signed = seed - (1 << 64) if seed >= 1 << 63 else seed
    kind = _UNSEEDED if _here.seed is None else _ASKED if _here.is_asked else _AGREED
    return torch.tensor([_VERSION, kind, signed, _here.number], device="cpu")


def set_state(state: Tensor) -> None:
    """Continue from a state of :func:`get_state`. Raises :class:`LayoutError` for any other tensor."""
    values = state.tolist() if state.dtype is torch.int64 and state.shape == (_FIELDS,) else []
    if values[:1] != [_VERSION]:
        raise LayoutError(
            asked="set the state of the random generator",
            found=f"a {state.dtype} tensor of shape {tuple(state.shape)} is not one of its states",
            do="Give what shardwise.random.get_state() returned.",
        )
    _, kind, seed, _here.number = values
    _here.seed = None if kind == _UNSEEDED else seed % (1 << 64)
    _here.is_asked = kind == _ASKED


def mode() -> str:
    """The mode in which random ops draw now: ``counter``, ``torch`` or ``local``. See docs/random.md."""
    if _here.modes:
        return _here.modes[-1]
    return _mode_of_settings() or ("counter" if _here.is_asked else "torch")


@cache
def _mode_of_settings() -> str | None:
    return read_settings().random


@contextmanager
def using(chosen: str) -> Iterator[None]:
    """A context that draws in another mode. Every rank must enter and leave it at the same point."""
    if chosen not in RANDOM_MODES:
        raise SettingsError(
            asked=f"draw random numbers in the mode {chosen!r}",
            found=f"the modes are {', '.join(RANDOM_MODES)}",
            do="Choose one of them.",
            setting="random",
        )
    _here.modes.append(chosen)
    try:
        yield
    finally:
        _here.modes.pop()


@contextmanager
def preserved_state() -> Iterator[None]:
    """A context that restores the state of the generator at its end."""
    before = get_state()
    try:
        yield
    finally:
        set_state(before)


def next_draw(agree: Agree) -> Draw | None:
    """The next draw; ``None`` if torch's generators draw. ``agree`` gives every rank of a mesh the same state.

    A recomputation of a forward repeats the forward's draws. ``torch.utils.checkpoint`` resets torch's CPU generator
    for it, and each draw is stored under a number that this generator gave just before.

    Raises :class:`TracingError` while a graph is traced or captured, which would draw the same numbers each time it
    runs.
    """
    chosen = mode()
    if chosen == "torch":
        return None
    if is_traced(torch.empty(0, device="cpu")):
        raise TracingError(
            asked="draw random numbers by their place in the global tensor",
            found="a graph is being traced, and would draw the same numbers each time it runs",
            do="Draw outside of compiled code, or let torch's generator draw: `with shardwise.random.using('torch')`.",
        )
    cuda: Any = torch.cuda
    if cuda.is_initialized() and cuda.is_current_stream_capturing():
        raise TracingError(
            asked="draw random numbers by their place in the global tensor",
            found="a CUDA graph is being captured, and would draw the same numbers each time it is replayed",
            do="Let torch's generator draw, which a graph advances: `with shardwise.random.using('torch')`.",
        )
    tag = _number_of_torch()
    draw = _here.draws.get(tag) if in_backward() else None
    if draw is None:
        draw = agree(_number_of_torch() if _here.seed is None else _here.seed, _here.number)
        _here.seed, _here.number = draw[0], draw[1] + 1
        if len(_here.draws) >= _REMEMBERED:
            del _here.draws[next(iter(_here.draws))]
        # The newest entry comes last, also if a reseeded generator gave the same tag before.
        _here.draws.pop(tag, None)
        _here.draws[tag] = draw
    return Draw(*draw, by_place=chosen == "counter")


def _number_of_torch() -> int:
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())
