"""Autograd at the borders of a MeshTensor: into it, out of it, and from one layout to another.

Each of the three is a function of autograd, and their backwards call each other: :func:`redistribute` for another
layout, :func:`split` for a rank's part, and :func:`join` for the tensor of a part. What they do to memory is in
:mod:`shardwise.tensor.below_autograd`. A tensor without a gradient has none under another layout: zeros would give a
parameter that was not used a gradient, and torch's formulas a case that they do not meet on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm import origins
from shardwise.comm.async_result import AsyncResult, InFlightLimit
from shardwise.comm.redistribute import route
from shardwise.comm.run_step import StepRunner
from shardwise.engine.judging import judge_move
from shardwise.engine.plain_tensors import accept
from shardwise.errors import LayoutError, LocalGradientError, TracingError
from shardwise.kernel.engine import tensor_class
from shardwise.kernel.placements import REPLICATE, Partial, Placement, check_placements, shard_dim, show_all
from shardwise.kernel.places import Places, per_mesh_dim
from shardwise.kernel.recording import recording
from shardwise.kernel.reductions import LINEAR
from shardwise.kernel.results import wrap
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.kernel.view_copies import fresh
from shardwise.private_torch.dispatch import with_memory
from shardwise.private_torch.modes import recording_mode
from shardwise.private_torch.tracing import (
    is_recorded,
    is_recorded_constant,
    is_recorded_whole,
    record_call,
)
from shardwise.private_torch.transforms import (
    above_batches,
    are_transforms_active,
    below_batches,
    below_transforms,
    has_tangent,
    held,
    is_functionalized,
    is_wrapped,
)
from shardwise.tensor.batched import batched_spec, in_batches, is_on_mesh, moved, spec_of
from shardwise.tensor.below_autograd import move, part_of, tensor_of
from shardwise.tensor.grad_layouts import checked_grad_layout, grad_layout
from shardwise.tensor.local_parts import check_device, spec_of_part
from shardwise.tensor.names import name_of
from shardwise.tensor.recorded import RecordedCall
from shardwise.tensor.waiting import source_of

__all__ = [
    "join",
    "on_mesh",
    "redistribute",
    "reduce_later",
    "split",
    "to_local",
]


# -- one layout to another ---------------------------------------------------------------------------------------


class _Redistribute(torch.autograd.Function):
    """For ``torch.func``: :class:`_RedistributeTransformed`."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Any,
        # One argument, because autograd looks at each.
        how: tuple[TensorSpec, StepRunner | None, tuple[Placement, ...], bool, torch.dtype | None],
    ) -> Any:
        target, steps, ctx.grad, ctx.async_op, ctx.grad_dtype = how
        ctx.spec = target
        ctx.set_materialize_grads(False)
        return _run(tensor, target, steps, ctx.async_op)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return None, None
        grad = on_mesh(grad, ctx.spec, "redistribute the gradient of a MeshTensor")
        if ctx.grad_dtype is not None:
            grad = grad.to(ctx.grad_dtype)  # autograd brings what this returns to the dtype of the tensor
        return (reduce_later if ctx.async_op else redistribute)(grad, ctx.grad), None

    @staticmethod
    def jvp(ctx: Any, tangent: Any, _how: None) -> Any:
        if tangent is None:
            return None
        # As a gradient, a tangent is a global tensor: each layout of it is correct.
        return redistribute(on_mesh(tangent, ctx.spec, "redistribute a tangent"), grad_layout(ctx.spec.placements))


class _RedistributeTransformed(_Redistribute):
    @staticmethod
    def forward(  # type: ignore[override]  # without a context, as torch.func asks
        tensor: Any, how: tuple[tuple[Placement, ...], tuple[Placement, ...], torch.dtype | None]
    ) -> Any:
        return _run(tensor, *route(tensor._spec, how[0]), False)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004  # torch's signature
        tensor, (target, ctx.grad, ctx.grad_dtype) = inputs
        ctx.spec, ctx.async_op = spec_of(tensor).with_placements(target), False
        ctx.set_materialize_grads(False)

    @staticmethod
    def vmap(_info: Any, in_dims: Any, tensor: Any, how: Any) -> Any:
        hidden = in_dims[0]
        target, grad, grad_dtype = how
        how = moved(target, hidden), moved(grad, hidden), grad_dtype
        return _apply(_RedistributeTransformed, tensor, how), hidden


def _apply(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """Apply a function that ``torch.func`` transforms."""
    if is_functionalized():
        raise TracingError(
            asked="move a tensor between layouts, or into a mesh or out of it, in torch.func.functionalize",
            found="functionalize takes no function with derivatives of its own",
            do="Move it before or after, or leave functionalize out: MeshTensors take writes in place.",
        )
    return function.apply(*inputs)  # type: ignore[no-untyped-call]


def _redistribute_transformed(
    tensor: Any,
    placements: Places,
    grad_placements: Sequence[Placement] | None,
    async_op: bool,
    grad_dtype: torch.dtype | None,
) -> Any:
    """:func:`redistribute` inside a function that is transformed."""
    if isinstance(tensor, tensor_class()):
        with below_transforms():
            return redistribute(tensor, placements, grad_placements, async_op, grad_dtype)
    if not are_transforms_active():
        target = per_mesh_dim(placements, spec_of(below_batches(tensor)[0]).mesh)
        return in_batches(lambda inside, n: redistribute(inside, moved(target, 0, n)), tensor)
    spec = spec_of(tensor)
    target = check_placements(per_mesh_dim(placements, spec.mesh), spec.mesh.ndim, spec.ndim)
    how = target, checked_grad_layout(grad_placements, spec), grad_dtype
    return _apply(_RedistributeTransformed, tensor, how)


def redistribute(
    tensor: Any,
    placements: Places,
    grad_placements: Sequence[Placement] | None = None,
    async_op: bool = False,
    grad_dtype: torch.dtype | None = None,
    subject: int = 0,
) -> Any:
    """``tensor`` under other placements; differentiable. See :meth:`MeshTensor.redistribute`.

    Returns the tensor itself if its placements do not change and nothing is said of its gradient. ``subject`` stands
    for the leaf whose gradient it is, in what the ranks compare.
    """
    if type(tensor) is torch.Tensor or are_transforms_active():
        return _redistribute_transformed(tensor, placements, grad_placements, async_op, grad_dtype)
    target, steps = route(tensor._spec, per_mesh_dim(placements, tensor._spec.mesh))
    if steps is None and grad_placements is None and grad_dtype is None:
        if recording.recorder is not None:
            recording.recorder.redistributed(tensor, tensor)
        return tensor
    if steps is not None and steps.groups and (subject or origins.ORIGIN in tensor.__dict__):
        subject = subject or origins.subject_of_distributed(tensor, name_of(tensor))
        if subject and not is_recorded(tensor._local_tensor):
            steps.tell_subject(subject)
    if (torch.is_grad_enabled() and _requires_grad(tensor)) or has_tangent(tensor):
        layout = checked_grad_layout(grad_placements, tensor._spec)
        how = target, steps, layout, async_op, grad_dtype
        return _Redistribute.apply(tensor, how)  # type: ignore[no-untyped-call]
    if grad_placements is not None:
        checked_grad_layout(grad_placements, tensor._spec)  # raises for wrong placements, also without a gradient
    return _run(tensor, target, steps, async_op)


def reduce_later(grad: Any, placements: Sequence[Placement], subject: int = 0) -> Any:
    """The same as :func:`redistribute`, for a gradient: its collective runs during backward, until its first use."""
    reduced = redistribute(grad, placements, async_op=True, subject=subject)
    source = source_of(reduced)
    if isinstance(source, AsyncResult):
        _backward.add(source)
    return reduced


# Limits the bytes that are kept only for collectives of gradients; beyond it the oldest is waited for. It is enough for
# a layer of small parameters, and large ones are reduced one at a time.
_backward = InFlightLimit(1 << 26)

# Torch's own property: that of MeshTensor is written in Python and slower.
_requires_grad: Any = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


def _run(tensor: Any, target: TensorSpec, steps: StepRunner | None, async_op: bool) -> Any:
    if recording_mode() is not None and (is_recorded_whole(tensor) or is_recorded_constant(tensor)):
        call = RecordedCall("redistribute", redistribute, target.placements)
        return record_call(call, tensor, lambda: move(tensor, target, steps, async_op))
    return move(tensor, target, steps, async_op)


# -- out and in --------------------------------------------------------------------------------------------------


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Any, grad: tuple[Placement, ...], again: tuple[Placement, ...] | None = None
    ) -> torch.Tensor:
        _keep_to_split(ctx, tensor, grad, again)
        return _part(tensor)  # a new object, because autograd writes its own data into it

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        spec: TensorSpec = ctx.spec
        if grad is None:
            if ctx.again is None:
                return None, None, None
            # Other ranks may have a part of this gradient, and all of them reduce it.
            grad = torch.zeros(spec.local_shape(), dtype=spec.dtype, device=spec.mesh.device_type)
        if is_on_mesh(grad):
            raise LayoutError(
                asked=f"take the gradient of {spec} from that of its local part",
                found=f"the gradient of the local part is a MeshTensor {spec_of(grad)}",
                do="Give the gradient of a local tensor as a local tensor: to_local() or full_tensor() of this one.",
            )
        meta = TensorMeta.contiguous(spec.shape, grad.dtype)
        mesh: Any = spec.mesh
        check_device(grad, mesh)
        part = spec_of_part(grad, mesh, ctx.grad, meta.shape, meta.stride)
        again = grad_layout(ctx.grad) if ctx.again is None else ctx.again
        return join(grad, part, again, ctx.again and ctx.grad), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Any, _grad: None, _again: None = None) -> Any:
        if tangent is None:
            return None
        _refuse_tangent("take the local part of", ctx.spec)
        tangent = redistribute(on_mesh(tangent, ctx.spec, "take the local part of a tangent"), ctx.spec.placements)
        return split(tangent, ctx.grad, ctx.again)


def _keep_to_split(ctx: Any, tensor: Any, grad: tuple[Placement, ...], again: tuple[Placement, ...] | None) -> None:
    ctx.spec, ctx.grad, ctx.again = spec_of(tensor), grad, again
    ctx.set_materialize_grads(False)


class _ToLocalTransformed(_ToLocal):
    @staticmethod
    def forward(tensor: Any, _grad: Any, _again: Any) -> torch.Tensor:  # type: ignore[override]  # as above
        return _part(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        _keep_to_split(ctx, *inputs)

    @staticmethod
    def vmap(_info: Any, in_dims: Any, tensor: Any, grad: Any, again: Any) -> Any:
        hidden = in_dims[0]
        spec = spec_of(tensor)
        if hidden in map(shard_dim, spec.placements):  # no rank has a part of each
            whole = [REPLICATE if shard_dim(p) == hidden else p for p in spec.placements]
            judge_move("take the local part of what vmap goes over", "the tensor", spec, whole)
            tensor = redistribute(tensor, whole)
        return split(tensor, moved(grad, hidden), again and moved(again, hidden)), hidden


def split(tensor: Any, grad: tuple[Placement, ...], again: tuple[Placement, ...] | None = None) -> torch.Tensor:
    """The part of a MeshTensor, or of a transform's around one, on this rank."""
    if are_transforms_active():
        if not isinstance(tensor, tensor_class()):
            return _apply(_ToLocalTransformed, tensor, grad, again)  # type: ignore[no-any-return]
        with below_transforms():
            return _ToLocal.apply(tensor, grad, again)  # type: ignore[no-any-return, no-untyped-call]
    if type(tensor) is torch.Tensor:
        return in_batches(lambda inside, n: split(inside, moved(grad, 0, n), again and moved(again, 0, n)), tensor)
    return _ToLocal.apply(tensor, grad, again)  # type: ignore[no-any-return, no-untyped-call]


def _refuse_tangent(asked: str, spec: TensorSpec) -> None:
    """Raise :class:`LocalGradientError` where the parts of a tangent depend on the values of other ranks."""
    if any(isinstance(p, Partial) and p.reduce_op not in LINEAR for p in spec.placements):
        raise LocalGradientError(
            asked=f"{asked} the tangent of {spec}",
            found="which rank's part has the tangent of a largest, a least or a product depends on the parts of the "
            "other ranks",
            do="Redistribute the tensor to Replicate() or Shard(dim) where it is computed.",
            placements=spec.placements,
        )


def _part(tensor: Any) -> torch.Tensor:
    """A new tensor over the local memory."""
    if recording_mode() is not None and is_recorded_whole(tensor):
        call = RecordedCall("split", split, grad_layout(tensor._spec.placements))
        return record_call(call, tensor, lambda: part_of(tensor).detach())
    return part_of(tensor)


def to_local(tensor: Any, grad_placements: Sequence[Placement] | None) -> torch.Tensor:
    """The part of this rank; see :meth:`MeshTensor.to_local`."""
    if type(tensor) is torch.Tensor or are_transforms_active():
        if isinstance(tensor, tensor_class()):
            with below_transforms():
                return to_local(tensor, grad_placements)
        return split(tensor, checked_grad_layout(grad_placements, spec_of(tensor)))
    if recording.recorder is not None:
        recording.recorder.read(tensor)
    if tensor._spec.is_copy:
        fresh(tensor._local_tensor)
    if not torch.is_grad_enabled() and grad_placements is None and not has_tangent(tensor):
        return _part(tensor)
    part: torch.Tensor = _ToLocal.apply(tensor, checked_grad_layout(grad_placements, tensor._spec))  # type: ignore[no-untyped-call]
    return part


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        spec: TensorSpec,
        grad: tuple[Placement, ...],
        again: tuple[Placement, ...] | None = None,
        *_beside: torch.Tensor,
    ) -> Any:
        _keep_to_join(ctx, spec, grad, again, len(_beside))
        return tensor_of(local, spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        others = (None,) * (3 + ctx.beside)
        if grad is None:
            return None, *others
        grad = on_mesh(grad, ctx.spec, "take the local gradient of a MeshTensor")
        if ctx.again is None:
            judge_move("take the local gradient of from_local", "the gradient", spec_of(grad), ctx.grad)
        grad = redistribute(grad, ctx.grad)
        if ctx.again is None and isinstance(grad, tensor_class()):
            return to_local(grad, None), *others
        if ctx.again is None:
            return split(grad, grad_layout(ctx.grad)), *others
        return split(grad, ctx.again, ctx.grad), *others

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_beside: Any) -> Any:
        if tangent is None:
            return None
        _refuse_tangent("take this rank's part of", ctx.spec)
        return join(tangent, ctx.spec, ctx.grad, ctx.again)


def _keep_to_join(ctx: Any, *values: Any) -> None:
    ctx.spec, ctx.grad, ctx.again, ctx.beside = values
    ctx.set_materialize_grads(False)


class _FromLocalTransformed(_FromLocal):
    @staticmethod
    def forward(local: torch.Tensor, spec: TensorSpec, _grad: Any, _again: Any, *_beside: torch.Tensor) -> Any:  # type: ignore[override]  # as above
        return tensor_of(local, spec)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        _keep_to_join(ctx, *inputs[1:4], len(inputs) - 4)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, local: torch.Tensor, spec: TensorSpec, grad: Any, again: Any, *beside: Any
    ) -> Any:
        hidden = in_dims[0]
        if hidden is None:  # what lies beside it is batched
            return join(local, spec, grad, again), None
        local, spec = local.movedim(hidden, 0), batched_spec(spec, [info.batch_size])
        return join(local, spec, moved(grad, 0), again and moved(again, 0), *beside), 0


def join(
    part: torch.Tensor,
    spec: TensorSpec,
    grad: tuple[Placement, ...],
    again: tuple[Placement, ...] | None = None,
    *beside: torch.Tensor,
) -> Any:
    """A MeshTensor, or a transform's tensor around one, of this rank's part."""
    if are_transforms_active():
        if is_wrapped(part) or any(map(is_wrapped, beside)):
            return _apply(_FromLocalTransformed, part, spec, grad, again, *beside)
        with below_transforms():
            return _FromLocal.apply(part, spec, grad, again, *beside)  # type: ignore[no-untyped-call]
    inside, levels = below_batches(part)
    if not levels:
        return _FromLocal.apply(part, spec, grad, again, *beside)  # type: ignore[no-untyped-call]
    n = len(levels)
    spec, grad, again = batched_spec(spec, inside.shape[:n]), moved(grad, 0, n), again and moved(again, 0, n)
    return above_batches(_FromLocal.apply(inside, spec, grad, again, *beside), levels)  # type: ignore[no-untyped-call]


# -- gradients that come as plain tensors ------------------------------------------------------------------------


def on_mesh(grad: Any, spec: TensorSpec, asked: str, *, compare: bool = True) -> Any:
    """A gradient as a MeshTensor. Autograd's own formulas make plain zeros where no gradient flows back, for example
    through a comparison in place, and a backward of the program may make others. The ranks compare these, unless not
    all of them come here: then it must be zeros or ones.
    """
    if isinstance(grad, tensor_class()) or is_on_mesh(grad):
        return grad
    with below_transforms():
        inside = held(grad)[0] if is_wrapped(grad) else below_batches(grad)[0]
        is_accepted = grad.shape == spec.shape and accept(inside, spec.mesh, asked, compare=compare)
    if is_accepted and inside is not grad:
        whole_spec = TensorSpec(spec.mesh, (REPLICATE,) * spec.mesh.ndim, TensorMeta.of(grad))
        return join(grad, whole_spec, whole_spec.placements)
    if is_accepted:
        whole = with_memory(grad)
        return wrap(whole, TensorSpec(spec.mesh, (REPLICATE,) * spec.mesh.ndim, TensorMeta.of(whole)))
    raise LayoutError(
        asked=asked,
        found=f"a hook returned a plain {type(grad).__name__}",
        do=f"Return a MeshTensor (placements {show_all(spec.placements)}).",
    )
