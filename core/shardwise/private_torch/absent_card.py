"""A CUDA device that is not there: for programs without data, on a machine without one.

With it a program on fake CUDA tensors runs as it would on a card, but for the kernels: torch's choices, its Python code
and autograd find a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from shardwise.private_torch.absent_cuda import autograd_of_fake_cuda
from shardwise.private_torch.cuda_choices import HOPPER, Card, choosing_for
from shardwise.private_torch.cuda_functions import answering_for
from shardwise.private_torch.cuda_shapes import shaping
from shardwise.private_torch.parts import require

__all__ = ["HOPPER", "Card", "as_on"]


# What the stand-in is made of, besides what autograd_of_fake_cuda looks for in the libraries.
PARTS = (
    "torch._C._AutoDispatchBelowAutograd",
    "torch._C._acc.DeviceGuard",
    "torch._C._acc.register_python_privateuseone_device_guard",
    "torch._C._autograd.DeviceType.CUDA",
    "torch._C._ensureCUDADeviceGuardSet",
    "torch._C._get_accelerator",
    "torch._C._get_sdp_priority_order",
    "torch._meta_registrations",
    "torch._subclasses.fake_tensor.run_fallback_kernel",
    "torch.library.Library._destroy",
    "torch.ops.aten.grid_sampler.default._dispatch_cache",
    "torch.ops.aten.grid_sampler.default._op_dk",
    "torch.ops.aten.grid_sampler.default.py_kernels",
)


@contextmanager
def as_on(device_type: str, card: Card = HOPPER) -> Iterator[None]:
    """A context in which a device of this type is there and is the default: a stand-in for a card that is missing.

    Where a CUDA device is there, it is asked, and ``card`` is not. Raises :class:`CallError` where this torch has no
    place for a stand-in, and :class:`TorchPartError` where it lacks what the stand-in is made of.
    """
    with ExitStack() as stack:
        if device_type == "cuda" and not torch.cuda.is_available():
            require(PARTS, "run a program as on CUDA, without a CUDA device", "Use device='cpu'.")
            stack.enter_context(autograd_of_fake_cuda())
            stack.enter_context(choosing_for(card))
            stack.enter_context(shaping())
            stack.enter_context(answering_for(card))
        stack.enter_context(torch.device(device_type))
        yield
