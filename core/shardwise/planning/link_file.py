"""The file of measured figures. ``shardwise calibrate`` writes it, and planning reads it.

It is JSON with one entry per site (shape, devices, backend and hosts of a mesh). Meshes of another shape also use an
entry's figures: each of their mesh dims takes those of a mesh dim of as many ranks over as many hosts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, evolve, field, fields, frozen

from shardwise.errors import LinksFileError, LinksVersionError
from shardwise.kernel.foreign_files import load_json, read_text, reason, short
from shardwise.kernel.mesh import ints
from shardwise.kernel.whole_files import write_whole
from shardwise.planning.cost import KINDS, Connection, Link, Links

__all__ = [
    "Calibration",
    "ENVIRONMENT",
    "MOST",
    "Site",
    "chosen_file",
    "default_file",
    "links_for",
    "parse",
    "read",
    "show",
    "store",
]

VERSION = 2
MOST = 16 << 20
"""The most bytes of a file that are read: an entry has some 5,000, and the text goes to all ranks."""

ENVIRONMENT = "SHARDWISE_LINKS"
"""The environment variable that names the file; ``off`` for none."""


@frozen
class Site:
    """The shape of a mesh, its devices, its backend, and its hosts.

    ``device`` is the device's name. ``hosts`` has the number of hosts over which the ranks of each mesh dim are spread.
    """

    mesh_shape: tuple[int, ...] = field(converter=ints)
    device_type: str
    device: str
    backend: str
    hosts: tuple[int, ...] = field(converter=ints)
    total_hosts: int = 1

    def __str__(self) -> str:
        shape = "x".join(map(str, self.mesh_shape))
        hosts = "one host" if self.total_hosts == 1 else f"{self.total_hosts} hosts"
        return f"{shape} {self.device_type} ({self.device}) with {self.backend} on {hosts}"


@frozen
class Calibration:
    """Figures, and the site where they were measured; ``date`` is UTC in ISO form."""

    site: Site
    links: Links
    torch: str
    date: str


# -- the figures for a mesh --------------------------------------------------------------------------------------------


def links_for(calibrations: Sequence[Calibration], site: Site) -> Links | None:
    """The figures for a mesh: of the entry for its site, else dim by dim from entries of the same devices and backend.

    A mesh dim takes the figures of the first measured mesh dim of as many ranks over as many hosts. ``None`` when there
    is no such mesh dim for one of several ranks: measured figures and defaults are never mixed on one mesh.
    """
    same_devices = []
    for entry in calibrations:
        if entry.site == site:
            return entry.links
        if evolve(entry.site, mesh_shape=site.mesh_shape, hosts=site.hosts, total_hosts=site.total_hosts) == site:
            same_devices.append(entry)
    measured: dict[tuple[int, int], Connection] = {}  # by number of ranks and of hosts
    for entry in same_devices:
        for n, hosts, connection in zip(entry.site.mesh_shape, entry.site.hosts, entry.links.mesh_dims, strict=True):
            if n > 1:
                measured.setdefault((n, hosts), connection)
    per_dim = [measured.get(key) for key in zip(site.mesh_shape, site.hosts, strict=True)]
    known = [connection for connection in per_dim if connection is not None]
    if not known or any(c is None and n > 1 for c, n in zip(per_dim, site.mesh_shape, strict=True)):
        return None
    # A mesh dim of one rank never communicates, so any figures serve.
    return evolve(same_devices[0].links, mesh_dims=tuple(c or known[0] for c in per_dim), whole=None)


# -- reading ---------------------------------------------------------------------------------------------------------


def default_file() -> Path:
    """The file of this user: ``links.json`` in shardwise's configuration folder."""
    import click

    return Path(click.get_app_dir("shardwise")) / "links.json"


def chosen_file() -> tuple[Path | None, bool]:
    """The file to read, ``None`` for none, and whether the environment names it."""
    named = os.environ.get(ENVIRONMENT, "")
    if named == "off":
        return None, True
    return (Path(named), True) if named else (default_file(), False)


def read(path: Path) -> tuple[Calibration, ...]:
    """The entries of a file. Raises what :func:`parse` raises, and :class:`LinksFileError` for one that is no text."""
    try:
        text = read_text(path, MOST)
    except (OSError, ValueError) as error:
        raise _malformed(str(path), reason(error)) from error
    return parse(text, str(path))


def parse(text: str, source: str) -> tuple[Calibration, ...]:
    """The entries of a file's text.

    Raises :class:`LinksVersionError` for a file of another version, and :class:`LinksFileError` for any other text.
    """
    try:
        content = load_json(text)
        version = content["version"]
    except (ValueError, TypeError, KeyError) as error:
        raise _malformed(source, f"it has no version: {reason(error)}") from error
    if type(version) is not int or version != VERSION:
        raise LinksVersionError(
            asked=f"read measured link figures from {source}",
            found=f"the file is of version {short(repr(version))}, and this shardwise reads version {VERSION}",
            do="Move it away and run `shardwise calibrate` with this version, or set SHARDWISE_LINKS=off.",
            path=source,
            version=version,
        )
    try:
        if unknown := sorted(content.keys() - {"version", "digest", "meshes"}):
            raise ValueError(f"nothing in such a file is called {short(unknown[0])!r}")  # noqa: TRY301
        if not isinstance(content["meshes"], list):
            raise ValueError("'meshes' is not a list")  # noqa: TRY301, TRY004  # of a file
        if content.get("digest", _digest(content["meshes"])) != _digest(content["meshes"]):
            raise ValueError(_CHANGED)  # noqa: TRY301
        return tuple(_read_entry(entry) for entry in content["meshes"])
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise _malformed(source, reason(error)) from error


def _malformed(source: str, why: str) -> LinksFileError:
    return LinksFileError(
        asked=f"read measured link figures from {source}",
        found=f"it is not a file of link figures ({why})",
        do="Move it away and run `shardwise calibrate`, which writes a new one, or set SHARDWISE_LINKS=off.",
        path=source,
    )


def _read_entry(entry: Mapping[str, Any]) -> Calibration:
    dims, local = entry["mesh_dims"], entry["local"]
    if not (isinstance(dims, list) and dims):
        raise ValueError("'mesh_dims' is not a list of mesh dims")
    connections = tuple(map(_read_connection, dims))
    whole = None if entry["whole"] is None else _read_connection(entry["whole"])
    site = Site(
        [_count(dim, "size") for dim in dims],
        _text(entry, "device_type"),
        _text(entry, "device"),
        _text(entry, "backend"),
        [_count(dim, "hosts") for dim in dims],
        _count(entry, "hosts"),
    )
    links = Links(
        connections,
        _figure(local, "start"),
        _figure(local, "bandwidth"),
        whole,
        flops=_figure(local, "flops"),
        cache_bytes=_count(local, "cache_bytes", least=0),
        cache_bandwidth=_figure(local, "cache_bandwidth"),
    )
    return Calibration(site, links, _text(entry, "torch"), _text(entry, "date"))


def _read_connection(figures: Mapping[str, Any]) -> Connection:
    return Connection(**{kind: Link(**{name: _figure(figures[kind], name) for name in _OF_LINK}) for kind in KINDS})


_OF_LINK = tuple(attribute.name for attribute in fields(Link))


def _figure(table: Mapping[str, Any], name: str) -> float:
    value = table[name]
    if type(value) not in (int, float):
        raise ValueError(f"{name!r} is {value!r}, and not a number")
    return float(value)


def _count(table: Mapping[str, Any], name: str, least: int = 1) -> int:
    value = table[name]
    if type(value) is not int or not least <= value <= _MOST_COUNT:
        raise ValueError(f"{name!r} is {value!r}, and not a whole number from {least} to {_MOST_COUNT}")
    return value


_MOST_COUNT = (1 << 63) - 1


def _text(table: Mapping[str, Any], name: str) -> str:
    value = table[name]
    if not isinstance(value, str):
        raise ValueError(f"{name!r} is {value!r}, and not a text")  # noqa: TRY004  # of a file
    if len(value) > _LONGEST or not value.isprintable():
        raise ValueError(f"{name!r} is {short(value)!r}, and not a name")
    return value


_LONGEST = 200  # letters: errors and tables show these texts


# -- writing ---------------------------------------------------------------------------------------------------------


def show(calibrations: Iterable[Calibration]) -> str:
    """The text of a file with these entries; :func:`parse` reads exactly the same floats from it."""
    meshes = []
    for calibration in calibrations:
        site, links = calibration.site, calibration.links
        mesh_dims = [
            {"size": n, "hosts": hosts, **asdict(connection)}
            for n, hosts, connection in zip(site.mesh_shape, site.hosts, links.mesh_dims, strict=True)
        ]
        meshes.append(
            {
                "device_type": site.device_type,
                "device": site.device,
                "backend": site.backend,
                "hosts": site.total_hosts,
                "torch": calibration.torch,
                "date": calibration.date,
                "local": {
                    "start": links.local_start,
                    "bandwidth": links.memory_bandwidth,
                    "flops": links.flops,
                    "cache_bytes": links.cache_bytes,
                    "cache_bandwidth": links.cache_bandwidth,
                },
                "mesh_dims": mesh_dims,
                "whole": None if links.whole is None else asdict(links.whole),
            }
        )
    return json.dumps({"version": VERSION, "digest": _digest(meshes), "meshes": meshes}, indent=1) + "\n"


_CHANGED = (
    "its digest is another one: the figures were changed after they were written; leave the digest out if you did"
)


def _digest(meshes: Any) -> str:
    return hashlib.sha256(json.dumps(meshes, sort_keys=True).encode()).hexdigest()[:16]


def store(calibration: Calibration, path: Path) -> None:
    """Write an entry to a file, in place of the one for its site; the other entries of the file stay.

    Raises what :func:`parse` raises for the existing file, and :class:`LinksFileError` where nothing can be written.
    """
    try:
        entries = read(path) if path.exists() else ()
        others = [c for c in entries if c.site != calibration.site]
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process may read the file meanwhile, so it is replaced at once.
        write_whole(path, show([calibration, *others]))
    except OSError as error:
        raise LinksFileError(
            asked=f"write measured link figures to {path}",
            found=reason(error),
            do="Name a file that can be written.",
            path=str(path),
        ) from error
