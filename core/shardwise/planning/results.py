"""The metas of a call's results, computed by running the op on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.kernel.schema import OpSchema
from shardwise.kernel.signature import Op, signature
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.private_torch.fake import shape_needs_data

__all__ = ["output_metas"]


def output_metas(
    op: Op, values: Sequence[Any], instead: Callable[..., Any] | None = None
) -> tuple[TensorMeta | None, ...] | None:
    """Metas of the tensor results, lists flattened, ``None`` for an undefined one; ``None`` if a shape depends on data.

    ``values`` are the schema arguments in order, with a :class:`TensorSpec` for each tensor. ``instead`` (a rule's
    ``meta``) runs in place of the op. Raises what torch raises for a call that the op refuses.
    """
    described = signature(op)
    if not any(r.is_tensor for r in described.results):
        return ()
    args, kwargs = described.unbind([_to_meta(v) for v in values])
    try:
        results = (instead or op)(*args, **kwargs)
    except NotImplementedError:
        return None
    except RuntimeError as error:
        if shape_needs_data(error):
            return None
        raise
    return tuple(flat_metas(results))


def flat_metas(results: Any) -> list[TensorMeta | None]:
    """Metas of an op's tensor results in order, ``None`` for an undefined one; other results are left out."""
    if isinstance(results, torch.Tensor):
        return [TensorMeta.of(results)]
    if results is None:
        return [None]
    if isinstance(results, (tuple, list)):
        return [meta for part in results for meta in flat_metas(part)]
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
