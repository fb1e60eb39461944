"""Meshes: torch's ``DeviceMesh``, and one without devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import product

from attrs import field, frozen
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import OffMeshError
from shardwise.kernel.world import PerWorld

__all__ = ["AbstractMesh", "Mesh", "coordinates", "first_equal", "ints", "own_coordinate"]


def ints(sizes: Iterable[int]) -> tuple[int, ...]:
    """A converter for attrs: any sizes as a tuple."""
    return tuple(sizes)


@frozen(cache_hash=True)
class AbstractMesh:
    """The shape of a mesh without devices: for planning, explaining and the oracle. It has no process group."""

    shape: tuple[int, ...] = field(converter=ints)
    device_type: str = "cpu"
    mesh_dim_names: tuple[str, ...] | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, mesh_dim: int | None = None) -> int:
        """Number of ranks, of the whole mesh or along one mesh dim."""
        return math.prod(self.shape) if mesh_dim is None else self.shape[mesh_dim]

    def coordinates(self) -> list[tuple[int, ...]]:
        """Coordinates of all ranks, in row-major order."""
        return coordinates(self.shape)


def coordinates(mesh_shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Coordinates of all ranks of a mesh of this shape, in row-major order."""
    return list(product(*map(range, mesh_shape)))


#: A mesh of processes, or one that is only thought of.
Mesh = DeviceMesh | AbstractMesh


_used: dict[DeviceMesh, DeviceMesh] = {}
_used_in_world = PerWorld(_used, _used.clear)


def first_equal(mesh: DeviceMesh) -> DeviceMesh:
    """The first mesh equal to this one that was used since the default process group was made.

    Meshes with the same ranks, shape and names are equal and have process groups of their own. Whatever is cached for a
    mesh is found again for an equal one, and when a rank deletes it depends on its garbage collector. So all equal
    meshes stand for the first one: otherwise ranks would wait for each other in different groups.
    """
    return _used_in_world.now().setdefault(mesh, mesh)


def own_coordinate(mesh: DeviceMesh) -> tuple[int, ...]:
    """The coordinate of this process on a mesh. Raises :class:`OffMeshError` where this rank is not on it."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise OffMeshError(
            asked=f"use a tensor on {mesh}",
            found=f"rank {mesh.get_rank()} is not on that mesh, so it has no part of the tensor",
            do="Make the call only on the ranks of the mesh: `if mesh.get_coordinate() is not None`.",
            rank=mesh.get_rank(),
        )
    return tuple(coordinate)
