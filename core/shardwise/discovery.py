"""Finding and loading plugins: entry points in, a filled registry out.

``importlib.metadata`` finds, pluggy validates. Steps: enumerate, dedupe, sort by name, filter by settings, check the
version, import, register. A broken third-party plugin is reported and left out; a broken first-party one is fatal.
"""

from __future__ import annotations

import os
import threading
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import Distribution, EntryPoint, distributions

import pluggy
from attrs import frozen

from shardwise import hookspecs
from shardwise.errors import PluginLoadError
from shardwise.registry import Failure, Origin, Registrar, Registry

__all__ = ["GROUP", "Found", "Status", "default_registry", "discover", "load", "use_registry"]

GROUP = "shardwise.plugins.v1"
_FAMILY = "shardwise.plugins.v"
FIRST_PARTY = "shardwise"


@frozen
class Found:
    """One plugin entry point, before anything is imported. ``status``: ready, blocked, needs upgrade or refused."""

    origin: Origin
    entry: EntryPoint
    status: str
    reason: str = ""

    @property
    def first_party(self) -> bool:
        return self.origin.distribution == FIRST_PARTY


@frozen
class Status:
    """What became of a plugin: loaded, failed, blocked, needs upgrade or refused."""

    found: Found
    status: str
    reason: str = ""
    ops: int = 0
    traceback: str = ""


# -- finding -----------------------------------------------------------------------------------------------------


def discover() -> list[Found]:
    """All plugin entry points of the environment, by name, with what the settings say of each."""
    unique: dict[tuple[str, str, str], tuple[Distribution, EntryPoint]] = {}
    for dist in distributions():
        for entry in dist.entry_points:
            if entry.group.startswith(_FAMILY):
                # A stale egg-info beside a fresh install shows one plugin twice; the first on the path is imported.
                unique.setdefault((entry.group, _canonical(dist.name), entry.name), (dist, entry))
    found = [_judge(dist, entry) for dist, entry in unique.values()]
    found.sort(key=lambda f: (f.origin.plugin, f.origin.distribution))
    _check_names(found)
    return found


def _canonical(name: str) -> str:
    # Imported here and below: `packaging` is needed once plugins are looked for, not to `import shardwise`.
    from packaging.utils import canonicalize_name

    return canonicalize_name(name)


def _judge(dist: Distribution, entry: EntryPoint) -> Found:
    origin = Origin(entry.name, _canonical(dist.name), dist.version)
    if entry.group != GROUP:
        return Found(origin, entry, "needs upgrade", f"it registers under {entry.group}; this shardwise reads {GROUP}")
    if not _truthy(os.environ.get("SHARDWISE_AUTOLOAD", "1")):
        return Found(origin, entry, "blocked", "SHARDWISE_AUTOLOAD is off")
    allowed, disabled = _names("SHARDWISE_PLUGINS"), _names("SHARDWISE_DISABLE_PLUGINS") or set()
    if allowed is not None and entry.name not in allowed:
        return Found(origin, entry, "blocked", "not in SHARDWISE_PLUGINS")
    if entry.name in disabled:
        return Found(origin, entry, "blocked", "in SHARDWISE_DISABLE_PLUGINS")
    clash = _version_clash(dist)
    return Found(origin, entry, "refused" if clash else "ready", clash)


def _names(variable: str) -> set[str] | None:
    value = os.environ.get(variable)
    return None if value is None else {name.strip() for name in value.split(",") if name.strip()}


def _truthy(value: str) -> bool:
    return value.strip().lower() not in {"0", "false", "no", "off"}


def _check_names(found: Iterable[Found]) -> None:
    known = {f.origin.plugin for f in found}
    for variable in ("SHARDWISE_PLUGINS", "SHARDWISE_DISABLE_PLUGINS"):
        unknown = sorted((_names(variable) or set()) - known)
        if unknown:
            raise PluginLoadError(
                asked=f"read {variable}",
                found=f"there is no plugin {', '.join(unknown)}",
                do=f"The installed plugins are {', '.join(sorted(known)) or 'none'}.",
                plugin=unknown[0],
            )


def _version_clash(dist: Distribution) -> str:
    """Why the distribution's own requirement on shardwise does not hold, or nothing."""
    from packaging.requirements import Requirement

    for line in dist.requires or ():
        need = Requirement(line)
        if _canonical(need.name) != FIRST_PARTY or (need.marker and not need.marker.evaluate({"extra": ""})):
            continue
        have = Distribution.from_name(FIRST_PARTY).version
        if not need.specifier.contains(have, prereleases=True):
            return f"it needs shardwise{need.specifier} and {have} is installed"
    return ""


# -- loading -----------------------------------------------------------------------------------------------------


def load(found: Iterable[Found], registry: Registry) -> list[Status]:
    """Import and register the ready ones. Third-party failures become a warning and a :class:`Status`."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return [_load_one(manager, f, registry) if f.status == "ready" else Status(f, f.status, f.reason) for f in found]


def _load_one(manager: pluggy.PluginManager, found: Found, registry: Registry) -> Status:
    registrar = Registrar(found.origin)
    try:
        _register(manager, found, registrar)
    except Exception as error:  # noqa: BLE001  # a third party may raise anything; it is reported and kept
        return _failed(found, error, registry)
    registry.accept(registrar)
    return Status(found, "loaded", ops=len(registrar.entries))


def _register(manager: pluggy.PluginManager, found: Found, registrar: Registrar) -> None:
    name = f"{found.origin.distribution}:{found.origin.plugin}"
    module = found.entry.load()
    try:
        manager.register(module, name)
        manager.check_pending()
        impls = [i for i in manager.hook.shardwise_register.get_hookimpls() if i.plugin_name == name]
        if not impls:
            _refuse_hookless(found)
        for impl in impls:
            impl.function(*(registrar for _ in impl.argnames))
    except BaseException:
        # pluggy may keep a plugin whose validation failed, and a later check would blame the next one for it.
        if manager.has_plugin(name):
            manager.unregister(name=name)
        raise


def _refuse_hookless(found: Found) -> None:
    raise LookupError(f"{found.entry.value} implements no shardwise_register hook")


def _failed(found: Found, error: Exception, registry: Registry) -> Status:
    cause = f"{type(error).__name__}: {error}"
    disable = f"SHARDWISE_DISABLE_PLUGINS={found.origin.plugin}"
    trace = traceback.format_exc()
    if found.first_party or _truthy(os.environ.get("SHARDWISE_STRICT", "0")):
        raise PluginLoadError(
            asked=f"load the plugin {found.origin}",
            found=cause,
            do=f"Reinstall {found.origin.distribution}, or disable the plugin with {disable}.",
            plugin=found.origin.plugin,
            distribution=found.origin.distribution,
        ) from error
    registry.reject(Failure(found.origin, cause, trace))
    warnings.warn(
        f"shardwise left out the plugin {found.origin}: {cause}. Disable it with {disable}; "
        f"`shardwise plugins` lists all.",
        RuntimeWarning,
        stacklevel=2,
    )
    return Status(found, "failed", cause, traceback=trace)


# -- the registry of this process --------------------------------------------------------------------------------


class _Process:
    """The one registry of this process, filled at the first look-up."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.registry: Registry | None = None
        self.statuses: list[Status] = []


_process = _Process()


def default_registry() -> Registry:
    """The registry of this process; the first call finds and loads the plugins."""
    ready = _process.registry
    if ready is not None:
        return ready
    with _process.lock:
        if _process.registry is None:
            registry = Registry()
            _process.statuses = load(discover(), registry)
            _process.registry = registry
        return _process.registry


def statuses() -> list[Status]:
    """What became of each installed plugin."""
    default_registry()
    return list(_process.statuses)


@contextmanager
def use_registry(registry: Registry) -> Iterator[Registry]:
    """Make another registry this process's one for a while, as tests do."""
    with _process.lock:
        before, _process.registry = _process.registry, registry
    registry.changed()
    try:
        yield registry
    finally:
        with _process.lock:
            _process.registry = before
        for one in (registry, before):
            if one is not None:
                one.changed()
