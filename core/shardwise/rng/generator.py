"""Which random numbers come next: the seed of this process's generator, and the number of its next draw.

A draw is one random op. All that it draws follows from the seed, its number and the places of its elements
(:mod:`shardwise.rng.sampling`), so the state is two integers. Ranks that draw on a mesh are at the same number: they
agree when a mesh first draws, and compare their state from time to time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from attrs import define, field
from torch import Tensor

from shardwise.errors import LayoutError, SettingsError, TracingError
from shardwise.private_torch.dispatch import in_backward
from shardwise.private_torch.tracing import is_traced
from shardwise.rng.sampling import Draw
from shardwise.settings import RANDOM_MODES, read_settings

__all__ = ["Agree", "get_state", "kept", "manual_seed", "mode", "set_state", "take", "using"]

# (seed, number) of this rank -> those that all ranks of the mesh take.
Agree = Callable[[int, int], tuple[int, int]]

# Draws that a recomputation may ask for again. A step with more between a forward and its recomputation draws afresh.
_REMEMBERED = 1 << 17
_VERSION = 1
_FIELDS = 4


@define
class _Generator:
    """``seed`` is ``None`` until somebody seeds it. ``modes`` are those of the contexts in force, innermost last.

    ``taken`` has the draws that were made from each state of torch's CPU generator, by what that generator gave.
    """

    seed: int | None = None
    number: int = 0
    modes: list[str] = field(factory=list)
    taken: dict[int, tuple[int, int]] = field(factory=dict)


_here = _Generator()


def manual_seed(seed: int) -> None:
    """Seed the generator of this process, and torch's generators as :func:`torch.manual_seed` does.

    From now on random ops on MeshTensors draw from it, unless a setting or :func:`using` says otherwise. Call it on
    every rank with the same seed. Any integer that torch takes will do.
    """
    torch.manual_seed(seed)
    _here.seed, _here.number = seed % (1 << 64), 0


def get_state() -> Tensor:
    """The state, as an int64 tensor on the CPU; it may be saved like any tensor. See :func:`set_state`."""
    seed = 0 if _here.seed is None else _here.seed
    signed = seed - (1 << 64) if seed >= 1 << 63 else seed
    return torch.tensor([_VERSION, int(_here.seed is not None), signed, _here.number], device="cpu")


def set_state(state: Tensor) -> None:
    """Go on from a state of :func:`get_state`; raises :class:`LayoutError` for what is none."""
    values = state.tolist() if state.dtype is torch.int64 and state.shape == (_FIELDS,) else []
    if values[:1] != [_VERSION]:
        raise LayoutError(
            asked="take up the state of the random generator",
            found=f"a {state.dtype} tensor of shape {tuple(state.shape)} is no state of it",
            do="Give what shardwise.random.get_state() returned.",
        )
    _, is_seeded, seed, _here.number = values
    _here.seed = seed % (1 << 64) if is_seeded else None


def mode() -> str:
    """How random ops draw here and now: ``counter``, ``torch`` or ``local``; see docs/random.md."""
    if _here.modes:
        return _here.modes[-1]
    return _setting() or ("torch" if _here.seed is None else "counter")


@cache
def _setting() -> str | None:
    return read_settings().random


@contextmanager
def using(chosen: str) -> Iterator[None]:
    """Draw in another way while the context lasts; every rank must do so alike."""
    if chosen not in RANDOM_MODES:
        raise SettingsError(
            asked=f"draw random numbers in the way {chosen!r}",
            found=f"the ways are {', '.join(RANDOM_MODES)}",
            do="Choose one of them.",
            setting="random",
        )
    _here.modes.append(chosen)
    try:
        yield
    finally:
        _here.modes.pop()


@contextmanager
def kept() -> Iterator[None]:
    """A context after which the generator is where it was before."""
    before = get_state()
    try:
        yield
    finally:
        set_state(before)


def take(agree: Agree) -> Draw | None:
    """The next draw; ``None`` where torch's generators draw. ``agree`` has the ranks of a mesh take the same.

    A recomputation of what a forward drew takes the forward's draws again: ``torch.utils.checkpoint`` sets torch's CPU
    generator back for it, and each draw takes a number from that generator to be found by.

    Raises :class:`TracingError` while a graph is traced: it would draw the same numbers each time it runs.
    """
    chosen = mode()
    if chosen == "torch":
        return None
    tag = _tag()
    known = _here.taken.get(tag) if in_backward() else None
    if known is None:
        known = agree(_seed(), _here.number)
        _here.seed, _here.number = known[0], known[1] + 1
        _remember(tag, known)
    return Draw(*known, by_place=chosen == "counter")


def _seed() -> int:
    """The seed; without one, what torch's generator gives."""
    return _number_of_torch() if _here.seed is None else _here.seed


def _tag() -> int:
    if is_traced(torch.empty(0, device="cpu")):
        raise TracingError(
            asked="draw random numbers by their place in the global tensor",
            found="a graph is being traced, and would draw the same numbers each time it runs",
            do="Draw outside of compiled code, or let torch's generator draw: `with shardwise.random.using('torch')`.",
        )
    return _number_of_torch()


def _number_of_torch() -> int:
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def _remember(tag: int, draw: tuple[int, int]) -> None:
    if len(_here.taken) >= _REMEMBERED:
        del _here.taken[next(iter(_here.taken))]
    # Behind the others, also where a reseeded generator gave the tag before.
    _here.taken.pop(tag, None)
    _here.taken[tag] = draw
