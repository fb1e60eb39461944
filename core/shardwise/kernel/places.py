"""Placements as programs write them: a list, one for the only mesh dim, or by the names of mesh dims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardwise.errors import PlacementCountError, PlacementError
from shardwise.kernel.arguments import kind_of
from shardwise.kernel.placements import REPLICATE, Placement, show

__all__ = ["Places", "per_mesh_dim"]

Places = Sequence[Placement] | Mapping[str, Placement] | Placement
"""One placement per mesh dim; or those of some mesh dims by name, and the others replicated; or the one of a mesh with
one dim.
"""


def per_mesh_dim(places: Any, mesh: Any) -> Sequence[Placement]:
    """One placement per mesh dim, as far as ``places`` says; :func:`check_placements` checks a list.

    Raises :class:`PlacementCountError` for one placement where the mesh has several dims, and for a name that no mesh
    dim has, and :class:`PlacementError` for what is no placement.
    """
    if isinstance(places, (list, tuple)):
        return places
    names = getattr(mesh, "mesh_dim_names", None) or ()
    if isinstance(places, Placement):
        if mesh.ndim == 1:
            return [places]
        by_name = f', or {{"{names[0]}": {places!r}}}' if names else ""
        rest = ", ".join([repr(places), *["Replicate()"] * (mesh.ndim - 1)])
        raise PlacementCountError(
            asked=f"place a tensor by {show(places)}",
            found=f"one placement says nothing of {mesh.ndim} mesh dims",
            do=f"Give one per mesh dim, as in [{rest}]{by_name}.",
            placements=(places,),
            mesh_ndim=mesh.ndim,
        )
    if isinstance(places, Mapping):
        unknown = [name for name in places if name not in names]
        if unknown:
            raise PlacementCountError(
                asked=f"place a tensor by mesh dim {unknown[0]!r}",
                found=f"the mesh has the dims {', '.join(names)}" if names else "the dims of the mesh have no names",
                do="Use the mesh's dim names, or a list with one placement per mesh dim.",
                mesh_dim=unknown[0],
            )
        return [places.get(name, REPLICATE) for name in names] if places else [REPLICATE] * mesh.ndim
    if isinstance(places, (str, type)) or not isinstance(places, Iterable):
        raise PlacementError(
            asked=f"place a tensor by {places!r}",
            found=f"it is {kind_of(places)}, and not a placement",
            do="Give Shard(dim), Replicate() or Partial() for each mesh dim.",
            placement=places,
        )
    return tuple(places)
