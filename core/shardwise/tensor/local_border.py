"""Into a local function and out of it, under autograd: see :mod:`shardwise.tensor.local_gradients`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.errors import LayoutError
from shardwise.kernel.engine import tensor_class
from shardwise.kernel.placements import Placement, check_placements
from shardwise.kernel.recording import recording
from shardwise.kernel.view_copies import fresh
from shardwise.private_torch.transforms import (
    are_transforms_active,
    has_tangent,
)
from shardwise.tensor.autograd import join, split
from shardwise.tensor.local_parts import agree_on_part, check_device, spec_of_part
from shardwise.tensor.traceable import traceable

__all__ = ["enter", "leave"]


@traceable
def enter(tensor: Any, grad: Sequence[Placement], again: Sequence[Placement], factor: int) -> torch.Tensor:
    """The part of this rank. Its gradients lie as ``grad`` says, ``factor`` times, and theirs as ``again`` says.

    A rank on which nothing uses the part has zeros as gradient where other ranks have one.
    """
    if isinstance(tensor, tensor_class()):
        if recording.recorder is not None:
            recording.recorder.read(tensor)
        if tensor._spec.is_copy:
            fresh(tensor._local_tensor)
    part = split(tensor, tuple(grad), tuple(again))
    return part if factor == 1 else _times(part, float(factor))


def fault_of_shapes(
    parts: Sequence[Any],
    mesh: Any,
    layouts: Sequence[Sequence[Placement] | None],
    shapes: Sequence[Sequence[int] | None],
) -> str:
    """What is wrong with this rank's parts of results of known global shapes; empty where nothing is."""
    for i, (part, layout, shape) in enumerate(zip(parts, layouts, shapes, strict=True)):
        if layout is None or shape is None:
            continue
        try:
            spec_of_part(part, mesh, check_placements(layout, mesh.ndim, part.ndim), shape, None)
        except LayoutError as error:
            return f"result {i} has shape {tuple(part.shape)}, and {error.found}"
    return ""


@traceable
def leave(
    part: torch.Tensor,
    mesh: Any,
    placements: Sequence[Placement],
    shape: Sequence[int] | None,
    grad: Sequence[Placement],
    again: Sequence[Placement],
    factor: int,
    beside: Sequence[torch.Tensor],
) -> Any:
    """A MeshTensor of which this rank has computed a part. The parts of its gradient lie as ``grad`` says, divided by
    ``factor``, and theirs as ``again`` says. A backward pass through it reaches ``beside`` too, on every rank.
    """
    check_device(part, mesh)
    spec = spec_of_part(part, mesh, check_placements(placements, mesh.ndim, part.ndim), shape, None)
    agree_on_part(part, spec, "local", "shapes" if shape is None else "")
    if factor != 1:
        part = _times(part, 1 / factor)
    grad, again = (check_placements(layout, mesh.ndim, part.ndim) for layout in (grad, again))
    return join(part, spec, grad, again, *beside)


class _Times(torch.autograd.Function):
    """The same values; their gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.factor, None


class _TimesTransformed(_Times):
    """The same where ``torch.func`` or forward mode differentiates: a copy, as a view asks for views of tangents, and
    autograd's ``vmap`` has none.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: torch.Tensor, _factor: float) -> torch.Tensor:  # type: ignore[override]  # as above
        return tensor.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.factor = inputs[1]

    @staticmethod
    def jvp(_ctx: Any, tangent: torch.Tensor, _factor: None) -> torch.Tensor:
        return tangent.clone()


def _times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    function = _TimesTransformed if are_transforms_active() or has_tangent(tensor) else _Times
    return function.apply(tensor, factor)  # type: ignore[no-any-return, no-untyped-call]
