"""Random decompositions: a whole tensor as the local tensors of simulated ranks, partial values in random pieces.

:func:`shardwise.tensor.shards.scatter_local` makes the simplest pieces (the value and zeros). These are any pieces that
a partial tensor may legally have: sums that cancel, maxima whose other pieces are any smaller values.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.kernel.placements import Partial, Placement, Shard
from shardwise.kernel.reductions import LINEAR
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.symbols import chunk
from shardwise.testing.exact_parts import exact_pieces, steps
from shardwise.testing.simulated import Coordinate

__all__ = ["can_be_partial", "pieces", "place"]


def place(
    full: Tensor,
    spec: TensorSpec,
    generator: torch.Generator,
    memory_format: torch.memory_format = torch.preserve_format,
    *,
    exact: bool = False,
) -> dict[Coordinate, Tensor]:
    """Local tensors by coordinate that together are ``full`` under ``spec``; each owns its memory.

    With ``exact``, a sum or an average of them is ``full`` without a rounding, which must have
    :func:`~shardwise.testing.exact_parts.few_digits`.
    """
    if spec.is_strided:
        inner = spec.unflattened(spec.factors)
        parts_of_inner = place(full.view(inner.shape), inner, generator, torch.preserve_format, exact=exact)
        flat = {at: part.reshape(spec.local_shape(at)) for at, part in parts_of_inner.items()}
        return {at: part.clone(memory_format=memory_format) for at, part in flat.items()}
    step = steps(full, spec.mesh.size()) if exact else None
    parts: dict[Coordinate, tuple[Tensor, Tensor | None]] = {(): (full, step)}
    for placement, size in zip(spec.placements, spec.mesh_shape, strict=True):
        parts = {
            (*head, i): share
            for head, part in parts.items()
            for i, share in enumerate(_shares(*part, placement, size, generator))
        }
    return {at: part.clone(memory_format=memory_format) for at, (part, _) in parts.items()}


def _shares(
    part: Tensor, step: Tensor | None, placement: Placement, size: int, generator: torch.Generator
) -> list[tuple[Tensor, Tensor | None]]:
    """What the ranks of one mesh dim have of a part, each with the steps of its elements."""
    if isinstance(placement, Shard):
        bounds = [chunk(part.shape[placement.dim], size, i) for i in range(size)]
        return [
            (
                part.narrow(placement.dim, start, length),
                None if step is None else step.narrow(placement.dim, start, length),
            )
            for length, start in bounds
        ]
    if not isinstance(placement, Partial):
        return [(part, step)] * size
    if step is not None and placement.reduce_op in LINEAR:
        return [(piece, step) for piece in exact_pieces(part, placement.reduce_op, size, generator, step)]
    return [(piece, step) for piece in pieces(part, placement.reduce_op, size, generator)]


def can_be_partial(kind: str, dtype: torch.dtype) -> bool:
    """Whether a tensor of this dtype can be partial with this reduction.

    Averages of narrow integers are excluded: the pieces that :func:`pieces` makes may not fit the dtype.
    """
    if kind == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        return dtype in (torch.int32, torch.int64)
    return not (dtype.is_complex and kind in ("max", "min"))


def pieces(value: Tensor, kind: str, count: int, generator: torch.Generator) -> list[Tensor]:
    """``count`` random tensors that reduce to ``value``, exactly except for one rounding of a sum or average."""
    if value.dtype == torch.bool:
        # A bool sum or maximum is an or, a product or minimum an and. One rank has the value; the others cannot change
        # it.
        neutral = kind in ("min", "product")
        noise = torch.rand((count, *value.shape), generator=generator) < 0.5  # noqa: PLR2004
        keep = _keepers(value, count, generator)
        others = torch.where(value == neutral, torch.full_like(value, neutral), noise)
        return list(torch.where(keep, value, others))
    return _SPLITS[kind](value, count, generator)


def _keepers(value: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Per element, one rank at random, as a mask of shape ``(count, *value.shape)``."""
    who = torch.randint(count, value.shape, generator=generator)
    return torch.stack([who == i for i in range(count)])


# Values with a binary exponent beyond this are split into terms of their own size.
_NEAR_ONE = 6
# Binary digits between such terms and the largest number of their dtype.
_ROOM = 16


def _step(dtype: torch.dtype) -> float:
    """The step of a grid for random pieces, so coarse that their sums are exact."""
    return 0.25 if dtype.itemsize <= 2 else 0.125  # noqa: PLR2004


def _grid(value: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Random tensors of the value's shape on a coarse grid of both signs; small whole numbers for integers."""
    shape = (count, *value.shape)
    if not (value.is_floating_point() or value.is_complex()):
        low = 0 if value.dtype == torch.uint8 else -9
        return torch.randint(low, 10, shape, generator=generator).to(value.dtype)
    reach = 8 if value.dtype.itemsize <= 2 else 128  # noqa: PLR2004
    values = torch.randint(-reach, reach + 1, shape, generator=generator) * _step(value.dtype)
    if value.is_complex():
        imaginary = torch.randint(-reach, reach + 1, shape, generator=generator) * _step(value.dtype)
        return torch.complex(values.double(), imaginary.double()).to(value.dtype)
    return values.to(value.dtype)


def _loose(value: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Random terms of about the size of each value, or of 16 around 1. They are on a grid, so that sums of two are
    exact, and not 0 where the value is: a zero that is left by terms that cancel is +0, and -0 is the sum of -0 only.
    """
    loose = _grid(value, count, generator)
    if not value.is_floating_point():
        return loose
    loose = torch.where((value == 0) & (loose == 0), _step(value.dtype), loose)
    exponent = torch.frexp(value.nan_to_num(0, 0, 0)).exponent
    # Terms that would overflow stay as they are: beside the value they are nothing.
    fits = exponent < math.log2(torch.finfo(value.dtype).max) - _ROOM
    loose = torch.where((exponent.abs() > _NEAR_ONE) & fits, torch.ldexp(loose, exponent), loose)
    return torch.where((value == 0) & value.signbit(), -0.0, loose)


def _sum(value: Tensor, count: int, generator: torch.Generator) -> list[Tensor]:
    loose = _loose(value, count - 1, generator)
    return [*loose, _rest(value, loose)]


def _avg(value: Tensor, count: int, generator: torch.Generator) -> list[Tensor]:
    loose = _loose(value, count - 1, generator)
    return [*(value + loose), _rest(value, loose)]


def _rest(value: Tensor, loose: Tensor) -> Tensor:
    rest = value - loose.sum(0, dtype=value.dtype)
    if not value.is_floating_point():
        return rest
    return torch.where((value == 0) & value.signbit(), -0.0, rest)


def _extreme(sign: int) -> Callable[[Tensor, int, torch.Generator], list[Tensor]]:
    def split(value: Tensor, count: int, generator: torch.Generator) -> list[Tensor]:
        beside = torch.stack([value] * count)
        if value.is_floating_point():
            beside = beside - sign * _grid(value, count, generator).abs()
        else:
            # Integers stay within their range: anything on the harmless side of the value.
            limits = torch.iinfo(value.dtype)
            drop = torch.randint(0, 10, beside.shape, generator=generator)
            beside = (beside.long() - sign * drop).clamp(limits.min, limits.max).to(value.dtype)
            beside = torch.where((beside > value) == (sign < 0), beside, value)
        return list(torch.where(_keepers(value, count, generator), value, beside))

    return split


def _product(value: Tensor, count: int, generator: torch.Generator) -> list[Tensor]:
    shape = (count - 1, *value.shape)
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    if value.is_floating_point() or value.is_complex():
        sizes = torch.tensor([0.5, 1.0, 2.0])[torch.randint(3, shape, generator=generator)]
        # Beside the largest and the smallest numbers only the sign has room.
        limits = torch.finfo(value.dtype)
        room = 2.0**count
        sizes = torch.where((value.abs() <= limits.max / room) & (value.abs() >= limits.tiny * room), sizes, 1.0)
        factors = (signs * sizes).to(value.dtype)
        return _shuffled([*factors, value / factors.prod(0)], generator)
    factors = (torch.ones_like(signs) if value.dtype == torch.uint8 else signs).to(value.dtype)
    return _shuffled([*factors, value * factors.prod(0, dtype=value.dtype)], generator)


def _shuffled(parts: list[Tensor], generator: torch.Generator) -> list[Tensor]:
    """The parts of each element in a random order of its own, so that not one rank has all the zeros."""
    stacked = torch.stack(parts)
    order = torch.rand(stacked.shape, generator=generator).argsort(0)
    return list(stacked.gather(0, order))


_SPLITS: dict[str, Callable[[Tensor, int, torch.Generator], list[Tensor]]] = {
    "sum": _sum,
    "avg": _avg,
    "max": _extreme(1),
    "min": _extreme(-1),
    "product": _product,
}
