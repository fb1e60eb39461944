"""The search: every row that holds for one sample, by trying every way to place its operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, product
from math import prod

import torch
from attrs import frozen

from shardwise.placements import PENDING_KINDS, REPLICATE, Placement, Shard, partial
from shardwise.rule import Row
from shardwise.spec import TensorMeta
from shardwise.testing.inference.draws import Draws
from shardwise.testing.inference.probe import Probe, tried

__all__ = ["MESHES", "Evidence", "Found", "Tell", "even_meshes", "may_lie", "search"]

MESHES = (2, 3, 4)
# Placings of all operands; each costs a fraction of a millisecond to rule out.
_MOST = 4096
# Parts of pending tensors grow by this in every second draw, so that thresholds and overflows show.
_WILD = 64.0

Inputs = tuple[Placement | None, ...]
# How many placings are done, of how many.
Tell = Callable[[int, int], None]


@frozen
class Evidence:
    """Mesh sizes on which a row held for one sample, and those on which it did not; ``even`` ones split evenly."""

    held: frozenset[int]
    failed: frozenset[int]
    even: frozenset[int]

    @property
    def holds(self) -> bool:
        return not self.failed

    @property
    def holds_when_even(self) -> bool:
        """Whether it held wherever the shards are of one size, and only there was it sure to."""
        return bool(self.even) and self.even <= self.held and bool(self.failed)


@frozen
class Found:
    """What one sample says: evidence for each row that held on some mesh. ``cut``: not everything could be tried."""

    draws: Draws
    rows: dict[Row, Evidence]
    cut: bool


def search(draws: Draws, generator: torch.Generator, tell: Tell) -> Found:
    """Every row of one sample that holds on a mesh of 2, 3 or 4 ranks for all draws of its values."""
    placings, cut = _placings(draws.operands)
    benches = {n: _benches(draws, n, generator) for n in MESHES}
    rows: dict[Row, Evidence] = {}
    for done, inputs in enumerate(placings):
        tell(done, len(placings))
        even = even_meshes(inputs, draws.operands)
        start = next((n for n in MESHES if n in even), MESHES[0])
        first = benches[start][0].rows(inputs)
        if not first:
            continue
        held = {n: _held(benches[n], inputs, first if n == start else None) for n in MESHES}
        found = dict.fromkeys(row for several in held.values() for row in several)
        for row in found:
            where = frozenset(n for n in MESHES if row in held[n])
            rows[row] = Evidence(where, frozenset(MESHES) - where, even)
    tell(len(placings), len(placings))
    return Found(draws, _undominated(rows), cut)


def may_lie(row: Row, operands: Sequence[TensorMeta | None]) -> bool:
    """Whether the search tries the row's input placements on these operands."""
    return all(p in choices for p, choices in zip(row.inputs, tried(operands), strict=True))


def _benches(draws: Draws, ranks: int, generator: torch.Generator) -> list[Probe]:
    return [
        Probe(trial, ranks, generator, _WILD if number % 2 else 1.0)
        for number, trial in enumerate((draws.first, *draws.trials))
    ]


def _held(benches: Sequence[Probe], inputs: Inputs, known: frozenset[Row] | None) -> frozenset[Row]:
    """The rows that hold in every draw; the one after the other, each only for what is left."""
    for bench in benches:
        known = bench.rows(inputs, known)
        if not known:
            break
    return known or frozenset()


def even_meshes(inputs: Inputs, operands: Sequence[TensorMeta | None]) -> frozenset[int]:
    """The sizes of meshes on which no shard of these operands is smaller than another."""
    sizes = [m.shape[p.dim] for p, m in zip(inputs, operands, strict=True) if isinstance(p, Shard) and m is not None]
    return frozenset(n for n in MESHES if all(size % n == 0 for size in sizes))


def _undominated(rows: dict[Row, Evidence]) -> dict[Row, Evidence]:
    """Without rows that say less than another: a whole result is a pending average, maximum and minimum too."""
    return {
        row: evidence
        for row, evidence in rows.items()
        if not any(_says_more(other, row) and e.held >= evidence.held for other, e in rows.items() if other != row)
    }


def _says_more(row: Row, than: Row) -> bool:
    return row.inputs == than.inputs and all(
        p in (q, REPLICATE) for p, q in zip(row.outputs, than.outputs, strict=True)
    )


# -- placings ----------------------------------------------------------------------------------------------------


def _placings(operands: Sequence[TensorMeta | None]) -> tuple[list[Inputs], bool]:
    """All ways to place the operands, or, where these are too many, those that rows are made of."""
    choices = tried(operands)
    if prod(map(len, choices)) <= _MOST:
        return list(product(*choices)), False
    found: dict[Inputs, None] = {}
    for family in _families(operands, choices):
        found.update(dict.fromkeys(islice(product(*family), _MOST)))
    return list(found), True


def _families(
    operands: Sequence[TensorMeta | None], choices: Sequence[Sequence[Placement | None]]
) -> Iterator[list[list[Placement | None]]]:
    """Shards of dims of one size; one pending kind; shards of one size with the other operands of one kind."""
    sizes = sorted({n for m in operands if m is not None for n in m.shape if n > 1})
    for size in sizes:
        shards = [
            [p for p in c if isinstance(p, Shard) and m is not None and m.shape[p.dim] == size]
            for m, c in zip(operands, choices, strict=True)
        ]
        yield [[c[0], *s] for s, c in zip(shards, choices, strict=True)]
        for kind in PENDING_KINDS:
            yield [[*s] or _whole_or(kind, c) for s, c in zip(shards, choices, strict=True)]
    for kind in PENDING_KINDS:
        yield [_whole_or(kind, c) for c in choices]



def _whole_or(kind: str, choices: Sequence[Placement | None]) -> list[Placement | None]:
    return [choices[0], *(p for p in choices if p == partial(kind))]
