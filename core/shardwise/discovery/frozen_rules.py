"""The rules of this installation as digests: what a lock file holds, and what a checkpoint remembers.

A digest is the same in every process and on every machine that has the same plugins: it is of what each rule says, and
of the source files of the plugin's package with plain line ends. Neither byte code nor places of files play a part.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, fields, frozen

from shardwise.discovery.entry_points import InstalledPlugin
from shardwise.discovery.loading import Status
from shardwise.errors import LockError
from shardwise.kernel.first_party import core_version
from shardwise.kernel.foreign_files import load_toml, read_text, reason, short
from shardwise.kernel.precedence import Entry
from shardwise.kernel.registrar import RuleModule
from shardwise.kernel.signature import op_name

__all__ = [
    "HEAD",
    "FrozenPlugin",
    "RuleLock",
    "as_refused",
    "check_installed",
    "check_loaded",
    "digests_of_modules",
    "freeze",
    "in_short",
    "read_lock",
]

VERSION = 1
NO_FILES = "none"
"""The digest of a package whose source files are not there."""

HEAD = """\
# The rules that a program may load. SHARDWISE_LOCK, or `lock` in [tool.shardwise], names this file, and anything else
# is refused. `shardwise plugins freeze --out FILE` writes it again.
"""


@frozen
class FrozenPlugin:
    """A plugin as it is in a lock: the version of its distribution, how many ops have its rules, and two digests."""

    name: str
    distribution: str
    version: str
    ops: int
    rules: str
    code: str

    @property
    def origin(self) -> tuple[str, str]:
        """What tells plugins apart."""
        return (self.name, self.distribution)


@frozen
class RuleLock:
    """The content of a lock: the version of shardwise, and the plugins sorted by name."""

    shardwise: str
    plugins: tuple[FrozenPlugin, ...]

    def text(self) -> str:
        """The file: sorted, one table for each plugin."""
        parts = [f"{HEAD}version = {VERSION}\nshardwise = {_quoted(self.shardwise)}\n"]
        for plugin in self.plugins:
            lines = [f"{name} = {_value(getattr(plugin, name))}\n" for name in _FIELDS]
            parts.append("[[plugin]]\n" + "".join(lines))
        return "\n".join(parts)


_FIELDS = tuple(attribute.name for attribute in fields(FrozenPlugin))


def _value(value: str | int) -> str:
    return str(value) if isinstance(value, int) else _quoted(value)


def _quoted(text: str) -> str:
    import json

    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


# -- making one ------------------------------------------------------------------------------------------------------


def freeze(statuses: Iterable[Status]) -> RuleLock:
    """The lock of the plugins that are loaded."""
    loaded = (_freeze_plugin(status) for status in statuses if status.status == "loaded")
    return RuleLock(core_version(), tuple(sorted(loaded, key=lambda plugin: plugin.origin)))


def _freeze_plugin(status: Status) -> FrozenPlugin:
    """A loaded plugin with its digests."""
    origin = status.plugin.origin
    digests = (digest_of_rules(status.entries), digest_of_code(status.plugin))
    return FrozenPlugin(origin.plugin, origin.distribution, origin.version, status.ops, *digests)


def in_short(status: Status) -> str:
    """The version of a loaded plugin and a digest of its rules, for the modules that it has not imported of their code.

    No module is imported for it: most programs need few, and all of them take longer than a checkpoint.
    """
    origin, registrar = status.plugin.origin, status.registrar
    assert registrar is not None, f"{origin} is {status.status}"
    own, code = status.plugin.entry.module.rpartition(".")[0], digest_of_code(status.plugin)
    others = [m for m in registrar.modules if code == NO_FILES or m.name.rpartition(".")[0] != own]
    digests = (digest_of_rules(registrar.entries), code, *digests_of_modules(others))
    together = hashlib.sha256(" ".join(digests).encode()).hexdigest()
    return f"{origin.distribution} {origin.version} {together[:16]}"


def digests_of_modules(modules: Iterable[RuleModule]) -> list[str]:
    """Digests of the packages that have modules of rules; of their rules, where a package has no source files."""
    by_package: dict[str, list[RuleModule]] = {}
    for module in modules:
        by_package.setdefault(module.name.rpartition(".")[0] or module.name, []).append(module)
    digests = []
    for name, of_package in sorted(by_package.items()):
        code = digest_of_package(name)
        digests.append(code if code != NO_FILES else digest_of_rules(e for m in of_package for e in m.all_entries()))
    return digests


def digest_of_rules(entries: Iterable[Entry]) -> str:
    """A digest of what rules say: ops, notation, and what else they were made with."""
    lines = sorted(
        f"{op_name(e.op)} {e.rule.form} {e.rule.text} static={sorted(e.rule.static)} writes={sorted(e.rule.writes)} "
        f"zip={e.rule.zip_lists} replaces={e.replaces}\n"
        for e in entries
    )
    return _digest(line.encode() for line in lines)


def digest_of_code(plugin: InstalledPlugin) -> str:
    """A digest of the source files of a plugin's package, which is not imported; "none" where there are none."""
    return digest_of_package(plugin.entry.module)


def digest_of_package(module: str) -> str:
    """The same of the package that a module is in, or of the module."""
    root = _package_of(module)
    if root is None:
        return NO_FILES
    files = sorted(root.rglob("*.py")) if root.is_dir() else [root]
    named = [(path.relative_to(root.parent).as_posix(), path) for path in files if path.is_file()]
    return _digest(part for name, path in named for part in (name.encode(), _source(path)))


def _source(path: Path) -> bytes:
    return path.read_bytes().replace(b"\r\n", b"\n")


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return f"sha256:{digest.hexdigest()}"


def _package_of(module: str) -> Path | None:
    """The folder or file of the first package on the way to a module that is one: a namespace has parts of others."""
    places: Sequence[str] | None = None
    for name in _ways(module):
        spec = importlib.machinery.PathFinder.find_spec(name, places)
        if spec is None and places is None:
            spec = importlib.util.find_spec(name)  # of an editable installation that has a finder of its own
        if spec is None:
            return None
        if spec.has_location and spec.origin:
            path = Path(spec.origin)
            return path.parent if path.name.startswith("__init__.") else path
        places = list(spec.submodule_search_locations or ())
    return None


def _ways(module: str) -> Iterator[str]:
    parts = module.split(".")
    return (".".join(parts[: i + 1]) for i in range(len(parts)))


# -- reading one -----------------------------------------------------------------------------------------------------


def read_lock(path: str) -> RuleLock:
    """The lock in a file. Raises :class:`LockError` for one that cannot be read."""
    try:
        content = load_toml(read_text(Path(path)))
    except (OSError, ValueError) as error:
        raise _unreadable(path, reason(error)) from error
    if "version" not in content:
        raise _unreadable(path, "it has no version")
    number = content["version"]
    if type(number) is not int or number != VERSION:
        raise _unreadable(path, f"it is of version {short(repr(number))}, and this release reads {VERSION}")
    try:
        if unknown := sorted(content.keys() - {"version", "shardwise", "plugin"}):
            raise ValueError(f"nothing in a lock is called {short(unknown[0])!r}")  # noqa: TRY301
        plugins = tuple(_plugin(table) for table in content.get("plugin", []))
        lock = RuleLock(_text(content["shardwise"]), plugins)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unreadable(path, reason(error)) from error
    if len({plugin.origin for plugin in plugins}) != len(plugins):
        raise _unreadable(path, "a plugin is there twice")
    return lock


def _plugin(table: dict[str, Any]) -> FrozenPlugin:
    if missing := [name for name in _FIELDS if name not in table]:
        raise ValueError(f"the entry of {short(repr(table.get('name', 'a plugin')))} has no {' and no '.join(missing)}")
    if unknown := sorted(table.keys() - set(_FIELDS)):
        raise ValueError(f"nothing in an entry of a plugin is called {short(unknown[0])!r}")
    made = FrozenPlugin(**table)
    for name in _FIELDS:
        value = getattr(made, name)
        if name == "ops" and (type(value) is not int or value < 0):
            raise ValueError(f"'ops' is {short(repr(value))}")
        if name != "ops":
            _text(value)
    return made


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{short(repr(value))} is not a text")
    return value


def _unreadable(path: str, why: str) -> LockError:
    return LockError(
        asked=f"load the plugins that {path} allows",
        found=f"it is not a lock of rules that can be read: {why}",
        do="Restore it, or write it again with `shardwise plugins freeze`.",
        path=path,
    )


# -- comparing -------------------------------------------------------------------------------------------------------


def _refused(lock: RuleLock, plugins: Iterable[InstalledPlugin]) -> dict[tuple[str, str], tuple[str, str]]:
    """By plugin, what was locked and what was found, for those that a program would load and the lock does not allow.
    Nothing is imported.
    """
    locked = {plugin.origin: plugin for plugin in lock.plugins}
    wrong = {}
    for plugin in plugins:
        if plugin.status != "ready":
            continue
        origin = plugin.origin
        key = (origin.plugin, origin.distribution)
        one = locked.pop(key, None)
        if one is None:
            wrong[key] = ("nothing of that name", f"{origin.distribution} {origin.version}")
        elif one.version != origin.version:
            wrong[key] = (f"version {one.version}", f"version {origin.version}")
        elif one.code != (code := digest_of_code(plugin)):
            wrong[key] = (f"code {_shown(one.code)}", f"code {_shown(code)} of the same version")
    for key, one in locked.items():
        wrong[key] = (f"{one.distribution} {one.version}", "no such plugin that could be loaded")
    return wrong


def check_installed(path: str, plugins: Iterable[InstalledPlugin]) -> RuleLock:
    """Raise :class:`LockError` unless these are the plugins of the lock at ``path``; the lock. Nothing is imported."""
    lock = read_lock(path)
    have = core_version()
    wrong = _refused(lock, plugins)
    if have != lock.shardwise:
        wrong = {("shardwise", "shardwise"): (f"version {lock.shardwise}", f"version {have}"), **wrong}
    if wrong:
        raise _differs(path, wrong)
    return lock


def check_loaded(path: str, lock: RuleLock, statuses: Iterable[Status]) -> None:
    """Raise :class:`LockError` unless the rules that plugins registered are those of the lock that ``path`` had before
    they were loaded: what they have written to it since does not count.
    """
    locked = {plugin.origin: plugin for plugin in lock.plugins}
    wrong = {}
    for status in statuses:
        key = (status.plugin.origin.plugin, status.plugin.origin.distribution)
        if key not in locked or status.status in ("blocked", "needs upgrade"):
            continue
        rules = digest_of_rules(status.entries) if status.status == "loaded" else ""
        if rules != locked[key].rules:
            found = f"rules {_shown(rules)} of the same files" if rules else f"it {status.status}: {status.reason}"
            wrong[key] = (f"rules {_shown(locked[key].rules)}", found)
    if wrong:
        raise _differs(path, wrong)


_LISTED = 6  # differences that an error lists


def _shown(digest: str) -> str:
    return digest[:19]


def _differs(path: str, wrong: dict[tuple[str, str], tuple[str, str]]) -> LockError:
    lines = [f"{name}: locked is {locked}, found is {found}" for (name, _), (locked, found) in wrong.items()]
    (name, _), (locked, found) = next(iter(wrong.items()))
    return LockError(
        asked=f"load the plugins that {path} allows",
        found="; ".join(lines[:_LISTED]) + (f"; and {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""),
        do="Install what is locked, disable what is not, or look at the change and write the lock again with "
        "`shardwise plugins freeze`.",
        path=path,
        plugin=name,
        locked=locked,
        differs=found,
    )


def as_refused(path: str, plugins: Iterable[InstalledPlugin]) -> list[InstalledPlugin]:
    """The plugins, those that the lock does not allow with that status."""
    plugins = list(plugins)
    wrong = _refused(read_lock(path), plugins)
    return [
        evolve(plugin, status="refused", reason=f"{path} has {wrong[key][0]}, and found is {wrong[key][1]}")
        if (key := (plugin.origin.plugin, plugin.origin.distribution)) in wrong and plugin.status == "ready"
        else plugin
        for plugin in plugins
    ]
