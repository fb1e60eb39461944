"""How the dims of one shape become those of another with the same elements in the same order.

Both shapes are read as runs of factors, as in einops: ``(6, 4) -> (24,)`` is ``a b -> (a b)``, ``(8,) -> (2, 4)`` is
``(a b) -> a b``, and ``(6, 4) -> (4, 6)`` is ``(a b) r -> (a s) t`` with ``a`` the common factor 2. A dim may stay
sharded by a factor that leads its dim on both sides; by another one it is sharded inside, a strided shard of that dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from shardwise.rule import Flow, common_factor

__all__ = ["regroup"]

_Factors = list[tuple[str, int]]
_Named = str | tuple[tuple[str, int], ...] | None


def regroup(before: Sequence[int], after: Sequence[int]) -> Flow:
    """The dims of ``self`` in another shape with the same number of elements; every reduction passes.

    It is long because a view may split dims, join dims and add dims of size one, all at once.
    """
    if prod(before) == 0:
        return _without_elements(before, after)
    left: list[_Named] = [None] * len(before)
    right: list[_Named] = [None] * len(after)
    for i, j in _ones(before, after):
        left[i] = right[j] = f"one{i}"
    for dims, others in _runs(before, after):
        ours, theirs = _common([before[i] for i in dims], [after[j] for j in others], f"d{dims[0]}")
        for at, factors in zip(dims, ours, strict=True):
            left[at] = _label(factors)
        for at, factors in zip(others, theirs, strict=True):
            right[at] = _label(factors)
    return Flow([left], [right], moves="self", strided=True)


def _label(factors: _Factors) -> _Named:
    return factors[0][0] if len(factors) == 1 else tuple(factors) or None


def _without_elements(before: Sequence[int], after: Sequence[int]) -> Flow:
    """For a tensor without elements: leading dims that keep their size pass; shards of others give a whole result."""
    same = 0
    while same < min(len(before), len(after)) and before[same] == after[same]:
        same += 1
    left = [f"d{i}" for i in range(len(before))]
    right = [*left[:same], *[None] * (len(after) - same)]
    return Flow([left], [right], reduce=dict.fromkeys(left[same:], "R"), moves="self")


def _ones(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Pairs of size-1 dims that have equally many elements in front of them, from left to right."""
    spare = [(prod(after[:j]), j) for j, n in enumerate(after) if n == 1]
    for i, n in enumerate(before):
        partner = next((pair for pair in spare if n == 1 and pair[0] == prod(before[:i])), None)
        if partner:
            spare.remove(partner)
            yield i, partner[1]


def _runs(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """The shortest runs of dims on both sides that hold equally many elements; size-1 dims are left out."""
    ours, theirs = ([k for k, n in enumerate(shape) if n != 1] for shape in (before, after))
    dims: list[int] = []
    others: list[int] = []
    while ours or theirs:
        if prod(before[i] for i in dims) <= prod(after[j] for j in others):
            dims.append(ours.pop(0))
        else:
            others.append(theirs.pop(0))
        if prod(before[i] for i in dims) == prod(after[j] for j in others):
            yield dims, others
            dims, others = [], []


def _common(before: Sequence[int], after: Sequence[int], name: str) -> tuple[list[_Factors], list[_Factors]]:
    """The factors of each dim of a run: common ones from the left and from the right, and what is left between them."""
    left, right = list(before), list(after)
    shared = [*_shared(left, right, name, 0)]
    ends = [*_shared(left, right, f"{name}.end", -1)]
    ours: list[_Factors] = [[] for _ in left]
    theirs: list[_Factors] = [[] for _ in right]
    for i, j, factor in shared:
        ours[i].append(factor)
        theirs[j].append(factor)
    for side, rest, factors in (("in", left, ours), ("out", right, theirs)):
        for k, size in enumerate(rest):
            if size > 1:
                factors[k].append((f"{name}.{side}{k}", size))
    for i, j, factor in reversed(ends):
        ours[i].append(factor)
        theirs[j].append(factor)
    return ours, theirs


def _shared(left: list[int], right: list[int], name: str, end: int) -> Iterator[tuple[int, int, tuple[str, int]]]:
    """Common factors from one end, with the dims that have them; they are divided out of the sizes."""
    ours, theirs = ([k for k, n in enumerate(sizes) if n > 1] for sizes in (left, right))
    count = 0
    while ours and theirs and (size := common_factor(left[ours[end]], right[theirs[end]])) > 1:
        i, j = ours[end], theirs[end]
        yield i, j, (f"{name}.{count}" if count else name, size)
        left[i], right[j], count = left[i] // size, right[j] // size, count + 1
        if left[i] == 1:
            ours.pop(end)
        if right[j] == 1:
            theirs.pop(end)
