"""The agreement of a mesh's ranks on the figures for costs.

Ranks with different figures would issue different collectives and wait for each other for ever, and ranks on several
hosts may have different files. So the mesh's first rank reads the file and sends it to the others, and every rank sends
the number of its host. This happens once per mesh, at its first use (see ``meeting``).
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

from shardwise.comm.groups import backend_of, broadcast_, carrying_device, process_group_of
from shardwise.comm.waiting_ranks import explained
from shardwise.errors import LinksFileError, LinksFitError
from shardwise.kernel.foreign_files import read_text, reason
from shardwise.kernel.mesh import Mesh, own_coordinate
from shardwise.kernel.world import PerWorld
from shardwise.planning.cost import Links, are_chosen, default_links, use_agreed_links
from shardwise.planning.link_file import ENVIRONMENT, MOST, Site, chosen_file, links_for, parse
from shardwise.private_torch.modes import outside_modes

__all__ = ["Ground", "agree_on_links", "agree_to", "forget", "from_first", "locate"]


@frozen
class Ground:
    """What all ranks of a mesh know: its site, the connection of each mesh dim, and the facts of the first rank."""

    site: Site
    wires: tuple[str, ...]
    facts: dict[str, Any]


_agreed: set[DeviceMesh] = set()


def agree_on_links(mesh: Mesh) -> None:
    """Give all ranks of a mesh the same figures, once. Every rank must call this.

    Nothing is sent if the mesh is abstract, has one rank or has fake ranks, if this rank is not part of it, or if the
    program has set the figures. Raises :class:`LinksFileError`, :class:`LinksVersionError` or
    :class:`LinksFitError` on every rank when the first rank's file cannot be used.
    """
    if not isinstance(mesh, DeviceMesh) or mesh in _per_world.now():
        return
    has_others = mesh.size() > 1 and mesh.get_coordinate() is not None and backend_of(mesh) != "fake"
    if has_others and not are_chosen(mesh):
        # Meshes are first used under tracing too, where a tensor made here would not be real.
        with outside_modes():
            path, named = chosen_file()
            text, error = None, ""
            try:
                if path is not None and (named or path.exists()):  # a default file need not exist
                    text = read_text(path, MOST)
            except (OSError, ValueError) as caught:
                error = reason(caught)
            facts = {"source": str(path), "named": named, "text": text, "error": error}
            agree_to(mesh, _links_of_file(locate(mesh, facts), mesh))
    else:
        _agreed.add(mesh)


def agree_to(mesh: DeviceMesh, links: Links) -> None:
    """Use figures that all ranks of the mesh have."""
    agreed = _per_world.now()
    # Planning looks the figures up often, and a mesh is a slow key: defaults need no entry.
    use_agreed_links(mesh, None if links == default_links(mesh) else links)
    agreed.add(mesh)


def forget() -> None:
    """Drop the figures that all meshes agreed on: their ranks must agree again. Every rank must call this."""
    for mesh in _agreed:
        use_agreed_links(mesh, None)
    _agreed.clear()


_per_world = PerWorld(_agreed, forget)


def _links_of_file(ground: Ground, mesh: DeviceMesh) -> Links:
    """The figures for a mesh from the first rank's file, else the defaults for its connections."""
    file = ground.facts
    if file["error"]:
        raise LinksFileError(
            asked=f"read measured link figures from {file['source']}",
            found=file["error"],
            do=f"Write it with `shardwise calibrate --out FILE`, or set {ENVIRONMENT}=off.",
            path=file["source"],
        )
    entries = parse(file["text"], file["source"]) if file["text"] is not None else ()
    links = links_for(entries, ground.site)
    if links is None and file["text"] is not None and file["named"]:
        raise LinksFitError(
            asked=f"cost redistributions on a mesh {ground.site} by {file['source']}, which {ENVIRONMENT} names",
            found=f"it has figures for {'; '.join(str(e.site) for e in entries) or 'no mesh'}",
            do=f"Add this mesh with `shardwise calibrate`, or unset {ENVIRONMENT}.",
            path=file["source"],
            site=str(ground.site),
        )
    return links or default_links(mesh, ground.wires)


# -- the site of a mesh ----------------------------------------------------------------------------------------------


def locate(mesh: DeviceMesh, facts: dict[str, Any] | None = None) -> Ground:
    """Find the site of a mesh, and give all its ranks the ``facts`` of the first rank. Every rank must call this."""
    backend = backend_of(mesh)
    # The host of every rank: a sum of grids with one entry each, because the order of ranks differs in process groups.
    hosts = torch.zeros(tuple(mesh.shape), dtype=torch.int64, device=carrying_device(mesh))
    hosts[own_coordinate(mesh)] = _host()
    for m in range(mesh.ndim):
        if mesh.size(m) > 1:
            with explained(process_group_of(mesh, m)):
                dist.all_reduce(hosts, group=process_group_of(mesh, m))
    hosts = hosts.cpu()
    # Per mesh dim, the most hosts of the ranks along it.
    lines = (hosts.movedim(m, -1).reshape(-1, mesh.size(m)).tolist() for m in range(mesh.ndim))
    spread = tuple(max(len(set(line)) for line in along) for along in lines)
    # Linux lists the adapters that speak verbs there; NCCL reads it, too.
    adapters = Path("/sys/class/infiniband")
    has_infiniband = adapters.is_dir() and any(adapters.iterdir())
    own = {"device": _device_name(mesh.device_type), "infiniband": has_infiniband, **(facts or {})}
    first = from_first(mesh, own)
    site = Site(
        tuple(mesh.shape), mesh.device_type, first["device"], backend, spread, len(set(hosts.flatten().tolist()))
    )
    inside = "nvlink" if mesh.device_type != "cpu" and backend != "gloo" else "loopback"
    between = "infiniband" if inside == "nvlink" and first["infiniband"] else "ethernet"
    return Ground(site, tuple(between if n > 1 else inside for n in spread), first)


def _device_name(device_type: str) -> str:
    if device_type == "cpu":
        return platform.machine()
    module = torch.get_device_module(device_type)
    return str(module.get_device_name()) if hasattr(module, "get_device_name") else device_type


def _host() -> int:
    """A number for this host: a hash of the kernel's boot id, since containers on one host have different names."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        name = platform.node()
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def from_first(mesh: DeviceMesh, facts: dict[str, Any]) -> dict[str, Any]:
    """The facts, a JSON object, of the rank at coordinate 0 of every mesh dim. Every rank must call this."""
    # A copy of the bytes: torch writes into a tensor's memory, and warns of memory that is read-only.
    data = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8).to(carrying_device(mesh))
    length = torch.tensor([len(data)], device=data.device)
    broadcast_(length, mesh, range(mesh.ndim))
    sent = data.new_zeros(int(length))
    if not any(own_coordinate(mesh)):
        sent.copy_(data)
    broadcast_(sent, mesh, range(mesh.ndim))
    first: dict[str, Any] = json.loads(sent.cpu().numpy().tobytes())
    return first
