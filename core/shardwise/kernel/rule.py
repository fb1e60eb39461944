"""Rules as values: ops, and the legal rows of a call of them. :mod:`shardwise.rule` is for writing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from attrs import field, frozen

from shardwise.kernel.placements import Placement, is_strided, show_all
from shardwise.kernel.signature import ByType, Call, Kind, Op, op_name, signature
from shardwise.kernel.tensor_meta import TensorMeta

__all__ = ["FullMeshRule", "Row", "Rows", "Rule", "Work"]


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

    inputs: tuple[Placement | None, ...]
    outputs: tuple[Placement | None, ...]
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

    rows: tuple[Row, ...]

    def bind(self, _call: Call) -> Rows:
        """These rows, for any call."""
        return self


# The floating-point operations of a whole call.
Work = Callable[[Call], float]
# (call, device type) -> metas of the results as that device's kernels return them, if the meta device says otherwise.
Results = Callable[[Call, str], Sequence[TensorMeta | None]]


@frozen(eq=False)
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
        described = self.describe(call)
        if callable(described):
            described = described(call)
        bound: Rows = described.bind(call)
        return bound.rows

    def __str__(self) -> str:
        return f"{', '.join(map(op_name, self.ops))}: {self.text}"


@frozen(eq=False)
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


AnyRule = Rule | FullMeshRule


def by_type(rule_: AnyRule, call_values: Sequence[Any], op: Op) -> dict[str, Any]:
    """A call's arguments with those that the rule keys by type replaced by :class:`ByType`."""
    arguments: dict[str, Any] = {}
    for arg, value in zip(signature(op).args, call_values, strict=True):
        is_by_type = arg.kind is Kind.BY_TYPE and arg.name not in rule_.static and value is not None
        arguments[arg.name] = ByType(arg.name, type(value)) if is_by_type else value
    return arguments
