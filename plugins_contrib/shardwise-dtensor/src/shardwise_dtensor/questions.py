"""The op schema that a classic rule reads, with torch's classes and conventions, from a shardwise op schema."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from shardwise.rule import ByType, OpSchema, TensorSpec
from shardwise_dtensor import torch_private
from shardwise_dtensor.torch_private import (
    DTensorSpec,
    OpSpec,
    OpStrategy,
    RuntimeSchemaInfo,
    TensorMeta,
    TupleStrategy,
)

__all__ = ["classic_schema"]


def classic_schema(
    schema: OpSchema, mesh: DeviceMesh, schema_info: RuntimeSchemaInfo | None, *, wrap: bool
) -> torch_private.OpSchema:
    """The same call as torch describes it: trailing defaults omitted, lists as lists.

    With ``wrap``, each spec is the only choice of an ``OpStrategy``.
    """
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    needed = 0
    for arg, value in zip(schema.signature.args, schema.values, strict=True):
        hidden = arg.name in schema.info.by_type and value is not None
        shown = ByType(arg.name, type(value)) if hidden else _classic(value, mesh, wrap=wrap)
        is_given = not (arg.has_default and _same(value, arg.default))
        if not arg.kwarg_only:
            positional.append(shown)
            needed = len(positional) if is_given else needed
        elif is_given:
            keywords[arg.name] = shown
    return torch_private.OpSchema(schema.op, tuple(positional[:needed]), keywords, schema_info)


def _same(value: Any, default: Any) -> bool:
    """Whether a value is its argument's default; schemas hold tuples for lists."""
    plain = tuple(default) if isinstance(default, list) else default
    return not isinstance(value, TensorSpec) and type(value) is type(plain) and bool(value == plain)


def _classic(value: Any, mesh: DeviceMesh, *, wrap: bool) -> Any:
    if isinstance(value, TensorSpec):
        meta = value.tensor_meta
        spec = DTensorSpec(mesh, value.placements, TensorMeta(meta.shape, meta.stride, meta.dtype))
        return OpStrategy([OpSpec(spec)]) if wrap else spec
    if not isinstance(value, tuple):
        return value
    parts = [_classic(v, mesh, wrap=wrap) for v in value]
    # Torch keeps a list that also holds None as a list.
    return TupleStrategy(parts) if wrap and parts and all(isinstance(p, OpStrategy) for p in parts) else parts
