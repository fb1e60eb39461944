"""The file of measured figures: what ``shardwise calibrate`` writes and planning reads.

JSON, one entry per kind of mesh that was measured. An entry is for the meshes that lie as the measured one did; its
mesh dims also serve meshes of another shape, each for a mesh dim of as many ranks over as many hosts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, evolve, field, frozen

from shardwise.errors import LinksFileError, LinksVersionError
from shardwise.kernel.spec import ints
from shardwise.planning.cost import KINDS, Connection, Link, Links

__all__ = ["Calibration", "ENVIRONMENT", "Site", "chosen_file", "default_file", "find", "parse", "show", "store"]

VERSION = 1
ENVIRONMENT = "SHARDWISE_LINKS"
"""The environment variable that names the file; ``off`` for none."""


@frozen
class Site:
    """Where a mesh lies: its shape, its devices, what carries its collectives, and over how many hosts.

    ``device`` is the device's name, ``hosts`` has one number per mesh dim: how many hosts its ranks are spread over.
    """

    mesh_shape: tuple[int, ...] = field(converter=ints)
    device_type: str
    device: str
    backend: str
    hosts: tuple[int, ...] = field(converter=ints)
    total_hosts: int = 1

    def __str__(self) -> str:
        shape = "x".join(map(str, self.mesh_shape))
        where = "one host" if self.total_hosts == 1 else f"{self.total_hosts} hosts"
        return f"{shape} {self.device_type} ({self.device}) with {self.backend} on {where}"


@frozen
class Calibration:
    """Figures and what they were measured on; ``date`` is UTC in ISO form."""

    site: Site
    links: Links
    torch: str
    date: str


# -- which figures a mesh takes ----------------------------------------------------------------------------------------


def find(calibrations: Sequence[Calibration], site: Site) -> Links | None:
    """The figures for a mesh: of an entry for its like, else dim by dim from entries for such devices and backends.

    A mesh dim takes the figures of the first measured mesh dim of as many ranks over as many hosts. ``None`` where a
    mesh dim of more than one rank finds none: a mesh is never costed half by measurement and half by defaults.
    """
    for entry in calibrations:
        if entry.site == site:
            return entry.links
    alike = [c for c in calibrations if _same_devices(c.site, site)]
    found = [_connection(alike, n, hosts) for n, hosts in zip(site.mesh_shape, site.hosts, strict=True)]
    known = [c for c in found if c is not None]
    if not known or any(c is None and n > 1 for c, n in zip(found, site.mesh_shape, strict=True)):
        return None
    # A mesh dim of one rank never communicates: any figures do.
    return evolve(alike[0].links, mesh_dims=tuple(c or known[0] for c in found), whole=None)


def _same_devices(one: Site, other: Site) -> bool:
    return (one.device_type, one.device, one.backend) == (other.device_type, other.device, other.backend)


def _connection(calibrations: Iterable[Calibration], size: int, hosts: int) -> Connection | None:
    for entry in calibrations:
        for n, h, connection in zip(entry.site.mesh_shape, entry.site.hosts, entry.links.mesh_dims, strict=True):
            if n == size > 1 and h == hosts:
                return connection
    return None


# -- reading ---------------------------------------------------------------------------------------------------------


def default_file() -> Path:
    """Where figures are kept for this user: ``links.json`` in shardwise's configuration folder."""
    import click

    return Path(click.get_app_dir("shardwise")) / "links.json"


def chosen_file() -> tuple[Path | None, bool]:
    """The file to read, ``None`` for none, and whether the environment names it."""
    named = os.environ.get(ENVIRONMENT, "")
    if named == "off":
        return None, True
    return (Path(named), True) if named else (default_file(), False)


def parse(text: str, source: str) -> tuple[Calibration, ...]:
    """The entries of a file's text.

    Raises :class:`LinksVersionError` for a newer version's file and :class:`LinksFileError` for what is none.
    """
    try:
        content = json.loads(text)
        version = content["version"]
    except (ValueError, TypeError, KeyError) as error:
        raise _malformed(source, f"it has no version: {error!r}") from error
    if version != VERSION:
        raise LinksVersionError(
            asked=f"read measured link figures from {source}",
            found=f"the file is of version {version!r}, and this shardwise reads version {VERSION}",
            do="Run `shardwise calibrate` with this version, or set SHARDWISE_LINKS=off.",
            path=source,
            version=version,
        )
    try:
        return tuple(_entry(entry) for entry in content["meshes"])
    except (ValueError, TypeError, KeyError) as error:
        raise _malformed(source, repr(error)) from error


def _malformed(source: str, why: str) -> LinksFileError:
    return LinksFileError(
        asked=f"read measured link figures from {source}",
        found=f"it is no such file ({why})",
        do="Write it anew with `shardwise calibrate`, or set SHARDWISE_LINKS=off.",
        path=source,
    )


def _entry(entry: Mapping[str, Any]) -> Calibration:
    dims, local = entry["mesh_dims"], entry["local"]
    connections = tuple(map(_read_connection, dims))
    whole = None if entry["whole"] is None else _read_connection(entry["whole"])
    site = Site(
        [dim["size"] for dim in dims],
        entry["device_type"],
        entry["device"],
        entry["backend"],
        [dim["hosts"] for dim in dims],
        entry["hosts"],
    )
    links = Links(connections, local["start"], local["bandwidth"], whole)
    return Calibration(site, links, entry["torch"], entry["date"])


def _read_connection(figures: Mapping[str, Any]) -> Connection:
    return Connection(**{kind: Link(**figures[kind]) for kind in KINDS})


# -- writing ---------------------------------------------------------------------------------------------------------


def show(calibrations: Iterable[Calibration]) -> str:
    """The text of a file with these entries; :func:`parse` reads the same floats back."""
    return json.dumps({"version": VERSION, "meshes": [_plain(c) for c in calibrations]}, indent=1) + "\n"


def _plain(calibration: Calibration) -> dict[str, Any]:
    site, links = calibration.site, calibration.links
    return {
        "device_type": site.device_type,
        "device": site.device,
        "backend": site.backend,
        "hosts": site.total_hosts,
        "torch": calibration.torch,
        "date": calibration.date,
        "local": {"start": links.local_start, "bandwidth": links.memory_bandwidth},
        "mesh_dims": [
            {"size": n, "hosts": hosts, **asdict(connection)}
            for n, hosts, connection in zip(site.mesh_shape, site.hosts, links.mesh_dims, strict=True)
        ],
        "whole": None if links.whole is None else asdict(links.whole),
    }


def store(calibration: Calibration, path: Path) -> None:
    """Write an entry to a file, in place of one for the same kind of mesh; others in the file stay.

    Raises what :func:`parse` raises where the existing file is not one of link figures, and :class:`LinksFileError`
    where nothing can be written.
    """
    try:
        before = parse(path.read_text(), str(path)) if path.exists() else ()
        others = [c for c in before if c.site != calibration.site]
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: another process may read it meanwhile.
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_text(show([calibration, *others]))
        part.replace(path)
    except OSError as error:
        raise LinksFileError(
            asked=f"write measured link figures to {path}",
            found=str(error),
            do="Name a file that can be written.",
            path=str(path),
        ) from error
