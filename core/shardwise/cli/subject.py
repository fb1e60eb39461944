"""What ``plugins check`` is asked to check: an installed plugin, a checkout, a wheel or one file."""

from __future__ import annotations

import json
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution, EntryPoint, PathDistribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import click
from attrs import frozen

from shardwise.cli.plugin_states import no_such_plugin, plugins_named
from shardwise.discovery.entry_points import GROUP, discover
from shardwise.settings import Settings, normalised

__all__ = ["FAMILY", "SAMPLES", "Subject", "editable_folder", "find_subject"]

FAMILY = GROUP.rstrip("0123456789")
SAMPLES = Path("tests", "samples.py")
"""Where a checkout keeps the sample calls of its ops."""


@frozen
class Subject:
    """A plugin to check, wherever it lies. ``kind``: installed, checkout, wheel or file.

    ``entries`` are its entry points in shardwise's groups of any major version, ``requires`` its requirements (None:
    it says nothing of them that can be read), ``roots`` the folders that its modules are imported from (none: from the
    environment), ``samples`` the file of its sample calls.
    """

    kind: str
    name: str
    version: str
    entries: tuple[EntryPoint, ...]
    requires: tuple[str, ...] | None
    roots: tuple[Path, ...] = ()
    samples: Path | None = None

    def __str__(self) -> str:
        # A wheel's is a scratch folder.
        where = f", {self.roots[0]}" if self.kind in ("checkout", "file") else ""
        return f"{self.name} {self.version} ({self.kind}{where})"


def find_subject(text: str, scratch: Path) -> Subject:
    """The plugin of that name, else what lies at that path; a wheel is unpacked to ``scratch``.

    Raises ``click.ClickException`` where there is none, or where it cannot be read.
    """
    path = Path(text)
    known = discover(Settings())
    chosen = plugins_named(text, known)
    if chosen:
        return _installed([plugin.entry for plugin in chosen])
    if path.is_dir():
        return _checkout(path.resolve())
    if path.is_file() and path.suffix == ".whl":
        return _wheel(path, scratch)
    if path.is_file() and path.suffix == ".py":
        return _file(path.resolve())
    if path.exists() or path.suffix in (".whl", ".py") or len(path.parts) > 1:
        what = "is no folder, wheel or .py file" if path.exists() else "does not exist"
        raise click.ClickException(
            f"{text} {what}. Name an installed plugin, a checkout's folder, a .whl or a .py file."
        )
    raise no_such_plugin(text, known)


# -- installed, wheels -----------------------------------------------------------------------------------------------


def _installed(entries: list[EntryPoint]) -> Subject:
    dist = entries[0].dist
    assert dist is not None
    if any(entry.dist is None or normalised(entry.dist.name) != normalised(dist.name) for entry in entries):
        names = sorted({entry.dist.name for entry in entries if entry.dist})
        raise click.ClickException(f"{' and '.join(names)} both have a plugin of that name. Name the distribution.")
    return Subject(
        "installed",
        normalised(dist.name),
        dist.version,
        tuple(entries),
        tuple(dist.requires or ()),
        samples=_existing(editable_folder(dist)),
    )


def editable_folder(dist: Distribution) -> Path | None:
    """The checkout behind an editable installation (PEP 610); None for any other."""
    try:
        said = json.loads(dist.read_text("direct_url.json") or "{}")
        url = urlsplit(said["url"])
        editable = said["dir_info"]["editable"]
    except (ValueError, KeyError, TypeError):
        return None
    return Path(unquote(url.path)) if editable and url.scheme == "file" else None


def _existing(folder: Path | None) -> Path | None:
    return folder / SAMPLES if folder is not None and (folder / SAMPLES).is_file() else None


def _wheel(path: Path, scratch: Path) -> Subject:
    try:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(scratch)
    except (OSError, zipfile.BadZipFile) as error:
        raise click.ClickException(f"{path} is no wheel: {error}") from error
    metadata = sorted(scratch.glob("*.dist-info"))
    if len(metadata) != 1:
        raise click.ClickException(f"{path} is no wheel: it has {len(metadata)} folders of metadata")
    dist = PathDistribution(metadata[0])
    entries = tuple(entry for entry in dist.entry_points if entry.group.startswith(FAMILY))
    name = normalised(dist.metadata["Name"])
    return Subject("wheel", name, dist.version, entries, tuple(dist.requires or ()), (scratch,))


# -- checkouts -------------------------------------------------------------------------------------------------------


def _checkout(folder: Path) -> Subject:
    path = folder / "pyproject.toml"
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        project = content["project"]
        name = project["name"]
    except OSError as error:
        raise click.ClickException(f"{folder} is no checkout of a plugin: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise click.ClickException(f"{path} has no [project] with a name that can be read: {error!r}") from error
    groups: Mapping[str, Mapping[str, str]] = project.get("entry-points", {})
    return Subject(
        "checkout",
        normalised(name),
        str(project.get("version", "with a version made when it is built")),
        tuple(
            EntryPoint(name=key, value=value, group=group)
            for group, listed in groups.items()
            if group.startswith(FAMILY)
            for key, value in listed.items()
        ),
        None if "dependencies" in project.get("dynamic", ()) else tuple(project.get("dependencies", ())),
        tuple(dict.fromkeys(_roots(folder, content.get("tool", {})))),
        _existing(folder),
    )


def _roots(folder: Path, tool: Mapping[str, Any]) -> Iterator[Path]:
    """The folders that a checkout's packages are imported from: as its build backend is told, else src, else itself."""
    build = _at(tool, "hatch", "build")
    for package in [*_listed(build, "targets", "wheel", "packages"), *_listed(build, "packages")]:
        yield (folder / package).parent
    setuptools = _at(tool, "setuptools")
    places = [*_listed(build, "dev-mode-dirs"), *_listed(setuptools, "packages", "find", "where")]
    places += [root for package, root in _at(setuptools, "package-dir").items() if package == ""]
    for place in [*places, "src"]:
        if (folder / place).is_dir():
            yield (folder / place).resolve()
    yield folder


def _at(table: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    found: Any = table
    for key in keys:
        found = found.get(key, {}) if isinstance(found, Mapping) else {}
    return found if isinstance(found, Mapping) else {}


def _listed(table: Mapping[str, Any], *keys: str) -> list[str]:
    words = _at(table, *keys[:-1]).get(keys[-1], ())
    return [word for word in words if isinstance(word, str)] if isinstance(words, list) else []


# -- one file --------------------------------------------------------------------------------------------------------


def _file(path: Path) -> Subject:
    """The module in a file, under the name that it has in its package."""
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").is_file():
        root, parts = root.parent, [root.name, *parts]
    name = normalised(path.stem)
    entry = EntryPoint(name=name, value=".".join(parts), group=GROUP)
    return Subject("file", name, "without a version", (entry,), None, (root,))
