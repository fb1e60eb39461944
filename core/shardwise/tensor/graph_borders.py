"""Where a MeshTensor meets a graph: gradients of compiled code, and parts that ``make_fx`` records."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.errors import TracingError
from shardwise.kernel.spec import SpecLayout, TensorSpec
from shardwise.tensor.autograd import join, on_mesh
from shardwise.tensor.grad_layouts import grad_layout, grad_under
from shardwise.tensor.recorded import RecordedCall

__all__ = ["join_in_graph", "plain_tangent"]


def plain_tangent(grad: torch.Tensor, known: Any) -> Any:
    """The gradient of an output of compiled code from the plain zeros that autograd makes for an unused output.

    The ranks do not compare it: torch asks for it only where the rank's part has elements, so some ranks never come
    here.
    """
    layout: SpecLayout = known[0]
    spec = layout.spec(grad.shape, grad.stride(), grad.dtype)
    asked = "take the gradient of an output of compiled code"
    return grad_under(on_mesh(grad, spec, asked, compare=False), layout.placements)


def join_in_graph(tensor: Any) -> tuple[torch.Tensor, RecordedCall]:
    """The part in a tensor, and what makes the tensor of it in a graph of ``make_fx``."""
    spec: TensorSpec = tensor._spec
    if spec.tensor_meta.is_symbolic:
        raise TracingError(
            asked=f"record {spec}, made of a local tensor, with make_fx",
            found="its sizes are symbols, and the graph would keep those of the trace",
            do='Use torch.compile, or tracing_mode="real" or "fake", or return to_local().',
        )
    return tensor._local_tensor, RecordedCall("join", join, spec, grad_layout(spec.placements))
