"""Exporting shardwise rules to torch's DTensor, with a report of what was exported and what was not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from attrs import field, frozen

from shardwise.discovery.process import default_registry
from shardwise.errors import RuleError
from shardwise.kernel.rule import runs_other_code
from shardwise.rule import REPLICATE, AbstractMesh, FullMeshRule, Op, Rule, show_all
from shardwise_dtensor import torch_private
from shardwise_dtensor.refusals import refusals
from shardwise_dtensor.shardings import Shardings

__all__ = ["Export", "Exported", "Preview", "export", "export_plugin", "preview"]

AnyRule = Rule | FullMeshRule
What = AnyRule | Op | str


@frozen(eq=False)
class Exported:
    """One op of an export.

    ``refused`` says why the op was left out; it is empty for an op that DTensor now runs. ``partly`` says that the rule
    has a lowering, so that some of its rows may be left out; ``rows_left_out`` maps those that calls have shown so far
    to the reason. Which rows a call has depends on the call: :func:`preview` lists them for an example.
    """

    op: Op
    source: str
    refused: tuple[str, ...]
    partly: bool
    rows_left_out: dict[str, str] = field(factory=dict)

    @property
    def status(self) -> str:
        """``exported``, ``partly`` or ``left out``."""
        if self.refused:
            return "left out"
        return "partly" if self.partly or self.rows_left_out else "exported"

    def __str__(self) -> str:
        reasons = list(self.refused) + [f"row {name!r} {why}" for name, why in self.rows_left_out.items()]
        return f"{self.op}: {self.status}" + (f" ({'; '.join(reasons)})" if reasons else "")


@frozen(eq=False)
class Export:
    """The report of an export, op by op. As a context manager it withdraws its rules at the end (:meth:`undo`)."""

    ops: tuple[Exported, ...]
    _restore: ExitStack = field(repr=False)

    def of(self, status: str) -> tuple[Exported, ...]:
        """The ops of one status: ``exported``, ``partly`` or ``left out``."""
        return tuple(exported for exported in self.ops if exported.status == status)

    def undo(self) -> None:
        """Restore what DTensor had for these ops. Choices that other threads cached with the rules remain."""
        self._restore.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __str__(self) -> str:
        return "\n".join(map(str, self.ops))


@frozen
class Preview:
    """What is exported of a rule for one call: rows as ``[inputs] -> [outputs]``, and the others with the reason."""

    rows: tuple[str, ...]
    left_out: dict[str, str]


# -- exporting ---------------------------------------------------------------------------------------------------


def export(what: What | Iterable[What], *, override: bool = False) -> Export:
    """Register rules with DTensor: a rule, an op (its rule in the registry), a pattern on op names, or several of them.

    The plain rows of a rule are exported. What DTensor would compute wrongly is left out, and the report has the
    reasons: rows that run a lowering, ops that write more than their first argument, and so on. An op that DTensor has
    a rule for is skipped unless ``override``. Raises :class:`RuleError` for a pattern that matches no op, and what the
    registry raises for an op without a rule.
    """
    several = [what] if isinstance(what, (Rule, FullMeshRule, Op, str)) else what
    return _export((pair for one in several for pair in _pairs(one)), override=override)


def export_plugin(name: str, *, override: bool = False) -> Export:
    """:func:`export` of every op whose rule comes from one plugin. Raises :class:`RuleError` for an unknown one."""
    registry = default_registry()
    entries = [entry for entry in registry.ops(plugin=name) if registry.lookup(entry.op) is entry]
    if not entries:
        loaded = ", ".join(sorted(origin.plugin for origin in registry.origins))
        raise RuleError(
            asked=f"export the rules of the plugin {name!r} to DTensor",
            found=f"it has no rule in force; the loaded plugins are {loaded or 'none'}",
            do="Correct the name, or see `shardwise plugins`.",
            plugin=name,
        )
    return _export(((entry.op, entry.rule) for entry in entries), override=override)


def _pairs(what: What) -> Iterator[tuple[Op, AnyRule]]:
    if isinstance(what, (Rule, FullMeshRule)):
        yield from ((op, what) for op in what.ops)
    elif isinstance(what, Op):
        yield what, default_registry().lookup(what).rule
    else:
        ops = dict.fromkeys(entry.op for entry in default_registry().ops(what))
        if not ops:
            raise RuleError(
                asked=f"export the rules for {what!r} to DTensor",
                found="no op with a rule has such a name",
                do="Correct the pattern (shell style), or see `shardwise rules`.",
                pattern=what,
            )
        yield from ((op, default_registry().lookup(op).rule) for op in ops)


def _export(pairs: Iterable[tuple[Op, AnyRule]], *, override: bool) -> Export:
    exported = []
    with ExitStack() as stack:
        for op, rule in pairs:
            refused = refusals(op, rule, override=override)
            if refused or isinstance(rule, FullMeshRule):
                exported.append(Exported(op, rule.source, refused, partly=False))
                continue
            shardings = Shardings(op, rule)
            positional, keywords = torch_private.varying(op, shardings.by_type)
            stack.callback(torch_private.put_rule(op, shardings, positional, keywords))
            partly = runs_other_code(rule) or rule.local_args is not None
            exported.append(Exported(op, rule.source, (), partly, shardings.left_out))
        return Export(tuple(exported), stack.pop_all())


# -- looking before --------------------------------------------------------------------------------------------------


def preview(rule: Rule, *args: Any, mesh_shape: tuple[int, ...] = (4,), **kwargs: Any) -> Preview:
    """What would be exported of a rule for a call of its first op with these arguments (tensors may be meta tensors).

    Raises :class:`NoStrategyError` when that is nothing.
    """
    mesh = torch_private.torch_mesh(AbstractMesh(mesh_shape))

    def spec(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            meta = torch_private.TensorMeta(value.shape, value.stride(), value.dtype)
            return torch_private.DTensorSpec(mesh, (REPLICATE,) * mesh.ndim, meta)
        return tuple(map(spec, value)) if isinstance(value, (list, tuple)) else value

    shardings = Shardings(rule.ops[0], rule)
    acceptable = shardings(*map(spec, args), **{name: spec(value) for name, value in kwargs.items()})
    shown = tuple(f"{show_all(inputs)} -> {show_all(outputs)}" for outputs, inputs in acceptable)
    return Preview(shown, dict(shardings.left_out))
