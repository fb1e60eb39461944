"""The status of every plugin, also if the process refuses to use any: bad settings, strict mode, a broken plugin."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches

import click
from attrs import evolve, frozen

from shardwise.cli.plugin_probe import Seen, probe_plugins, stdout_on_stderr
from shardwise.discovery.entry_points import InstalledPlugin, discover
from shardwise.discovery.frozen_rules import as_refused
from shardwise.discovery.loading import Status, load
from shardwise.discovery.process import default_registry, is_filled, statuses
from shardwise.errors import LockError, PluginLoadError, SettingsError, ShardingError
from shardwise.kernel.registry import Failure, Registry
from shardwise.settings import Settings, read_settings

__all__ = ["PluginStates", "plugins_named", "load_each", "no_such_plugin", "readable_settings", "plugin_states"]


@frozen(eq=False)
class PluginStates:
    """The plugins, the registry of those that load, and the error if this process cannot look up rules."""

    statuses: tuple[Status, ...]
    registry: Registry
    refusal: ShardingError | None = None


def plugin_states(*, heed_lock: bool = True) -> PluginStates:
    """Load the plugins as a program does; if that raises, load each plugin by itself. What a lock refuses is not
    loaded, unless ``heed_lock`` is off: then no lock is read.

    Where this process has not loaded them, another one imports them first: a plugin that ends a process or never comes
    back is not imported here.
    """
    settings = readable_settings()
    seen = {} if is_filled() else _probed(settings, heed_lock=heed_lock)
    with _without_warnings(), stdout_on_stderr():
        ending = [plugin for plugin, one in seen.items() if one.end]
        try:
            if ending:
                raise _ends_programs(ending[0], seen[ending[0]])
            if not heed_lock and settings.lock is not None and not is_filled():
                registry = Registry(settings.prefer, settings.unknown_ops)
                loaded = load_each(discover(settings), registry, seen)
            else:
                registry = default_registry()
                loaded = statuses()
                registry.read_modules()  # a program finds what is wrong with one at the first op of it
            refusal = None
        except ShardingError as error:
            refusal = error
            registry = Registry(settings.prefer, settings.unknown_ops)
            loaded = load_each(_allowed(settings, heed_lock=heed_lock), registry, seen)
    return PluginStates(tuple(_with_notes(status, seen) for status in loaded), registry, refusal)


SeenOf = Mapping[InstalledPlugin, Seen]
_seen: dict[tuple[InstalledPlugin, ...], SeenOf] = {}  # the doctor asks twice


def _allowed(settings: Settings, *, heed_lock: bool) -> list[InstalledPlugin]:
    """The plugins; those that a lock refuses with that status, all of them where it cannot be read."""
    plugins = discover(settings)
    if settings.lock is None or not heed_lock:
        return plugins
    try:
        return as_refused(settings.lock, plugins)
    except LockError as error:
        return [evolve(p, status="refused", reason=error.found) if p.status == "ready" else p for p in plugins]


def _probed(settings: Settings, *, heed_lock: bool) -> SeenOf:
    """What importing each plugin does that is to be loaded and that this process has not imported."""
    plugins = tuple(p for p in _allowed(settings, heed_lock=heed_lock) if p.status == "ready")
    new = tuple(p for p in plugins if p.entry.module not in sys.modules)
    if new not in _seen:
        _seen[new] = dict(zip(new, probe_plugins(new), strict=True)) if new else {}
    return _seen[new]


def _ends_programs(plugin: InstalledPlugin, seen: Seen) -> PluginLoadError:
    name = plugin.origin.plugin
    return PluginLoadError(
        asked=f"load the plugin {plugin.origin}",
        found=f"it {seen.end}, and so does every program that loads it",
        do=f"Reinstall {plugin.origin.distribution}, or disable the plugin with SHARDWISE_DISABLE_PLUGINS={name}.",
        plugin=name,
        distribution=plugin.origin.distribution,
    )


def _with_notes(status: Status, seen: SeenOf) -> Status:
    notes = seen[status.plugin].notes if status.plugin in seen else ()
    return evolve(status, reason="; ".join([*filter(None, [status.reason]), *notes])) if notes else status


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Without warnings of plugins that are left out: the command lists them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "shardwise left out the plugin")
        yield


def readable_settings() -> Settings:
    """The settings, without entries that cannot be read or do not name a plugin; never strict."""
    try:
        settings = read_settings()
    except SettingsError:
        return Settings()
    origins = [plugin.origin for plugin in discover(Settings())]

    def known(names: Iterable[str]) -> frozenset[str]:
        return frozenset(name for name in names if any(origin.is_called(name) for origin in origins))

    return evolve(
        settings,
        plugins=None if settings.plugins is None else known(settings.plugins),
        disabled=known(settings.disabled),
        prefer=tuple(pair for pair in settings.prefer if known([pair[1]])),
        strict=False,
    )


def load_each(plugins: Iterable[InstalledPlugin], registry: Registry, seen: SeenOf | None = None) -> list[Status]:
    """Load each plugin, also if others fail; a first-party plugin that fails is only recorded, too. One that was seen
    to end a process is not imported.
    """
    outcome: list[Status] = []
    for one in plugins:
        probed = (seen or {}).get(one, Seen())
        if probed.end:
            registry.reject(Failure(one.origin, probed.end, probed.stderr))
            outcome.append(Status(one, "failed", probed.end, traceback=probed.stderr))
            continue
        try:
            with _without_warnings():
                outcome += load([one], registry, strict=False, whole=True)
        except PluginLoadError as error:
            trace = "".join(traceback.format_exception(error.__cause__ or error))
            registry.reject(Failure(one.origin, error.found, trace))
            outcome.append(Status(one, "failed", error.found, traceback=trace))
    return outcome


def plugins_named(name: str, known: Iterable[InstalledPlugin]) -> list[InstalledPlugin]:
    """The plugins of that name, or those of the distribution of that name."""
    known = list(known)
    return [f for f in known if f.origin.plugin == name] or [f for f in known if f.origin.is_called(name)]


def no_such_plugin(name: str, known: Iterable[InstalledPlugin]) -> click.ClickException:
    """The error for an unknown name, with the names that are close to it."""
    names = sorted({word for plugin in known for word in (plugin.origin.plugin, plugin.origin.distribution)})
    near = get_close_matches(name, names, 3)
    hint = f"Close to it: {', '.join(near)}" if near else "`shardwise plugins` lists all"
    return click.ClickException(f"there is no plugin {name!r}. {hint}.")
