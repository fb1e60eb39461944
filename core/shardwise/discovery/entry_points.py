"""Finding plugins: the entry points of the environment, and what the settings say of each. Imports no plugin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, EntryPoint, distributions

from attrs import evolve, frozen

from shardwise.errors import SettingsError
from shardwise.kernel.precedence import Origin
from shardwise.settings import Settings, normalised, read_settings

__all__ = ["InstalledPlugin", "GROUP", "discover"]

GROUP = "shardwise.plugins.v1"
_FAMILY = "shardwise.plugins.v"
FIRST_PARTY = "shardwise"


@frozen
class InstalledPlugin:
    """One plugin entry point, before anything is imported. ``status``: ready, blocked, needs upgrade or refused.

    ``location`` is the folder that it was installed to; ``hides`` tells of other copies of it, which are not used.
    """

    origin: Origin
    entry: EntryPoint
    status: str
    reason: str = ""
    location: str = ""
    hides: tuple[str, ...] = ()

    @property
    def first_party(self) -> bool:
        return self.origin.distribution == FIRST_PARTY


def discover(settings: Settings | None = None) -> list[InstalledPlugin]:
    """All plugin entry points of the environment, by name, with what the settings say of each.

    Raises :class:`SettingsError` when the settings name a plugin that is not there.
    """
    settings = read_settings() if settings is None else settings
    found = [_judge(settings, *copies) for copies in _copies().values()]
    found.sort(key=lambda f: (f.origin.plugin, f.origin.distribution, f.entry.group))
    current = {f.origin.plugin: f.origin.distribution for f in found if f.entry.group == GROUP}
    # One that registers under several majors works with several; the one that fits is used.
    found = [f for f in found if f.entry.group == GROUP or current.get(f.origin.plugin) != f.origin.distribution]
    _check_names(found, settings)
    return found


Copy = tuple[Distribution, EntryPoint]


def _copies() -> dict[tuple[str, str, str], list[Copy]]:
    """The entry points with their copies: what was installed first, in the order of the path, stale metadata last.

    Metadata of an old checkout may lie in front of a real installation on the path (PEP 376's RECORD tells which is
    one), and a folder may be on the path twice.
    """
    found: dict[tuple[str, str, str], list[Copy]] = {}
    for dist, entry in _entries():
        found.setdefault((entry.group, normalised(dist.name), entry.name), []).append((dist, entry))
    for copies in found.values():
        copies.sort(key=lambda copy: copy[0].read_text("RECORD") is None)
    return found


def _entries() -> Iterator[Copy]:
    for dist in distributions():
        # A broken distribution may have no name at all.
        if not dist.metadata["Name"]:
            continue
        for entry in dist.entry_points:
            if entry.group.startswith(_FAMILY):
                yield dist, entry


def _judge(settings: Settings, used: Copy, *others: Copy) -> InstalledPlugin:
    dist, entry = used
    place = _location(dist)
    hides = tuple(f"{dist.name} {dist.version} in {_location(dist)}" for dist, _ in others if _location(dist) != place)
    origin = Origin(entry.name, normalised(dist.name), dist.version)
    found = InstalledPlugin(origin, entry, "ready", location=place, hides=hides)
    status, reason = _verdict(settings, found, dist)
    return evolve(found, status=status, reason=reason)


def _location(dist: Distribution) -> str:
    from pathlib import Path

    return str(Path(str(dist.locate_file(""))).resolve())


def _verdict(settings: Settings, found: InstalledPlugin, dist: Distribution) -> tuple[str, str]:
    origin, group = found.origin, found.entry.group
    if any(origin.is_called(name) for name in settings.disabled):
        return "blocked", f"in {settings.source('disabled')}"
    allowed = settings.plugins is not None and any(origin.is_called(name) for name in settings.plugins)
    if not settings.autoload and not allowed:
        return "blocked", f"{settings.source('autoload')} is off"
    if settings.plugins is not None and not allowed:
        return "blocked", f"not in {settings.source('plugins')}"
    if group != GROUP:
        newer = "this shardwise" if _major(group) > _major(GROUP) else "the plugin"
        return "needs upgrade", f"it registers under {group}, this shardwise reads {GROUP}: upgrade {newer}"
    clash = _version_clash(dist)
    return ("refused", clash) if clash else ("ready", "")


def _major(group: str) -> int:
    digits = group.removeprefix(_FAMILY).partition(".")[0]
    return int(digits) if digits.isdigit() else 0


def _check_names(found: Iterable[InstalledPlugin], settings: Settings) -> None:
    origins = [f.origin for f in found]
    named = {"plugins": settings.plugins or (), "disabled": settings.disabled, "prefer": dict(settings.prefer).values()}
    for setting, names in named.items():
        unknown = sorted({name for name in names if not any(origin.is_called(name) for origin in origins)})
        if unknown:
            raise SettingsError(
                asked=f"read {settings.source(setting)}",
                found=f"there is no plugin {', '.join(unknown)}",
                do=f"The installed plugins are {', '.join(sorted({o.plugin for o in origins})) or 'none'}.",
                plugin=unknown[0],
                setting=settings.source(setting),
            )


def _version_clash(dist: Distribution) -> str:
    """Why the distribution's own requirement on shardwise does not hold, or nothing."""
    # `packaging` is needed once plugins are looked for, not to `import shardwise`.
    from packaging.requirements import InvalidRequirement, Requirement

    for line in dist.requires or ():
        try:
            need = Requirement(line)
        except InvalidRequirement as error:
            if normalised(line.strip()).startswith(FIRST_PARTY):
                return f"its requirement {line!r} cannot be read: {error}"
            continue
        if normalised(need.name) != FIRST_PARTY or (need.marker and not need.marker.evaluate({"extra": ""})):
            continue
        have = Distribution.from_name(FIRST_PARTY).version
        if not need.specifier.contains(have, prereleases=True):
            return f"it needs shardwise{need.specifier} and {have} is installed"
    return ""
