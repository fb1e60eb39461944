"""Random decompositions: a whole tensor as the local tensors of simulated ranks, partial values in random pieces.

:func:`shardwise.tensor.shards.scatter_local` makes the simplest pieces (the value and zeros). These are any pieces that
a partial tensor may legally have: sums that cancel, maxima whose other pieces are any smaller values.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.kernel.placements import Partial, Shard
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.symbols import chunk
from shardwise.testing.simulated import Coordinate

__all__ = ["can_be_partial", "pieces", "place"]


def place(
    full: Tensor,
    spec: TensorSpec,
    generator: torch.Generator,
    memory_format: torch.memory_format = torch.preserve_format,
) -> dict[Coordinate, Tensor]:
    """Local tensors by coordinate that together are ``full`` under ``spec``; each owns its memory."""
    parts: dict[Coordinate, Tensor] = {(): full}
    for placement, size in zip(spec.placements, spec.mesh_shape, strict=True):
        split: dict[Coordinate, Tensor] = {}
        for head, part in parts.items():
            if isinstance(placement, Partial):
                shares = pieces(part, placement.reduce_op, size, generator)
            elif isinstance(placement, Shard):
                bounds = [chunk(part.shape[placement.dim], size, i) for i in range(size)]
                shares = [part.narrow(placement.dim, start, length) for length, start in bounds]
            else:
                shares = [part] * size
            split.update({(*head, i): piece for i, piece in enumerate(shares)})
        parts = split
    return {at: part.clone(memory_format=memory_format) for at, part in parts.items()}


def can_be_partial(kind: str, dtype: torch.dtype) -> bool:
    """Whether a tensor of this dtype can be partial with this reduction.

    Averages of narrow integers are excluded: their sum, from which the average is taken, may not fit the dtype.
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
        factors = (signs * torch.tensor([0.5, 1.0, 2.0])[torch.randint(3, shape, generator=generator)]).to(value.dtype)
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
