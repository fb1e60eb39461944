"""The rules to judge: those of an installed plugin, of a module with the hook, or rules themselves."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pluggy
from attrs import frozen

from shardwise import hookspecs
from shardwise.discovery.entry_points import discover
from shardwise.discovery.loading import load
from shardwise.errors import PluginLoadError
from shardwise.kernel.plurals import counted
from shardwise.kernel.precedence import Origin
from shardwise.kernel.registry import NO_LIBRARY, Registrar, Registry
from shardwise.kernel.rule import AnyRule, FullMeshRule, Rule

__all__ = ["Plugin", "Subject", "subject_of"]

Plugin = str | AnyRule | Iterable[AnyRule] | Any
"""The name of an installed plugin, an object with a ``shardwise_register`` hook (a module), a rule, or rules."""


@frozen
class Subject:
    """Rules to judge. ``module`` is the module with the hook, if there is one.

    ``installed`` is true if every process of this environment finds the rules by itself.
    """

    name: str
    rules: tuple[AnyRule, ...]
    module: str | None = None
    installed: bool = False

    @property
    def loose_rules(self) -> tuple[AnyRule, ...]:
        """The rules that must be sent to another process."""
        return () if self.installed else self.rules


def subject_of(plugin: Plugin) -> Subject:
    """The rules of ``plugin``; see :data:`Plugin`.

    Raises :class:`PluginLoadError` for a name that is not installed or not loaded, with the cause, and for an object
    that has neither rules nor a hook, or a hook that pluggy refuses.
    """
    if isinstance(plugin, str):
        return _installed(plugin)
    if isinstance(plugin, (Rule, FullMeshRule)):
        return Subject(str(plugin), (plugin,))
    if isinstance(plugin, Iterable):
        rules = tuple(plugin)
        Registrar(Origin("rules")).add(*rules)  # refuses a value that is not a rule, and two rules for one op
        return Subject(f"{counted(len(rules), 'rule')}", rules)
    return _hooked(plugin)


def _installed(name: str) -> Subject:
    plugins = discover()
    plugin = next((plugin for plugin in plugins if plugin.origin.plugin == name), None)
    if plugin is None:
        names = ", ".join(sorted(plugin.origin.plugin for plugin in plugins)) or "none"
        raise _load_error(name, "it is not installed", f"The installed plugins are: {names}.")
    registry = Registry()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the error says the same
        (status,) = load([plugin], registry, whole=True)
    if status.status != "loaded":
        raise _load_error(
            name, f"it is {status.status}: {status.reason}", f"`shardwise plugins show {name}` says more."
        )
    _see_later(name, registry)
    return Subject(name, tuple(registry.rules()), plugin.entry.module, installed=True)


def _see_later(name: str, registry: Registry) -> None:
    """Get the rules by the names of ops that exist by now: those of the libraries that the test imports."""
    wrong = {op: why for op, why in registry.see_all().items() if why != NO_LIBRARY}
    for op, why in wrong.items():
        raise _load_error(name, f"the rule of {op} cannot be had: {why}", "Correct its place in add_later().")


def _hooked(plugin: Any) -> Subject:
    name = plugin.__name__ if isinstance(plugin, (ModuleType, type)) else type(plugin).__name__
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(plugin, name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise _load_error(name, str(error), "The hook is shardwise_register(registry).") from error
    if not manager.hook.shardwise_register.get_hookimpls():
        raise _load_error(
            name,
            "it has no shardwise_register hook",
            "Give the name of an installed plugin, a module with the hook (marked with @hookimpl), or rules.",
        )
    registrar = Registrar(Origin(name))
    manager.hook.shardwise_register(registry=registrar)
    registry = Registry()
    registry.accept(registrar)
    _see_later(name, registry)
    rules = {id(rule): rule for rule in (*(entry.rule for entry in registrar.entries), *registry.rules())}
    return Subject(name, tuple(rules.values()), name if isinstance(plugin, ModuleType) else None)


def _load_error(plugin: str, found: str, do: str) -> PluginLoadError:
    return PluginLoadError(asked=f"read the rules of {plugin!r}", found=found, do=do, plugin=plugin)
