"""What ``plugins check`` is asked to check: an installed plugin, a checkout, a wheel or one file."""

from __future__ import annotations

import json
import os
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import Distribution, EntryPoint, PathDistribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import click
from attrs import frozen

from shardwise.cli.plugin_states import no_such_plugin, plugins_named
from shardwise.discovery.entry_points import GROUP, LIKE_OURS, discover
from shardwise.kernel.foreign_files import reason
from shardwise.kernel.plurals import counted
from shardwise.settings import Settings, normalised

__all__ = ["SAMPLES", "SAMPLES_GROUP", "PluginToCheck", "editable_folder", "find_subject"]

SAMPLES = Path("tests", "samples.py")
"""Where a checkout keeps the sample calls of its ops, if it does not declare them."""

SAMPLES_GROUP = "shardwise.samples"
"""The group of entry points for sample calls: a module with SAMPLES under the plugin's name. No program imports it."""


@frozen
class PluginToCheck:
    """A plugin to check. ``kind``: installed, checkout, wheel or file.

    ``entries`` are its entry points in shardwise's groups of any major version, and in groups that are slips of these.
    ``requires`` are its requirements (None: they cannot be read), ``roots`` the folders that its modules are imported
    from (none: from the environment), ``samples`` the file of its sample calls, ``declared`` the entry points of
    modules with sample calls, ``absent`` what a checkout names for its wheel and does not have, ``keywords`` the words
    that an index finds it by (None: they cannot be read).
    """

    kind: str
    name: str
    version: str
    entries: tuple[EntryPoint, ...]
    requires: tuple[str, ...] | None
    roots: tuple[Path, ...] = ()
    samples: Path | None = None
    declared: tuple[EntryPoint, ...] = ()
    absent: tuple[str, ...] = ()
    keywords: tuple[str, ...] | None = None

    def __str__(self) -> str:
        # A wheel's is a scratch folder.
        where = f", {self.roots[0]}" if self.kind in ("checkout", "file") else ""
        return f"{self.name} {self.version} ({self.kind}{where})"


def find_subject(text: str, scratch: Path) -> PluginToCheck:
    """The plugin of that name, or the one at that path; a wheel is unpacked to ``scratch``.

    Raises ``click.ClickException`` if there is not one, or it cannot be read.
    """
    path = Path(text)
    known = discover(Settings())
    chosen = plugins_named(text, known)
    if chosen:
        return _installed([plugin.entry for plugin in chosen])
    if path.is_dir():
        return _checkout(path.resolve())
    if path.is_file() and path.suffix == ".whl":
        try:
            with zipfile.ZipFile(path) as archive:
                archive.extractall(scratch)
        except (OSError, zipfile.BadZipFile) as error:
            raise click.ClickException(f"{path} is not a wheel: {error}") from error
        metadata = sorted(scratch.glob("*.dist-info"))
        if len(metadata) != 1:
            raise click.ClickException(f"{path} is not a wheel: it has {counted(len(metadata), 'folder')} of metadata")
        dist = PathDistribution(metadata[0])
        entries = tuple(entry for entry in dist.entry_points if LIKE_OURS.match(entry.group))
        name = normalised(dist.metadata["Name"])
        declared = _declared(dist, entries)
        requires = tuple(dist.requires or ())
        return PluginToCheck(
            "wheel", name, dist.version, entries, requires, (scratch,), declared=declared, keywords=_keywords(dist)
        )
    if path.is_file() and path.suffix == ".py":
        return _file(path.resolve())
    if ":" in text and not path.exists():
        raise click.ClickException(
            f"{text} names a function of a program: `shardwise check {text} --mesh 2x2` compares it with one device."
        )
    if path.exists() or path.suffix in (".whl", ".py") or "/" in text or os.sep in text:
        what = "is not a folder, a wheel or a .py file" if path.exists() else "does not exist"
        raise click.ClickException(
            f"{text} {what}. Name an installed plugin, a checkout's folder, a .whl or a .py file."
        )
    raise no_such_plugin(text, known)


# -- installed, wheels -----------------------------------------------------------------------------------------------


def _installed(entries: list[EntryPoint]) -> PluginToCheck:
    dist = entries[0].dist
    assert dist is not None
    if any(entry.dist is None or normalised(entry.dist.name) != normalised(dist.name) for entry in entries):
        names = sorted({entry.dist.name for entry in entries if entry.dist})
        raise click.ClickException(f"{' and '.join(names)} both have a plugin of that name. Name the distribution.")
    return PluginToCheck(
        "installed",
        normalised(dist.name),
        dist.version,
        tuple(entries),
        tuple(dist.requires or ()),
        samples=_samples_in(editable_folder(dist)),
        declared=_declared(dist, entries),
        keywords=_keywords(dist),
    )


def _keywords(dist: Distribution) -> tuple[str, ...]:
    """The words of a metadata field that has commas between them, or blanks in the metadata of old tools."""
    text = dist.metadata["Keywords"] or ""
    return tuple(word.strip() for word in (text.split(",") if "," in text else text.split()))


def _declared(dist: Distribution, entries: Iterable[EntryPoint]) -> tuple[EntryPoint, ...]:
    names = {normalised(entry.name) for entry in entries}
    return tuple(e for e in dist.entry_points if e.group == SAMPLES_GROUP and normalised(e.name) in names)


def editable_folder(dist: Distribution) -> Path | None:
    """The checkout behind an editable installation (PEP 610); None for any other."""
    try:
        direct_url = json.loads(dist.read_text("direct_url.json") or "{}")
        url = urlsplit(direct_url["url"])
        editable = direct_url["dir_info"]["editable"]
    except (ValueError, KeyError, TypeError):
        return None
    return Path(unquote(url.path)) if editable and url.scheme == "file" else None


def _samples_in(folder: Path | None) -> Path | None:
    return folder / SAMPLES if folder is not None and (folder / SAMPLES).is_file() else None


# -- checkouts -------------------------------------------------------------------------------------------------------


def _checkout(folder: Path) -> PluginToCheck:
    path = folder / "pyproject.toml"
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        project = content["project"]
        name = project["name"]
    except FileNotFoundError as error:
        raise click.ClickException(f"{folder} is not a checkout of a plugin: it has no pyproject.toml") from error
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{path} cannot be read: {reason(error)}") from error
    except (KeyError, TypeError):
        name = None
    if not isinstance(name, str):
        raise click.ClickException(f"{path} has no [project] with a name")
    try:
        return _described(folder, name, project, content.get("tool", {}))
    except (AttributeError, TypeError, ValueError) as error:
        raise click.ClickException(
            f"{path} has a table of another form than the standard's: {reason(error)}"
        ) from error


def _described(folder: Path, name: str, project: Mapping[str, Any], tool: Mapping[str, Any]) -> PluginToCheck:
    groups: Mapping[str, Mapping[str, str]] = project.get("entry-points", {})
    declared = groups.get(SAMPLES_GROUP, {}).items()
    return PluginToCheck(
        "checkout",
        normalised(name),
        str(project.get("version", "with a version made when it is built")),
        tuple(
            EntryPoint(name=key, value=value, group=group)
            for group, listed in groups.items()
            if LIKE_OURS.match(group)
            for key, value in listed.items()
        ),
        None if "dependencies" in project.get("dynamic", ()) else tuple(project.get("dependencies", ())),
        tuple(dict.fromkeys(_roots(folder, tool))),
        _samples_in(folder),
        tuple(EntryPoint(name=key, value=value, group=SAMPLES_GROUP) for key, value in declared),
        tuple(package for package in _hatch_packages(tool) if not (folder / package).exists()),
        None if "keywords" in project.get("dynamic", ()) else tuple(map(str, project.get("keywords", ()))),
    )


def _roots(folder: Path, tool: Mapping[str, Any]) -> Iterator[Path]:
    """The folders that a checkout's packages are imported from: those of its build backend, then src, then the
    checkout.
    """
    for package in _hatch_packages(tool):
        yield (folder / package).parent
    build = _table_at(tool, "hatch", "build")
    setuptools = _table_at(tool, "setuptools")
    places = [*_strings_at(build, "dev-mode-dirs"), *_strings_at(setuptools, "packages", "find", "where")]
    places += [root for package, root in _table_at(setuptools, "package-dir").items() if package == ""]
    for place in [*places, "src"]:
        if (folder / place).is_dir():
            yield (folder / place).resolve()
    yield folder


def _hatch_packages(tool: Mapping[str, Any]) -> list[str]:
    """The folders that hatch puts into a wheel, which it builds without those that are not there."""
    build = _table_at(tool, "hatch", "build")
    return [*_strings_at(build, "targets", "wheel", "packages"), *_strings_at(build, "packages")]


def _table_at(table: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    inner: Any = table
    for key in keys:
        inner = inner.get(key, {}) if isinstance(inner, Mapping) else {}
    return inner if isinstance(inner, Mapping) else {}


def _strings_at(table: Mapping[str, Any], *keys: str) -> list[str]:
    words = _table_at(table, *keys[:-1]).get(keys[-1], ())
    return [word for word in words if isinstance(word, str)] if isinstance(words, list) else []


# -- one file --------------------------------------------------------------------------------------------------------


def _file(path: Path) -> PluginToCheck:
    """The module in a file, by its name in its package."""
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").is_file():
        root, parts = root.parent, [root.name, *parts]
    name = normalised(path.stem)
    entry = EntryPoint(name=name, value=".".join(parts), group=GROUP)
    return PluginToCheck("file", name, "without a version", (entry,), None, (root,))
