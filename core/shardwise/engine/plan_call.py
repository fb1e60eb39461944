"""From one call, with the arguments that torch passes, to its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import Any

import torch

from shardwise.comm.meeting import meet
from shardwise.engine.c_functions import binding
from shardwise.engine.first_run import put_in_order
from shardwise.engine.kept_operands import KeptOperands
from shardwise.engine.kernel_results import as_of_kernel, metas_by_kernel
from shardwise.engine.make_plan import DescribedCall, make_plan
from shardwise.engine.plain_tensors import compare_on, refuse_foreign
from shardwise.engine.resized_outs import resize_outs
from shardwise.engine.several_meshes import Lists, compared, mesh_of, on_one_mesh, only_mesh, plan_of_lists
from shardwise.engine.shared_moves import results_apart
from shardwise.errors import DeviceMismatchError, MeshMismatchError, ShardingError
from shardwise.kernel.mesh import Mesh
from shardwise.kernel.operands import NUMBERS
from shardwise.kernel.placements import REPLICATE
from shardwise.kernel.plan import Plan
from shardwise.kernel.precedence import Entry
from shardwise.kernel.registry import Registry
from shardwise.kernel.schema import OpSchema, RuntimeSchemaInfo
from shardwise.kernel.signature import Kind, Op, op_name, signature
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.symbols import guess
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.results import output_metas
from shardwise.planning.strategies import check_lengths
from shardwise.private_torch.ops import direct_call

__all__ = ["common_mesh", "describe_call", "plan_call"]


def plan_call(
    cls: type,
    registry: Registry,
    entry: Entry,
    info: RuntimeSchemaInfo,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Plan | None:
    """Describe one call, check it and plan it; ``cls`` is the tensor class.

    None if its ``out=`` tensors had another shape than the results and were resized: then it is another call now.
    An illegal call raises here, before anything is communicated.
    """
    op = entry.op
    values: Sequence[Any] = [_without_symbol(v) for v in signature(op).bind(args, kwargs)]
    refuse_foreign(cls, op, values)
    _refuse_without_values(cls, op, values)
    if entry.rule.zip_lists and not signature(op).results[1:]:
        lists = Lists.of(cls, op, values)
        if len(lists.by_mesh) > 1:
            for part_mesh in lists.by_mesh:
                meet(part_mesh)
            parts = [lists.part(signature(op), values, at) for at in lists.by_mesh.values()]
            plans = [
                _plan(cls, *_describe_on(cls, entry, info, mesh, part), part)
                for mesh, part in zip(lists.by_mesh, parts, strict=True)
            ]
            schema, _ = describe_call(cls, entry, info, next(iter(lists.by_mesh)), values)
            return put_in_order(plan_of_lists(lists, schema, plans))
    mesh = only_mesh(cls, values)
    if mesh is not None:
        meet(mesh)
        described, moved = _describe(cls, entry, info, mesh, values), values
    else:
        mesh = mesh_of(cls, values)
        assert mesh is not None, f"{op_name(op)} was dispatched without a MeshTensor"
        meet(mesh)
        compare_on(cls, op, values, mesh)
        described, moved = _describe_on(cls, entry, info, mesh, values)
    if resize_outs(registry, described.schema, values, described.metas if described.is_known else None):
        return None
    plan = _plan(cls, described, moved, values)
    if plan.call is direct_call(op):
        plan.run_by(_local_binding(cls, plan, args, kwargs, described.metas if described.is_known else None))
    plan.kept = KeptOperands.of(plan)
    return put_in_order(results_apart(plan))


def _refuse_without_values(cls: type, op: Op, values: Sequence[Any]) -> None:
    """Raise :class:`DeviceMismatchError` where an operand has no values, being on the meta device, and others do.

    Torch's own kernels compute with whatever memory they find then. Specs do not tell such tensors apart, so this is
    asked where a call is planned: at the first use of a module of which a part was forgotten on the meta device.
    """
    real, empty = False, ""
    for arg, value in zip(signature(op).args, values, strict=True):
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(part, cls) and not part._local_tensor.is_meta:  # type: ignore[attr-defined]
                real = real or part._spec.ndim > 0  # type: ignore[attr-defined]
            elif isinstance(part, cls) and not arg.written:
                empty = empty or arg.name
    if real and empty:
        raise DeviceMismatchError(
            asked=f"run {op_name(op)}",
            found=f"its argument {empty!r} is on the meta device and has no values, and others have",
            do="Call module.to_empty(device=...) on a module that was made on the meta device, and give its parameters "
            "and buffers their values (reset_parameters, load_state_dict, a checkpoint) before it is used.",
            op=op_name(op),
        )


def _describe_on(
    cls: type, entry: Entry, info: RuntimeSchemaInfo, mesh: Mesh, values: Sequence[Any]
) -> tuple[DescribedCall, Sequence[Any]]:
    """A call on one mesh, and its values with the replicated numbers of other meshes brought to this mesh."""
    moved = on_one_mesh(cls, entry.op, values, mesh)
    common_mesh(cls, entry.op, moved)
    return _describe(cls, entry, info, mesh, moved), moved


def _describe(cls: type, entry: Entry, info: RuntimeSchemaInfo, mesh: Mesh, values: Sequence[Any]) -> DescribedCall:
    schema, arguments = describe_call(cls, entry, info, mesh, values)
    refusal = None
    try:
        metas = output_metas(entry.op, arguments, entry.rule.meta)
    except Exception as error:
        if isinstance(error, ShardingError):
            raise
        refusal = as_of_kernel(error)
        if entry.rule.meta is not None:
            raise refusal from (None if refusal is error else error)
    if refusal is not None:  # outside of the handler: what the program was handling is the context of an error
        metas = metas_by_kernel(schema, arguments, refusal)
    return DescribedCall.of(entry, schema, metas)


def _plan(cls: type, described: DescribedCall, moved: Sequence[Any], values: Sequence[Any]) -> Plan:
    plan = make_plan(described)
    return plan if moved is values or all(map(is_, values, moved)) else compared(cls, plan, values)


def _without_symbol(value: Any) -> Any:
    """A number in place of a symbol that is keyed by its type: a plan outlives the graph and must not refer to it."""
    if isinstance(value, torch.SymInt):
        return guess(value)
    return 1.0 if isinstance(value, torch.SymFloat) else True if isinstance(value, torch.SymBool) else value


def describe_call(
    cls: type, entry: Entry, info: RuntimeSchemaInfo, mesh: Mesh, values: Iterable[Any]
) -> tuple[OpSchema, list[Any]]:
    """The schema of a call, and its arguments with specs in place of tensors.

    A plain 0-dim tensor, or a number in place of a tensor, is replicated in the schema. Among the arguments a number
    stays a number.
    """
    op, whole, values = entry.op, (REPLICATE,) * mesh.ndim, list(values)
    described = signature(op)

    def spec_of(value: Any) -> Any:
        if isinstance(value, cls):
            return value._spec  # type: ignore[attr-defined]
        if isinstance(value, torch.Tensor):
            return TensorSpec(mesh, whole, TensorMeta.of(value))
        return tuple(map(spec_of, value)) if isinstance(value, (list, tuple)) else value

    specs: list[Any] = []
    arguments: list[Any] = []
    fixed: list[int] = []
    for arg, value, start in zip(described.args, values, described.starts(values), strict=True):
        if arg.kind is Kind.TENSOR and isinstance(value, NUMBERS):
            number = _LIKE_SYMBOLS.get(type(value), value)
            # torch.tensor(number) has the dtype too, but refuses a complex number where the default is bfloat16.
            dtype = torch.result_type(_NO_NUMBER, number)
            specs.append(TensorSpec(mesh, whole, TensorMeta((), (), dtype)))
            arguments.append(value)
            fixed.append(start)
        else:
            specs.append(spec_of(value))
            arguments.append(specs[-1])
    schema = OpSchema(op, tuple(specs), info, tuple(fixed))
    if entry.rule.zip_lists:
        check_lengths(schema)
    return schema, arguments


# Of the least dtype: beside it every number keeps its own.
_NO_NUMBER = torch.empty(0, dtype=torch.bool, device="meta")

#: By the type of a symbol, a number that torch gives the same dtype.
_LIKE_SYMBOLS: dict[type, Any] = {torch.SymInt: 0, torch.SymFloat: 0.0, torch.SymBool: False}


def _local_binding(
    cls: type, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], metas: Sequence[TensorMeta | None] | None
) -> Callable[..., Any]:
    """The C function for the plan's op on arguments of the types that the handler passes.

    The whole call stands for the local one: its arguments have the same types, and its results are known.
    """

    def meta(value: Any) -> Any:
        if isinstance(value, cls):
            return value._spec.tensor_meta  # type: ignore[attr-defined]
        return list(map(meta, value)) if isinstance(value, (list, tuple)) else value

    schema = plan.schema
    if plan.full:
        values = signature(schema.op).bind(args, kwargs)
        if plan.static is not None:
            replaced = iter(plan.static)
            named = zip(schema.signature.args, values, strict=True)
            values = [next(replaced) if a.name in schema.info.by_value else v for a, v in named]
        args, kwargs = signature(schema.op).unbind(values)
    return binding(schema.op, list(map(meta, args)), {name: meta(v) for name, v in kwargs.items()}, metas)


def common_mesh(cls: Any, op: Op, values: Sequence[Any]) -> Mesh:
    """The mesh of all MeshTensors of a call.

    Raises :class:`DeviceMismatchError` or :class:`MeshMismatchError` when they are on several meshes.
    """
    first: tuple[str, Mesh] | None = None
    for arg, value in zip(signature(op).args, values, strict=True):
        parts = [(f"{arg.name}[{i}]", t) for i, t in enumerate(value or ())] if arg.kind is Kind.TENSORS else []
        for name, tensor in parts or [(arg.name, value)]:
            if not isinstance(tensor, cls):
                continue
            mesh = tensor._spec.mesh
            first = first or (name, mesh)
            if mesh != first[1]:
                kind = DeviceMismatchError if mesh.device_type != first[1].device_type else MeshMismatchError
                raise kind(
                    asked=f"run {op_name(op)}",
                    found=f"its argument {first[0]!r} lies on {first[1]} and {name!r} on {mesh}",
                    do="Bring both to one mesh: full_tensor() on one, then distribute_tensor on the other's mesh.",
                    op=op_name(op),
                    meshes=(str(first[1]), str(mesh)),
                )
    assert first is not None, f"{op_name(op)} was dispatched without a MeshTensor"
    return first[1]
