"""Factories: MeshTensors made from nothing, with the names and arguments of torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import agree_on_generator
from shardwise.errors import LayoutError
from shardwise.layout import scatter_local
from shardwise.placements import REPLICATE, Placement, check_placements
from shardwise.private_torch import current_mesh
from shardwise.rule_agreement import agree_on_rules
from shardwise.spec import TensorMeta, TensorSpec
from shardwise.tensor import MeshTensor
from shardwise.traceable import traceable

__all__ = ["empty", "full", "ones", "rand", "randn", "zeros"]


class Factory(Protocol):
    """A factory that takes a global size, as separate integers or as one sequence."""

    def __call__(
        self,
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
    ) -> MeshTensor:
        """A MeshTensor of the global ``size``; replicated when no placements are given."""
        ...


def _make(
    make: Callable[..., torch.Tensor],
    size: Sequence[int],
    dtype: torch.dtype | None,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    is_random: bool,
) -> MeshTensor:
    mesh = current_mesh() if device_mesh is None else device_mesh
    wanted = [REPLICATE] * mesh.ndim if placements is None else placements
    meta = TensorMeta.contiguous(size, make((0,), dtype=dtype, device="meta").dtype)
    spec = TensorSpec(mesh, check_placements(wanted, mesh.ndim, len(size)), meta)
    agree_on_rules(mesh)
    if is_random:
        agree_on_generator(mesh)
    # Random values must not depend on the mesh, so every rank draws them all; a pending tensor holds its value once.
    whole = is_random or bool(spec.pending)
    made = make(size if whole else spec.local_shape(), dtype=dtype, device=mesh.device_type)
    return MeshTensor(scatter_local(made, spec) if whole else made, spec)


def _factory(make: Callable[..., torch.Tensor], summary: str, is_random: bool = False) -> Factory:
    def factory(
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
    ) -> MeshTensor:
        check_layout(layout)
        sizes = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
        made = _make(make, sizes, dtype, device_mesh, placements, is_random)
        return made.requires_grad_(requires_grad)

    factory.__name__ = factory.__qualname__ = make.__name__
    factory.__doc__ = f"{summary} Takes the global size; replicated when no placements are given."
    return traceable(factory)


def check_layout(layout: torch.layout) -> None:
    """Only strided tensors lie on a mesh."""
    if layout is not torch.strided:
        raise LayoutError(
            asked=f"make a MeshTensor with layout {layout}",
            found="a shard of it could not be cut or sent",
            do="Use torch.strided.",
        )


zeros = _factory(torch.zeros, "A MeshTensor of zeros.")
ones = _factory(torch.ones, "A MeshTensor of ones.")
empty = _factory(torch.empty, "A MeshTensor of undefined values.")
rand = _factory(torch.rand, "Uniform values on [0, 1), those that torch.rand gives on one device.", is_random=True)
randn = _factory(torch.randn, "Normal values, those that torch.randn gives on one device.", is_random=True)


@traceable
def full(
    size: Sequence[int],
    fill_value: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> MeshTensor:
    """A MeshTensor of the global ``size`` filled with one value; replicated when no placements are given."""
    check_layout(layout)
    make = partial(torch.full, fill_value=fill_value)
    return _make(make, size, dtype, device_mesh, placements, False).requires_grad_(requires_grad)
