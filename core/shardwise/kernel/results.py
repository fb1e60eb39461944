"""From the local results of an op to MeshTensors, views among them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise.errors import ViewError
from shardwise.kernel.engine import started
from shardwise.kernel.placements import REPLICATE
from shardwise.kernel.plan import Plan
from shardwise.kernel.signature import op_name
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.private_torch.dispatch import new_wrapper, set_data

__all__ = [
    "guard",
    "new_view_of",
    "reseat",
    "reseat_copy",
    "views",
    "wrap",
    "wrap_results",
    "wrap_unknown",
]


def wrap(local: torch.Tensor, spec: TensorSpec) -> Any:
    """The tensor on a mesh with this local tensor and spec."""
    return new_wrapper(started.tensor_class, local, spec, False)


def wrap_results(plan: Plan, out: Sequence[Any]) -> tuple[Any, ...]:
    """Wrap the results of an op that returns several, lists among them."""
    specs = iter(plan.outs)

    def wrap(local: torch.Tensor | None) -> Any:
        spec = next(specs)
        return None if local is None else new_wrapper(started.tensor_class, local, spec, False)

    wrapped: list[Any] = []
    for result, value in zip(plan.schema.signature.results, out, strict=True):
        if result.is_list:
            wrapped.append([wrap(part) for part in value])
        else:
            wrapped.append(wrap(value) if result.is_tensor else value)
    return tuple(wrapped)


def wrap_unknown(plan: Plan, local: torch.Tensor | None) -> Any:
    """Wrap a result without a spec: it is undefined, or its shape depends on data and every operand was whole."""
    if local is None:
        return None
    mesh = plan.schema.mesh
    spec = TensorSpec(mesh, (REPLICATE,) * mesh.ndim, TensorMeta.of(local))
    return new_wrapper(started.tensor_class, local, spec, False)


# -- views -------------------------------------------------------------------------------------------------------


class _Views(threading.local):
    """Whether a view must share memory with its base in this thread, as the ``view`` method promises."""

    must_share = False


views = _Views()


def guard(plan: Plan) -> None:
    """Refuse to gather for a view that must share memory; ``reshape`` and its callers may copy."""
    if not (views.must_share and plan.copies):
        return
    schema = plan.schema
    arguments = ", ".join(f"{a.name}={v}" for a, v in zip(schema.signature.args, schema.values, strict=True))
    raise ViewError(
        asked=f"run {op_name(schema.op)} with {arguments}",
        found=f"the view would need data from another rank: the tensor would have to lie as {plan.strategies[0]}",
        do="Call reshape, which may copy, or redistribute the tensor first.",
        op=op_name(schema.op),
    )


def new_view_of(base: torch.Tensor) -> Callable[..., Any]:
    """The constructor of a view under inference mode: a view of a normal tensor is a normal tensor there too."""
    return new_wrapper if base.is_inference() else _new_normal


def _new_normal(*parts: Any) -> Any:
    with torch.inference_mode(False):
        return new_wrapper(*parts)


def reseat(tensor: Any, local: torch.Tensor, spec: TensorSpec) -> Any:
    """Make a tensor another view of its memory, as ``x.t_()`` does."""
    is_plain = not isinstance(tensor, started.tensor_class)
    if is_plain:  # plain.resize_as_(x)
        set_data(tensor, local)
        return tensor
    # Torch's setter changes sizes and strides, which torch holds, and leaves autograd's state alone.
    set_data(tensor, new_wrapper(started.tensor_class, local, spec, False))
    tensor._local_tensor, tensor._spec = local, spec
    tensor._follow_layout()
    return tensor


def reseat_copy(
    plan: Plan,
    tensor: Any,
    local: torch.Tensor,
    spec: TensorSpec,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
) -> Any:
    """As :func:`reseat`, for a view that is a copy. Its base is what the tensor was: earlier views share its memory."""
    base = new_wrapper(started.tensor_class, tensor._local_tensor, tensor._spec, False)
    reseat(tensor, local, spec)
    started.engine.link(plan, tensor, (base, *args[1:]) if args else args, kwargs)
    return tensor
