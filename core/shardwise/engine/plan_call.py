"""From one call, as torch hands it over, to its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shardwise.engine.c_functions import binding
from shardwise.engine.make_plan import DescribedCall, make_plan
from shardwise.errors import DeviceMismatchError, MeshMismatchError
from shardwise.kernel.dispatcher import NUMBERS
from shardwise.kernel.placements import REPLICATE
from shardwise.kernel.plan import Plan
from shardwise.kernel.precedence import Entry
from shardwise.kernel.schema import OpSchema, RuntimeSchemaInfo
from shardwise.kernel.signature import Arg, Kind, Op, op_name, signature
from shardwise.kernel.spec import Mesh, TensorMeta, TensorSpec
from shardwise.kernel.symbols import hint
from shardwise.planning.results import output_metas
from shardwise.planning.strategies import check_lengths
from shardwise.private_torch.ops import direct_call

__all__ = ["common_mesh", "describe_call", "plan_call"]


def plan_call(cls: type, entry: Entry, info: RuntimeSchemaInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Plan:
    """Build the schema of one call, check it, and plan it; ``cls`` is the tensor class.

    Raises what is wrong with the call, before anything is communicated.
    """
    op = entry.op
    values = signature(op).bind(args, kwargs)
    schema, arguments = describe_call(cls, entry, info, common_mesh(cls, op, values), map(_number, values))
    plan = make_plan(DescribedCall.of(entry, schema, output_metas(op, arguments, entry.rule.meta)))
    if plan.call is direct_call(op):
        plan.run_by(_local_binding(cls, plan, args, kwargs))
    return plan


def _number(value: Any) -> Any:
    """A number in place of a symbol that is keyed by its type: a plan is kept, and must not hold on to a graph."""
    if isinstance(value, torch.SymInt):
        return hint(value)
    return 1.0 if isinstance(value, torch.SymFloat) else True if isinstance(value, torch.SymBool) else value


def describe_call(
    cls: type, entry: Entry, info: RuntimeSchemaInfo, mesh: Mesh, given: Iterable[Any]
) -> tuple[OpSchema, list[Any]]:
    """The schema of a call, and its arguments with specs for tensors only: numbers in their place stay numbers."""
    op, values = entry.op, list(given)
    schema = OpSchema(op, tuple(_to_specs(cls, op, mesh, values)), info, _number_operands(op, values))
    if entry.rule.zip_lists:
        check_lengths(schema)
    named = zip(signature(op).args, values, schema.values, strict=True)
    return schema, [n if _is_number_operand(a, n) else v for a, n, v in named]


def _local_binding(cls: type, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """The C function that runs the plan's op on arguments of the types that the handler will pass."""
    schema = plan.schema
    if plan.full:
        values = signature(schema.op).bind(args, kwargs)
        if plan.static is not None:
            replaced = iter(plan.static)
            named = zip(schema.signature.args, values, strict=True)
            values = [next(replaced) if a.name in schema.info.by_value else v for a, v in named]
        args, kwargs = signature(schema.op).unbind(values)
    return binding(schema.op, [_local(cls, v) for v in args], {name: _local(cls, v) for name, v in kwargs.items()})


def _local(cls: type, value: Any) -> Any:
    if isinstance(value, cls):
        return value._local_tensor  # type: ignore[attr-defined]
    return [_local(cls, v) for v in value] if isinstance(value, (list, tuple)) else value


def _tensors(op: Op, values: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for arg, value in zip(signature(op).args, values, strict=True):
        if arg.kind is Kind.TENSOR and isinstance(value, torch.Tensor):
            yield arg.name, value
        elif arg.kind is Kind.TENSORS:
            yield from ((f"{arg.name}[{i}]", t) for i, t in enumerate(value or ()) if t is not None)


def common_mesh(cls: Any, op: Op, values: Sequence[Any]) -> Mesh:
    """The one mesh of all MeshTensors of a call; raises when they differ."""
    first: tuple[str, Mesh] | None = None
    for name, tensor in _tensors(op, values):
        if not isinstance(tensor, cls):
            continue
        mesh = tensor._spec.mesh
        if first is None:
            first = (name, mesh)
        elif mesh != first[1]:
            raise _mesh_error(op, first, (name, mesh))
    assert first is not None, f"{op_name(op)} was dispatched without a MeshTensor"
    return first[1]


def _mesh_error(op: Op, one: tuple[str, Mesh], other: tuple[str, Mesh]) -> Exception:
    kind = DeviceMismatchError if one[1].device_type != other[1].device_type else MeshMismatchError
    return kind(
        asked=f"run {op_name(op)}",
        found=f"its argument {one[0]!r} lies on {one[1]} and {other[0]!r} on {other[1]}",
        do="Bring both to one mesh: full_tensor() on one, then distribute_tensor on the other's mesh.",
        op=op_name(op),
        meshes=(str(one[1]), str(other[1])),
    )


def _is_number_operand(arg: Arg, value: Any) -> bool:
    return arg.kind is Kind.TENSOR and isinstance(value, NUMBERS)


def _number_operands(op: Op, values: Sequence[Any]) -> tuple[int, ...]:
    """Flat indices of the tensor operands that were given as Python numbers."""
    arguments = zip(signature(op).args, values, signature(op).starts(values), strict=True)
    return tuple(start for arg, value, start in arguments if _is_number_operand(arg, value))


def _to_specs(cls: type, op: Op, mesh: Mesh, values: Sequence[Any]) -> Iterator[Any]:
    """The schema values: a spec for each tensor, replicated for a plain 0-dim tensor and for a number in its place."""
    whole = (REPLICATE,) * mesh.ndim
    for arg, value in zip(signature(op).args, values, strict=True):
        if _is_number_operand(arg, value):
            yield TensorSpec(mesh, whole, TensorMeta((), (), _dtype_of(value)))
        else:
            yield _to_spec(cls, mesh, value)


def _dtype_of(number: Any) -> torch.dtype:
    """The dtype of a tensor of one number; a symbol has its type's."""
    kinds = {torch.SymInt: 0, torch.SymFloat: 0.0, torch.SymBool: False}
    return torch.tensor(kinds.get(type(number), number)).dtype


def _to_spec(cls: type, mesh: Mesh, value: Any) -> Any:
    if isinstance(value, cls):
        return value._spec  # type: ignore[attr-defined]
    if isinstance(value, torch.Tensor):
        return TensorSpec(mesh, (REPLICATE,) * mesh.ndim, TensorMeta.of(value))
    if isinstance(value, (list, tuple)):
        return tuple(_to_spec(cls, mesh, v) for v in value)
    return value
