"""What a call returns: its result shapes, strides and dtypes, found by running the op on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.kernel.schema import OpSchema
from shardwise.kernel.signature import Op, signature
from shardwise.kernel.spec import TensorMeta, TensorSpec

__all__ = ["output_metas"]


def output_metas(
    op: Op, values: Sequence[Any], instead: Callable[..., Any] | None = None
) -> tuple[TensorMeta | None, ...] | None:
    """Metas of the tensor results, lists flattened, ``None`` for one that is undefined.

    The answer as a whole is ``None`` where a shape depends on data: it is known only after the op has run.

    ``values`` are the schema arguments in order with a :class:`TensorSpec` for each tensor. An op that refuses the call
    raises here what torch raises for it. ``instead`` (a rule's ``meta``) is run in place of the op.
    """
    described = signature(op)
    if not any(r.is_tensor for r in described.results):
        return ()
    args, kwargs = described.unbind([_to_meta(v) for v in values])
    try:
        found = (instead or op)(*args, **kwargs)
    except NotImplementedError:
        return None
    return tuple(flat_metas(found))


def flat_metas(found: Any) -> list[TensorMeta | None]:
    """Metas of an op's tensor results in order; other results are left out."""
    if isinstance(found, torch.Tensor):
        return [TensorMeta.of(found)]
    if found is None:
        return [None]
    if isinstance(found, (tuple, list)):
        return [meta for part in found for meta in flat_metas(part)]
    return []


def _to_meta(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        return value.tensor_meta.to_meta_tensor()
    if isinstance(value, (tuple, list)):
        return [_to_meta(v) for v in value]
    if isinstance(value, torch.device):
        return torch.device("meta")
    return None if isinstance(value, torch.Generator) else value


def schema_metas(schema: OpSchema, instead: Callable[..., Any] | None = None) -> tuple[TensorMeta | None, ...] | None:
    """:func:`output_metas` of a schema."""
    return output_metas(schema.op, schema.values, instead)
