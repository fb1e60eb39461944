"""What ranks must agree on: values, shapes, replicated copies, the state of a generator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import groups
from shardwise.comm.groups import broadcast_
from shardwise.errors import RankDisagreementError, TracingError
from shardwise.kernel.placements import Replicate
from shardwise.kernel.spec import Mesh, TensorSpec
from shardwise.private_torch.fake import is_rehearsing
from shardwise.private_torch.tracing import is_traced, outside_modes

__all__ = [
    "SHAPE_BYTES",
    "agree_on_generator",
    "broadcast_whole",
    "check_agreement",
    "generator_of",
    "raise_unless_equal",
    "refuse_traced",
    "shape_row",
]

_MAX_NDIM = 62
SHAPE_BYTES = (1 + _MAX_NDIM) * 8
"""Bytes of a shape that a rank sends: see :func:`shape_row`."""


def refuse_traced(tensor: torch.Tensor, asked: str) -> None:
    """Raise :class:`TracingError` while a graph is traced: it cannot wait for the answers of other ranks."""
    if is_traced(tensor):
        raise TracingError(
            asked=asked,
            found="a graph is being traced, and it cannot wait for what other ranks answer",
            do="Do it outside of compiled code, or redistribute first so that it is not needed.",
        )


def shape_row(shape: Sequence[int]) -> list[int]:
    """A shape in a buffer of fixed length, so that ranks with different shapes still exchange them."""
    return [len(shape), *shape, *[0] * (_MAX_NDIM - len(shape))]


# -- agreements --------------------------------------------------------------------------------------------------


def broadcast_whole(tensor: torch.Tensor, mesh: DeviceMesh, src: int = 0) -> torch.Tensor:
    """A whole tensor as the rank with coordinate ``src`` on every mesh dim has it; checks first that shapes agree.

    Raises :class:`RankDisagreementError` on every rank when shapes or dtypes differ.
    """
    refuse_traced(tensor, "distribute the values of one rank")
    _check_alike(tensor, mesh, "distribute a tensor")
    found = tensor.clone(memory_format=torch.contiguous_format)
    for mesh_dim in range(mesh.ndim):
        broadcast_(found, mesh, mesh_dim, src)
    # Keep the order of the strides: a channels-last or transposed tensor must not come back row-major.
    return torch.empty_like(tensor).copy_(found)


def _check_alike(tensor: torch.Tensor, mesh: DeviceMesh, asked: str) -> None:
    described = [*shape_row(tensor.shape), sum(map(ord, str(tensor.dtype)))]
    mine = torch.tensor(described, device=mesh.device_type)
    raise_unless_equal(mine, mesh, asked, f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)}")


def raise_unless_equal(
    mine: torch.Tensor,
    mesh: DeviceMesh,
    asked: str,
    here: str,
    do: str = "Make the call with alike arguments on every rank.",
) -> None:
    """Raise :class:`RankDisagreementError` on every rank unless all ranks of the mesh have the same numbers."""
    if is_rehearsing():
        return
    least, most = _reduced(mine, mesh, "min"), _reduced(mine, mesh, "max")
    if not torch.equal(least, most):
        raise RankDisagreementError(
            asked=asked,
            found=f"the ranks of the mesh do not agree; this rank has {here}",
            do=do,
        )


def _reduced(mine: torch.Tensor, mesh: DeviceMesh, kind: str) -> torch.Tensor:
    dims = tuple(m for m in range(mesh.ndim) if mesh.size(m) > 1)
    return groups.all_reduce(mine, kind, mesh, dims) if dims else mine


def check_agreement(local: torch.Tensor, spec: TensorSpec) -> None:
    """Ranks must agree on the global shape, and replicated copies must be alike; raises on every rank if not."""
    refuse_traced(local, "check that ranks agree")
    mesh: Any = spec.mesh
    shape = [*shape_row(spec.shape), sum(map(ord, str(spec.dtype)))]
    raise_unless_equal(
        torch.tensor(shape, device=mesh.device_type), mesh, "make a MeshTensor of local tensors", str(spec)
    )
    alike = 1
    for mesh_dim, placement in enumerate(spec.placements):
        if isinstance(placement, Replicate) and mesh.size(mesh_dim) > 1:
            first = broadcast_(local.clone(memory_format=torch.contiguous_format), mesh, mesh_dim)
            same = torch.equal(first, local) or bool(torch.allclose(first, local, rtol=0, atol=0, equal_nan=True))
            alike &= int(same)
    flag = torch.tensor([alike], device=mesh.device_type)
    if int(_reduced(flag, mesh, "min")) == 0:
        raise RankDisagreementError(
            asked=f"make a MeshTensor {spec} of local tensors",
            found="copies that should be replicated differ between ranks",
            do="Pass the same values on every rank, or Partial() where the parts are to be added.",
        )


_agreed: WeakSet[Any] = WeakSet()


def agree_on_generator(mesh: Mesh) -> None:
    """Give all ranks of a mesh the generator state of its first one, once per mesh.

    Random values are drawn alike on every rank; ranks that were seeded differently would drift apart in silence.
    """
    if not isinstance(mesh, DeviceMesh) or mesh in _agreed:
        return
    _agreed.add(mesh)
    if mesh.size() > 1:
        with outside_modes():
            _agree(mesh)


def _agree(mesh: DeviceMesh) -> None:
    module = generator_of(mesh)
    state = module.get_rng_state().to(mesh.device_type)
    for mesh_dim in range(mesh.ndim):
        broadcast_(state, mesh, mesh_dim)
    module.set_rng_state(state.cpu())


def generator_of(mesh: DeviceMesh) -> Any:
    """The module with the state of the generator that a mesh's devices draw from."""
    return torch if mesh.device_type == "cpu" else torch.get_device_module(mesh.device_type)
