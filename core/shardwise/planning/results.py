"""The metas of a call's results, computed by running the op on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.kernel.authored import refuse_answer
from shardwise.kernel.plurals import counted
from shardwise.kernel.schema import OpSchema
from shardwise.kernel.signature import Op, Signature, signature
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.private_torch.fake import shape_needs_data

__all__ = ["forget_metas", "output_metas", "says_that_data_decide"]

_MOST = 1024

# By op, arguments and what stands in for the op. Calls whose operands lie elsewhere on the mesh have the same results,
# and running an op on the meta device, which torch does in Python for many, is a third of the time of a new plan.
_known: dict[Any, tuple[TensorMeta | None, ...]] = {}


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
    try:
        key = op, instead, torch.get_default_dtype(), _key(values)
        is_known = key in _known
    except TypeError:  # symbols for sizes have no hash
        return _run_on_meta(op, described, values, instead)
    if is_known:
        return _known[key]
    metas = _run_on_meta(op, described, values, instead)
    if metas is not None:  # an op that has no answer without data may get a fake later
        if len(_known) >= _MOST:
            _known.clear()
        _known[key] = metas
    return metas


def forget_metas() -> None:
    """Run each op anew: what describes the results of some op may have changed."""
    _known.clear()


def _key(value: Any) -> Any:
    """What the metas of the results depend on. Numbers of other types are other arguments, and so are other zeros."""
    if isinstance(value, TensorSpec):
        return value.tensor_meta
    if isinstance(value, (tuple, list)):
        return tuple(map(_key, value))
    if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise TypeError
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


def _run_on_meta(
    op: Op, described: Signature, values: Sequence[Any], instead: Callable[..., Any] | None
) -> tuple[TensorMeta | None, ...] | None:
    args, kwargs = described.unbind([_to_meta(v) for v in values])
    try:
        results = (instead or op)(*args, **kwargs)
    except NotImplementedError:
        return None
    except RuntimeError as error:
        if shape_needs_data(error):
            return None
        raise
    metas = tuple(flat_metas(results))
    if instead is not None:
        _check_meta(op, described, instead, metas)
    return metas


def says_that_data_decide(op: Op, values: Sequence[Any]) -> bool:
    """Whether an op's fake answers that a shape of its results depends on data, as ``new_dynamic_size()`` says."""
    args, kwargs = signature(op).unbind([_to_meta(v) for v in values])
    try:
        op(*args, **kwargs)
    except RuntimeError as error:
        return shape_needs_data(error)
    return False


def _check_meta(op: Op, described: Signature, instead: Callable[..., Any], metas: Sequence[TensorMeta | None]) -> None:
    """Raise :class:`RuleError` for a rule's ``meta`` that does not return what the schema says."""
    tensors = [r for r in described.results if r.is_tensor]
    if any(metas) and (len(metas) == len(tensors) or any(r.is_list for r in tensors)):
        return
    code = getattr(instead, "__code__", None)
    source = f"{code.co_filename}:{code.co_firstlineno}" if code else repr(instead)
    found = f"{counted(sum(m is not None for m in metas), 'tensor')} for {counted(len(tensors), 'tensor result')}"
    refuse_answer(op, source, "meta=", found, "Return what the op returns, made on the meta device")


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
