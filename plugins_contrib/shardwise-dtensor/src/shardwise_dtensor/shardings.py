"""A rule's rows as ``register_sharding`` takes them: acceptable placements on one mesh dim.

DTensor combines them over the mesh dims by itself and runs the plain op. So a row is exported only if every such
combination is right: it runs no lowering, it has no condition that a combination may break, and it has no placement
that DTensor cannot make.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch
from attrs import define, evolve, field, frozen

from shardwise.errors import NoStrategyError
from shardwise.kernel.rule import runs_other_code
from shardwise.planning.results import schema_metas
from shardwise.planning.strategies import make_call, rows
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
class _Call:
    """One call as DTensor passes it: its schema, its operands' placements, and which operands are plain numbers."""

    schema: OpSchema
    mesh_shape: tuple[int, ...]
    placements: tuple[tuple[Placement, ...], ...]
    numbers: tuple[int, ...]
    device_type: str

    def meta(self, operand: int) -> TensorMeta:
        spec = self.schema.specs[operand]
        if spec is None:
            raise IndexError(operand)
        return spec.tensor_meta


@define(eq=False)
class Shardings:
    """The function that ``register_sharding`` registers for one op. Calls fill ``left_out``: row -> reason."""

    op: Op
    rule: Rule
    left_out: dict[str, str] = field(factory=dict, init=False)

    @property
    def by_type(self) -> frozenset[str]:
        """Arguments of which the rule sees only the type."""
        return RuntimeSchemaInfo.of(self.op, self.rule.static).by_type

    def __call__(self, *args: Any, **kwargs: Any) -> Acceptable:
        """Acceptable placements of a call, specs in place of tensors: ``(outputs, inputs)`` per row, the whole row
        first.

        Raises :class:`NoStrategyError` when DTensor can run no row.
        """
        call = _call(self.op, self.rule, args, kwargs)
        if not _lies_as_noted(self.rule, call):
            raise NoStrategyError(
                asked=f"run {call.schema} by DTensor with the rule at {self.rule.source}",
                found="the kernel makes a result with other strides, or another shape or dtype, than the meta device "
                "says, and DTensor notes that",
                do="Make the operands contiguous, or run it on a MeshTensor.",
            )
        ndims = [None if s is None else s.ndim for s in call.schema.specs]
        legal = []
        for row in rows(self.rule, call.schema):
            # DTensor compares placements, so dims are counted from the front.
            inputs = tuple(
                Shard(p.dim + (ndim or 0)) if isinstance(p, Shard) and p.dim < 0 else p
                for p, ndim in zip(row.inputs, ndims, strict=True)
            )
            counted = evolve(row, inputs=inputs)
            reason = _reason(counted, call, self.rule)
            if reason:
                self.left_out[row.name or str(counted)] = reason
            else:
                legal.append(counted)
        if len(call.mesh_shape) > 1:
            legal = self._commuting(legal, call)
        if not legal:
            raise NoStrategyError(
                asked=f"run {call.schema} by DTensor with the rule at {self.rule.source}",
                found="; ".join(f"row {name!r} {why}" for name, why in self.left_out.items()) or "it has no row",
                do="Run it on a MeshTensor, where rows may have lowerings.",
            )
        legal.sort(key=lambda row: not _is_whole(row))
        return [(list(row.outputs), [p for i, p in enumerate(row.inputs) if i not in call.numbers]) for row in legal]

    def _commuting(self, legal: Sequence[Row], call: _Call) -> list[Row]:
        """Rows whose reductions commute with each other. Rows that ask for the operands' own reductions come first.

        Not every release of torch refuses a combination that does not commute.
        """
        present = {p.reduce_op for placements in call.placements for p in placements if isinstance(p, Partial)}

        def preference(row: Row) -> int:
            asked = _kinds(row.inputs)
            return 1 if not asked else 0 if asked <= present else 2

        commuting: list[Row] = []
        for row in sorted(legal, key=preference):
            if all(_commute(row, other) for other in commuting):
                commuting.append(row)
            else:
                self.left_out[row.name or str(row)] = "has a reduction that does not commute with another row's"
        return [row for row in legal if row in commuting]


# -- reading the call --------------------------------------------------------------------------------------------


def _call(op: Op, rule: Rule, args: Sequence[Any], kwargs: dict[str, Any]) -> _Call:
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
    device_type = specs[0].mesh.device_type if specs else "cpu"
    return _Call(schema, mesh_shape, tuple(s.placements for s in specs), tuple(numbers), device_type)


def _read(value: Any, specs: list[DTensorSpec]) -> Any:
    if isinstance(value, OpStrategy):  # an element of a list that also holds None
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


def _lies_as_noted(rule: Rule, call: _Call) -> bool:
    """Whether the results of a call are what the meta device says, by which DTensor goes."""
    if rule.results is None:
        return True
    noted = schema_metas(call.schema, rule.meta) or ()
    plain = make_call(evolve(rule, results=None), call.schema, noted)
    return tuple(rule.results(plain, call.device_type)) == tuple(noted)


# -- judging a row -----------------------------------------------------------------------------------------------


def _reason(row: Row, call: _Call, rule: Rule) -> str:
    """Why a row must not be exported for this call; empty if it may be."""
    if row.lowered and runs_other_code(rule):
        return "runs a lowering, and DTensor would run the plain op"
    if rule.local_args is not None and not _is_whole(row):
        return "may need local arguments, and DTensor would pass the global ones"
    if _breaks_a_condition(row, call):
        return "needs even or nonempty shards, which this size does not give on every choice of mesh dims"
    if call.schema.written and row.outputs and row.outputs[0] != row.inputs[0]:
        return "gives the written tensor another placement"
    return _unplaceable(row, call)


def _unplaceable(row: Row, call: _Call) -> str:
    """Which placement of a row DTensor cannot make or read; empty if it can do so with all."""
    if any(row.inputs[i] != REPLICATE for i in call.numbers):
        return "places a plain number"
    if any(p is not None and not _can_be_made(p, call.meta(i).dtype) for i, p in enumerate(row.inputs)):
        return "asks for a partial operand that DTensor cannot make of a whole one"
    if any(isinstance(p, Shard) and p.dim < 0 for p in row.outputs):
        return "counts a dim of a result from the end"
    return ""


def _is_whole(row: Row) -> bool:
    return all(p is None or p == REPLICATE for p in (*row.inputs, *row.outputs))


def _can_be_made(placement: Placement, dtype: torch.dtype) -> bool:
    """Whether DTensor can make such an operand of a whole one; it may do so at any time, since that costs it nothing.

    For a sum it divides, which does not work for integers. It cannot do it for a product.
    """
    if not isinstance(placement, Partial):
        return True
    divides = placement.reduce_op == "sum"
    return placement.reduce_op != "product" and (not divides or dtype.is_floating_point or dtype.is_complex)


def _breaks_a_condition(row: Row, call: _Call) -> bool:
    """Whether some choice of mesh dims for the row breaks its condition on the shards."""
    if any(size % math.prod(call.mesh_shape) for _, _, size in row.divides):
        return True
    dims = range(1, len(call.mesh_shape) + 1)
    choices = [c for n in dims for c in combinations(call.mesh_shape, n)]
    return any(_leaves_empty(call.meta(i).shape[d], parts) for i, d in row.nonempty for parts in choices)


def _leaves_empty(size: int, parts: Sequence[int]) -> bool:
    sizes = {size}
    for n in parts:
        sizes = {chunk(size, n, i)[0] for size in sizes for i in range(n)}
    return 0 in sizes


# -- reductions -----------------------------------------------------------------------------------------------


def _kinds(placements: Sequence[Placement | None]) -> set[str]:
    return {p.reduce_op for p in placements if isinstance(p, Partial)}


def _commute(one: Row, other: Row) -> bool:
    pairs = zip((*one.inputs, *one.outputs), (*other.inputs, *other.outputs), strict=True)
    kinds = [_kinds(pair) for pair in pairs if all(isinstance(p, Partial) for p in pair)]
    return all(len(k) == 1 or k <= _COMMUTING for k in kinds)
