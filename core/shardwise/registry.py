"""The registry: op -> rule, and who supplied it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from attrs import field, frozen

from shardwise import planner
from shardwise.errors import NoRuleError, NoStrategyError, RuleConflictError, RuleError
from shardwise.meta import UNKNOWN, schema_metas
from shardwise.rule import AnyRule, FullMeshRule, Rule
from shardwise.schema import OpSchema, OpStrategy, OutputSharding, TupleStrategy
from shardwise.signature import Op, op_name
from shardwise.spec import TensorMeta

__all__ = ["Entry", "Failure", "Origin", "Registrar", "Registry"]


@frozen
class Origin:
    """A plugin and the distribution that brought it."""

    plugin: str
    distribution: str = "this process"
    version: str = "-"

    def __str__(self) -> str:
        same = self.plugin == self.distribution
        return f"{self.plugin} {self.version}" if same else f"{self.plugin} ({self.distribution} {self.version})"


@frozen(eq=False)
class Entry:
    """One rule for one op, with its origin."""

    op: Op
    rule: AnyRule
    origin: Origin

    def __str__(self) -> str:
        return f"{self.origin} at {self.rule.source}"


@frozen
class Failure:
    """A plugin that could not be loaded, and why."""

    origin: Origin
    cause: str
    traceback: str = field(default="", repr=False)


class Registrar:
    """What a plugin's hook receives: the door through which its rules come in."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self._by_op: dict[Op, Entry] = {}
        self.optimizers: list[type[torch.optim.Optimizer]] = []

    @property
    def entries(self) -> list[Entry]:
        """All that was handed over, in that order."""
        return list(self._by_op.values())

    def add(self, *rules: AnyRule) -> None:
        """Hand over rules. Raises :class:`RuleError` for something that is no rule or an op that comes twice."""
        for rule in rules:
            if not isinstance(rule, (Rule, FullMeshRule)):
                raise RuleError(
                    asked=f"register a rule of {self.origin}",
                    found=f"{rule!r} is a {type(rule).__name__}",
                    do="Hand over what rule(), rule_from() or full_mesh_rule() returned.",
                )
            for op in rule.ops:
                self._add(op, rule)

    def add_optimizers(self, *classes: Any) -> None:
        """Name optimizers whose step treats each element alone: it may run on shards as they are.

        Subclasses are not meant. Raises :class:`RuleError` for something that is no optimizer class.
        """
        for cls in classes:
            if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
                raise RuleError(
                    asked=f"register an optimizer of {self.origin}",
                    found=f"{cls!r} is not a class of torch.optim.Optimizer",
                    do="Hand over classes, as in add_optimizers(torch.optim.AdamW).",
                )
        self.optimizers += classes

    def _add(self, op: Op, rule: AnyRule) -> None:
        twice = self._by_op.get(op)
        if twice is not None:
            raise RuleError(
                asked=f"register {op_name(op)} of {self.origin}",
                found=f"the plugin has two rules for it: {twice.rule.source} and {rule.source}",
                do="Keep one.",
                op=op_name(op),
            )
        self._by_op[op] = Entry(op, rule, self.origin)


class Registry:
    """Rules by op. An op with two rules and nothing that says which wins raises when *that op* is looked up."""

    def __init__(self) -> None:
        self._entries: dict[Op, list[Entry]] = {}
        self._overrides: dict[Op, list[Entry]] = {}
        self.optimizers: set[type[torch.optim.Optimizer]] = set()
        self.origins: list[Origin] = []
        self.failures: list[Failure] = []
        self._listeners: list[Callable[[], None]] = []

    # -- filling --
    def accept(self, registrar: Registrar) -> None:
        """Take over all that one plugin registered."""
        self.origins.append(registrar.origin)
        self.optimizers.update(registrar.optimizers)
        for entry in registrar.entries:
            self._entries.setdefault(entry.op, []).append(entry)
        self.changed()

    def reject(self, failure: Failure) -> None:
        """Record a plugin that failed; none of its rules is taken."""
        self.failures.append(failure)

    def override(self, *rules: AnyRule) -> Callable[[], None]:
        """Put rules above all others in this process; returns the function that takes them back."""
        registrar = Registrar(Origin("override"))
        registrar.add(*rules)
        for entry in registrar.entries:
            self._overrides.setdefault(entry.op, []).append(entry)
        self.changed()

        def undo() -> None:
            for entry in registrar.entries:
                self._overrides[entry.op].remove(entry)
            self.changed()

        return undo

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever a look-up may answer differently than before (caches of plans hang on it)."""
        self._listeners.append(listener)

    def changed(self) -> None:
        """Tell the listeners that a look-up may answer differently now."""
        for listener in self._listeners:
            listener()

    # -- asking --
    def lookup(self, op: Op) -> Entry:
        """The rule that holds for an op; raises :class:`NoRuleError` or :class:`RuleConflictError`."""
        if self._overrides.get(op):
            return self._overrides[op][-1]
        found = self._entries.get(op, [])
        if len(found) == 1:
            return found[0]
        raise self._conflict(op, found) if found else self._missing(op)

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
        """The different rules, by the name of their first op."""
        unique = {id(e.rule): e.rule for e in self.ops(plugin=plugin)}
        return sorted(unique.values(), key=lambda r: op_name(r.ops[0]))

    def strategies(self, schema: OpSchema) -> OpStrategy | TupleStrategy:
        """Every legal strategy of a call with its cost, cheapest first; one list per position for zipped lists."""
        rule = self.lookup(schema.op).rule
        return planner.strategies(rule, schema, _known_metas(schema, rule.meta))

    def propagate(self, schema: OpSchema) -> OutputSharding:
        """Where the results of a call lie, and what its operands must be redistributed to first."""
        rule = self.lookup(schema.op).rule
        return planner.propagate(rule, schema, _known_metas(schema, rule.meta))

    # -- refusing --
    def _missing(self, op: Op) -> NoRuleError:
        looked = ", ".join(sorted(o.plugin for o in self.origins)) or "none is installed"
        failed = "; ".join(f"{f.origin} failed to load ({f.cause})" for f in self.failures)
        return NoRuleError(
            asked=f"run {op_name(op)} on a MeshTensor",
            found=f"no rule for it in the plugins {looked}" + (f". Possible cause: {failed}" if failed else ""),
            do="Install or enable a plugin that has it (shardwise plugins), write a rule, "
            "or run it on local tensors (to_local, from_local).",
            op=op_name(op),
            plugins=tuple(sorted(o.plugin for o in self.origins)),
            failures=tuple(f"{f.origin}: {f.cause}" for f in self.failures),
        )

    def _conflict(self, op: Op, found: list[Entry]) -> RuleConflictError:
        rivals = sorted(found, key=lambda e: e.origin.plugin)
        return RuleConflictError(
            asked=f"find the rule for {op_name(op)}",
            found="; ".join(map(str, rivals)) + " all supply one",
            do=f"Disable all but one, for example SHARDWISE_DISABLE_PLUGINS={rivals[-1].origin.plugin}, "
            "or choose in this process with registry.override(rule).",
            op=op_name(op),
            plugins=tuple(e.origin.plugin for e in rivals),
        )


def _known_metas(schema: OpSchema, instead: Callable[..., Any] | None) -> tuple[TensorMeta | None, ...]:
    found = schema_metas(schema, instead)
    if found is UNKNOWN:
        raise NoStrategyError(
            asked=f"enumerate the strategies of {schema}",
            found="the shape of its result depends on data",
            do="Run the op on data.",
            op=op_name(schema.op),
        )
    metas: tuple[TensorMeta | None, ...] = found
    return metas
