"""Sizes that are symbols: ``torch.compile`` uses them in place of integers where a size may change.

Code computes with a symbol as with a number. Where it branches on one, torch notes the answer as a guard of the graph,
and a size with another answer makes another graph. All ranks must make that graph together. So every question here is
about global sizes and has the same answer on every rank. Torch asks of each rank's own shard whether it is empty or
holds one element; here every rank asks that of the shards of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from shardwise.private_torch.sizes import (
    guess_of,
    hint_of,
    is_known,
    settled,
)

__all__ = [
    "chunk",
    "common_factor",
    "guess",
    "hint",
    "is_same",
    "is_symbolic",
    "lengths",
    "numbers",
    "place",
    "settled_sizes",
    "symbolic_chunk",
    "unique",
]

T = TypeVar("T")


def is_symbolic(sizes: Sequence[Any]) -> bool:
    """Whether any of these numbers is a symbol."""
    return any(isinstance(n, torch.SymInt) for n in sizes)


def is_same(one: Any, other: Any) -> bool:
    """Whether two sizes are the same wherever the graph holds; no guard is made."""
    return is_known(one == other)


def unique(values: Sequence[T]) -> list[T]:
    """The different ones among values, in order. Symbols, and what holds some, have no hash: then all of the values."""
    try:
        return list(dict.fromkeys(values))
    except TypeError:
        return list(values)


def hint(value: Any) -> Any:
    """The number that a symbol stood for when the graph was made; anything else as it is."""
    return hint_of(value) if isinstance(value, torch.SymInt) else value


def guess(value: Any) -> Any:
    """:func:`hint`, and of a size that data decides a guess: for questions about the order of dims in memory."""
    return guess_of(value) if isinstance(value, torch.SymInt) else value


def settled_sizes(sizes: Sequence[Any]) -> tuple[Any, ...]:
    """Sizes with plain integers for symbols that cannot change any more."""
    return tuple(settled(n) if isinstance(n, torch.SymInt) else n for n in sizes)


def common_factor(one: Any, other: Any) -> Any:
    """The greatest common divisor of two sizes.

    Of symbols: one size where it is known to divide the other, else the divisor of the numbers that they stand for. A
    guard then says that it divides both.
    """
    if not isinstance(one, torch.SymInt) and not isinstance(other, torch.SymInt):
        return math.gcd(one, other)
    if is_known(one == other) or is_known(other % one == 0):
        return one
    if is_known(one % other == 0):
        return other
    factor = math.gcd(hint(one), hint(other))
    # These questions become guards: the factor holds wherever the graph does.
    return factor if one % factor == 0 and other % factor == 0 else 1


def numbers(value: Any) -> Any:
    """A value, or a nested list of values, with numbers in place of symbols. They become guards of the graph."""
    if isinstance(value, torch.SymInt):
        return int(value)
    if isinstance(value, torch.SymFloat):
        return float(value)
    if isinstance(value, torch.SymBool):
        return bool(value)
    return tuple(map(numbers, value)) if isinstance(value, (tuple, list)) else value


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Size and offset of piece ``index`` when ``size`` elements are split as ``torch.chunk`` splits them.

    10 elements in 4 parts have the sizes 3, 3, 3, 1.
    """
    step = -(-size // parts)
    start = min(size, step * index)
    return min(size, start + step) - start, start


def symbolic_chunk(size: Any, parts: int, index: int) -> tuple[Any, Any]:
    """:func:`chunk` of a symbol: size and offset of one piece."""
    if size % parts == 0:
        piece = size // parts
        return piece, piece * index
    step = (size + (parts - 1)) // parts
    last = size - step * (parts - 1)
    if last >= 0:
        return (step if index < parts - 1 else last), step * index
    least: Any = torch.sym_min  # torch leaves it unannotated
    start = least(size, step * index)
    return least(size, step * (index + 1)) - start, start


def lengths(size: Any, parts: int) -> list[Any]:
    """The different sizes of the pieces. Guards say whether each is empty or holds one element: see the module."""
    first = symbolic_chunk(size, parts, 0)[0]
    if size % parts == 0:
        pieces = [first]
    elif size - first * (parts - 1) >= 0:
        pieces = [first, symbolic_chunk(size, parts, parts - 1)[0]]
    else:
        pieces = [symbolic_chunk(size, parts, i)[0] for i in range(parts)]
    for n in pieces:
        if not n > 1:
            bool(n == 0)
    if not first > 1:
        # No piece has more than one element, so torch would find sooner or later that few sizes are left. In a later
        # pass that would be too late, because the passes of a graph must agree on what is a symbol.
        int(size)
    return pieces


def place(size: Any, parts: Sequence[int], at: Sequence[int]) -> tuple[Any, Any]:
    """Size and offset of one rank's piece of a dim that several mesh dims split.

    ``parts`` are the sizes of these mesh dims, ``at`` is the rank's coordinate on them. Guards speak of the pieces of
    all ranks.
    """
    start: Any = 0
    sizes = [size]
    for n, index in zip(parts, at, strict=True):
        sizes = [length for one in sizes for length in (lengths(one, n) if isinstance(one, torch.SymInt) else ())]
        size, offset = (symbolic_chunk if isinstance(size, torch.SymInt) else chunk)(size, n, index)
        start = start + offset
    return size, start
