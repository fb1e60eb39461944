"""Rules as values: ops, and the legal rows of a call of them. :mod:`shardwise.rule` is for writing them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, NoReturn, TypeVar

from attrs import field, frozen

from shardwise.errors import RuleError
from shardwise.kernel.arguments import kind_of
from shardwise.kernel.authored import authored, refuse_answer
from shardwise.kernel.placements import Partial, Placement, is_strided, shard_dim, show_all
from shardwise.kernel.plurals import counted
from shardwise.kernel.signature import ByType, Call, Kind, Op, op_name, signature
from shardwise.kernel.tensor_meta import TensorMeta

__all__ = ["FullMeshRule", "Row", "Rows", "Rule", "Work", "running_its_op", "runs_other_code"]


def _placements(values: Iterable[Placement | None]) -> tuple[Placement | None, ...]:
    return tuple(values)


def _rows(values: Iterable[Row]) -> tuple[Row, ...]:
    return tuple(values)


@frozen(cache_hash=True)
class Row:
    """One legal choice on one mesh dim.

    ``inputs`` and ``outputs`` hold a placement per tensor operand and result (lists flattened, ``None`` where absent).
    A ``lowered`` row runs the rule's lowering. ``divides`` lists ``(operand, dim, size)``: the number of pieces of that
    operand's dim must divide ``size``. ``nonempty`` lists ``(operand, dim)``: no rank's shard may be empty there. A
    strided shard of a row counts its factor in the whole dim, not in what other mesh dims leave of it. ``scattered``
    says that the rule's lowering does not ask where shards of this row start, so that they may be strided. Where they
    are, a row that is not ``scattered`` excludes lowered ones on other mesh dims: it is ``apart``.
    """

    inputs: tuple[Placement | None, ...] = field(converter=_placements)
    outputs: tuple[Placement | None, ...] = field(converter=_placements)
    name: str = ""
    lowered: bool = False
    divides: tuple[tuple[int, int, int], ...] = ()
    nonempty: tuple[tuple[int, int], ...] = ()
    scattered: bool = False
    apart: bool = False

    @cached_property
    def is_strided(self) -> bool:
        """Whether a tensor has a strided shard."""
        return is_strided((*self.inputs, *self.outputs))

    def __str__(self) -> str:
        return f"{self.name or 'row'}: {show_all(self.inputs)} -> {show_all(self.outputs)}"


@frozen
class Rows:
    """The rows of a rule for one call, in order of preference."""

    rows: tuple[Row, ...] = field(converter=_rows)

    def bind(self, call: Call) -> Rows:
        """These rows. Raises :class:`RuleError` for one that does not fit the call."""
        operands = (*call.operands, *call.out_operands)
        for row in self.rows:
            if not isinstance(row, Row):
                _refuse_row(call, f"{row!r} is {kind_of(row)}", "Make rows by Row(inputs, outputs)")
            for what, placements, metas in (("operand", row.inputs, operands), ("result", row.outputs, call.outputs)):
                if len(placements) != len(metas):
                    found = f"{counted(len(placements), 'placement')} for {counted(len(metas), what)}"
                    _refuse_row(call, f"{row} has {found}", "Give one placement per tensor, None for an absent one")
                for placement, meta in zip(placements, metas, strict=True):
                    _check_placement(call, row, placement, meta)
        return self


def _check_placement(call: Call, row: Row, placement: Any, meta: TensorMeta | None) -> None:
    if placement is None:
        return
    if not isinstance(placement, (Placement, Partial)):
        found = f"{row} has {placement!r}, {kind_of(placement)}, for a placement"
        _refuse_row(call, found, "Write Shard(0), Replicate() or Partial('sum')")
    dim = shard_dim(placement)
    if dim is not None and meta is not None and not 0 <= dim < meta.ndim:
        found = f"{row} shards dim {dim} of a tensor of {counted(meta.ndim, 'dim')}"
        _refuse_row(call, found, "Give rows that the tensors of the call can have; dims count from 0")


def _refuse_row(call: Call, found: str, do: str) -> NoReturn:
    name = op_name(call.op)
    raise RuleError(
        asked=f"apply a rule to {call}", found=found, do=f"{do}; `shardwise why {name}` names the plugin", op=name
    )


Lowers = TypeVar("Lowers", bound=Callable[..., Any])
# The floating-point operations of a whole call.
Work = Callable[[Call], float]
# (call, device type) -> metas of the results as that device's kernels return them, if the meta device says otherwise.
Results = Callable[[Call, str], Sequence[TensorMeta | None]]


@frozen(eq=False, repr=False)
class Rule:
    """The legal rows of one or more ops. Make one with :func:`rule` or :func:`rule_from`.

    ``text`` is the notation as written. ``static`` names arguments that are keyed by value though their schema type is
    keyed by type. ``zip_lists`` gives each position of the tensor lists its own choice. ``writes`` names operands that
    the ops write though their schemas do not say so. ``results`` corrects the metas of the results. ``meta`` runs on
    the meta device in place of the ops. ``replaces`` names the distribution whose rule for an op is replaced by this
    one. ``form`` names the function that made the rule. ``work`` gives the floating-point operations of a whole call,
    for planning; without it a call costs the bytes that it reads and writes.
    """

    ops: tuple[Op, ...]
    describe: Callable[[Call], Any]
    text: str
    static: frozenset[str]
    zip_lists: bool
    lowering: Callable[..., Any] | None
    local_args: Callable[..., Any] | None
    source: str
    partial: tuple[str, ...] = ()
    writes: frozenset[str] = frozenset()
    results: Results | None = None
    replaces: str | None = None
    meta: Callable[..., Any] | None = None
    form: str = "rule"
    work: Work | None = None

    def rows(self, call: Call) -> tuple[Row, ...]:
        """The legal rows of one call in order of preference. For a ``zip_lists`` rule: of one list position."""
        with authored(call.op, self.source, "function"):
            described = self.describe(call)
            if callable(described) and not isinstance(described, type):
                described = described(call)
            if isinstance(described, type) or not hasattr(described, "bind"):
                do = "Return like(...), einop(...), a Flow or Rows"
                refuse_answer(call.op, self.source, "function", kind_of(described), do)
            bound: Rows = described.bind(call)
        return bound.rows

    def __str__(self) -> str:
        return f"{', '.join(map(op_name, self.ops))}: {self.text}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"


@frozen(eq=False, repr=False)
class FullMeshRule:
    """A function ``(mesh, op_schema) -> OpStrategy`` that enumerates full strategies itself."""

    ops: tuple[Op, ...]
    strategies: Callable[[Any, Any], Any]
    source: str
    static: frozenset[str] = frozenset()
    lowering: Callable[..., Any] | None = None
    local_args: Callable[..., Any] | None = None
    text: str = "function of the full mesh"
    replaces: str | None = None
    zip_lists: bool = field(default=False, init=False)
    writes: frozenset[str] = field(default=frozenset(), init=False)
    results: Results | None = field(default=None, init=False)
    meta: Callable[..., Any] | None = field(default=None, init=False)
    form: str = field(default="full mesh", init=False)

    def __str__(self) -> str:
        return f"{', '.join(map(op_name, self.ops))}: {self.text}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"


AnyRule = Rule | FullMeshRule

_running_their_op: list[Callable[..., Any]] = []


def running_its_op(lowering: Lowers) -> Lowers:
    """Mark a lowering that runs the op of its call on the parts, but for special values: a decorator."""
    _running_their_op.append(lowering)
    return lowering


def runs_other_code(rule_: AnyRule) -> bool:
    """Whether rows of a rule that are lowered run something else than the op."""
    return rule_.lowering is not None and not any(rule_.lowering is one for one in _running_their_op)


def by_type(rule_: AnyRule, call_values: Sequence[Any], op: Op) -> dict[str, Any]:
    """A call's arguments with those that the rule keys by type replaced by :class:`ByType`."""
    arguments: dict[str, Any] = {}
    for arg, value in zip(signature(op).args, call_values, strict=True):
        is_by_type = arg.kind is Kind.BY_TYPE and arg.name not in rule_.static and value is not None
        arguments[arg.name] = ByType(arg.name, type(value)) if is_by_type else value
    return arguments
