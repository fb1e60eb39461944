"""The search: every row that holds for one sample, by trying all placements of its operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice, product
from math import prod

import torch
from attrs import define, field, frozen

from shardwise.kernel.placements import REPLICATE, Placement, Shard, partial
from shardwise.kernel.reductions import REDUCE_OPS
from shardwise.kernel.rule import Row
from shardwise.kernel.symbols import chunk
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.testing.inference.draws import Draws
from shardwise.testing.inference.probe import PARTS, Probe, tried

__all__ = ["MESHES", "Evidence", "SampleSearch", "Tell", "even_meshes", "may_lie", "search"]

MESHES = (2, 3, 4)
# The most combinations of operand placements to try. Ruling one out costs a fraction of a millisecond.
_MOST = 4096
# Meshes are smaller than this, also the one that is added so that some shard is empty.
_LARGEST = 17

Inputs = tuple[Placement | None, ...]
# tell(done, total): how many combinations of placements are tried, and how many there are.
Tell = Callable[[int, int], None]


@frozen
class Evidence:
    """The mesh sizes on which a row held for one sample, and those on which it failed.

    On meshes of an ``even`` size all shards have one size. On meshes of an ``empty`` size some shard is empty.
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
        """Whether it held on a mesh whose shards differ in size and all have elements."""
        return not self.held <= self.even | self.empty


@frozen
class SampleSearch:
    """The evidence of one sample for each row that held on some mesh.

    ``cut`` is true if there were too many combinations of placements, and only the usual ones were tried.
    """

    draws: Draws
    rows: dict[Row, Evidence]
    cut: bool


def search(draws: Draws, generator: torch.Generator, tell: Tell) -> SampleSearch:
    """Every row of one sample that holds for all its draws on some mesh. Each is tried with an empty shard, too."""
    combinations, cut = _input_placements(draws.operands)
    probes = _Probes(draws, generator)
    rows: dict[Row, Evidence] = {}
    for done, inputs in enumerate(combinations):
        tell(done, len(combinations))
        even, empty = even_meshes(inputs, draws.operands), _empty_meshes(inputs, draws.operands)
        start = next((n for n in MESHES if n in even), MESHES[0])
        candidates = probes.of(start)[0].rows(inputs)
        if not candidates:
            continue
        meshes = sorted({*MESHES, *empty})
        # Rows that a stronger row implies are tried only if that row does not hold on every mesh.
        strongest = frozenset(
            row for row in candidates if not any(_says_more(other, row) for other in candidates if other != row)
        )
        held = _held_on(probes, inputs, strongest, meshes)
        sure = [row for row, where in held.items() if len(where) == len(meshes)]
        weaker = frozenset(r for r in candidates - strongest if not any(_says_more(other, r) for other in sure))
        if weaker:
            held |= _held_on(probes, inputs, weaker, meshes)
        for row, where in held.items():
            rows[row] = Evidence(where, frozenset(meshes) - where, even, empty)
    tell(len(combinations), len(combinations))
    # A row that another one implies says nothing new: a whole result is a partial average, maximum and minimum too.
    implied = {
        row
        for row, evidence in rows.items()
        if any(_says_more(other, row) and e.held >= evidence.held for other, e in rows.items() if other != row)
    }
    return SampleSearch(draws, {row: evidence for row, evidence in rows.items() if row not in implied}, cut)


def may_lie(row: Row, operands: Sequence[TensorMeta | None]) -> bool:
    """Whether the search tries the row's input placements on these operands."""
    return all(p in choices for p, choices in zip(row.inputs, tried(operands), strict=True))


@define(eq=False)
class _Probes:
    """The probes of all draws of a sample for each mesh size. They are built at their first use."""

    draws: Draws
    generator: torch.Generator
    _by_size: dict[int, list[Probe]] = field(factory=dict, init=False)

    def of(self, ranks: int) -> list[Probe]:
        if ranks not in self._by_size:
            self._by_size[ranks] = [
                Probe(trial, ranks, self.generator, PARTS[number % len(PARTS)])
                for number, trial in enumerate((self.draws.first, *self.draws.trials))
            ]
        return self._by_size[ranks]


def _held_on(probes: _Probes, inputs: Inputs, rows: frozenset[Row], meshes: Sequence[int]) -> dict[Row, frozenset[int]]:
    """The mesh sizes on which each row holds in every draw. Rows that hold on no mesh are left out."""
    left = dict.fromkeys(meshes, rows)
    for n in meshes:
        for probe in probes.of(n):
            left[n] = probe.rows(inputs, left[n]) if left[n] else left[n]
    held = {row: frozenset(n for n in meshes if row in left[n]) for row in sorted(rows, key=str)}
    return {row: where for row, where in held.items() if where}


def even_meshes(inputs: Inputs, operands: Sequence[TensorMeta | None]) -> frozenset[int]:
    """The sizes of meshes on which all shards of these operands have one size."""
    sizes = _sharded_sizes(inputs, operands)
    return frozenset(n for n in MESHES if all(size % n == 0 for size in sizes))


def _empty_meshes(inputs: Inputs, operands: Sequence[TensorMeta | None]) -> frozenset[int]:
    """The sizes of meshes on which some shard is empty: those in ``MESHES``, and the smallest of all."""
    sizes = _sharded_sizes(inputs, operands)
    empty = [n for n in range(2, _LARGEST) if any(chunk(size, n, n - 1)[0] == 0 for size in sizes)]
    return frozenset(n for n in empty if n in MESHES or n == empty[0])


def _sharded_sizes(inputs: Inputs, operands: Sequence[TensorMeta | None]) -> list[int]:
    return [m.shape[p.dim] for p, m in zip(inputs, operands, strict=True) if isinstance(p, Shard) and m is not None]


def _says_more(row: Row, than: Row) -> bool:
    """Whether a row implies another: each of its results has the same placement, or is whole."""
    return row.inputs == than.inputs and all(
        p in (q, REPLICATE) for p, q in zip(row.outputs, than.outputs, strict=True)
    )


# -- placements of the operands ------------------------------------------------------------------------------------


def _input_placements(operands: Sequence[TensorMeta | None]) -> tuple[list[Inputs], bool]:
    """All combinations of placements of the operands. If these are too many, the combinations that rows usually have.

    The flag says that some were left out.
    """
    choices = tried(operands)
    if prod(map(len, choices)) <= _MOST:
        return list(product(*choices)), False
    families: list[list[list[Placement | None]]] = []
    for size in sorted({n for m in operands if m is not None for n in m.shape if n > 1}):
        shards: list[list[Placement | None]] = [
            [p for p in c if isinstance(p, Shard) and m is not None and m.shape[p.dim] == size]
            for m, c in zip(operands, choices, strict=True)
        ]
        # Shards of dims of one size, beside whole operands; or beside operands with one reduction.
        families.append([[c[0], *s] for s, c in zip(shards, choices, strict=True)])
        families += [[s or _whole_or(k, c) for s, c in zip(shards, choices, strict=True)] for k in REDUCE_OPS]
    # One reduction, without shards.
    families += [[_whole_or(kind, c) for c in choices] for kind in REDUCE_OPS]
    combinations: dict[Inputs, None] = {}
    for family in families:
        combinations.update(dict.fromkeys(islice(product(*family), _MOST)))
    return list(combinations), True


def _whole_or(kind: str, choices: Sequence[Placement | None]) -> list[Placement | None]:
    return [choices[0], *(p for p in choices if p == partial(kind))]
