"""``out=`` tensors of another shape than the result: they take its shape, as in torch.

An empty MeshTensor also takes the placements that the result has without ``out=``, but no partial ones. One with
elements is not resized: other tensors may share its memory. A plain one is, with torch's warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.engine.make_plan import DescribedCall, make_plan
from shardwise.errors import InPlaceError, ShardingError, warn_user
from shardwise.kernel.engine import tensor_class
from shardwise.kernel.local_strides import in_order
from shardwise.kernel.placements import REPLICATE, Partial
from shardwise.kernel.registry import Registry
from shardwise.kernel.results import reseat
from shardwise.kernel.schema import OpSchema, RuntimeSchemaInfo
from shardwise.kernel.signature import Kind, op_name
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.results import schema_metas
from shardwise.private_torch.ops import functional_of

__all__ = ["resize_outs"]


def resize_outs(
    registry: Registry, schema: OpSchema, values: Sequence[Any], metas: Sequence[TensorMeta | None] | None
) -> bool:
    """Resize the ``out=`` tensors among the values of a call that have another shape than its results, whose metas are
    ``metas``. True if there were any: then the call has other operands than its schema says.

    Raises :class:`InPlaceError` for a MeshTensor if the shape depends on data, for which ``metas`` is None.
    """
    if not schema.signature.has_outs:
        return False
    if metas is None:
        for arg, value in zip(schema.signature.args, values, strict=True):
            if arg.is_out and isinstance(value, tensor_class()):
                raise InPlaceError(
                    asked=f"run {op_name(schema.op)} with a MeshTensor as {arg.name}=",
                    found="the shape of the result depends on data, and a MeshTensor has its shape before the op runs",
                    do="Use the out-of-place form, or pass a plain tensor.",
                    op=op_name(schema.op),
                )
        return False
    if schema.is_symbolic:
        return False
    to_resize: list[tuple[int, str, torch.Tensor, TensorMeta]] = []
    tensor_results = [r for r in schema.signature.results if r.is_tensor]
    for position, (result, meta) in enumerate(zip(tensor_results, metas, strict=False)):
        if result.written and result.alias is not None and meta is not None:
            arg, out = schema.signature.args[result.alias], values[result.alias]
            may_resize = (
                arg.is_out and arg.kind is Kind.TENSOR and not (isinstance(out, tensor_class()) and out.numel())
            )
            if may_resize and tuple(out.shape) != tuple(meta.shape):
                to_resize.append((position, arg.name, out, meta))
    if not to_resize:
        return False
    results = _results_without_out(registry, schema, len(metas))
    for position, name, out, meta in to_resize:
        like = results[position]
        stride = meta.stride if like is None or like.shape != meta.shape else like.stride
        if isinstance(out, tensor_class()):
            placements = (REPLICATE,) * schema.mesh.ndim if like is None else like.placements
            whole = TensorMeta(meta.shape, stride, meta.dtype)
            spec = TensorSpec(schema.mesh, tuple(REPLICATE if isinstance(p, Partial) else p for p in placements), whole)
            local = torch.empty(spec.local_shape(), dtype=meta.dtype, device=out.device)
            reseat(out, in_order(local, whole), spec)
            continue
        if out.numel():
            warn_user(
                f"{name!r} has shape {list(out.shape)} and is resized to that of the result, {list(meta.shape)}. Torch "
                "deprecates this. Pass an empty tensor, or one of that shape.",
                UserWarning,
            )
        out.resize_(meta.shape).as_strided_(meta.shape, stride)
    return True


def _results_without_out(registry: Registry, schema: OpSchema, count: int) -> Sequence[TensorSpec | None]:
    """The specs of the results of the call without ``out=``. None where no rule says them."""
    unknown = [None] * count
    op = functional_of(schema.op)
    if op is None or op not in registry:
        return unknown
    entry = registry.lookup(op)
    info = RuntimeSchemaInfo.of(op, entry.rule.static, entry.rule.writes)
    values = [v for arg, v in zip(schema.signature.args, schema.values, strict=True) if not arg.is_out]
    without_out = OpSchema(op, tuple(values), info, schema.fixed)
    try:
        plan = make_plan(DescribedCall.of(entry, without_out, schema_metas(without_out, entry.rule.meta)))
    except ShardingError:  # the call with out= is planned next and says what is wrong with it
        return unknown
    return plan.outs
