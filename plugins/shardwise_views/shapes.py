"""Views that regroup dims, add or remove dims of size one, or repeat them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.rule import Call, Flow, LocalCall, TensorMeta, dim_of, labels, rule_from
from shardwise_views.regroup import regroup

__all__ = ["RULES"]

aten = torch.ops.aten


def _local_size(local: LocalCall) -> Mapping[str, Any]:
    """The ``size`` argument of this rank: the shape of its part of the result."""
    spec = local.outputs[0]
    assert spec is not None
    return {"size": local.local_shape(spec)}


def _regrouped(call: Call) -> Flow:
    before, after = call.operands[0], call.outputs[0]
    assert before is not None
    assert after is not None
    return regroup(before.shape, after.shape)


def _copied_on_meta(x: torch.Tensor, size: Sequence[int], **out: torch.Tensor) -> torch.Tensor:
    """Torch's kernels copy a tensor that cannot be viewed; its meta functions refuse it."""
    contiguous = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    copied: torch.Tensor = (aten.view_copy.out if out else aten.view_copy.default)(contiguous, size, **out)
    return copied


@rule_from([aten.view_copy.default, aten.view_copy.out], local_args=_local_size, meta=_copied_on_meta)
def VIEW_COPY(call: Call) -> Flow:
    """As view."""
    return _regrouped(call)


@rule_from([aten.view.default, aten._reshape_copy.default], local_args=_local_size)
def VIEW(call: Call) -> Flow:
    """Dims regrouped: (a b) -> a b and back; each factor of a compound dim may be sharded."""
    return _regrouped(call)


@rule_from([aten._unsafe_view.default, aten._unsafe_view.out], local_args=_local_size)
def UNSAFE_VIEW(call: Call) -> Flow:
    """As view; its operand is a temporary, so it may be moved."""
    return _regrouped(call)


@rule_from([aten.expand.default, aten.expand_copy.default, aten.expand_copy.out], local_args=_local_size)
def EXPAND(self: TensorMeta, size: Sequence[int]) -> Flow:
    """Dims that keep their size pass; new ones and those of size one that grow are whole."""
    new = len(size) - self.ndim
    names = labels(self.ndim, whole={d for d, n in enumerate(self.shape) if size[new + d] not in (n, -1)})
    return Flow([names], [[*[None] * new, *names]], moves="self")


@rule_from([aten.repeat.default, aten.repeat.out])
def REPEAT(self: TensorMeta, repeats: Sequence[int]) -> Flow:
    """Dims that are not repeated pass."""
    new = len(repeats) - self.ndim
    names = labels(self.ndim, whole={d for d in range(self.ndim) if repeats[new + d] != 1})
    return Flow([names], [[*[None] * new, *names]], moves="self")


@rule_from([aten.unsqueeze.default, aten.unsqueeze_.default, aten.unsqueeze_copy.default, aten.unsqueeze_copy.out])
def UNSQUEEZE(self: TensorMeta, dim: int) -> Flow:
    """Every dim passes, around a new one."""
    names, at = labels(self.ndim), dim % (self.ndim + 1)
    return Flow([names], [[*names[:at], None, *names[at:]]], moves="self")


def _squeezed(x: TensorMeta, dim: int | Sequence[int] | None) -> list[int]:
    """The dims that squeeze removes: of those named (all, for ``None``) the ones of size one."""
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    named = {dim_of(d, x.ndim) for d in dims}
    return [d for d in range(x.ndim) if d in named and x.shape[d] == 1]


def _squeeze_locally(
    local: LocalCall, x: torch.Tensor, dim: int | Sequence[int] | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    # A shard may have size one where the whole tensor does not, so the global shape decides.
    gone = _squeezed(local.spec("self").tensor_meta, dim)
    if out is not None:
        return out.copy_(x.squeeze(gone))
    packet = local.call.op.overloadpacket
    squeezed: torch.Tensor = packet.dims(x, gone)
    return squeezed


@rule_from(
    [
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.squeeze_.default,
        aten.squeeze_.dim,
        aten.squeeze_.dims,
        aten.squeeze_copy.default,
        aten.squeeze_copy.dim,
        aten.squeeze_copy.dims,
        aten.squeeze_copy.out,
        aten.squeeze_copy.dim_out,
        aten.squeeze_copy.dims_out,
    ],
    lowering=_squeeze_locally,
)
def SQUEEZE(self: TensorMeta, dim: int | Sequence[int] | None = None) -> Flow:
    """Dims that stay pass; a dim that is removed is whole."""
    names = labels(self.ndim, whole=_squeezed(self, dim))
    return Flow([names], [[*filter(None, names)]], moves="self", lowered="*", scattered="*")


RULES = (VIEW, VIEW_COPY, UNSAFE_VIEW, EXPAND, REPEAT, UNSQUEEZE, SQUEEZE)
