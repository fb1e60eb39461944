"""From a rule's rows to what ``register_sharding`` takes: acceptable placements on one mesh dim.

DTensor combines them over the mesh dims by itself and runs the plain op. So a row goes over only when every such
combination is right without any help: no lowering, no condition that a combination may break, no placement that
DTensor cannot make.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import torch
from attrs import define, field, frozen

from shardwise.errors import NoStrategyError
from shardwise.planning.strategies import rows
from shardwise.rule import (
    REPLICATE,
    AbstractMesh,
    Op,
    OpSchema,
    Partial,
    Placement,
    Row,
    Rule,
    RuntimeSchemaInfo,
    Shard,
    TensorMeta,
    TensorSpec,
    chunk,
)
from shardwise_dtensor.torch_private import DTensorSpec, OpStrategy

__all__ = ["Shardings"]

Places = list[Placement | None]
Acceptable = list[tuple[Places, Places]]
_ABSTRACT = AbstractMesh((1,))
_COMMUTING = {"sum", "avg"}


@frozen(eq=False)
class _Given:
    """One call as DTensor hands it over: its schema, where its operands lie, and which of them are plain numbers."""

    schema: OpSchema
    mesh_shape: tuple[int, ...]
    present: tuple[tuple[Placement, ...], ...]
    numbers: tuple[int, ...]

    def meta(self, operand: int) -> TensorMeta:
        spec = self.schema.specs[operand]
        if spec is None:
            raise IndexError(operand)
        return spec.tensor_meta


@define(eq=False)
class Shardings:
    """The function that ``register_sharding`` registers for one op. ``left_out`` fills as calls come: row -> reason."""

    op: Op
    rule: Rule
    left_out: dict[str, str] = field(factory=dict, init=False)

    @property
    def by_type(self) -> frozenset[str]:
        """Arguments of which the rule sees the type only."""
        return RuntimeSchemaInfo.of(self.op, self.rule.static).by_type

    def __call__(self, *args: Any, **kwargs: Any) -> Acceptable:
        """Acceptable placements of a call, specs in place of tensors: ``(outputs, inputs)`` per row, the whole one
        first.

        Raises :class:`NoStrategyError` when no row is fit for DTensor.
        """
        given = _given(self.op, self.rule, args, kwargs)
        kept = [row for row in map(_counted(given), rows(self.rule, given.schema)) if self._fits(row, given)]
        if len(given.mesh_shape) > 1:
            kept = self._commuting(kept, given)
        if not kept:
            raise NoStrategyError(
                asked=f"run {given.schema} by DTensor with the rule at {self.rule.source}",
                found="; ".join(f"row {name!r} {why}" for name, why in self.left_out.items()) or "it has no row",
                do="Run it on a MeshTensor, where rows may have lowerings.",
            )
        kept.sort(key=lambda row: not _is_whole(row))
        return [(list(row.outputs), [p for i, p in enumerate(row.inputs) if i not in given.numbers]) for row in kept]

    def _fits(self, row: Row, given: _Given) -> bool:
        reason = _reason(row, given, self.rule)
        if reason:
            self.left_out[row.name or str(row)] = reason
        return not reason

    def _commuting(self, kept: Sequence[Row], given: _Given) -> list[Row]:
        """Rows of which no two leave a tensor partial in ways that do not commute; those that fit the operands first.

        Not every release of torch refuses such a combination by itself.
        """
        there = {p.reduce_op for placements in given.present for p in placements if isinstance(p, Partial)}
        commuting: list[Row] = []
        for row in sorted(kept, key=lambda row: _strangeness(_kinds(row.inputs), there)):
            if all(_commute(row, other) for other in commuting):
                commuting.append(row)
            else:
                self.left_out[row.name or str(row)] = "leaves a tensor partial in a way that clashes with another row's"
        return [row for row in kept if row in commuting]


# -- reading the call --------------------------------------------------------------------------------------------


def _given(op: Op, rule: Rule, args: Sequence[Any], kwargs: dict[str, Any]) -> _Given:
    specs: list[DTensorSpec] = []
    plain = OpSchema.of(op, *(_read(a, specs) for a in args), **{k: _read(v, specs) for k, v in kwargs.items()})
    numbers: list[int] = []
    values: list[Any] = []
    at = 0
    for arg, value in zip(plain.signature.args, plain.values, strict=True):
        is_tensor = arg in plain.signature.tensor_args
        number = is_tensor and isinstance(value, (bool, int, float, complex))
        if number:
            numbers.append(at)
        values.append(_abstract(TensorMeta.of(torch.tensor(value))) if number else value)
        at += 0 if not is_tensor else len(value or ()) if arg.is_list else 1
    schema = OpSchema(op, tuple(values), OpSchema.of(op, static=rule.static).info)
    mesh_shape = tuple(specs[0].mesh.shape) if specs else ()
    return _Given(schema, mesh_shape, tuple(s.placements for s in specs), tuple(numbers))


def _read(value: Any, specs: list[DTensorSpec]) -> Any:
    if isinstance(value, OpStrategy):  # elements of lists that hold None, too
        value = value.strategies[0].output_spec
    if isinstance(value, DTensorSpec):
        specs.append(value)
        meta = value.tensor_meta
        if meta is None:
            raise ValueError("DTensor gave a spec without tensor meta")
        plain = TensorMeta(meta.shape, meta.stride, meta.dtype)
        if plain.is_symbolic:
            raise NoStrategyError(
                asked=f"tell DTensor the rows of a call with a tensor of shape {tuple(meta.shape)}",
                found="a size is symbolic, and rows may depend on sizes",
                do="Compile with dynamic=False.",
            )
        return _abstract(plain)
    if isinstance(value, (list, tuple)):
        return tuple(_read(v, specs) for v in value)
    return value


def _abstract(meta: TensorMeta) -> TensorSpec:
    return TensorSpec(_ABSTRACT, (REPLICATE,), meta)


def _counted(given: _Given) -> Callable[[Row], Row]:
    """Rows with every dim counted from the front, as DTensor compares placements."""
    inputs = [None if s is None else s.ndim for s in given.schema.specs]

    def counted(row: Row) -> Row:
        placed = tuple(_from_front(p, ndim) for p, ndim in zip(row.inputs, inputs, strict=True))
        return Row(placed, row.outputs, row.name, row.lowered, row.divides, row.nonempty)

    return counted


def _from_front(placement: Placement | None, ndim: int | None) -> Placement | None:
    if isinstance(placement, Shard) and placement.dim < 0:
        return Shard(placement.dim + (ndim or 0))
    return placement


# -- judging a row -----------------------------------------------------------------------------------------------


def _reason(row: Row, given: _Given, rule: Rule) -> str:
    """Why DTensor may not have a row for this call, empty when it may."""
    if row.lowered:
        return "runs a lowering, and DTensor would run the plain op"
    if rule.local_args is not None and not _is_whole(row):
        return "may need local arguments, and DTensor would pass the global ones"
    if _breaks_a_condition(row, given):
        return "needs even or nonempty shards, which this size does not give on every choice of mesh dims"
    if given.schema.written and row.outputs and row.outputs[0] != row.inputs[0]:
        return "gives the written tensor another placement"
    return _unplaceable(row, given)


def _unplaceable(row: Row, given: _Given) -> str:
    """Which placement of a row DTensor cannot make or read, if any."""
    if any(row.inputs[i] != REPLICATE for i in given.numbers):
        return "places a plain number"
    if any(p is not None and not _can_be_made(p, given.meta(i).dtype) for i, p in enumerate(row.inputs)):
        return "asks for a partial operand that DTensor cannot make of a whole one"
    if any(isinstance(p, Shard) and p.dim < 0 for p in row.outputs):
        return "counts a dim of a result from the end"
    return ""


def _is_whole(row: Row) -> bool:
    return all(p is None or p == REPLICATE for p in (*row.inputs, *row.outputs))


def _can_be_made(placement: Placement, dtype: torch.dtype) -> bool:
    """DTensor takes ``R -> Partial`` to cost nothing, so it may do it to any operand. It divides for a sum, which gives
    an integer fractions, and has no way for a product.
    """
    if not isinstance(placement, Partial):
        return True
    divides = placement.reduce_op == "sum"
    return placement.reduce_op != "product" and (not divides or dtype.is_floating_point or dtype.is_complex)


def _breaks_a_condition(row: Row, given: _Given) -> bool:
    """Whether some choice of mesh dims for the row breaks what it asks of the shards."""
    if any(size % math.prod(given.mesh_shape) for _, _, size in row.divides):
        return True
    dims = range(1, len(given.mesh_shape) + 1)
    choices = [c for n in dims for c in combinations(given.mesh_shape, n)]
    return any(_leaves_empty(given.meta(i).shape[d], parts) for i, d in row.nonempty for parts in choices)


def _leaves_empty(size: int, parts: Sequence[int]) -> bool:
    sizes = {size}
    for n in parts:
        sizes = {chunk(size, n, i)[0] for size in sizes for i in range(n)}
    return 0 in sizes


# -- reductions -----------------------------------------------------------------------------------------------


def _kinds(placements: Sequence[Placement | None]) -> set[str]:
    return {p.reduce_op for p in placements if isinstance(p, Partial)}


def _strangeness(asked: set[str], there: set[str]) -> int:
    """How well the reductions that a row asks for fit the operands: 0 when they are there, 1 when it asks none."""
    return 1 if not asked else 0 if asked <= there else 2


def _commute(one: Row, other: Row) -> bool:
    pairs = zip((*one.inputs, *one.outputs), (*other.inputs, *other.outputs), strict=True)
    kinds = [_kinds(pair) for pair in pairs if all(isinstance(p, Partial) for p in pair)]
    return all(len(k) == 1 or k <= _COMMUTING for k in kinds)
