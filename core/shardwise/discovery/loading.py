"""Loading plugins, and the one registry of this process.

``finding`` enumerates, dedupes, sorts by name, filters by settings and checks versions; here each plugin that is left
is imported, registered and validated. A broken third-party plugin is reported and left out; a broken first-party one is
fatal.
"""

from __future__ import annotations

import inspect
import traceback
import warnings
from collections.abc import Iterable
from typing import Any

import pluggy
from attrs import frozen

from shardwise import hookspecs
from shardwise.discovery.entry_points import InstalledPlugin
from shardwise.errors import PluginLoadError
from shardwise.kernel.registry import Failure, Registrar, Registry
from shardwise.settings import read_settings

__all__ = ["Status", "load"]


@frozen
class Status:
    """What became of a plugin: loaded, failed, blocked, needs upgrade or refused."""

    plugin: InstalledPlugin
    status: str
    reason: str = ""
    ops: int = 0
    traceback: str = ""


# -- loading -----------------------------------------------------------------------------------------------------


def load(found: Iterable[InstalledPlugin], registry: Registry, *, strict: bool | None = None) -> list[Status]:
    """Import and register the ready ones. Third-party failures become a warning and a :class:`Status`.

    When ``strict`` (default: as the settings say) any problem raises :class:`PluginLoadError`.
    """
    strict = read_settings().strict if strict is None else strict
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return [_load_one(manager, f, registry, strict=strict) for f in found]


def _load_one(manager: pluggy.PluginManager, found: InstalledPlugin, registry: Registry, *, strict: bool) -> Status:
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


def _register(manager: pluggy.PluginManager, found: InstalledPlugin, registrar: Registrar) -> None:
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


def _required(manager: pluggy.PluginManager, found: InstalledPlugin, plugin: str) -> list[Any]:
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


def _failed(found: InstalledPlugin, error: BaseException, registry: Registry, *, strict: bool) -> Status:
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


def _fatal(found: InstalledPlugin, cause: str) -> PluginLoadError:
    return PluginLoadError(
        asked=f"load the plugin {found.origin}",
        found=cause,
        do=f"Reinstall {found.origin.distribution}, or disable the plugin with {_disable(found)}.",
        plugin=found.origin.plugin,
        distribution=found.origin.distribution,
    )


def _disable(found: InstalledPlugin) -> str:
    return f"SHARDWISE_DISABLE_PLUGINS={found.origin.plugin}"
