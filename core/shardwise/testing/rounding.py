"""How far each element of a result may be from the element of one device: what rounding does, measured for this call.

Ranks add in another order than one device does, and every one of them rounds. How much that moves an element depends
on the element: a sum that cancels has the errors of its large terms, and a small element beside large ones has errors
of its own size only. So the reach of an element is, with the relative rounding ``eps`` of the coarsest dtype in the
call,

* ``4 eps`` times its absolute value, and times the sum of the absolute values of the partial pieces that add up to it;
* ``3 eps`` times its condition: how far the op moves the element for a relative change of the operands.

The condition is measured as stochastic arithmetic does (Parker, Monte Carlo arithmetic, 1997): the whole op runs again
on operands whose elements are each moved up or down by one rounding, and the largest change of each element counts,
with what the op itself rounds on the way. For a partial sum the op runs also on operands of the size of its pieces,
because the ranks round those. These runs happen only where an element differs by more than the first reach.

Moved operands do not show what an op rounds on its way to a result that they hardly change: in ``65536 - exp(1e-5) *
65538`` both terms move together, and in the distance of two points that a product of matrices gives, squares round far
above their difference. That is measured by the results of one device in double precision, from which its own are as far
as it rounds. In double precision the op's results in single precision are taken, and the distance is scaled.

A zero of the other sign is a difference, the least there is: it is within any reach but 0. So a sum that cancels may
have either zero, and an element that is not the result of an addition has the sign that it has on one device. Where
partial pieces are added, the sign may come from a sum that was multiplied by 0: there it must be the same only if it is
the same for operands of any signs. Kernels that add, and do not act on each element alone, differ among themselves in
the signs of zeros, so these are not judged. Such a kernel gives other absolute values for operands of other signs.

One device may disagree with itself: a kernel has a vectorised loop and a scalar one, and which of them meets an element
depends on where it lies in memory. Some kernels give zeros of another sign there, or a number for NaN. And which kernel
of a convolution runs depends on the shape: some multiply the zeros of the padding by an infinite weight, which is NaN.
So the op also runs on the same operands with gaps in memory, where no loop is vectorised, and without the kernels of
oneDNN. If it acts on each element alone, it runs on many copies of the operands, where the vectorised loop meets the
first. An element may be as far away as those results of one device are.

Infinity and NaN are themselves. They are within reach of other values only where the moved operands cross that border,
too, and where one device overflows on the way: in double precision the element is not what it is in its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import torch
from attrs import define, evolve, field
from torch import Tensor

from shardwise.kernel.placements import REPLICATE, partial
from shardwise.kernel.spec import TensorSpec
from shardwise.tensor.shards import assemble

__all__ = ["LEAST", "Rounding", "distance", "rounds", "sizes_of"]

#: The distance of a zero from a zero of the other sign.
LEAST = 5e-324

_OWN = 4.0
_CONDITION = 3.0
# A run does not show two large terms that cancel if it moves both in the same direction: that is half of all runs. All
# of so many runs miss them with a chance of 1e-9. Most elements need one run.
_RUNS = 30
_TURNS = 20


def epsilon(tensors: Sequence[Tensor | None]) -> float:
    """The relative rounding of the coarsest floating dtype; 0 where all are exact. A float8 result is exact."""
    return max((torch.finfo(t.dtype).eps for t in tensors if t is not None and rounds(t)), default=0.0)


def distance(actual: Tensor, wanted: Tensor) -> Tensor:
    """Per element (of complex numbers: per part) how far two tensors are apart, in float64.

    Equal elements, two NaNs included, have distance 0; zeros of different signs have :data:`LEAST`. An infinity or a
    NaN is infinitely far from everything else.
    """
    a, w = _wide(actual), _wide(wanted)
    if torch.equal(a.view(torch.int64), w.view(torch.int64)):  # most results, and bits are compared at once
        return torch.zeros_like(a)
    apart = (a - w).abs()
    same = (a == w) | (a.isnan() & w.isnan())
    apart = torch.where(same, 0.0, torch.where(apart.isnan(), torch.inf, apart))
    return torch.where(same & (w == 0) & (a.signbit() != w.signbit()), LEAST, apart)


def _wide(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj().resolve_neg()).double()
    return tensor.resolve_neg().double()


def moved(operand: Tensor, scale: Tensor, generator: torch.Generator) -> Tensor:
    """The operand with each finite element moved up or down by ``scale``, which is not negative."""
    sign = torch.randint(0, 2, operand.shape, generator=generator) * 2 - 1
    other = operand + (sign * scale).to(operand.dtype)
    return torch.where(other.isfinite() & (scale != 0), other, operand)


def turned(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """The tensor with each element's sign kept or changed at random."""
    return tensor * (torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1).to(tensor.dtype)


def _shares(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Random numbers between 1/2 and 1."""
    return (0.5 + torch.rand(tensor.shape, generator=generator, dtype=torch.float64) / 2).to(tensor.dtype)


def rounds(tensor: Tensor) -> bool:
    """Whether arithmetic of this dtype rounds. Results in float8 are compared exactly."""
    return tensor.is_complex() or (tensor.is_floating_point() and tensor.dtype.itemsize > 1)


def sizes_of(full: Tensor, spec: TensorSpec, parts: Mapping[tuple[int, ...], Tensor]) -> Tensor:
    """Per element its absolute value or, if that is more, the sum of the absolute values of its partial pieces.

    ``parts`` are the local tensors of all ranks.
    """
    value = full.abs()
    if not spec.reductions:
        return value
    sizes = {at: part.abs().nan_to_num(0, 0, 0) for at, part in parts.items()}
    meta = evolve(spec.tensor_meta, dtype=value.dtype)
    # Ranks with the same value may have other pieces of it: the largest count.
    placements = tuple(partial("max") if p is REPLICATE else p for p in spec.placements)
    return torch.maximum(value, assemble(sizes, TensorSpec(spec.mesh, placements, meta)))


Results = Sequence[Tensor | None]

_DOUBLE: Mapping[torch.dtype, torch.dtype] = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
_SINGLE: Mapping[torch.dtype, torch.dtype] = {torch.float64: torch.float32, torch.complex128: torch.complex64}


class Whole(Protocol):
    """Makes the call on copies of other operands, with other dtypes as arguments, and returns all its tensors."""

    def __call__(self, operands: Results, dtypes: Mapping[torch.dtype, torch.dtype] = ..., /) -> Results: ...


@define(eq=False)
class Rounding:
    """The reach of each element of the tensors that one call on one device gives.

    ``whole`` makes the call. ``sizes`` are those of the operands' elements (see :func:`sizes_of`), ``None`` for
    operands that stay as they are. The results of a call that is ``random`` are others for each dtype.
    """

    whole: Whole
    operands: Results
    sizes: Results
    expected: Results
    pointwise: bool
    random: bool = False
    eps: float = field(init=False)
    _changes: list[Tensor | None] = field(init=False)
    _fickle: list[Tensor | None] = field(init=False)
    _double: Results | None = field(default=None, init=False)
    _others: Sequence[Results] | None = field(default=None, init=False)
    _sums: list[bool] | None = field(default=None, init=False)
    _runs: int = field(default=0, init=False)
    _measured: int = field(default=0, init=False)
    _turns: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.eps = epsilon((*self.operands, *self.expected))
        self._changes = [None for _ in self.expected]
        self._fickle = [None for _ in self.expected]

    def within(self, i: int, apart: Tensor, size: Tensor, cut: Callable[[Tensor], Tensor], *, added: bool) -> Tensor:
        """Per element, whether a distance from tensor ``i`` is what rounding may do.

        ``size`` is the absolute value and that of the partial pieces, which exist if the element is ``added`` from
        them; ``cut`` gives this rank's part of a whole tensor.
        """
        close = apart <= _OWN * self.eps * size
        if bool(close.all()):
            return close
        # What is measured in two precisions is finite, and nearer to nothing that is infinitely far away.
        nowhere, infinite = torch.zeros_like(close), apart.isinf()
        for run, known, beyond in ((self._run, self._runs, nowhere), (self._measure, self._measured, infinite)):
            runs = 0
            while not bool((close | beyond).all()) and runs < _RUNS:
                runs = max(runs + 1, known)  # those of earlier calls count at once
                run(runs)
                changes = self._changes[i]
                if changes is not None:
                    close |= apart <= _OWN * self.eps * size + _CONDITION * cut(changes)
        if bool(close.all()):
            return close
        if not self.pointwise and bool(((apart == LEAST) & ~close).any()) and self._adds(i):
            close |= apart == LEAST
        turns = 0 if added or not self.pointwise else _TURNS
        while turns < _TURNS and bool(((apart == LEAST) & ~close).any()):
            turns += 1
            if turns > self._turns:
                self._turn()
            fickle = self._fickle[i]
            if fickle is not None:
                close |= (apart == LEAST) & cut(fickle)
        if not bool(close.all()):
            close |= apart <= cut(self._elsewhere(i))
        if bool((apart.isinf() & ~close).any()):
            close |= cut(self._overflows(i))
        return close

    def _run(self, number: int) -> None:
        """Run on operands that differ by one rounding. Every second time they are of the size of the pieces."""
        if number <= self._runs:
            return
        self._runs = number
        generator = torch.Generator().manual_seed(number)
        start = self.operands
        if number % 2 == 0:
            start = self._changed(start, lambda t, size: torch.where(size > t.abs(), turned(size, generator), t))
        nearby = self._changed(start, lambda t, size: moved(t, size * self.eps, generator))
        # A moved operand may leave the op's domain; then this run shows nothing.
        with suppress(Exception):
            ones = self.expected if start is self.operands else self.whole(start)
            for i, (one, other) in enumerate(zip(ones, self.whole(nearby), strict=True)):
                if one is not None and other is not None and one.shape == other.shape:
                    self._note(i, distance(one, other))

    def _measure(self, number: int) -> None:
        """Run on nearby operands in two precisions. An element that one of them cannot hold shows nothing."""
        if number <= self._measured or self.random:
            return
        self._measured = number
        generator = torch.Generator().manual_seed(number)
        nearby, scale = self.operands, 1.0
        if number % 2 == 0:  # of about the size of the pieces, with all their digits: sums of short numbers are exact
            nearby = self._changed(
                nearby,
                lambda t, size: torch.where(size > t.abs(), turned(size * _shares(size, generator), generator), t),
            )
        nearby = self._changed(nearby, lambda t, size: moved(t, size * self.eps, generator))
        if all(t is None or not rounds(t) or t.dtype in _SINGLE for t in nearby):
            nearby, scale = _cast(nearby, _SINGLE), torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        with suppress(Exception):
            ones = self.whole(nearby, {} if scale == 1 else _SINGLE)
            for i, (one, other) in enumerate(zip(ones, self.whole(_cast(nearby, _DOUBLE), _DOUBLE), strict=True)):
                if one is None or other is None or one.shape != other.shape or not rounds(one):
                    continue
                held = _wide(one).isfinite() & (_wide(other).abs() <= torch.finfo(one.dtype).max)
                self._note(i, torch.where(held, scale * distance(one, other), 0.0))

    def _note(self, i: int, change: Tensor) -> None:
        """Remember a change of the elements of tensor ``i`` if it is their largest."""
        wanted, before = self.expected[i], self._changes[i]
        if wanted is not None and rounds(wanted) and change.shape == _wide(wanted).shape:
            change = torch.where(change == LEAST, 0.0, change)
            self._changes[i] = change if before is None else torch.maximum(before, change)

    def _turn(self) -> None:
        """Run on operands with other signs."""
        self._turns += 1
        generator = torch.Generator().manual_seed(self._turns)
        with suppress(Exception):
            results = self.whole(
                self._changed(self.operands, lambda t, _: torch.where(t == 0, t, turned(t, generator)))
            )
            for i, (result, wanted) in enumerate(zip(results, self.expected, strict=True)):
                if result is not None and wanted is not None and rounds(wanted) and result.shape == wanted.shape:
                    other, before = _wide(result).signbit() != _wide(wanted).signbit(), self._fickle[i]
                    self._fickle[i] = other if before is None else before | other

    def _adds(self, i: int) -> bool:
        """Whether absolute values in tensor ``i`` depend on the signs of the operands."""
        if self._sums is None:
            generator = torch.Generator().manual_seed(0)

            def plain(tensor: Tensor, _: Tensor) -> Tensor:
                drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
                return torch.where((tensor == 0) | ~tensor.isfinite(), drawn, tensor)

            self._sums = [True for _ in self.expected]
            with suppress(Exception):
                start = self._changed(self.operands, plain)
                ones, adds = self.whole(start), [False for _ in self.expected]
                for _ in range(_TURNS):  # a draw may change the signs of all terms of a sum, or of none
                    others = self.whole(self._changed(start, lambda t, _: turned(t, generator)))
                    for n, (one, other) in enumerate(zip(ones, others, strict=True)):
                        adds[n] |= one is None or other is None or bool(distance(one.abs(), other.abs()).any())
                self._sums = adds
        return self._sums[i]

    def _elsewhere(self, i: int) -> Tensor:
        """How far tensor ``i`` is from that of operands that lie elsewhere in memory, and from other kernels'."""
        wanted = self.expected[i]
        assert wanted is not None
        if self._others is None:
            self._others = []
            gapped = [t if t is None or size is None else _gapped(t) for t, size in self._pairs(self.operands)]
            with suppress(Exception):
                self._others.append(self.whole(gapped))
            if self.pointwise and not self.random:
                with suppress(Exception):
                    results = self.whole(_copied_often(self.operands))
                    self._others.append([t if t is None else t[0] for t in results])
            with suppress(Exception), torch.backends.mkldnn.flags(enabled=False):
                self._others.append(self.whole(self.operands))
        far = torch.zeros(_wide(wanted).shape, dtype=torch.float64)
        for other in (others[i] for others in self._others):
            if other is not None and other.shape == wanted.shape and other.dtype == wanted.dtype:
                far = torch.maximum(far, distance(other, wanted))
        return far

    def _overflows(self, i: int) -> Tensor:
        """Where tensor ``i`` is finite in double precision and not in its own, or the reverse."""
        if self._double is None:
            self._double = [None for _ in self.expected]
            with suppress(Exception):
                self._double = self.whole(_cast(self.operands, _DOUBLE), _DOUBLE)
        double, wanted = self._double[i], self.expected[i]
        assert wanted is not None
        if double is None or double.shape != wanted.shape:
            return torch.zeros_like(_wide(wanted), dtype=torch.bool)
        return _wide(double).isfinite() != _wide(wanted).isfinite()

    def _changed(self, operands: Results, change: Callable[[Tensor, Tensor], Tensor]) -> Results:
        return [t if t is None or size is None else _lying_as(t, change(t, size)) for t, size in self._pairs(operands)]

    def _pairs(self, operands: Results) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        return zip(operands, self.sizes, strict=True)


def _cast(operands: Results, dtypes: Mapping[torch.dtype, torch.dtype]) -> Results:
    return [t if t is None or t.dtype not in dtypes else _lying_as(t, t.to(dtypes[t.dtype])) for t in operands]


def _lying_as(tensor: Tensor, changed: Tensor) -> Tensor:
    """A changed tensor with the strides of the first: some kernels refuse others. Not if elements share memory."""
    if changed.stride() == tensor.stride() or 0 in tensor.stride():
        return changed
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=changed.dtype).copy_(changed)


# A vectorised loop takes at most so many elements in one step, and leaves what does not fill a step to the scalar loop.
_STEP = 256


def _copied_often(operands: Results) -> Results:
    """The operands, broadcast, with copies behind them in memory that fill a step of a vectorised loop."""
    present = [t for t in operands if t is not None]
    shape = torch.broadcast_shapes(*(t.shape for t in present))  # type: ignore[no-untyped-call]
    copies = 2 + _STEP // max(1, math.prod(shape))
    return [None if t is None else t.expand(copies, *shape).contiguous() for t in operands]


def _gapped(tensor: Tensor) -> Tensor:
    """The same tensor with a gap behind each element in memory."""
    wide = tensor.unsqueeze(-1).expand(*tensor.shape, 2).clone()
    return wide[..., 0]
