"""The registry: which rule holds for an op, and which plugin supplied it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Self

import torch
from attrs import field, frozen

from shardwise.errors import NoRuleError, RuleConflictError, RuleError
from shardwise.kernel.precedence import Entry, Origin, Resolution, prefer_settings, resolve
from shardwise.kernel.rule import AnyRule, FullMeshRule, Rule
from shardwise.kernel.signature import Op, as_op, op_name
from shardwise.private_torch.ops import HigherOrderOperator, OpLike
from shardwise.settings import normalised

__all__ = ["Failure", "Override", "Registrar", "Registry"]

Observer = Callable[[Any], None]
Instead = Callable[..., Any] | None
LinkSupplier = Callable[[tuple[int, ...], str, tuple[str, ...]], Any]


@frozen
class Failure:
    """A plugin that could not be loaded, and why."""

    origin: Origin
    cause: str
    traceback: str = field(default="", repr=False)


class Registrar:
    """A plugin's hook receives one and registers rules with it."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self._by_op: dict[Op, Entry] = {}
        self.optimizers: list[type[torch.optim.Optimizer]] = []
        self.composites: dict[Op, Instead] = {}
        self.higher_order: dict[Any, Callable[..., Any]] = {}
        self.compared: list[Op] = []
        self.views: dict[Op, Callable[..., Any]] = {}
        self.observers: list[Observer] = []
        self.links: list[LinkSupplier] = []
        #: By the name of an op that does not exist yet (``acme::swish``), the function that makes its rule.
        self.later: dict[str, Callable[[Op], AnyRule]] = {}

    @property
    def entries(self) -> list[Entry]:
        """The registered rules, in order."""
        return list(self._by_op.values())

    def add(self, *rules: AnyRule, replaces: str | None = None) -> None:
        """Register rules.

        They replace the rules that the distribution ``replaces`` has for these ops; a rule's own ``replaces`` goes
        first. Raises :class:`RuleError` for anything but a rule, for a second rule of an op, and for a rule that
        replaces its own distribution.
        """
        for rule in rules:
            if not isinstance(rule, (Rule, FullMeshRule)):
                raise RuleError(
                    asked=f"register a rule of {self.origin}",
                    found=f"{rule!r} is a {type(rule).__name__}",
                    do="Pass what rule(), rule_from() or full_mesh_rule() returned.",
                )
            replaced = rule.replaces or replaces
            replaced_name = None if replaced is None else normalised(replaced)
            for op in rule.ops:
                if op in self._by_op:
                    raise RuleError(
                        asked=f"register {op_name(op)} of {self.origin}",
                        found=f"the plugin has two rules for it: {self._by_op[op].rule.source} and {rule.source}",
                        do="Keep one.",
                        op=op_name(op),
                    )
                if replaced_name == normalised(self.origin.distribution):
                    raise RuleError(
                        asked=f"register {op_name(op)} of {self.origin}",
                        found=f"its rule at {rule.source} replaces {replaced!r}, its own distribution",
                        do="Name the other distribution in replaces=.",
                        op=op_name(op),
                    )
                self._by_op[op] = Entry(op, rule, self.origin, replaced_name)

    def add_later(self, name: str, make: Callable[[Op], AnyRule]) -> None:
        """Register the rule of an op that does not exist yet, because torch makes it when it is first used.

        ``name`` is that of the default overload: ``"prims::fma"``. ``make(op)`` returns the rule.
        """
        self.later[name] = make

    def add_optimizers(self, *classes: Any) -> None:
        """Name optimizers whose step treats each element by itself. It may then run on local shards.

        Subclasses are not included. Raises :class:`RuleError` for anything but an optimizer class.
        """
        for cls in classes:
            if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
                raise RuleError(
                    asked=f"register an optimizer of {self.origin}",
                    found=f"{cls!r} is not a class of torch.optim.Optimizer",
                    do="Pass classes, as in add_optimizers(torch.optim.AdamW).",
                )
        self.optimizers += classes

    def add_composites(self, *ops: OpLike, instead: Instead = None) -> None:
        """Name ops that torch computes by other ops and that make new tensors inside, for example a mask.

        Such a tensor is the same on every rank, so it is replicated on the mesh. ``instead`` runs in place of the ops,
        above autograd, with their arguments: for an op whose kernel or gradient formula cannot run on a mesh. It must
        give the same numbers; where it returns ``NotImplemented``, torch's own kernel runs. Raises :class:`RuleError`
        for anything but an op.
        """
        self.composites |= dict.fromkeys(self._overloads(ops, "a composite op"), instead)

    def add_higher_order(self, op: Any, instead: Callable[..., Any]) -> None:
        """Say what runs in place of an operator that takes functions, one of ``torch.ops.higher_order``.

        No rule describes a function. ``instead(call, *args)`` takes the operator's arguments, MeshTensors and plain
        tensors, below autograd. ``call(op, *args)`` runs an op that has a rule: usually an op of the plugin's own,
        whose lowering runs the operator on local tensors. It must give the same results. Raises :class:`RuleError` for
        anything but such an operator.
        """
        if not isinstance(op, HigherOrderOperator):
            raise RuleError(
                asked=f"register an operator of higher order of {self.origin}",
                found=f"{op!r} is a {type(op).__name__}",
                do="Name an operator of torch.ops.higher_order; rules of other ops go to add().",
            )
        self.higher_order[op] = instead

    def add_compared(self, *ops: OpLike) -> None:
        """Name ops whose gradient compares an operand with the result, as that of a maximum does.

        If a gradient will be computed, their partial operands are reduced before autograd sees them: forward and
        backward then compare the same numbers, and not two roundings of them. Raises :class:`RuleError` for anything
        but an op.
        """
        self.compared += self._overloads(ops, "an op")

    def add_view(self, *ops: OpLike, undo: Callable[..., Any]) -> None:
        """Say how a write to the result of a view op reaches its base, where the view had to be a copy.

        ``undo(base, value, index, *args)`` returns the whole new base: ``value`` is what the result number ``index``
        holds now, and ``args`` are the op's arguments after the base. Raises :class:`RuleError` for anything but an op.
        """
        self.views |= dict.fromkeys(self._overloads(ops, "a view op"), undo)

    def _overloads(self, ops: Sequence[OpLike], what: str) -> list[Op]:
        overloads = [as_op(one) for one in ops]
        for one, op in zip(ops, overloads, strict=True):
            if op is None:
                raise RuleError(
                    asked=f"register {what} of {self.origin}",
                    found=f"{one!r} is not one op overload",
                    do="Name overloads, as in torch.ops.acme.mix.default.",
                )
        return [op for op in overloads if op is not None]


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
        self._later: dict[str, tuple[Origin, Callable[[Op], AnyRule]]] = {}
        self.optimizers: set[type[torch.optim.Optimizer]] = set()
        self.composites: dict[Op, Instead] = {}
        self.higher_order: dict[Any, Callable[..., Any]] = {}
        self.compared: set[Op] = set()
        self.views: dict[Op, Callable[..., Any]] = {}
        self.observers: list[Observer] = []
        self.links: list[tuple[Origin, LinkSupplier]] = []
        self.origins: list[Origin] = []
        self.failures: list[Failure] = []
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
        self._later |= {name: (registrar.origin, make) for name, make in registrar.later.items()}
        for entry in registrar.entries:
            self._entries.setdefault(entry.op, []).append(entry)
        self.changed()

    def reject(self, failure: Failure) -> None:
        """Record a plugin that failed; none of its rules holds."""
        self.failures.append(failure)

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
        """Which rule holds for an op and why, and why its rivals do not; never raises."""
        resolution = self._resolutions.get(op)
        if resolution is None:
            later = self._later.pop(op.name(), None)  # type: ignore[no-untyped-call]
            if later is not None:
                origin, make = later
                registrar = Registrar(origin)
                registrar.add(make(op))
                self._entries.setdefault(op, []).extend(registrar.entries)
            overrides, entries = self._overrides.get(op, ()), self._entries.get(op, ())
            resolution = self._resolutions[op] = resolve(op, overrides, entries, self.prefer)
        return resolution

    def conflicts(self) -> list[Resolution]:
        """The ops whose rules conflict, sorted by name."""
        resolutions = (self.resolve(op) for op in self._entries)
        return sorted((r for r in resolutions if r.winner is None), key=lambda r: op_name(r.op))

    def find(self, op: Op) -> list[Entry]:
        """All rules for an op, overrides first."""
        return self._overrides.get(op, [])[::-1] + self._entries.get(op, [])

    def __contains__(self, op: Op) -> bool:
        return bool(self.find(op))

    def ops(self, pattern: str = "*", plugin: str | None = None) -> Iterator[Entry]:
        """All entries by op name, filtered by a shell pattern on the name (with or without ``aten.``) and by plugin."""
        entries = [e for op in {*self._entries, *self._overrides} for e in self.find(op)]
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
        plugins = ", ".join(sorted(o.plugin for o in self.origins)) or "none is installed"
        failed = "; ".join(f"{f.origin} failed to load ({f.cause})" for f in self.failures)
        return NoRuleError(
            asked=f"run {op_name(op)} on a MeshTensor",
            found=f"no rule for it in the plugins {plugins}"
            + (f", and {tried}" if tried else "")
            + (f". Possible cause: {failed}" if failed else ""),
            do="Install or enable a plugin that has one (`shardwise plugins` lists them); docs/unknown-ops.md has the "
            "other remedies.",
            op=op_name(op),
            plugins=tuple(sorted(o.plugin for o in self.origins)),
            failures=tuple(f"{f.origin}: {f.cause}" for f in self.failures),
            parts=tuple(map(op_name, parts)),
            missing=tuple(map(op_name, missing)),
        )
