"""Specs: how one tensor lies on a mesh, and the arithmetic of its shards.

The layout is DTensor's, bit for bit. Mesh dims split a tensor dim from left to right, and each split is
``torch.chunk``'s: ceil-sized pieces, the last ones smaller or empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

import torch
from attrs import field, frozen
from torch.distributed.device_mesh import DeviceMesh

from shardwise.kernel.factors import Factors, Scattered, factors_of, runs_of, unflattened_placements
from shardwise.kernel.mesh import Mesh, first_equal, own_coordinate
from shardwise.kernel.placements import (
    Partial,
    Placement,
    Replicate,
    Shard,
    check_placements,
    is_strided,
    shard,
    shard_dim,
    show_all,
)
from shardwise.kernel.symbols import chunk, guess, hint, numbers, place, settled_sizes
from shardwise.kernel.tags import Tag
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.kernel.world import PerWorld, world_number

__all__ = ["Block", "SpecLayout", "SymbolicSpec", "TensorSpec", "guessed_meta", "hinted", "hinted_meta", "in_numbers"]


@lru_cache(maxsize=64)
def _shape_of(mesh: Mesh) -> tuple[int, ...]:
    return tuple(mesh.shape)


class _Interned(type):
    """One object per value, so that specs hash and compare by identity on the hot path."""

    # Two levels, so that the keys that stay in memory are short.
    _known: ClassVar[dict[Any, WeakValueDictionary[Any, Any]]] = {}

    def __call__(
        cls,
        mesh: Mesh,
        placements: Sequence[Placement],
        tensor_meta: TensorMeta,
        is_copy: bool = False,
        tag: Tag | None = None,
    ) -> Any:
        # The class is in the key because attrs builds a slotted class from a first, slotless one. The number of the
        # world is in it because a mesh of a new world equals one of an earlier world, whose groups are gone.
        key = (cls, mesh, is_copy, world_number() if isinstance(mesh, DeviceMesh) else None, tag)
        known = _Interned._known.get(key)
        if known is None:
            for unused in [k for k, specs in _Interned._known.items() if not specs]:
                del _Interned._known[unused]
            known = _Interned._known[key] = WeakValueDictionary()
        try:
            return known[tuple(placements), tensor_meta]
        except KeyError:
            pass
        except TypeError:  # symbols have no hash
            if not tensor_meta.is_symbolic:
                raise
            shape, stride = settled_sizes(tensor_meta.shape), settled_sizes(tensor_meta.stride)
            tensor_meta = TensorMeta(shape, stride, tensor_meta.dtype)
            if not tensor_meta.is_symbolic:
                return cls(mesh, placements, tensor_meta, is_copy, tag)
            checked = check_placements(placements, mesh.ndim, tensor_meta.ndim)
            if is_strided(checked):
                factors_of(tensor_meta.shape, checked, _shape_of(mesh))
            return type.__call__(SymbolicSpec, _first_equal(mesh), checked, tensor_meta, is_copy)
        checked = _shared(check_placements(placements, mesh.ndim, tensor_meta.ndim))
        # Where the placements are the same after the check, the spec was looked up above.
        spec = None if checked == placements else known.get((checked, tensor_meta))
        if spec is None:
            if is_strided(checked):
                factors_of(tensor_meta.shape, checked, _shape_of(mesh))
            spec = super().__call__(_first_equal(mesh), checked, tensor_meta, is_copy, tag)
            known[checked, tensor_meta] = spec
        return spec


def _first_equal(mesh: Mesh) -> Mesh:
    return first_equal(mesh) if isinstance(mesh, DeviceMesh) else mesh


@lru_cache(maxsize=4096)
def _shared(placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """One tuple for all equal ones: many specs have the same placements."""
    return placements


@frozen
class Block:
    """A block of a tensor: where it starts in the whole, its size, and where it starts in the rank's part."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    local_offset: tuple[int, ...]


@frozen(eq=False, repr=False)
class TensorSpec(metaclass=_Interned):
    """Mesh, one placement per mesh dim, and the global tensor meta. Equal specs are one object.

    ``is_copy`` marks the result of a view op whose operand had to be redistributed: it does not share memory with its
    base, so writing to it is refused. ``tag`` says where in a program the tensor comes from, if the program runs by
    decisions for its whole step (see :mod:`shardwise.kernel.tags`); specs that differ in it are the same layout.
    """

    mesh: Mesh
    placements: tuple[Placement, ...]
    tensor_meta: TensorMeta
    is_copy: bool = False
    tag: Tag | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            mesh: Mesh,
            placements: Sequence[Placement],
            tensor_meta: TensorMeta,
            is_copy: bool = False,
            tag: Tag | None = None,
        ) -> None: ...

    # -- the tensor --
    @property
    def shape(self) -> torch.Size:
        return self.tensor_meta.shape

    @property
    def stride(self) -> tuple[int, ...]:
        return self.tensor_meta.stride

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor_meta.dtype

    @property
    def ndim(self) -> int:
        return self.tensor_meta.ndim

    # -- the mesh --
    @property
    def mesh_shape(self) -> tuple[int, ...]:
        return _shape_of(self.mesh)

    @cached_property
    def dim_map(self) -> tuple[tuple[int, ...], ...]:
        """Per tensor dim, the mesh dims that split it, in the order in which they do."""
        mesh_dims: list[list[int]] = [[] for _ in range(self.ndim)]
        for mesh_dim, placement in enumerate(self.placements):
            if (dim := shard_dim(placement)) is not None:
                mesh_dims[dim].append(mesh_dim)
        return tuple(map(tuple, mesh_dims))

    @cached_property
    def shards_per_dim(self) -> tuple[int, ...]:
        """Per tensor dim, into how many pieces it is split."""
        return tuple(math.prod(self.mesh_shape[m] for m in mesh_dims) for mesh_dims in self.dim_map)

    @property
    def num_shards(self) -> int:
        """How many different shards the tensor has over the whole mesh."""
        return math.prod(self.shards_per_dim)

    @cached_property
    def reductions(self) -> dict[int, str]:
        """Mesh dim -> reduction, for each mesh dim with a ``Partial``."""
        return {m: p.reduce_op for m, p in enumerate(self.placements) if isinstance(p, Partial)}

    @cached_property
    def is_strided(self) -> bool:
        """Whether a mesh dim shards a dim inside; see :mod:`shardwise.kernel.factors`."""
        return is_strided(self.placements)

    @cached_property
    def is_replicated(self) -> bool:
        return all(isinstance(p, Replicate) for p in self.placements)

    # -- one rank's part --
    def coordinate(self) -> tuple[int, ...]:
        """The coordinate of this process on the mesh.

        Raises ``TypeError`` when the mesh is abstract, :class:`OffMeshError` when this rank is not on it.
        """
        if not isinstance(self.mesh, DeviceMesh):
            raise TypeError("an AbstractMesh has no own coordinate; pass one")
        return own_coordinate(self.mesh)

    def local_shape(self, coordinate: Sequence[int] | None = None) -> tuple[int, ...]:
        """Shape of the local tensor of the rank at ``coordinate`` (default: this process)."""
        return self.local_shape_and_offset(coordinate)[0]

    def local_shape_and_offset(
        self, coordinate: Sequence[int] | None = None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and start of one rank's shard, per tensor dim, in elements.

        A dim of 10 over mesh dims of 2 and 2 is split into 5 and 5, and these into 3 and 2: the rank at (1, 1) has 2
        elements from 8 on. In place of the start along a dim with a strided shard there is a :class:`Scattered`.
        """
        at = self.coordinate() if coordinate is None else coordinate
        if self.is_strided:
            return self._scattered_shape_and_offset(at)
        sizes, starts = list(self.shape), [0] * self.ndim
        for mesh_dim, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                d = placement.dim
                sizes[d], start = chunk(sizes[d], self.mesh_shape[mesh_dim], at[mesh_dim])
                starts[d] += start
        return tuple(sizes), tuple(starts)

    def _scattered_shape_and_offset(self, at: Sequence[int]) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        factors = self.factors
        sizes, starts = self.unflattened(factors).local_shape_and_offset(at)
        ends = [sum(map(len, factors[: d + 1])) for d in range(len(factors))]
        local = tuple(math.prod(sizes[end - len(f) : end]) for end, f in zip(ends, factors, strict=True))
        offset = (
            starts[end - 1] if len(f) == 1 else Scattered(d)
            for d, (end, f) in enumerate(zip(ends, factors, strict=True))
        )
        return local, tuple(offset)

    @cached_property
    def max_local_numel(self) -> int:
        """Elements of the largest shard."""
        if self.is_strided:
            return self.unflattened(self.factors).max_local_numel
        sizes = list(self.shape)
        for mesh_dim, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                sizes[placement.dim] = -(-sizes[placement.dim] // self.mesh_shape[mesh_dim])
        return math.prod(sizes)

    # -- strided shards --
    @property
    def factors(self) -> Factors:
        """Per dim, the sizes into which its strided shards divide it; see :func:`factors_of`."""
        return factors_of(self.shape, self.placements, self.mesh_shape)

    def blocks(self, coordinate: Sequence[int] | None = None) -> list[Block]:
        """The blocks of the whole tensor that one rank's part consists of: one, or several along strided shards."""
        at = self.coordinate() if coordinate is None else coordinate
        factors = self.factors
        sizes, starts = self.unflattened(factors).local_shape_and_offset(at)
        runs, start = [], 0
        for of_dim in factors:
            end = start + len(of_dim)
            runs.append(runs_of(of_dim, sizes[start:end], starts[start:end]))
            start = end
        return [
            Block(tuple(r[0] for r in box), tuple(r[1] for r in box), tuple(r[2] for r in box))
            for box in product(*runs)
        ]

    def in_factors(self, factors: Factors) -> TensorSpec | None:
        """The same layout of the tensor whose dims are these factors of its dims; ``None`` where no shards say it."""
        placements = unflattened_placements(self.placements, self.mesh_shape, factors)
        if placements is None:
            return None
        shape, stride = [], []
        for sizes, step in zip(factors, self.stride, strict=True):
            for k, n in enumerate(sizes):
                shape.append(n)
                stride.append(step * math.prod(sizes[k + 1 :]))
        return TensorSpec(self.mesh, placements, TensorMeta(shape, stride, self.dtype))

    def unflattened(self, factors: Factors) -> TensorSpec:
        """:meth:`in_factors` by factors that are this tensor's own, or a refinement of them that is known to do."""
        spec = self.in_factors(factors)
        assert spec is not None
        return spec

    def without_strides(self) -> TensorSpec:
        """The tensor with ``Shard(d)`` in place of each strided shard of dim d: another layout, of parts as large."""
        if not self.is_strided:
            return self
        return self.with_placements([p if (d := shard_dim(p)) is None else shard(d) for p in self.placements])

    # -- derived --
    def with_placements(self, placements: Sequence[Placement]) -> TensorSpec:
        """The same tensor with other placements; never a copy that may not be written."""
        return TensorSpec(self.mesh, tuple(placements), self.tensor_meta, False, self.tag)

    def with_tag(self, tag: Tag | None) -> TensorSpec:
        """The same tensor and layout with another tag."""
        return TensorSpec(self.mesh, self.placements, self.tensor_meta, self.is_copy, tag)

    @property
    def untagged(self) -> TensorSpec:
        """The same tensor and layout without a tag."""
        return self if self.tag is None else self.with_tag(None)

    @cached_property
    def layout(self) -> SpecLayout:
        """The spec without its meta."""
        return layout_of(self.mesh, self.placements, self.is_copy)

    def as_copy(self) -> TensorSpec:
        """The same, marked as a copy that may not be written."""
        return TensorSpec(self.mesh, self.placements, self.tensor_meta, True, self.tag)

    def with_meta(self, tensor_meta: TensorMeta) -> TensorSpec:
        return TensorSpec(self.mesh, self.placements, tensor_meta, False, self.tag)

    def __str__(self) -> str:
        return f"{self.tensor_meta} {show_all(self.placements)}"

    def __repr__(self) -> str:
        mesh = "x".join(map(str, self.mesh_shape))
        return f"TensorSpec({self.tensor_meta}, {show_all(self.placements)}, mesh={mesh})"

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorSpec:
        return self  # frozen, and one object per value

    def __reduce__(self) -> Any:
        return TensorSpec, (self.mesh, self.placements, self.tensor_meta, self.is_copy)


@frozen(eq=False)
class SpecLayout:
    """A spec without the tensor meta. Equal ones are one object. Compiled graphs are guarded by it and by sizes."""

    mesh: Mesh
    placements: tuple[Placement, ...]
    is_copy: bool
    _specs: dict[Any, TensorSpec] = field(factory=dict, init=False, repr=False)

    def spec(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> TensorSpec:
        """The spec of a tensor with this layout."""
        key = (shape, stride, dtype)
        try:
            return self._specs[key]
        except KeyError:
            if len(self._specs) >= _SPECS_PER_LAYOUT:
                self._specs.clear()
            return self._specs.setdefault(key, self._make(shape, stride, dtype))
        except TypeError:  # symbols have no hash
            return self._make(shape, stride, dtype)

    def _make(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> TensorSpec:
        return TensorSpec(self.mesh, self.placements, TensorMeta(shape, stride, dtype), self.is_copy)

    def __deepcopy__(self, memo: dict[int, Any]) -> SpecLayout:
        return self

    def __reduce__(self) -> Any:
        return layout_of, (self.mesh, self.placements, self.is_copy)


_SPECS_PER_LAYOUT = 256
_layouts: dict[Any, SpecLayout] = {}
_per_world = PerWorld(_layouts, _layouts.clear)


def layout_of(mesh: Mesh, placements: tuple[Placement, ...], is_copy: bool) -> SpecLayout:
    """The :class:`SpecLayout` of these parts."""
    known, key = _per_world.now(), (mesh, placements, is_copy)
    layout = known.get(key)
    if layout is None:
        layout = known[key] = SpecLayout(mesh, placements, is_copy)
    return layout


class SymbolicSpec(TensorSpec):
    """A spec with a symbol among its sizes or strides, while a graph is traced.

    It has no hash, and equal ones are different objects: no cache may hold one.
    """

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def local_shape_and_offset(
        self, coordinate: Sequence[int] | None = None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and start of one rank's shard, as formulas of the global shape's symbols."""
        at = self.coordinate() if coordinate is None else coordinate
        if self.is_strided:
            return self._scattered_shape_and_offset(at)
        pieces = [
            place(n, [self.mesh_shape[m] for m in mesh_dims], [at[m] for m in mesh_dims])
            for n, mesh_dims in zip(self.shape, self.dim_map, strict=True)
        ]
        return tuple(n for n, _ in pieces), tuple(start for _, start in pieces)

    def with_placements(self, placements: Sequence[Placement]) -> TensorSpec:
        """The same tensor with other placements; this object where the placements are the same."""
        target = tuple(placements)
        return self if target == self.placements else TensorSpec(self.mesh, target, self.tensor_meta)

    def with_tag(self, tag: Tag | None) -> TensorSpec:  # noqa: ARG002  # a graph is guarded by layouts, without tags
        return self


def hinted(spec: TensorSpec) -> TensorSpec:
    """A spec with the sizes that the graph was made for, where they are symbols."""
    if not isinstance(spec, SymbolicSpec):
        return spec
    return TensorSpec(spec.mesh, spec.placements, hinted_meta(spec.tensor_meta), spec.is_copy)


def hinted_meta(meta: TensorMeta) -> TensorMeta:
    """A meta with the sizes and strides that the graph was made for, where they are symbols."""
    return TensorMeta([hint(n) for n in meta.shape], [hint(n) for n in meta.stride], meta.dtype)


def guessed_meta(meta: TensorMeta) -> TensorMeta:
    """:func:`hinted_meta`, with a guess of a size that data decides: for questions about the order of dims."""
    return TensorMeta([guess(n) for n in meta.shape], [guess(n) for n in meta.stride], meta.dtype)


def in_numbers(value: Any) -> Any:
    """Specs, metas, static arguments or lists of them, with numbers in place of symbols. The numbers become guards."""
    if isinstance(value, SymbolicSpec):
        return value.with_meta(in_numbers(value.tensor_meta))
    if isinstance(value, TensorMeta):
        return TensorMeta(numbers(tuple(value.shape)), numbers(value.stride), value.dtype)
    return tuple(map(in_numbers, value)) if isinstance(value, (tuple, list)) else numbers(value)
