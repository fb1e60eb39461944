"""Where one call's work lies: the ring of ranks, and the positions of each rank before and during the work."""

from __future__ import annotations

from itertools import product

from attrs import frozen

from shardwise.rule import LocalCall, TensorSpec
from shardwise_ring_attention.geometry import Piece, Range, Ranges, balanced, pieces

__all__ = ["SEQUENCE", "Layout", "Place", "place"]

SEQUENCE = 2
"""The tensor dim of positions in query, key and value, which are ``(batch, heads, positions, features)``."""


@frozen
class Layout:
    """The positions of queries and of keys by place in the ring."""

    queries: tuple[Ranges, ...]
    keys: tuple[Ranges, ...]


@frozen
class Place:
    """One rank's part in a call.

    ``ring`` are the mesh dims over which queries and keys are both sharded, ``index`` is this rank's place among their
    ranks, row-major. ``only_keys`` are the mesh dims over which only keys are sharded. ``home`` is the layout of the
    operands, ``work`` their layout during the work, and ``steps`` what this rank computes in each step: in step ``t``
    it has the keys of the rank ``t`` places before.
    """

    ring: tuple[int, ...]
    only_keys: tuple[int, ...]
    index: int
    home: Layout
    work: Layout
    steps: tuple[tuple[Piece, ...], ...]

    @property
    def size(self) -> int:
        """The number of ranks in the ring."""
        return len(self.home.queries)

    def source(self, step: int) -> int:
        """Whose keys this rank has in a step."""
        return (self.index - step) % self.size


def place(local: LocalCall) -> Place:
    """The place of this rank in a call; the same for every call of a plan."""
    query, key = local.spec("query"), local.spec("key")
    by_query, by_key = (local.sharding(spec, SEQUENCE) for spec in (query, key))
    ring = tuple(m for m in by_query if m in by_key)
    members = [_at(local.coordinate, ring, where) for where in product(*(range(query.mesh_shape[m]) for m in ring))]
    queries, keys = ([_held(spec, member) for member in members] for spec in (query, key))
    causal = bool(local.arg("is_causal"))
    home = Layout(*(tuple(_ranges(r) for r in held) for held in (queries, keys)))
    # All ranks of the mesh decide the same: no other mesh dim shards positions, so each ring has all of them.
    whole = len(ring) == len(by_query) == len(by_key)
    work = home
    if causal and whole and queries == keys and len(members) > 1:
        even = balanced((0, query.shape[SEQUENCE]), len(members))
        work = Layout(even, even)
    index = members.index(local.coordinate)
    steps = (work.keys[(index - step) % len(members)] for step in range(len(members)))
    return Place(
        ring=ring,
        only_keys=tuple(m for m in by_key if m not in by_query),
        index=index,
        home=home,
        work=work,
        steps=tuple(pieces(work.queries[index], held, causal=causal) for held in steps),
    )


def _at(coordinate: tuple[int, ...], dims: tuple[int, ...], where: tuple[int, ...]) -> tuple[int, ...]:
    """A coordinate moved to ``where`` on some mesh dims."""
    moved = dict(zip(dims, where, strict=True))
    return tuple(moved.get(m, c) for m, c in enumerate(coordinate))


def _held(spec: TensorSpec, coordinate: tuple[int, ...]) -> Range:
    shape, start = spec.local_shape_and_offset(coordinate)
    return start[SEQUENCE], start[SEQUENCE] + shape[SEQUENCE]


def _ranges(held: Range) -> Ranges:
    return (held,) if held[0] < held[1] else ()
