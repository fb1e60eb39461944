"""The agreement of a mesh's ranks on the figures that moves are costed by.

Ranks that cost redistributions by different figures would issue different collectives and wait for each other for ever,
and ranks on several hosts may find different files. So the mesh's first rank reads the file and sends it to the others,
and every rank sends the number of its host. This happens once per mesh, at its first use (see ``meeting``).
"""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.groups import backend_of, broadcast_, carrying_device
from shardwise.errors import LinksFileError, LinksFitError
from shardwise.kernel.spec import Mesh
from shardwise.kernel.world import PerWorld
from shardwise.planning.cost import Links, are_chosen, default_links, use_agreed_links
from shardwise.planning.link_file import ENVIRONMENT, Site, chosen_file, find, parse
from shardwise.private_torch.tracing import outside_modes

__all__ = ["Ground", "agree_on_links", "agree_to", "forget", "from_first", "locate"]


@frozen
class Ground:
    """What all ranks of a mesh know alike: where it lies, what connects its ranks per mesh dim, and what else the first
    rank told.
    """

    site: Site
    wires: tuple[str, ...]
    told: dict[str, Any]


_agreed: set[DeviceMesh] = set()


def agree_on_links(mesh: Mesh) -> None:
    """Bring one set of figures to all ranks of a mesh, once. Every rank must call this.

    Nothing is sent on an abstract mesh, on a mesh of one rank or of fake ranks, by a rank that is not part of the mesh,
    or where the program has set the figures. Raises :class:`LinksFileError`, :class:`LinksVersionError` or
    :class:`LinksFitError` on every rank when the first rank's file cannot be used.
    """
    if not isinstance(mesh, DeviceMesh) or mesh in _per_world.now():
        return
    has_others = mesh.size() > 1 and mesh.get_coordinate() is not None and backend_of(mesh) != "fake"
    if has_others and not are_chosen(mesh):
        # Meshes are first used under tracing too, where a tensor made here would not be real.
        with outside_modes():
            agree_to(mesh, _links_on(locate(mesh, _read_file()), mesh))
    else:
        _agreed.add(mesh)


def agree_to(mesh: DeviceMesh, links: Links) -> None:
    """Cost by figures that all ranks of the mesh already have alike."""
    agreed = _per_world.now()
    # Planning asks for the figures often, and a mesh is slow to look up: plain defaults need no entry.
    use_agreed_links(mesh, None if links == default_links(mesh) else links)
    agreed.add(mesh)


def forget() -> None:
    """Take back what all meshes agreed on: their ranks are others now, or are to agree anew. All ranks must call."""
    for mesh in _agreed:
        use_agreed_links(mesh, None)
    _agreed.clear()


_per_world = PerWorld(_agreed, forget)


def _links_on(ground: Ground, mesh: DeviceMesh) -> Links:
    """The figures for a mesh from what its first rank told: of its file, else the defaults for what connects it."""
    told = ground.told
    if told["error"]:
        raise LinksFileError(
            asked=f"read measured link figures from {told['source']}",
            found=told["error"],
            do=f"Write it with `shardwise calibrate --out FILE`, or set {ENVIRONMENT}=off.",
            path=told["source"],
        )
    entries = parse(told["text"], told["source"]) if told["text"] is not None else ()
    found = find(entries, ground.site)
    if found is None and told["text"] is not None and told["named"]:
        raise LinksFitError(
            asked=f"cost moves on a mesh {ground.site} by {told['source']}, which {ENVIRONMENT} names",
            found=f"it has figures for {'; '.join(str(e.site) for e in entries) or 'no mesh'}",
            do=f"Add this mesh with `shardwise calibrate`, or unset {ENVIRONMENT}.",
            path=told["source"],
            site=str(ground.site),
        )
    return found or default_links(mesh, ground.wires)


def _read_file() -> dict[str, Any]:
    """What the first rank tells of its file; a default file that is not there is no error."""
    path, named = chosen_file()
    text, error = None, ""
    if path is not None and (named or path.exists()):
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as caught:
            error = str(caught)
    return {"source": str(path), "named": named, "text": text, "error": error}


# -- where a mesh lies -----------------------------------------------------------------------------------------------


def locate(mesh: DeviceMesh, mine: dict[str, Any] | None = None) -> Ground:
    """Find out together where a mesh lies; ``mine`` is what this rank tells if it is the first. All ranks must call."""
    backend = backend_of(mesh)
    hosts = _host_grid(mesh)
    spread = tuple(_most_hosts(hosts, m) for m in range(mesh.ndim))
    about = {"device": _device_name(mesh.device_type), "infiniband": _has_infiniband(), **(mine or {})}
    told = from_first(mesh, about)
    site = Site(
        tuple(mesh.shape), mesh.device_type, told["device"], backend, spread, len(set(hosts.flatten().tolist()))
    )
    inside = "nvlink" if mesh.device_type != "cpu" and backend != "gloo" else "loopback"
    between = "infiniband" if inside == "nvlink" and told["infiniband"] else "ethernet"
    return Ground(site, tuple(between if n > 1 else inside for n in spread), told)


def _device_name(device_type: str) -> str:
    if device_type == "cpu":
        return platform.machine()
    module = torch.get_device_module(device_type)
    return str(module.get_device_name()) if hasattr(module, "get_device_name") else device_type


def _has_infiniband() -> bool:
    # Where Linux lists the adapters that speak verbs; NCCL looks there too.
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())


def _host() -> int:
    """A number for this host. The kernel's boot id, because containers on one host have names of their own."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        name = platform.node()
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def _host_grid(mesh: DeviceMesh) -> torch.Tensor:
    """The host of every rank, in the shape of the mesh."""
    # A sum of grids with one entry each: process groups count their ranks in an order of their own.
    grid = torch.zeros(tuple(mesh.shape), dtype=torch.int64, device=carrying_device(mesh))
    grid[_place(mesh)] = _host()
    for m in range(mesh.ndim):
        if mesh.size(m) > 1:
            dist.all_reduce(grid, group=mesh.get_group(m))
    return grid.cpu()


def _place(mesh: DeviceMesh) -> tuple[int, ...]:
    found = mesh.get_coordinate()
    if found is None:
        raise ValueError("this rank is not part of the mesh")
    return tuple(found)


def _most_hosts(hosts: torch.Tensor, mesh_dim: int) -> int:
    """The most hosts that the ranks along a mesh dim are on."""
    lines = hosts.movedim(mesh_dim, -1).reshape(-1, hosts.shape[mesh_dim])
    return max(len(set(line)) for line in lines.tolist())


def from_first(mesh: DeviceMesh, told: dict[str, Any]) -> dict[str, Any]:
    """What the rank at coordinate 0 of every mesh dim tells, a JSON object; all ranks of the mesh must call."""
    data = torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8, device=carrying_device(mesh))
    length = torch.tensor([len(data)], device=data.device)
    _broadcast(mesh, length)
    sent = data.new_zeros(int(length))
    if not any(_place(mesh)):
        sent.copy_(data)
    _broadcast(mesh, sent)
    found: dict[str, Any] = json.loads(bytes(sent.tolist()).decode())
    return found


def _broadcast(mesh: DeviceMesh, tensor: torch.Tensor) -> None:
    for m in range(mesh.ndim):
        broadcast_(tensor, mesh, m)
