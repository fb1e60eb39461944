"""What a plugin's hook receives, and collects: rules, those that are got later, and what else a plugin says of ops."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

import torch
from attrs import frozen

from shardwise.errors import PluginLoadError, RuleError
from shardwise.kernel.arguments import kind_of
from shardwise.kernel.precedence import Entry, Origin
from shardwise.kernel.rule import AnyRule, FullMeshRule, Rule
from shardwise.kernel.signature import Op, as_op, op_name
from shardwise.private_torch.ops import HigherOrderOperator, OpLike
from shardwise.settings import normalised

__all__ = ["Instead", "Later", "LinkSupplier", "Observer", "Registrar", "RuleModule", "stem_of"]

_MODULES = 'Map names of modules to the names of their ops, as in {"acme.mixing": "acme::mix acme::unmix"}.'

Observer = Callable[[Any], None]
Instead = Callable[..., Any] | None
LinkSupplier = Callable[[tuple[int, ...], str, tuple[str, ...]], Any]


@frozen
class Later:
    """The rule of an op that was not seen yet: where it is (``module:NAME``), or a function of the op that makes it."""

    origin: Origin
    rule: str | Callable[[Op], AnyRule]
    replaces: str | None = None

    @property
    def missing_module(self) -> str:
        """The module of the rule where there is no such module; empty otherwise. Imports the packages around it."""
        module = self.rule.partition(":")[0] if isinstance(self.rule, str) else ""
        try:
            return "" if not module or module in sys.modules or find_spec(module) is not None else module
        except Exception:  # noqa: BLE001  # a package around it is missing, or raises whatever it likes
            return module

    def entries(self, op: Op) -> list[Entry]:
        """Import or make the rule. Raises :class:`PluginLoadError` if there is none for this op."""
        try:
            if isinstance(self.rule, str):
                module, _, name = self.rule.partition(":")
                rule = getattr(import_module(module), name)
            else:
                rule = self.rule(op)
            registrar = Registrar(self.origin)
            registrar.add(rule, replaces=self.replaces)
            own = [entry for entry in registrar.entries if entry.op == op]
            if not own:
                raise LookupError(f"the rule is for {', '.join(op_name(e.op) for e in registrar.entries)}")  # noqa: TRY301  as any failure
        except KeyboardInterrupt:  # of a person, who waits too long
            raise
        except BaseException as error:  # a library that is imported may raise anything
            raise _cannot(f"get the rule of {op_name(op)} from the plugin {self.origin}", self.origin, error) from error
        return own


def stem_of(name: str) -> str:
    """``aten::add`` for ``aten::add.Tensor``, ``aten::add.out`` and ``aten::add_.Tensor``."""
    name = name.partition(".")[0]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


class RuleModule:
    """A module whose ``RULES`` are rules for the ops of some stems (see :func:`stem_of`), imported when one is seen."""

    def __init__(self, origin: Origin, name: str, stems: Sequence[str]) -> None:
        self.origin = origin
        self.name = name
        self.stems = tuple(stems)

    @cached_property
    def read(self) -> Mapping[Op, Entry]:
        """The rules by op. Raises what the module raises, and :class:`RuleError` for a rule of another stem's op."""
        registrar = Registrar(self.origin)
        rules = getattr(import_module(self.name), "RULES", None)
        if not isinstance(rules, (tuple, list)):
            raise RuleError(
                asked=f"read the rules of {self.name} of {self.origin}",
                found="it has no RULES" if rules is None else f"its RULES is {kind_of(rules)}",
                do="Write RULES = (FIRST, SECOND), a tuple of what rule(), rule_from() or full_mesh_rule() returned.",
            )
        registrar.add(*rules)
        for entry in registrar.entries:
            name = entry.op.name()  # type: ignore[no-untyped-call]
            if stem_of(name) not in self.stems:
                raise RuleError(
                    asked=f"register {op_name(entry.op)} of {self.origin}",
                    found=f"{self.name}.RULES has a rule for it, at {entry.rule.source}, and the names that the module "
                    "is registered for do not have it",
                    do=f"Register the module for {stem_of(name)}, too.",
                    op=op_name(entry.op),
                )
        return {entry.op: entry for entry in registrar.entries}

    def all_entries(self) -> list[Entry]:
        """The rules. Raises :class:`PluginLoadError` if the module cannot be imported or its rules are refused."""
        try:
            return list(self.read.values())
        except KeyboardInterrupt:  # of a person, who waits too long
            raise
        except BaseException as error:
            raise _cannot(f"load {self.name} of the plugin {self.origin}", self.origin, error) from error

    def entries(self, op: Op) -> list[Entry]:
        """The rule of an op, if the module has one. Raises as :meth:`all_entries` does."""
        self.all_entries()
        entry = self.read.get(op)
        return [] if entry is None else [entry]


def _cannot(asked: str, origin: Origin, error: BaseException) -> PluginLoadError:
    return PluginLoadError(
        asked=asked,
        found=f"{type(error).__name__}: {error}",
        do=f"Reinstall {origin.distribution}, or disable the plugin with SHARDWISE_DISABLE_PLUGINS={origin.plugin}.",
        plugin=origin.plugin,
        distribution=origin.distribution,
    )


def _no_rule(value: object, origin: Origin) -> RuleError:
    do = "Pass what rule(), rule_from() or full_mesh_rule() returned."
    if isinstance(value, (list, tuple)):
        do = "Pass its rules one by one, with a star: add(*RULES)."
    return RuleError(asked=f"register a rule of {origin}", found=f"{value!r} is {kind_of(value)}", do=do)


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
        #: By the name of an op (``acme::swish``), the rule that is imported or made when the op is first seen.
        self.later: dict[str, Later] = {}
        #: Modules of rules that are imported when an op of theirs is first seen.
        self.modules: list[RuleModule] = []

    @property
    def has_anything(self) -> bool:
        """Whether the plugin registered anything at all."""
        own = (self._by_op, self.optimizers, self.composites, self.higher_order, self.compared, self.views)
        return any((*own, self.observers, self.links, self.later, self.modules))

    @property
    def entries(self) -> list[Entry]:
        """The rules that were registered as values, in order."""
        return list(self._by_op.values())

    def add(self, *rules: AnyRule, replaces: str | None = None) -> None:
        """Register rules.

        They replace the rules that the plugin or distribution ``replaces`` has for these ops; a rule's own ``replaces``
        goes first. Raises :class:`RuleError` for anything but a rule, for a second rule of an op, and for a rule that
        replaces its own plugin or distribution. A name that nobody has is refused when the plugin is loaded.
        """
        for rule in rules:
            if not isinstance(rule, (Rule, FullMeshRule)):
                raise _no_rule(rule, self.origin)
            replaced = rule.replaces or replaces
            replaced_name = None if replaced is None else normalised(replaced)
            for op in rule.ops:
                name = op.name()  # type: ignore[no-untyped-call]
                if op in self._by_op or name in self.later:
                    other = self._by_op[op].rule.source if op in self._by_op else f"add_later({name!r}, ...)"
                    raise RuleError(
                        asked=f"register {op_name(op)} of {self.origin}",
                        found=f"the plugin has two rules for it: {other} and {rule.source}",
                        do="Keep one.",
                        op=op_name(op),
                    )
                if replaced_name is not None and self.origin.is_called(replaced_name):
                    raise RuleError(
                        asked=f"register {op_name(op)} of {self.origin}",
                        found=f"its rule at {rule.source} replaces {replaced!r}, its own plugin or distribution",
                        do="Name the other one in replaces=.",
                        op=op_name(op),
                    )
                self._by_op[op] = Entry(op, rule, self.origin, replaced_name)

    def add_later(self, name: str, rule: str | Callable[[Op], AnyRule], *, replaces: str | None = None) -> None:
        """Register the rule of an op by the op's name, for an op that need not exist yet.

        ``name`` is as torch prints it: ``"torchvision::nms"`` for the default overload, ``"acme::mix.out"`` for another
        one. ``rule`` is where the rule is, ``"acme_vision.rules:NMS"``, or a function of the op that returns it. It is
        imported or called when the op is first seen: rules for the ops of a library do not import the library.
        ``replaces`` is as in :meth:`add`. Raises :class:`RuleError` for a name without a namespace, for a rule that is
        neither, and for a second rule of an op.
        """
        asked = f"register {name!r} of {self.origin}"
        if not re.fullmatch(r"\w+::\w+(\.\w+)?", name):
            do = 'Write it as in "torchvision::nms" or "acme::mix.out".'
            raise RuleError(asked=asked, found="it is not the name of an op with its namespace", do=do, op=name)
        if not (re.fullmatch(r"[\w.]+:\w+", rule) if isinstance(rule, str) else callable(rule)):
            do = 'Write "module:NAME", or pass a function of the op.'
            raise RuleError(asked=asked, found=f"{rule!r} does not say where the rule is", do=do, op=name)
        if name in self.later or name in {op.name() for op in self._by_op}:  # type: ignore[no-untyped-call]
            raise RuleError(asked=asked, found="the plugin has two rules for it", do="Keep one.", op=name)
        self.later[name] = Later(self.origin, rule, None if replaces is None else normalised(replaces))

    def add_modules(self, modules: Mapping[str, str]) -> None:
        """Register the rules of modules, each imported when an op of its own is first seen.

        A key is the name of a module; its ``RULES`` are what :meth:`add` takes. The value has the names of its ops
        between blanks, without overloads and without the underscore of what writes in place: ``"aten::add"`` is for
        ``aten.add.Tensor`` and ``aten.add_.Tensor``. Ops that this version of torch lacks may be among them, and
        several modules may have overloads of one name. Raises :class:`RuleError` for a value that is not such names. A
        rule for an op that the names do not have is refused when the module is imported.
        """
        if not isinstance(modules, Mapping):
            self._refuse("modules of rules", modules, _MODULES)
        for module, names in modules.items():
            asked = f"register the module {module} of {self.origin}"
            if not all(isinstance(word, str) for word in (module, names)):
                self._refuse("modules of rules", modules, _MODULES)
            stems = names.split()
            for name in stems:
                if not re.fullmatch(r"\w+::\w+", name) or stem_of(name) != name:
                    do = 'Write it as in "acme::mix", without an overload.'
                    raise RuleError(asked=asked, found=f"{name!r} is not the name of an op", do=do, op=name)
            if not stems:
                raise RuleError(asked=asked, found="no op is named", do="Name its ops, or leave the module out.")
            self.modules.append(RuleModule(self.origin, module, stems))

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
        self._check_function("a composite op", "instead", instead)
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
        self._check_function("an operator of higher order", "instead", instead, required=True)
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
        self._check_function("a view op", "undo", undo, required=True)
        self.views |= dict.fromkeys(self._overloads(ops, "a view op"), undo)

    def _check_function(self, what: str, name: str, value: Any, *, required: bool = False) -> None:
        if not callable(value) and (required or value is not None):
            raise RuleError(
                asked=f"register {what} of {self.origin}",
                found=f"{name}={value!r} is {kind_of(value)}",
                do=f"Pass a function as {name}=.",
            )

    def _refuse(self, what: str, value: Any, do: str) -> NoReturn:
        raise RuleError(asked=f"register {what} of {self.origin}", found=f"{value!r} is {kind_of(value)}", do=do)

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
