"""Find plugins: the entry points of the environment, and the status of each by the settings. Imports no plugin."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from importlib.metadata import Distribution, EntryPoint, distributions

from attrs import evolve, frozen

from shardwise.errors import SettingsError
from shardwise.kernel.first_party import CORE, FAMILIES, PROJECT, core_version, is_first_party, requirement
from shardwise.kernel.precedence import Origin
from shardwise.settings import Settings, normalised, read_settings

__all__ = ["GROUP", "LIKE_OURS", "InstalledPlugin", "discover"]

GROUP = "shardwise.plugins.v1"
_FAMILY = "shardwise.plugins.v"
LIKE_OURS = re.compile(r"shardwise[-._]*plugin", re.IGNORECASE)
"""Groups of any major version, and slips in writing one, which are named instead of being passed over."""
_VALUE = re.compile(r"\w+(\.\w+)*\s*(:\s*\w+(\.\w+)*\s*)?(\[.*\]\s*)?")
"""A module, an attribute of it and extras, as the specification of entry points has it."""


@frozen
class InstalledPlugin:
    """A plugin's entry point, before anything is imported. ``status``: ready, blocked, needs upgrade or refused.

    ``location`` is the folder that it is installed in. ``hides`` describes other copies of it, which are not used.
    """

    origin: Origin
    entry: EntryPoint
    status: str
    reason: str = ""
    location: str = ""
    hides: tuple[str, ...] = ()

    @property
    def first_party(self) -> bool:
        return self.origin.first_party


def discover(settings: Settings | None = None) -> list[InstalledPlugin]:
    """All plugin entry points of the environment, sorted by name, with their status.

    Raises :class:`SettingsError` if the settings name a plugin that is not installed.
    """
    settings = read_settings() if settings is None else settings
    plugins = []
    for (dist, entry), *others in _copies().values():
        origin = Origin(entry.name, normalised(dist.name), dist.version)
        hides = [
            f"{d.name} {d.version} in {d.folder}"
            for d, _ in others
            if (normalised(d.name), d.folder) != (origin.distribution, dist.folder)
        ]
        plugin = InstalledPlugin(origin, entry, "ready", location=dist.folder, hides=tuple(hides))
        status, reason = _status(settings, plugin, dist)
        plugins.append(evolve(plugin, status=status, reason=reason))
    plugins.sort(key=lambda p: (p.origin.plugin, p.origin.distribution, p.entry.group))
    current = {p.origin.plugin: p.origin.distribution for p in plugins if p.entry.group == GROUP}
    # A plugin may register under several major versions. The entry point of this version is used.
    plugins = [p for p in plugins if p.entry.group == GROUP or current.get(p.origin.plugin) != p.origin.distribution]
    _check_names(plugins, settings)
    return plugins


class _Distribution:
    """What is read of a distribution, once: it may have many plugins, and importlib reads files at each question."""

    def __init__(self, read: Distribution) -> None:
        self._read = read
        metadata = read.metadata
        self.name, self.version = metadata["Name"], metadata["Version"]

    @cached_property
    def is_installation(self) -> bool:
        """Whether it was installed: metadata of an old checkout has no RECORD (PEP 376)."""
        return self._read.read_text("RECORD") is not None

    @cached_property
    def folder(self) -> str:
        from pathlib import Path

        return str(Path(str(self._read.locate_file(""))).resolve())

    @cached_property
    def version_clash(self) -> str:
        """Why its own requirement on shardwise or its core does not hold; empty if it does.

        Whatever it requires, what has the name of a family is one of this release.
        """
        name, have = normalised(self.name), core_version()
        if name in FAMILIES and self.version != have:
            return f"{name} ships with shardwise, whose core is {have} here: a family and its core are of one release"
        return _version_clash(self._read.requires or ())


Copy = tuple[_Distribution, EntryPoint]


def _copies() -> dict[tuple[str, str, str], list[Copy]]:
    """The entry points with their copies: installed ones in the order of the path, then stale metadata.

    Metadata of an old checkout may come before a real installation on the path. A folder may also be on the path
    twice. A family of shardwise may be there twice, too: as a distribution of its own, whose files are imported, and in
    a checkout's distribution of everything.
    """
    by_name: dict[tuple[str, str, str], list[Copy]] = {}
    for read in distributions():
        entries = [entry for entry in read.entry_points if LIKE_OURS.match(entry.group)]
        # A broken distribution may have no name. To parse metadata takes long, so only that of plugins is parsed.
        if entries and (dist := _Distribution(read)).name:
            name = normalised(dist.name)
            for entry in entries:
                owner = PROJECT if is_first_party(name) and entry.name in FAMILIES else name
                by_name.setdefault((entry.group, owner, entry.name), []).append((dist, entry))
    for copies in by_name.values():
        copies.sort(key=lambda copy: (not copy[0].is_installation, normalised(copy[0].name) == PROJECT))
    return by_name


def _status(settings: Settings, plugin: InstalledPlugin, dist: _Distribution) -> tuple[str, str]:
    """The status of a plugin and the reason."""
    origin, group = plugin.origin, plugin.entry.group
    if any(origin.is_called(name) for name in settings.disabled):
        return "blocked", f"in {settings.source('disabled')}"
    allowed = settings.plugins is not None and any(origin.is_called(name) for name in settings.plugins)
    if not settings.autoload and not allowed:
        return "blocked", f"{settings.source('autoload')} is off"
    if settings.plugins is not None and not allowed:
        return "blocked", f"not in {settings.source('plugins')}"
    if fault := _fault(plugin):
        return "refused", fault
    if group != GROUP:
        newer = "this shardwise" if _major(group) > _major(GROUP) else "the plugin"
        return "needs upgrade", f"it registers under {group}, this shardwise reads {GROUP}: upgrade {newer}"
    clash = dist.version_clash
    return ("refused", clash) if clash else ("ready", "")


def _fault(plugin: InstalledPlugin) -> str:
    """What is wrong with how an entry point is written; empty if nothing is."""
    name, value, group = plugin.origin.plugin, plugin.entry.value, plugin.entry.group
    if not group.startswith(_FAMILY):
        return f"it registers under {group}: plugins register under {GROUP}"
    if not name:
        return f"its entry point for {value} has no name: write acme = {value}"
    if not _VALUE.fullmatch(value):
        return f"its entry point {name} = {value} names no module: write it as for import, as in {name} = acme.plugin"
    if not plugin.first_party and is_first_party(normalised(name)):
        return f"its entry point has the name {name}, which ships with shardwise: choose another"
    return ""


def _major(group: str) -> int:
    digits = group.removeprefix(_FAMILY).partition(".")[0]
    return int(digits) if digits.isdigit() else 0


def _check_names(plugins: Iterable[InstalledPlugin], settings: Settings) -> None:
    origins = [p.origin for p in plugins]
    named = {"plugins": settings.plugins or (), "disabled": settings.disabled, "prefer": dict(settings.prefer).values()}
    for setting, names in named.items():
        # A family that is not installed need not be disabled, but may be.
        absent = FAMILIES if setting == "disabled" else ()
        unknown = sorted(
            {name for name in names if name not in absent and not any(origin.is_called(name) for origin in origins)}
        )
        if unknown:
            raise SettingsError(
                asked=f"read {settings.source(setting)}",
                found=f"there is no plugin {', '.join(unknown)}",
                do=_advice(unknown[0], origins),
                plugin=unknown[0],
                setting=settings.source(setting),
            )


def _advice(name: str, origins: Iterable[Origin]) -> str:
    """What to do about a name that no installed plugin has."""
    from difflib import get_close_matches  # only here: what is well needs none

    known = sorted({o.plugin for o in origins})
    listed = f"The installed plugins are {', '.join(known) or 'none'}."
    if name in FAMILIES:
        return f"Install it: pip install {requirement(name)}. {listed}"
    near = get_close_matches(name, known, n=1)
    return f"The nearest is {near[0]}. {listed}" if near else listed


def _version_clash(requires: Iterable[str]) -> str:
    """Which of a distribution's requirements on shardwise or its core does not hold, and why; empty if all do."""
    # A requirement begins with its name. Few begin with this one, and the families of a release pin their core.
    ours = [line.strip() for line in requires if normalised(line.strip()).startswith(PROJECT)]
    if not ours:
        return ""
    have = core_version()
    for line in ours:
        if line not in (f"{PROJECT}=={have}", f"{CORE}=={have}") and (clash := _clash(line, have)):
            return clash
    return ""


def _clash(line: str, have: str) -> str:
    """Why a requirement on something whose name begins with that of shardwise does not hold; empty if it does."""
    # Imported here: `import shardwise` does not need `packaging`, whose import takes as long as finding all plugins.
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        need = Requirement(line)
    except InvalidRequirement as error:
        return f"its requirement {line!r} cannot be read: {error}"
    name = normalised(need.name)
    if name not in (PROJECT, CORE) or (need.marker and not need.marker.evaluate({"extra": ""})):
        return ""
    if need.specifier.contains(have, prereleases=True):
        return ""
    return f"it needs {name}{need.specifier} and {have} is installed"
