"""Values of a step: where they are, what one device keeps of them, and how those of a rank differ."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from shardwise.kernel.plurals import counted
from shardwise.tensor.on_mesh import on

__all__ = ["RTOL", "Compared", "Difference", "Kept", "Place", "Values", "difference"]

# The relative rounding, beside the largest value of a tensor, that the order of sums makes in a step.
RTOL = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
_MOST = 200  # differences of a rank that are kept
_AHEAD = 40  # values of one device among which the next one of the ranks is looked for
_FINE = 1e-4  # above 16 roundings of float32: gradients in bfloat16 are often smaller than 16 roundings
_NOISE = 16  # roundings of the largest value of a stage that a value may be off which is 0 in exact arithmetic


@frozen(order=True)
class Place:
    """Where in a step a value is. ``what`` is ``output``, a parameter's name, or an op and which of its tensors."""

    stage: str
    module: str = ""
    call: int = 0
    what: str = ""

    def __str__(self) -> str:
        again = self.call + 1 if self.call else 0
        if self.stage != "forward":
            return f"{self.stage}{f' (step {again})' if again else ''}: {self.what}"
        return f"forward: module {self.module or 'the model'}{f' (call {again})' if again else ''}, {self.what}"


@frozen
class Difference:
    """A value that is not the one of one device.

    ``found`` says how it differs, ``worst`` by how much, relative to the largest value; infinite where it has another
    shape, or another op ran. ``position`` is that of the value in the step. Ops add the line of the program, the rule,
    its rows and its source.
    """

    place: Place
    found: str
    worst: float
    placements: str = ""
    line: str = ""
    op: str = ""
    rule: str = ""
    rows: tuple[str, ...] = ()
    position: int = 0


class Values(Protocol):
    """Takes the values of a step in order."""

    def saw(self, dtype: torch.dtype) -> None: ...

    def take(self, place: Place, values: Sequence[Tensor], lies: str = "", **facts: Any) -> None: ...


@define
class Kept:
    """Keeps the values of one device in files of a folder."""

    folder: Path
    places: list[Place] = field(factory=list)
    largest: dict[str, float] = field(factory=dict)

    @on(None)
    def take(self, place: Place, values: Sequence[Tensor], lies: str = "", **facts: Any) -> None:  # noqa: ARG002
        """Keep the values of a place."""
        values = [value.detach().clone() for value in values]
        torch.save(values, self.folder / f"{len(self.places)}.pt")
        self.places.append(place)
        for value in values:
            if value.numel() and (value.is_floating_point() or value.is_complex()):
                size = float(value.abs().nan_to_num(0, 0, 0).max())
                self.largest[place.stage] = max(self.largest.get(place.stage, 0.0), size)

    def saw(self, dtype: torch.dtype) -> None:
        """One device is what the others are compared with, whatever it rounds to."""

    def close(self) -> None:
        """Write what the values are."""
        (self.folder / "places").write_bytes(pickle.dumps((self.places, self.largest)))


@define
class Compared:
    """Compares the values of this rank with those that one device kept.

    Ops of which one side has more, as for the layout of a gradient, are passed over; ``by_op`` says that values are
    those of ops. ``more`` is the first op that one device does not run. ``coarsest`` is the dtype with the largest
    roundings that an op has given so far: what is computed from it is no more exact, whatever its own dtype is.
    ``small_gradients`` is not 0 where all gradients are so small that they may be rounding alone: the bound for that.
    """

    folder: Path
    rtol: float | None
    by_op: bool = False
    next: int = 0
    places: list[Place] = field(factory=list)
    largest: dict[str, float] = field(factory=dict)
    compared: dict[str, int] = field(factory=dict)
    differences: list[Difference] = field(factory=list)
    is_lost: bool = False
    noise: dict[str, Tensor] = field(factory=dict)
    more: Difference | None = None
    coarsest: torch.dtype = torch.float64
    small_gradients: float = 0.0

    def __attrs_post_init__(self) -> None:
        self.places, self.largest = pickle.loads((self.folder / "places").read_bytes())

    @on(None)
    def take(self, place: Place, values: Sequence[Tensor], lies: str = "", **facts: Any) -> None:
        """Compare the values of a place with those that one device has there."""
        if self.is_lost or (self.by_op and self.differences):
            return
        ahead = self.places[self.next : self.next + (_AHEAD if self.by_op else 1)]
        if place not in ahead:
            if not self.by_op:
                self.is_lost = True
                other = str(ahead[0]) if ahead else "nothing more"
                self._note(Difference(place, f"one device has {other} here", float("inf"), lies, **facts))
            elif self.more is None and " gives " in place.what:
                self.more = Difference(place, "one device does not run it", float("inf"), lies, **facts)
            return
        number = self.next + ahead.index(place)
        self.next = number + 1
        expected = torch.load(self.folder / f"{number}.pt")
        if len(expected) != len(values):
            found = f"there are {counted(len(values), 'tensor')}, and on one device {len(expected)}"
            self._note(Difference(place, found, float("inf"), lies, **facts))
            return
        self.compared[place.stage] = self.compared.get(place.stage, 0) + 1
        for actual, wanted in zip(values, expected, strict=True):
            ignored = self._ignored(place, wanted)
            wrong = difference(actual.detach(), wanted, self._reach(place, wanted), ignored)
            if wrong is not None:
                self._note(Difference(place, wrong[0], wrong[1], lies, **facts))
                return

    def _ignored(self, place: Place, wanted: Tensor) -> Tensor | None:
        """Elements of a parameter whose gradient is rounding alone: optimizers that divide by its size enlarge it."""
        if place.stage == "gradients" and wanted.numel() and wanted.is_floating_point():
            small = wanted.abs() <= self._reach(place, wanted)
            before = self.noise.get(place.what)
            self.noise[place.what] = small if before is None or before.shape != small.shape else before | small
        return self.noise.get(place.what) if place.stage == "parameters" else None

    def saw(self, dtype: torch.dtype) -> None:
        """An op of this rank has given this dtype."""
        if dtype in RTOL and RTOL[dtype] > RTOL[self.coarsest]:
            self.coarsest = dtype

    def rounding(self, dtype: torch.dtype) -> float:
        """What rounding may do to a value that is 0 in exact arithmetic, as a share of the largest of its stage."""
        real = dtype.to_real() if dtype.is_complex else dtype
        return _NOISE * max(torch.finfo(real).eps, torch.finfo(self.coarsest).eps)

    def _reach(self, place: Place, wanted: Tensor) -> float:
        """By how much a value may differ; 0 for numbers that are not rounded."""
        if not (wanted.is_floating_point() or wanted.is_complex()):
            return 0.0
        size = float(wanted.abs().nan_to_num(0, 0, 0).max()) if wanted.numel() else 0.0
        real = wanted.dtype.to_real() if wanted.is_complex() else wanted.dtype
        coarse = max(RTOL.get(real, RTOL[torch.float32]), RTOL[self.coarsest])
        largest, rounding = self.largest.get(place.stage, 0.0), self.rounding(wanted.dtype)
        if place.stage == "gradients" and largest <= rounding < _FINE:
            largest = 1.0  # the gradient of a result: what is left of it is rounding, as far as can be told
            self.small_gradients = rounding
        return (coarse if self.rtol is None else self.rtol) * size + rounding * largest

    def _note(self, difference: Difference) -> None:
        if len(self.differences) < _MOST:
            self.differences.append(evolve(difference, position=self.next))

    def close(self) -> None:
        """The step is over: note what one device has besides."""
        if not (self.is_lost or self.by_op) and self.next < len(self.places):
            place = self.places[self.next]
            self._note(Difference(place, "one device has it, and the ranks come to no such value", float("inf")))


def difference(actual: Tensor, wanted: Tensor, reach: float, ignored: Tensor | None = None) -> tuple[str, float] | None:
    """How a tensor differs from that of one device, and by how much; None if by no more than ``reach``."""
    if actual.shape != wanted.shape or actual.dtype != wanted.dtype:
        kinds = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (actual, wanted)]
        return f"it is {kinds[0]} where one device has {kinds[1]}", float("inf")
    if not (wanted.is_floating_point() or wanted.is_complex()):
        wrong = actual != wanted
        apart = wrong.double()
    else:
        wide = torch.complex128 if wanted.is_complex() else torch.float64
        apart = (actual.to(wide) - wanted.to(wide)).abs()
        same = (actual == wanted) | (actual.isnan() & wanted.isnan())
        apart = torch.where(same, 0.0, apart.nan_to_num(torch.inf, torch.inf, torch.inf))
        wrong = apart > reach
    if ignored is not None:
        wrong = wrong & ~ignored
    if not bool(wrong.any()):
        return None
    at = tuple(torch.where(wrong, apart, -1.0).flatten().argmax().unsqueeze(0).tolist())
    index = tuple(int(n) for n in torch.unravel_index(torch.tensor(at[0]), wanted.shape))
    size = float(wanted.abs().double().nan_to_num(0, 0, 0).max()) if wanted.dtype != torch.bool else 1.0
    worst = float(apart.flatten()[at[0]]) / size if size else float("inf")
    pair = f"at {index} it has {actual[index].item():.6g} where one device has {wanted[index].item():.6g}"
    return f"{int(wrong.sum())} of {wrong.numel()} elements differ; {pair}", worst
