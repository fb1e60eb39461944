"""Random values by place: the value of element ``i`` depends only on the seed, the draw's number and ``i``.

``i`` is the element's row-major index in the global tensor, whatever the strides. So a rank computes the values of the
elements that it holds, and they are the same under any placement on any mesh.

The counter of Philox is the number of a block of elements (64 bits, low word first) and the number of the draw. The key
is the seed. A block has the elements that four words make: four of 32 bits, or two of 64.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from attrs import frozen
from torch import Tensor

from shardwise.rng.philox import WORD, philox

__all__ = ["Draw", "Region"]

# How many counters are computed at once. On a CPU the tensors of a tile should stay in the caches. Measured with
# tests/benchmarks/bench_random.py: 2**13 to 2**15 are equally fast there, and larger tiles are slower.
_TILE = {"cpu": 1 << 14}
_LARGE_TILE = 1 << 22

# (words 0 and 2, words 1 and 3) of n blocks, each (2, n) -> the values of the blocks, (n, values per block).
Transform = Callable[[Tensor, Tensor], Tensor]


@frozen
class Region:
    """A box in a global tensor: the global shape, and the box's offset and size per dim."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """The whole tensor."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    def with_dim(self, size: int) -> Region:
        """The same box of a tensor with one more last dim, which is whole: for elements of several values."""
        return Region((*self.shape, size), (*self.offset, 0), (*self.size, size))

    @property
    def numel(self) -> int:
        """The number of elements of the box."""
        return math.prod(self.size)


@frozen
class Draw:
    """The values of one draw. ``by_place`` is false for the fast mode, whose values depend on the placements.

    Every method that takes a :class:`Region` returns a contiguous tensor of the region's size.
    """

    seed: int
    number: int
    by_place: bool = True

    def uniform(self, region: Region, dtype: torch.dtype, device: torch.device) -> Tensor:
        """On ``[0, 1)``, in steps that ``dtype`` holds exactly (2**-8 for bfloat16, 2**-53 for float64). The same holds
        for the parts of complex values.
        """
        if dtype.is_complex:
            return torch.view_as_complex(self.uniform(region.with_dim(2), dtype.to_real(), device))
        bits = _mantissa(dtype)
        if dtype is torch.float64:
            return self._values(
                region, 2, lambda even, odd: _wide(even, odd, bits).double() * 2.0**-bits, dtype, device
            )
        return self._values(
            region, 4, lambda even, odd: (_words(even, odd) >> (32 - bits)).float() * 2.0**-bits, torch.float32, device
        ).to(dtype)

    def positive(self, region: Region, dtype: torch.dtype, device: torch.device) -> Tensor:
        """On ``(0, 1)``, for logarithms. Computed in float32, or in float64 if that is ``dtype``."""
        if dtype is torch.float64:
            return self._values(region, 2, _open_wide, dtype, device)
        return self._values(region, 4, lambda even, odd: _open(_words(even, odd)), torch.float32, device)

    def normal(self, region: Region, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Standard normal values, in pairs (Box and Muller 1958). Computed in float32, or in float64 for float64.
        The parts of complex values have half the variance.
        """
        if dtype.is_complex:
            return torch.view_as_complex(self.normal(region.with_dim(2), dtype.to_real(), device)).mul_(0.5**0.5)
        if dtype is torch.float64:
            return self._values(region, 2, _normal_wide, dtype, device)
        return self._values(region, 4, _normal, torch.float32, device)

    def below(self, region: Region, probability: float | Tensor, device: torch.device) -> Tensor:
        """Bools that are true with a probability (a number, or a tensor of the region's size)."""
        words = self._values(region, 4, _words, torch.int64, device)
        if isinstance(probability, Tensor):
            return words < probability.double() * 2.0**32
        return words < math.ceil(probability * 2.0**32)

    def bits(self, region: Region, device: torch.device) -> Tensor:
        """64 random bits per element, as int64 of either sign."""
        return self._values(region, 2, lambda even, odd: _pairs(even << 32 | odd), torch.int64, device)

    def integers(self, region: Region, low: int, high: int, device: torch.device) -> Tensor:
        """On ``low`` to ``high - 1``, as int64: 63 or 64 bits modulo the width, biased by less than width / 2**63."""
        width = high - low
        bits = self.bits(region, device)
        if width <= 1 << 63:
            bits.bitwise_right_shift_(1).bitwise_and_(_HIGHEST)
            return (bits if width == 1 << 63 else bits.remainder_(width)).add_(low)
        if width < 1 << 64:
            # 64 bits as an unsigned number hold less than two widths. Flipping the sign bits compares as unsigned.
            width -= 1 << 64
            bits = torch.where((bits ^ _LOWEST) >= (width ^ _LOWEST), bits - width, bits)
        return bits.add_(low)

    def permutation(self, count: int, device: torch.device) -> Tensor:
        """A random order of ``range(count)``, as int64: a stable sort of as many 64-bit keys."""
        return self.bits(Region.whole((count,)), device).argsort(stable=True)

    def generator(self, device: torch.device, place: Sequence[int] = ()) -> torch.Generator:
        """A torch generator that is seeded for this draw alone (and for a place, if ranks should differ)."""
        key = repr((self.seed, self.number, tuple(place))).encode()
        return torch.Generator(device).manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()))

    @contextmanager
    def seeding(self, device: torch.device) -> Iterator[None]:
        """Seed torch's default generator of a device for this draw alone, for an op that takes no other generator."""
        seed = self.generator(torch.device("cpu")).initial_seed()
        if device.type == "cpu":
            with torch.random.fork_rng(devices=()):
                torch.default_generator.manual_seed(seed)
                yield
        else:
            module = torch.get_device_module(device)
            with torch.random.fork_rng(devices=(device,), device_type=device.type), module.device(device):
                module.manual_seed(seed)
                yield

    # -- blocks and tiles --
    def _values(
        self, region: Region, per_block: int, transform: Transform, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        out = torch.empty(region.size, dtype=dtype, device=device)
        if not region.numel:
            return out
        starts, run, shift = _runs(region, per_block, device)
        flat = out.view(len(starts), run)
        # A tile is some rows and a part of each run, so that few counters are computed at once. Parts begin a whole
        # number of blocks apart, so that they share their place in a block.
        tile = _TILE.get(device.type, _LARGE_TILE)
        rows, part = max(1, tile // (run // per_block + 1)), tile * per_block
        for row in range(0, len(starts), rows):
            for begin in range(0, run, part):
                end = min(run, begin + part)
                first = starts[row : row + rows] + begin
                flat[row : row + rows, begin:end] = self._tile(first, end - begin, per_block, shift, transform)
        return out

    def _tile(self, starts: Tensor, run: int, per_block: int, shift: int | None, transform: Transform) -> Tensor:
        """The values of one run of elements from each start. ``shift`` is their place in a block if they share it."""
        blocks = (run + (per_block - 1 if shift is None else shift) - 1) // per_block + 1
        counters = (starts // per_block).unsqueeze(1) + torch.arange(blocks, device=starts.device)
        numbers = counters.view(-1)
        even, odd = numbers.new_empty((2, len(numbers))), numbers.new_empty((2, len(numbers)))
        even[0], odd[0] = numbers & WORD, numbers >> 32
        even[1], odd[1] = self.number & WORD, self.number >> 32 & WORD
        words = philox(even, odd, (self.seed & WORD, self.seed >> 32 & WORD))
        values = transform(*words).view(len(starts), blocks * per_block)
        if shift is not None:
            return values[:, shift : shift + run]
        places = (starts % per_block).unsqueeze(1) + torch.arange(run, device=starts.device)
        return values.gather(1, places)


_LOWEST, _HIGHEST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


def _runs(region: Region, per_block: int, device: torch.device) -> tuple[Tensor, int, int | None]:
    """The starts of a region's contiguous runs (global, flat), their length, and their common place in a block of
    elements: ``None`` if it differs.
    """
    run = step = 1
    starts = torch.zeros((), dtype=torch.int64, device=device)
    steps = []
    is_contiguous = True
    for n, offset, size in zip(reversed(region.shape), reversed(region.offset), reversed(region.size), strict=True):
        if is_contiguous:
            run *= size
            starts = starts + offset * step
            is_contiguous = size == n
        else:
            starts = (torch.arange(offset, offset + size, device=device) * step).unsqueeze(-1) + starts.reshape(1, -1)
            starts = starts.reshape(-1)
            steps.append(step)
        step *= n
    starts = starts.reshape(-1)
    if any(step % per_block for step in steps):
        return starts, run, None
    first = 0  # the flat index of the region's first element
    for n, offset in zip(region.shape, region.offset, strict=True):
        first = first * n + offset
    return starts, run, first % per_block


@lru_cache
def _mantissa(dtype: torch.dtype) -> int:
    """How many bits of a value on [0, 1) a dtype holds. More bits would be rounded, possibly up to 1."""
    return 1 - int(math.log2(torch.finfo(dtype).eps))


# -- from words to values --------------------------------------------------------------------------------------------


def _words(even: Tensor, odd: Tensor) -> Tensor:
    """The four words of each block in order."""
    return torch.stack((even[0], odd[0], even[1], odd[1]), -1)


def _pairs(values: Tensor) -> Tensor:
    """The two values of each block in order, from a tensor of shape (2, n)."""
    return values.t().contiguous()


def _wide(even: Tensor, odd: Tensor, bits: int) -> Tensor:
    """The leading ``bits`` of 64."""
    return _pairs((even << (bits - 32)) | (odd >> (64 - bits)))


def _open(words: Tensor) -> Tensor:
    # All 32 bits are used, for the tails. Words near 2**32 would round to 1.
    return words.float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)


def _open_wide(even: Tensor, odd: Tensor) -> Tensor:
    return _wide(even, odd, 52).double().mul_(2).add_(1).mul_(2.0**-53)


def _normal(even: Tensor, odd: Tensor) -> Tensor:
    radius = _open(even).log_().mul_(-2).sqrt_()
    angle = odd.float().mul_(2 * math.pi * 2.0**-32)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), -1).transpose(0, 1).reshape(-1, 4)


def _normal_wide(even: Tensor, odd: Tensor) -> Tensor:
    first, second = _open_wide(even, odd).unbind(-1)
    radius = first.log().mul_(-2).sqrt_()
    angle = second * (2 * math.pi)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), -1)
