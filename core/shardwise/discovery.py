"""Loading plugins, and the one registry of this process.

``finding`` enumerates, dedupes, sorts by name, filters by settings and checks versions; here each plugin that is left
is imported, registered and validated. A broken third-party plugin is reported and left out; a broken first-party one is
fatal.
"""

from __future__ import annotations

import inspect
import os
import threading
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pluggy
from attrs import frozen

from shardwise import hookspecs
from shardwise.cost import Links, supply_links
from shardwise.errors import PluginLoadError
from shardwise.finding import GROUP, Found, discover
from shardwise.registry import Failure, Registrar, Registry
from shardwise.settings import Settings, read_settings

__all__ = ["GROUP", "Found", "Status", "default_registry", "discover", "load", "statuses", "use_registry"]


@frozen
class Status:
    """What became of a plugin: loaded, failed, blocked, needs upgrade or refused."""

    found: Found
    status: str
    reason: str = ""
    ops: int = 0
    traceback: str = ""


# -- loading -----------------------------------------------------------------------------------------------------


def load(found: Iterable[Found], registry: Registry, *, strict: bool | None = None) -> list[Status]:
    """Import and register the ready ones. Third-party failures become a warning and a :class:`Status`.

    When ``strict`` (default: as the settings say) any problem raises :class:`PluginLoadError`.
    """
    strict = read_settings().strict if strict is None else strict
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return [_load_one(manager, f, registry, strict=strict) for f in found]


def _load_one(manager: pluggy.PluginManager, found: Found, registry: Registry, *, strict: bool) -> Status:
    if found.status != "ready":
        if strict and found.status != "blocked":
            raise _fatal(found, found.reason)
        return Status(found, found.status, found.reason)
    registrar = Registrar(found.origin)
    try:
        _register(manager, found, registrar)
    # A third party may raise anything, and end the process by sys.exit(); it is reported and kept.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return _failed(found, error, registry, strict=strict)
    registry.accept(registrar)
    return Status(found, "loaded", ops=len(registrar.entries))


def _register(manager: pluggy.PluginManager, found: Found, registrar: Registrar) -> None:
    name = f"{found.origin.distribution}:{found.origin.plugin}"
    module = found.entry.load()
    try:
        manager.register(module, name)
        manager.check_pending()
        for impl in _required(manager, found, name):
            impl.function(*(registrar for _ in impl.argnames))
        registrar.links += [_plain(impl) for impl in _implementations(manager, "shardwise_links", name)]
        registrar.observers += [_plain(impl) for impl in _implementations(manager, "shardwise_dispatched", name)]
    except BaseException:
        # pluggy may keep a plugin whose validation failed, and a later check would blame the next one for it.
        if manager.has_plugin(name):
            manager.unregister(name=name)
        raise


def _required(manager: pluggy.PluginManager, found: Found, plugin: str) -> list[Any]:
    impls = _implementations(manager, "shardwise_register", plugin)
    if not impls:
        raise LookupError(f"{found.entry.value} implements no shardwise_register hook")
    return impls


def _implementations(manager: pluggy.PluginManager, hook: str, plugin: str) -> list[Any]:
    return [impl for impl in getattr(manager.hook, hook).get_hookimpls() if impl.plugin_name == plugin]


def _plain(impl: Any) -> Any:
    """A hook as a function of all arguments of its specification, by position: an implementation may leave some out,
    and pluggy's own call is too slow where ops are dispatched.
    """
    name = impl.opts["specname"] or impl.function.__name__
    names = tuple(inspect.signature(getattr(hookspecs, name)).parameters)
    if tuple(impl.argnames) == names:
        return impl.function
    wanted = [names.index(argument) for argument in impl.argnames]
    return lambda *given: impl.function(*(given[i] for i in wanted))


def _failed(found: Found, error: BaseException, registry: Registry, *, strict: bool) -> Status:
    cause = f"{type(error).__name__}: {error}"
    trace = traceback.format_exc()
    if found.first_party or strict:
        raise _fatal(found, cause) from error
    registry.reject(Failure(found.origin, cause, trace))
    warnings.warn(
        f"shardwise left out the plugin {found.origin}: {cause}. Disable it with {_disable(found)}; "
        f"`shardwise plugins show {found.origin.plugin}` has the traceback.",
        RuntimeWarning,
        stacklevel=2,
    )
    return Status(found, "failed", cause, traceback=trace)


def _fatal(found: Found, cause: str) -> PluginLoadError:
    return PluginLoadError(
        asked=f"load the plugin {found.origin}",
        found=cause,
        do=f"Reinstall {found.origin.distribution}, or disable the plugin with {_disable(found)}.",
        plugin=found.origin.plugin,
        distribution=found.origin.distribution,
    )


def _disable(found: Found) -> str:
    return f"SHARDWISE_DISABLE_PLUGINS={found.origin.plugin}"


# -- the registry of this process --------------------------------------------------------------------------------


class _Process:
    """The one registry of this process, filled at the first look-up."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.loading = False
        self.registry: Registry | None = None
        self.statuses: list[Status] = []


# A reload of this module must not make a second registry beside the one that plans were made by.
_process: _Process = globals().get("_process") or _Process()


def _hold() -> None:
    _process.lock.acquire()


def _release() -> None:
    _process.lock.release()


if "_forks_safely" not in globals():
    # No thread is in the middle of loading while the process is copied: the copy has a whole registry, or none.
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_release)
_forks_safely = True


def default_registry() -> Registry:
    """The registry of this process; the first call finds and loads the plugins.

    Raises :class:`SettingsError` for bad settings, and :class:`PluginLoadError` for a broken first-party plugin, for
    any problem in strict mode, and when a plugin asks for the registry while it is being loaded.
    """
    ready = _process.registry
    if ready is not None:
        return ready
    with _process.lock:
        if _process.registry is None:
            _fill(read_settings())
        assert _process.registry is not None
        return _process.registry


def _fill(settings: Settings) -> None:
    if _process.loading:
        raise PluginLoadError(
            asked="look up a rule",
            found="the plugins are just being loaded, and one of them asks",
            do="Let a plugin's module define rules and do nothing else; run ops on MeshTensors later.",
        )
    _process.loading = True
    try:
        registry = Registry(settings.prefer, settings.unknown_ops)
        found = load(discover(settings), registry, strict=settings.strict)
        if settings.strict:
            for verdict in registry.conflicts():
                registry.lookup(verdict.op)
        _process.statuses, _process.registry = found, registry
        _supply_links(registry)
    finally:
        _process.loading = False


def _supply_links(registry: Registry | None) -> None:
    """Let the plugins of a registry say what moves cost where nothing was measured."""
    suppliers = registry.links if registry is not None else []

    def ask(mesh_shape: tuple[int, ...], device_type: str, wires: tuple[str, ...]) -> Links | None:
        for origin, supplier in suppliers:
            links = supplier(mesh_shape, device_type, wires)
            if links is not None:
                return _checked(links, mesh_shape, str(origin))
        return None

    supply_links(ask if suppliers else None)


def _checked(links: Any, mesh_shape: tuple[int, ...], origin: str) -> Links:
    if isinstance(links, Links) and len(links.mesh_dims) == len(mesh_shape):
        return links
    raise PluginLoadError(
        asked=f"cost moves on a mesh of shape {mesh_shape} by the plugin {origin}",
        found=f"its hook shardwise_links answers {links!r}",
        do=f"Return None, or Links with {len(mesh_shape)} mesh dims.",
        plugin=origin,
    )


def statuses() -> list[Status]:
    """What became of each installed plugin."""
    default_registry()
    return list(_process.statuses)


@contextmanager
def use_registry(registry: Registry) -> Iterator[Registry]:
    """Make another registry this process's one for a while, as tests do."""
    with _process.lock:
        before, _process.registry = _process.registry, registry
    _supply_links(registry)
    for one in (before, registry):
        if one is not None:
            one.changed()
    try:
        yield registry
    finally:
        with _process.lock:
            _process.registry = before
        _supply_links(before)
        for one in (registry, before):
            if one is not None:
                one.changed()
