"""Shapes of CUDA's ops for fake tensors, where there is no CUDA device.

For an op without a kernel for shapes torch runs the real kernel on zeros. On a build without CUDA there is not one:
then that of the CPU runs. Ops that CUDA alone has are given shapes here. Nothing public decides how a fake tensor is
made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor

from shardwise.private_torch.fake import replaced
from shardwise.private_torch.trees import tree_map_only

__all__ = ["shaping"]


@contextmanager
def shaping() -> Iterator[None]:
    """A context in which ops on fake CUDA tensors have the shapes that torch lacks."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        for name, kernel in _SHAPES.items():
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
                library.impl(name, kernel, "Meta")  # type: ignore[no-untyped-call]
        with (
            replaced(fake_tensor, run_fallback_kernel=_on_cpu(vars(fake_tensor)["run_fallback_kernel"])),
            # It fails for an LSTM without biases.
            replaced(import_module("torch._meta_registrations"), rnn_cell_checkSizes=lambda *_: None),
        ):
            yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _on_cpu(run: Callable[..., Any]) -> Callable[..., Any]:
    """What runs the real kernel on zeros, for the CPU's kernel."""

    def fall_back(mode: Any, op: Any, flat: Any, spec: Any, error: BaseException) -> Any:
        there = [t for t in flat if isinstance(t, fake_tensor.FakeTensor) and t.fake_device.type == "cuda"]
        if not there:
            return run(mode, op, flat, spec, error)
        before = [t.fake_device for t in there]
        here = [torch.device("cpu") if isinstance(v, torch.device) else v for v in flat]
        try:
            for tensor in there:
                tensor.fake_device = torch.device("cpu")
            results = run(mode, op, here, spec, error)
        finally:
            for tensor, device in zip(there, before, strict=True):
                tensor.fake_device = device

        def back(tensor: Tensor) -> Tensor:
            if any(tensor is operand for operand in flat):
                return tensor
            with mode:
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=before[0])

        return tree_map_only(Tensor, back, results)

    return fall_back


def _gradients_of_recurrent(x: Tensor, weight: Any, *rest: Any) -> Any:
    """What cuDNN's backward returns, without data: torch has shapes for the forward only."""
    _stride, _buffer, hx, cx, *_, mask = rest
    wanted = [x, hx, cx]
    gradients = [
        torch.empty_like(t) if t is not None and asked else None for t, asked in zip(wanted, mask, strict=False)
    ]
    return (*gradients, [torch.empty_like(w) for w in weight] if mask[3] else [])


def _sampled(x: Tensor, grid: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:2], *grid.shape[1:3]))


def _gradients_of_sampled(x: Tensor, grid: Tensor, _gradient: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(grid)


def _not_by_cudnn(*_: Any) -> bool:
    """Torch's own CTC loss: cuDNN's takes one form of the targets alone."""
    return False


def _gru_cell(gates: Tensor, _hidden: Tensor, state: Tensor, *_: Any) -> Any:
    return torch.empty_like(state), gates.new_empty((state.shape[0], 5 * state.shape[1]))


def _gradients_of_gru_cell(grad: Tensor, _workspace: Tensor, has_bias: bool) -> Any:
    gates = [grad.new_empty((grad.shape[0], 3 * grad.shape[1])) for _ in range(2)]
    biases = [grad.new_empty((3 * grad.shape[1],)) if has_bias else None for _ in range(2)]
    return (*gates, torch.empty_like(grad), *biases)


# Ops that CUDA alone has, and for which torch has no shapes.
_SHAPES: dict[str, Callable[..., Any]] = {
    "_cudnn_rnn_backward": _gradients_of_recurrent,
    "_use_cudnn_ctc_loss": _not_by_cudnn,
    "_use_cudnn_ctc_loss.Tensor": _not_by_cudnn,
    "_use_miopen_ctc_loss": _not_by_cudnn,
    "_use_miopen_ctc_loss.Tensor": _not_by_cudnn,
    "cudnn_grid_sampler": _sampled,
    "cudnn_grid_sampler_backward": _gradients_of_sampled,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gradients_of_gru_cell,
}
