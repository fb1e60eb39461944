"""Load plugins into a registry.

``entry_points`` finds the plugins, sorts them by name, drops duplicates, reads the settings and checks versions. This
module imports, registers and validates each plugin that is left. A broken third-party plugin is reported and left out.
A broken first-party plugin is fatal.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pluggy
from attrs import field, frozen

from shardwise import hookspecs
from shardwise.discovery.entry_points import InstalledPlugin, discover
from shardwise.errors import PluginLoadError, RuleError, ShardingError, warn_user
from shardwise.kernel.arguments import kind_of
from shardwise.kernel.known_rules import known_names
from shardwise.kernel.plan import Plan
from shardwise.kernel.precedence import Entry
from shardwise.kernel.registry import Failure, Registrar, Registry
from shardwise.kernel.signature import op_name
from shardwise.settings import Settings, read_settings

__all__ = ["Status", "load"]


@frozen
class Status:
    """The outcome for a plugin: loaded, failed, blocked, needs upgrade or refused."""

    plugin: InstalledPlugin
    status: str
    reason: str = ""
    traceback: str = ""
    registrar: Registrar | None = field(default=None, repr=False, eq=False)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The plugin's rules but for those by the names of ops. Imports its modules, and raises what they raise."""
        if self.registrar is None:
            return ()
        late = (entry for module in self.registrar.modules for entry in module.all_entries())
        return (*self.registrar.entries, *late)

    @property
    def ops(self) -> int:
        """How many ops have rules of the plugin. Imports its modules, as ``entries`` does."""
        return len(self.entries) + (0 if self.registrar is None else len(self.registrar.later))


# -- loading -----------------------------------------------------------------------------------------------------


def load(
    plugins: Iterable[InstalledPlugin], registry: Registry, *, strict: bool | None = None, whole: bool = False
) -> list[Status]:
    """Import and register the plugins that are ready. A failure of a third party becomes a warning and a status.

    Modules of rules that a plugin registers by name are imported when an op of theirs is seen; now, if ``whole``, and
    if ``strict`` (default: the setting). Raises :class:`PluginLoadError` for a failure of a first-party plugin and, if
    ``strict``, for any problem.
    """
    strict = read_settings().strict if strict is None else strict
    whole = whole or strict
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    plugins = list(plugins)
    return [_load_one(manager, plugin, plugins, registry, strict=strict, whole=whole) for plugin in plugins]


def _load_one(
    manager: pluggy.PluginManager,
    plugin: InstalledPlugin,
    plugins: Sequence[InstalledPlugin],
    registry: Registry,
    *,
    strict: bool,
    whole: bool,
) -> Status:
    if plugin.status != "ready":
        if strict and plugin.status != "blocked":
            raise _fatal(plugin, plugin.reason)
        registry.leave_out(Failure(plugin.origin, f"{plugin.status}: {plugin.reason}"))
        return Status(plugin, plugin.status, plugin.reason)
    registrar = Registrar(plugin.origin)
    try:
        _register(manager, plugin, registrar)
        late = [entry for module in registrar.modules if whole for entry in module.read.values()]
        _check_replaced(registrar, late, plugins)
    except KeyboardInterrupt:  # of a person, who waits too long
        raise
    # A third party may raise anything or call sys.exit(). Both are reported.
    except BaseException as error:  # noqa: BLE001
        return _failed(plugin, error, registry, strict=strict)
    registry.accept(registrar)
    return Status(plugin, "loaded", "" if registrar.has_anything else "registers nothing", registrar=registrar)


def _register(manager: pluggy.PluginManager, plugin: InstalledPlugin, registrar: Registrar) -> None:
    name = f"{plugin.origin.distribution}:{plugin.origin.plugin}"
    module = plugin.entry.load()
    if other := manager.get_name(module):
        raise LookupError(
            f"{plugin.entry.value} is the plugin {other.partition(':')[2]} already: a module is one plugin"
        )
    try:
        manager.register(module, name)
        manager.check_pending()
        impls = _implementations(manager, "shardwise_register", name)
        if not impls:
            raise LookupError(f"{plugin.entry.value} implements no shardwise_register hook")  # noqa: TRY301  # as any failure
        for impl in impls:
            returned = impl.function(*(registrar for _ in impl.argnames))
            if returned is not None:
                raise TypeError(  # noqa: TRY301  # as any failure
                    f"shardwise_register of {plugin.entry.value} returned {kind_of(returned)}, which "
                    "registers nothing: pass rules to registry.add(...), and return nothing"
                )
        registrar.links += [_by_position(impl) for impl in _implementations(manager, "shardwise_links", name)]
        observers = (_by_position(impl) for impl in _implementations(manager, "shardwise_dispatched", name))
        registrar.observers += [_observer(plugin, observe) for observe in observers]
    except BaseException:
        # pluggy may keep a plugin whose validation failed. A later check would then blame the next plugin.
        if manager.has_plugin(name):
            manager.unregister(name=name)
        raise


def _check_replaced(registrar: Registrar, late: Sequence[Entry], plugins: Sequence[InstalledPlugin]) -> None:
    """Raise :class:`RuleError` for a rule that replaces those of a name that nobody has."""
    entries = (*registrar.entries, *late)
    named = {e.replaces: (op_name(e.op), e.rule.source) for e in entries if e.replaces is not None}
    named |= {late.replaces: (op, str(late.rule)) for op, late in registrar.later.items() if late.replaces is not None}
    for name, (op, source) in named.items():
        if any(plugin.origin.is_called(name) for plugin in plugins) or name in known_names():
            continue
        origins = [plugin.origin for plugin in discover(Settings())]  # these may be some of those that are installed
        if any(origin.is_called(name) for origin in origins):
            continue
        known = known_names().union(*((o.plugin, o.distribution) for o in origins))
        from difflib import get_close_matches  # only here: what is well needs none

        near = get_close_matches(name, sorted(known), n=1)
        raise RuleError(
            asked=f"register {op} of {registrar.origin}",
            found=f"its rule at {source} replaces {name!r}, and no plugin or distribution has that name",
            do=(f"The nearest is {near[0]}. " if near else "") + "Name an installed one in replaces=, or leave it out.",
            op=op,
        )


def _implementations(manager: pluggy.PluginManager, hook: str, name: str) -> list[Any]:
    return [impl for impl in getattr(manager.hook, hook).get_hookimpls() if impl.plugin_name == name]


def _by_position(impl: Any) -> Any:
    """A hook as a function of all arguments of its specification, by position.

    An implementation may leave arguments out, and pluggy's own call is too slow for a dispatch.
    """
    name = impl.opts["specname"] or impl.function.__name__
    names = tuple(inspect.signature(getattr(hookspecs, name)).parameters)
    if tuple(impl.argnames) == names:
        return impl.function
    indices = [names.index(argument) for argument in impl.argnames]
    return lambda *args: impl.function(*(args[i] for i in indices))


def _observer(plugin: InstalledPlugin, observe: Callable[[Plan], None]) -> Callable[[Plan], None]:
    """A plugin's hook that watches dispatches; what it raises names the plugin, the hook and the op."""

    def call(plan: Plan) -> None:
        try:
            observe(plan)
        except ShardingError:
            raise
        except Exception as error:  # an author's code may raise anything
            raise PluginLoadError(
                asked=f"tell the plugin {plugin.origin} of a call of {op_name(plan.schema.op)}",
                found=f"its hook shardwise_dispatched raised {type(error).__name__}: {error}",
                do=f"Correct the hook, or disable the plugin with {_disable(plugin)}.",
                plugin=plugin.origin.plugin,
                distribution=plugin.origin.distribution,
            ) from error

    return call


def _failed(plugin: InstalledPlugin, error: BaseException, registry: Registry, *, strict: bool) -> Status:
    # Each sentence of pluggy's is a line, and the last says what is wrong. A list of findings shows one line.
    text = "; ".join(str(error).splitlines()) if isinstance(error, pluggy.PluginValidationError) else str(error)
    cause = f"{type(error).__name__}: {text}"
    trace = traceback.format_exc()
    if plugin.first_party or strict:
        raise _fatal(plugin, cause) from error
    registry.reject(Failure(plugin.origin, cause, trace))
    warn_user(
        f"shardwise left out the plugin {plugin.origin}: {cause.rstrip('.')}. Disable it with {_disable(plugin)}; "
        f"`shardwise plugins show {plugin.origin.plugin}` has the traceback.",
        RuntimeWarning,
        at=error,
    )
    return Status(plugin, "failed", cause, traceback=trace)


def _fatal(plugin: InstalledPlugin, cause: str) -> PluginLoadError:
    return PluginLoadError(
        asked=f"load the plugin {plugin.origin}",
        found=cause,
        do=f"Reinstall {plugin.origin.distribution}, or disable the plugin with {_disable(plugin)}.",
        plugin=plugin.origin.plugin,
        distribution=plugin.origin.distribution,
    )


def _disable(plugin: InstalledPlugin) -> str:
    return f"SHARDWISE_DISABLE_PLUGINS={plugin.origin.plugin}"
