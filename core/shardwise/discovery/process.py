"""The one registry of this process. The first look-up fills it with the installed plugins."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardwise.errors import PluginLoadError
from shardwise.kernel.registry import Registry
from shardwise.settings import Settings, read_settings

if TYPE_CHECKING:
    from shardwise.discovery.loading import Status
    from shardwise.kernel.registry import Override
    from shardwise.kernel.rule import AnyRule

__all__ = ["default_registry", "is_filled", "override", "statuses", "use_registry"]


class _Process:
    """The one registry of this process, filled at the first look-up."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.loading = False
        self.registry: Registry | None = None
        self.statuses: list[Status] = []


_process = _Process()


def _hold() -> None:
    _process.lock.acquire()


def _release() -> None:
    _process.lock.release()


# A fork waits for a thread that loads plugins. So the child has a complete registry or no registry.
os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_release)


def default_registry() -> Registry:
    """The registry of this process; the first call finds and loads the plugins.

    Raises :class:`SettingsError` for bad settings, and :class:`PluginLoadError` for a broken first-party plugin, for
    any problem in strict mode, :class:`LockError` for plugins that the lock does not allow, and
    when a plugin calls this while it is being loaded.
    """
    registry = _process.registry
    if registry is not None:
        return registry
    with _process.lock:
        if _process.registry is None:
            _load_plugins(read_settings())
        assert _process.registry is not None
        return _process.registry


def is_filled() -> bool:
    """Whether this process has loaded the plugins."""
    return _process.registry is not None


def _load_plugins(settings: Settings) -> None:
    if _process.loading:
        raise PluginLoadError(
            asked="look up a rule",
            found="the plugins are just being loaded, and one of them asks",
            do="Let a plugin's module define rules and do nothing else; run ops on MeshTensors later.",
        )
    # Imported here: `import shardwise` needs neither pluggy nor entry points.
    from shardwise.discovery.entry_points import discover
    from shardwise.discovery.loading import load

    _process.loading = True
    try:
        registry = Registry(settings.prefer, settings.unknown_ops)
        plugins = discover(settings)
        if settings.lock is None:
            outcomes = load(plugins, registry, strict=settings.strict)
        else:
            from shardwise.discovery.frozen_rules import check_installed, check_loaded

            lock = check_installed(settings.lock, plugins)
            outcomes = load(plugins, registry, strict=settings.strict, whole=True)
            check_loaded(settings.lock, lock, outcomes)
        if settings.strict:
            for resolution in registry.conflicts():
                registry.lookup(resolution.op)
        _process.statuses, _process.registry = outcomes, registry
    finally:
        _process.loading = False


def override(*rules: AnyRule) -> Override:
    """Give rules precedence over those of all plugins in this process.

    They apply until the returned object is called, or for the length of a ``with``. Every rank must override the same
    rules at the same point of the program. Raises :class:`RuleError` for a value that is not a rule.
    """
    return default_registry().override(*rules)


def statuses() -> list[Status]:
    """The outcome for each installed plugin."""
    default_registry()
    return list(_process.statuses)


@contextmanager
def use_registry(registry: Registry) -> Iterator[Registry]:
    """A context in which this process uses another registry, for tests."""
    with _process.lock:
        before, _process.registry = _process.registry, registry
    for one in (before, registry):
        if one is not None:
            one.changed()
    try:
        yield registry
    finally:
        with _process.lock:
            _process.registry = before
        for one in (registry, before):
            if one is not None:
                one.changed()
