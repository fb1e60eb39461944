"""The search: every row that holds for one sample, by trying all placements of its operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, product
from math import prod

import torch
from attrs import define, field, frozen

from shardwise.kernel.placements import REPLICATE, Placement, Shard, partial
from shardwise.kernel.reductions import REDUCE_OPS
from shardwise.kernel.rule import Row
from shardwise.kernel.spec import TensorMeta
from shardwise.kernel.symbols import chunk
from shardwise.testing.inference.draws import Draws
from shardwise.testing.inference.probe import PARTS, Probe, tried

__all__ = ["MESHES", "Evidence", "SampleSearch", "Tell", "even_meshes", "may_lie", "search"]

MESHES = (2, 3, 4)
# Placings of all operands; each costs a fraction of a millisecond to rule out.
_MOST = 4096
# Ranks of the mesh on which a shard is empty, if none of the usual ones has one.
_LARGEST = 17

Inputs = tuple[Placement | None, ...]
# How many placings are done, of how many.
Tell = Callable[[int, int], None]


@frozen
class Evidence:
    """Mesh sizes on which a row held for one sample, and those on which it did not.

    On ``even`` ones all shards are of one size, on ``empty`` ones some rank has nothing.
    """

    held: frozenset[int]
    failed: frozenset[int]
    even: frozenset[int]
    empty: frozenset[int]

    @property
    def holds(self) -> bool:
        return not self.failed

    @property
    def holds_unless_empty(self) -> bool:
        return self.failed <= self.empty and not self.held <= self.empty

    @property
    def held_unevenly(self) -> bool:
        """Whether it held for shards of different sizes none of which is empty."""
        return not self.held <= self.even | self.empty


@frozen
class SampleSearch:
    """The evidence of one sample for each row that held on some mesh. ``cut``: some placements were not tried."""

    draws: Draws
    rows: dict[Row, Evidence]
    cut: bool


def search(draws: Draws, generator: torch.Generator, tell: Tell) -> SampleSearch:
    """Every row of one sample that holds for all draws of its values on some mesh; each is tried on an empty shard."""
    placings, cut = _placings(draws.operands)
    benches = _Benches(draws, generator)
    rows: dict[Row, Evidence] = {}
    for done, inputs in enumerate(placings):
        tell(done, len(placings))
        even, empty = even_meshes(inputs, draws.operands), _empty_meshes(inputs, draws.operands)
        start = next((n for n in MESHES if n in even), MESHES[0])
        first = benches.of(start)[0].rows(inputs)
        if not first:
            continue
        for row, where in _held_on(benches, inputs, first, sorted({*MESHES, *empty})).items():
            rows[row] = Evidence(where, frozenset({*MESHES, *empty}) - where, even, empty)
    tell(len(placings), len(placings))
    return SampleSearch(draws, _undominated(rows), cut)


def may_lie(row: Row, operands: Sequence[TensorMeta | None]) -> bool:
    """Whether the search tries the row's input placements on these operands."""
    return all(p in choices for p, choices in zip(row.inputs, tried(operands), strict=True))


@define(eq=False)
class _Benches:
    """Probes of all draws of a sample, by the size of the mesh; made when they are first asked for."""

    draws: Draws
    generator: torch.Generator
    _known: dict[int, list[Probe]] = field(factory=dict, init=False)

    def of(self, ranks: int) -> list[Probe]:
        if ranks not in self._known:
            self._known[ranks] = [
                Probe(trial, ranks, self.generator, PARTS[number % len(PARTS)])
                for number, trial in enumerate((self.draws.first, *self.draws.trials))
            ]
        return self._known[ranks]


def _held_on(
    benches: _Benches, inputs: Inputs, rows: frozenset[Row], meshes: Sequence[int]
) -> dict[Row, frozenset[int]]:
    """The mesh sizes on which each row holds in every draw; without rows that a stronger row implies."""
    most = frozenset(row for row in rows if not any(_says_more(other, row) for other in rows if other != row))
    held = _held(benches, inputs, most, meshes)
    sure = [row for row, where in held.items() if len(where) == len(meshes)]
    less = frozenset(row for row in rows - most if not any(_says_more(other, row) for other in sure))
    return {**held, **(_held(benches, inputs, less, meshes) if less else {})}


def _held(benches: _Benches, inputs: Inputs, rows: frozenset[Row], meshes: Sequence[int]) -> dict[Row, frozenset[int]]:
    left = dict.fromkeys(meshes, rows)
    for n in meshes:
        for bench in benches.of(n):
            left[n] = bench.rows(inputs, left[n]) if left[n] else left[n]
    held = {row: frozenset(n for n in meshes if row in left[n]) for row in sorted(rows, key=str)}
    return {row: where for row, where in held.items() if where}


def even_meshes(inputs: Inputs, operands: Sequence[TensorMeta | None]) -> frozenset[int]:
    """The sizes of meshes on which no shard of these operands is smaller than another."""
    sizes = _sharded_sizes(inputs, operands)
    return frozenset(n for n in MESHES if all(size % n == 0 for size in sizes))


def _empty_meshes(inputs: Inputs, operands: Sequence[TensorMeta | None]) -> frozenset[int]:
    """The sizes of meshes on which some rank has nothing of a sharded dim: of those that are tried, or the least."""
    sizes = _sharded_sizes(inputs, operands)
    least = next((n for n in range(2, _LARGEST) if any(_leaves_empty(size, n) for size in sizes)), None)
    of_all = (n for n in MESHES if any(_leaves_empty(size, n) for size in sizes))
    return frozenset(of_all) | (frozenset() if least is None else {least})


def _leaves_empty(size: int, ranks: int) -> bool:
    return chunk(size, ranks, ranks - 1)[0] == 0


def _sharded_sizes(inputs: Inputs, operands: Sequence[TensorMeta | None]) -> list[int]:
    return [m.shape[p.dim] for p, m in zip(inputs, operands, strict=True) if isinstance(p, Shard) and m is not None]


def _undominated(rows: dict[Row, Evidence]) -> dict[Row, Evidence]:
    """Without rows that another implies: a whole result is a partial average, maximum and minimum too."""
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
    """All combinations of placements of the operands, or, where these are too many, those that rows consist of."""
    choices = tried(operands)
    if prod(map(len, choices)) <= _MOST:
        return list(product(*choices)), False
    placings: dict[Inputs, None] = {}
    for family in _families(operands, choices):
        placings.update(dict.fromkeys(islice(product(*family), _MOST)))
    return list(placings), True


def _families(
    operands: Sequence[TensorMeta | None], choices: Sequence[Sequence[Placement | None]]
) -> Iterator[list[list[Placement | None]]]:
    """Shards of dims of one size; one reduction; shards of one size with the other operands of one kind."""
    sizes = sorted({n for m in operands if m is not None for n in m.shape if n > 1})
    for size in sizes:
        shards = [
            [p for p in c if isinstance(p, Shard) and m is not None and m.shape[p.dim] == size]
            for m, c in zip(operands, choices, strict=True)
        ]
        yield [[c[0], *s] for s, c in zip(shards, choices, strict=True)]
        for kind in REDUCE_OPS:
            yield [[*s] or _whole_or(kind, c) for s, c in zip(shards, choices, strict=True)]
    for kind in REDUCE_OPS:
        yield [_whole_or(kind, c) for c in choices]


def _whole_or(kind: str, choices: Sequence[Placement | None]) -> list[Placement | None]:
    return [choices[0], *(p for p in choices if p == partial(kind))]
