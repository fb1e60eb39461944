"""The registry: which rule holds for an op, and which plugin supplied it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Self

import torch
from attrs import field, frozen

from shardwise.errors import NoRuleError, PluginLoadError, RuleConflictError
from shardwise.kernel.precedence import Entry, Origin, Resolution, prefer_settings, resolve
from shardwise.kernel.registrar import Instead, Later, LinkSupplier, Observer, Registrar, RuleModule, stem_of
from shardwise.kernel.rule import AnyRule
from shardwise.kernel.signature import Op, op_name
from shardwise.private_torch.ops import op_named

__all__ = ["NO_LIBRARY", "Failure", "Override", "Registrar", "Registry", "is_collective", "refused_collective"]

NO_LIBRARY = "no library that is imported has the op"

# The libraries of torch's own distributed tools.
_COLLECTIVES = frozenset(
    {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "fsdp", "symm_mem"}
)


@frozen
class Failure:
    """A plugin that could not be loaded, and why."""

    origin: Origin
    cause: str
    traceback: str = field(default="", repr=False)


class Override:
    """Rules that go before all others in this process. Call it, or leave its ``with``, to remove them."""

    def __init__(self, registry: Registry, entries: list[Entry]) -> None:
        self._registry = registry
        self._entries = entries

    def __call__(self) -> None:
        """Remove the rules; a second call does nothing."""
        entries, self._entries = self._entries, []
        if entries:
            self._registry.take_back(entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self()


class Registry:
    """Rules by op. Rules of one op that conflict are an error when *that op* is looked up, not before.

    ``prefer`` has pairs of an op (or a pattern on its name) and the plugin whose rule is to hold. ``unknown_ops`` says
    whether ops without a rule are refused (``refuse``) or run on whole tensors (``replicate``).
    """

    def __init__(self, prefer: Sequence[tuple[str, str]] = (), unknown_ops: str = "refuse") -> None:
        self.prefer = tuple(prefer)
        self.unknown_ops = unknown_ops
        self._entries: dict[Op, list[Entry]] = {}
        self._overrides: dict[Op, list[Entry]] = {}
        self._resolutions: dict[Op, Resolution] = {}
        self._later: dict[str, list[Later]] = {}
        self._by_stem: dict[str, list[RuleModule]] = {}
        self.modules: list[RuleModule] = []
        self._seen: dict[Op, tuple[Entry, ...]] = {}  # what of these two was got, by the ops that were asked for
        self.optimizers: set[type[torch.optim.Optimizer]] = set()
        self.composites: dict[Op, Instead] = {}
        self.higher_order: dict[Any, Callable[..., Any]] = {}
        self.compared: set[Op] = set()
        self.views: dict[Op, Callable[..., Any]] = {}
        self.observers: list[Observer] = []
        self.links: list[tuple[Origin, LinkSupplier]] = []
        self.origins: list[Origin] = []
        self.failures: list[Failure] = []
        self.left_out: list[Failure] = []
        self._listeners: list[Callable[[], None]] = []

    # -- filling --
    def accept(self, registrar: Registrar) -> None:
        """Add everything that one plugin registered."""
        self.origins.append(registrar.origin)
        self.optimizers.update(registrar.optimizers)
        self.composites.update(registrar.composites)
        self.higher_order.update(registrar.higher_order)
        self.compared.update(registrar.compared)
        self.views.update(registrar.views)
        self.observers += registrar.observers
        self.links += [(registrar.origin, supplier) for supplier in registrar.links]
        for name, later in registrar.later.items():
            self._later.setdefault(name, []).append(later)
        for module in registrar.modules:
            self.modules.append(module)
            for stem in module.stems:
                self._by_stem.setdefault(stem, []).append(module)
        self._seen.clear()
        for entry in registrar.entries:
            self._entries.setdefault(entry.op, []).append(entry)
        self.changed()

    def reject(self, failure: Failure) -> None:
        """Record a plugin that failed; none of its rules holds."""
        self.failures.append(failure)

    def leave_out(self, failure: Failure) -> None:
        """Record a plugin that was not to be loaded, and why."""
        self.left_out.append(failure)

    def override(self, *rules: AnyRule) -> Override:
        """Let rules go before all others in this process, until the returned object is called or its ``with`` ends.

        Every rank of a program must call this with the same rules and at the same point.
        """
        registrar = Registrar(Origin("override"))
        registrar.add(*rules)
        for entry in registrar.entries:
            self._overrides.setdefault(entry.op, []).append(entry)
        self.changed()
        return Override(self, registrar.entries)

    def take_back(self, entries: Sequence[Entry]) -> None:
        """Remove entries that :meth:`override` added."""
        for entry in entries:
            self._overrides[entry.op].remove(entry)
        self.changed()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever the result of a look-up may change. Caches of plans are cleared so."""
        self._listeners.append(listener)

    def changed(self) -> None:
        """Call the listeners: the result of a look-up may have changed."""
        self._resolutions.clear()
        for listener in self._listeners:
            listener()

    # -- asking --
    def lookup(self, op: Op) -> Entry:
        """The rule that holds for an op; raises :class:`NoRuleError` or :class:`RuleConflictError`."""
        resolution = self.resolve(op)
        if resolution.winner is not None:
            return resolution.winner
        if not resolution.losers:
            raise self.missing(op)
        name, rivals = op_name(op), resolution.rivals
        settings = prefer_settings(op, rivals[0])
        others = "".join(f" or ={e.origin.plugin}" for e in rivals[1:])
        raise RuleConflictError(
            asked=f"find the rule for {name}",
            found=f"{'; '.join(map(str, rivals))} {'all supply' if others else 'supplies'} one, "
            f"and {resolution.reason}",
            do=f"Set {settings['environment']}{others} (or the same under [tool.shardwise.prefer] in pyproject.toml), "
            f"or leave a plugin out with SHARDWISE_DISABLE_PLUGINS={rivals[-1].origin.plugin}",
            op=name,
            plugins=tuple(e.origin.plugin for e in rivals),
            distributions=tuple(f"{e.origin.distribution} {e.origin.version}" for e in rivals),
            sources=tuple(e.rule.source for e in rivals),
            settings=settings,
        )

    def resolve(self, op: Op) -> Resolution:
        """Which rule holds for an op and why, and why its rivals do not.

        Raises :class:`PluginLoadError` for a rule that is got when the op is first seen, and cannot be.
        """
        resolution = self._resolutions.get(op)
        if resolution is None:
            overrides, entries = self._overrides.get(op, ()), (*self._entries.get(op, ()), *self._see(op))
            resolution = self._resolutions[op] = resolve(op, overrides, entries, self.prefer)
        return resolution

    def _see(self, op: Op) -> tuple[Entry, ...]:
        """The rules of an op that are got when it is first seen."""
        seen = self._seen.get(op)
        if seen is None:
            name: str = op.name()  # type: ignore[no-untyped-call]
            entries: list[Entry] = []
            for later in (*self._later.get(name, ()), *self._by_stem.get(stem_of(name), ())):
                entries += later.entries(op)
            self._refuse_two(op, (*self._entries.get(op, ()), *entries))
            # Two threads may see an op at the same time, for a backward pass has its own: the first one's are kept.
            seen = self._seen.setdefault(op, tuple(entries))
        return seen

    def _refuse_two(self, op: Op, entries: Sequence[Entry]) -> None:
        """Raise :class:`PluginLoadError` if a plugin has two rules for an op, which modules show only here."""
        by_origin: dict[Origin, Entry] = {}
        for entry in entries:
            origin, other = entry.origin, by_origin.setdefault(entry.origin, entry)
            if other is not entry:
                raise PluginLoadError(
                    asked=f"get the rule of {op_name(op)} from the plugin {origin}",
                    found=f"the plugin has two rules for it: {other.rule.source} and {entry.rule.source}",
                    do="Keep one.",
                    plugin=origin.plugin,
                    distribution=origin.distribution,
                )

    def later(self) -> Iterator[tuple[str, Origin]]:
        """The full names of the ops whose rules were registered by name, seen or not, and their plugins."""
        for name, rules in sorted(self._later.items()):
            yield from ((_full(name), later.origin) for later in rules)

    def missing_modules(self) -> dict[str, str]:
        """The modules that are not there, by the full names of the ops whose rules they should have."""
        return {
            _full(name): late.missing_module
            for name, rules in sorted(self._later.items())
            for late in rules
            if late.missing_module
        }

    def early(self) -> set[Op]:
        """The ops that have a rule which was registered as a value; nothing is imported."""
        return {*self._entries, *self._overrides}

    def read_modules(self) -> None:
        """Import all modules of rules. Raises :class:`PluginLoadError` for the first that cannot be."""
        for module in self.modules:
            module.all_entries()

    def see_all(self) -> dict[str, str]:
        """Get the rules of all ops that exist by now; returns, by the full names of the others, why theirs are not
        there.
        """
        absent: dict[str, str] = {}
        for name in sorted(self._later):
            absent |= {_full(name): why for why in self._try(op_named(name))}
        for module in self.modules:
            try:
                ops = [entry.op for entry in module.all_entries()]
            except PluginLoadError as error:
                absent |= dict.fromkeys(map(_full, module.stems), error.found)
                continue
            for op in ops:
                absent |= {op_name(op): why for why in self._try(op)}
        return absent

    def _try(self, op: Op | None) -> Iterator[str]:
        """See an op; why that is not possible, if it is not."""
        if op is None:
            yield NO_LIBRARY
            return
        try:
            self._see(op)
        except PluginLoadError as error:
            yield error.found

    def conflicts(self) -> list[Resolution]:
        """The ops whose rules conflict, sorted by name. Gets all rules."""
        self.see_all()
        resolutions = (self.resolve(op) for op in {*self._entries, *self._seen})
        return sorted((r for r in resolutions if r.winner is None and r.losers), key=lambda r: op_name(r.op))

    def find(self, op: Op) -> list[Entry]:
        """All rules for an op, overrides first."""
        seen = self._see(op)
        return [*self._overrides.get(op, ())[::-1], *self._entries.get(op, ()), *seen]

    def __contains__(self, op: Op) -> bool:
        return bool(self.find(op))

    def ops(self, pattern: str = "*", plugin: str | None = None) -> Iterator[Entry]:
        """All entries by op name, filtered by a shell pattern on the name (with or without ``aten.``) and by plugin.

        Gets all rules; those that cannot be had are left out (:meth:`see_all` names them).
        """
        self.see_all()
        entries = [e for op in {*self._entries, *self._overrides, *self._seen} for e in self.find(op)]
        for entry in sorted(entries, key=lambda e: (op_name(e.op), e.origin.plugin)):
            name = op_name(entry.op)
            named = fnmatchcase(name, pattern) or fnmatchcase(name, f"*{pattern}*")
            if named and plugin in (None, entry.origin.plugin):
                yield entry

    def rules(self, plugin: str | None = None) -> list[AnyRule]:
        """The different rules, sorted by the name of their first op."""
        unique = {id(e.rule): e.rule for e in self.ops(plugin=plugin)}
        return sorted(unique.values(), key=lambda r: op_name(r.ops[0]))

    # -- refusing --
    def missing(self, op: Op, tried: str = "", *, parts: Sequence[Op] = (), missing: Sequence[Op] = ()) -> NoRuleError:
        """The error for an op without a rule.

        ``tried`` says why no decomposition works. Torch decomposes the op into ``parts``; those in ``missing`` have no
        rule.
        """
        plugins = sorted(o.plugin for o in self.origins)
        if is_collective(op):
            return refused_collective(op_name(op))
        failed = "; ".join(f"{f.origin} failed to load ({f.cause})" for f in self.failures)
        known = self.known(map(op_name, (op, *missing)))
        return NoRuleError(
            asked=f"run {op_name(op)} on a MeshTensor",
            found=f"no rule for it{_in_plugins(plugins)}"
            + (f", and {tried}" if tried else "")
            + (f". Possible cause: {failed}" if failed else ""),
            do="".join(f"{advice} " for advice in known.values())
            + ("" if known else "Install or enable a plugin that has one (`shardwise plugins` lists them); ")
            + "docs/unknown-ops.md has the other remedies.",
            op=op_name(op),
            plugins=tuple(plugins),
            failures=tuple(f"{f.origin}: {f.cause}" for f in self.failures),
            parts=tuple(map(op_name, parts)),
            missing=tuple(map(op_name, missing)),
            known=tuple(known),
        )

    def known(self, ops: Iterable[str]) -> dict[str, str]:
        """What to do to get rules for ops, by the distribution that is known to have them and is not loaded."""
        # Imported here: two files are read, for the error only.
        from shardwise.kernel.first_party import requirement
        from shardwise.kernel.known_rules import providers

        loaded = {name for origin in self.origins for name in (origin.plugin, origin.distribution)}
        advice: dict[str, str] = {}
        for op in ops:
            for name in providers(op):
                out = next((one for one in self.left_out if one.origin.is_called(name)), None)
                if name in loaded or name in advice or any(one.origin.is_called(name) for one in self.failures):
                    continue
                if out is not None:
                    advice[name] = f"Enable {name}, which has a rule for {op} and is not loaded ({out.cause})."
                else:
                    advice[name] = f"Install {name}, which has a rule for {op}: pip install {requirement(name)}."
        return advice


def _full(name: str) -> str:
    """``acme::mix`` as ``acme.mix.default``, ``acme::mix.out`` as ``acme.mix.out``."""
    return name.replace("::", ".") + ("" if "." in name else ".default")


def is_collective(op: Op) -> bool:
    """Whether an op sends, or copies for sending, what torch's own distributed tools give it."""
    return op.namespace in _COLLECTIVES


def refused_collective(name: str) -> NoRuleError:
    """The error for a collective of torch on a MeshTensor."""
    return NoRuleError(
        asked=f"run {name} on a MeshTensor",
        found="collectives of torch.distributed work on tensors of one rank, and this one lies on all",
        do="Leave it out where it gathers or adds up what ranks have, for x is the whole already (a layer may have an "
        "option for that, as sync_codebook=False, and a metric sync_on_compute=False). Else say where x shall lie, "
        "with x.redistribute(placements=...) or x.full_tensor(), or call the collective on x.to_local().",
        op=name,
    )


def _in_plugins(plugins: Sequence[str]) -> str:
    if not plugins:
        return " in the plugins, of which none is installed"
    return f" in the plugin{'s' if len(plugins) > 1 else ''} {', '.join(plugins)}"
