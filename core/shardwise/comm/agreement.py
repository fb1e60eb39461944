"""Agreements of ranks: on values, shapes, replicated copies, and the state of a generator."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import groups
from shardwise.comm.call_posts import lines_by_rank
from shardwise.comm.groups import broadcast_
from shardwise.comm.rule_agreement import different_summaries
from shardwise.errors import RankDisagreementError, TracingError
from shardwise.kernel.mesh import Mesh
from shardwise.kernel.placements import Replicate
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.world import PerWorld
from shardwise.private_torch.fake import is_rehearsing
from shardwise.private_torch.modes import outside_modes
from shardwise.private_torch.tracing import is_traced

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
    """Raise :class:`TracingError` while a graph is traced: it cannot wait for data of other ranks."""
    if is_traced(tensor):
        raise TracingError(
            asked=asked,
            found="a graph is being traced, and it cannot wait for what other ranks answer",
            do="Do it outside of compiled code, or redistribute first so that it is not needed.",
        )


def shape_row(shape: Sequence[int]) -> list[int]:
    """The number of dims and the sizes, in a list of fixed length: ranks with different shapes can exchange it."""
    return [len(shape), *shape, *[0] * (_MAX_NDIM - len(shape))]


# -- agreements --------------------------------------------------------------------------------------------------


def broadcast_whole(
    tensor: torch.Tensor, spec: TensorSpec, src: int = 0, *, requires_grad: bool = False
) -> torch.Tensor:
    """The whole tensor of the rank with coordinate ``src`` on every mesh dim, with the strides of ``tensor``.

    Compares first what ``spec`` and ``requires_grad`` say of the tensor that the ranks make. Raises
    :class:`RankDisagreementError` on every rank when they differ.
    """
    refuse_traced(tensor, "distribute the values of one rank")
    mesh: Any = spec.mesh
    _compare(spec, requires_grad, "distribute a tensor")
    values = tensor.clone(memory_format=torch.contiguous_format)
    broadcast_(values, mesh, range(mesh.ndim), src)
    # Keep the order of the strides: a channels-last or transposed tensor must not become row-major.
    return torch.empty_like(tensor).copy_(values)


def _compare(spec: TensorSpec, requires_grad: bool, asked: str) -> None:
    """Raise on every rank unless all make the same tensor."""
    here = f"{spec} with strides {spec.stride} and requires_grad={requires_grad}"
    raise_unless_equal(here, cast("DeviceMesh", spec.mesh), asked, here)


def raise_unless_equal(
    said: str,
    mesh: DeviceMesh,
    asked: str,
    here: str,
    do: str = "Make the call with the same arguments on every rank.",
) -> None:
    """Raise :class:`RankDisagreementError` on every rank unless all ranks of the mesh say the same.

    What they say is compared by a digest of 64 bits. ``asked``, ``here`` (the thing that this rank has) and ``do``
    become the message.
    """
    if is_rehearsing():
        return
    number = int.from_bytes(blake2b(said.encode(), digest_size=8).digest(), "big", signed=True)
    # ~ turns the order of integers round, so one reduction finds the least, too. gloo reduces two integers in a fifth
    # of the time that it needs for eight or more.
    most, turned = _reduced(torch.tensor([number, ~number], device=mesh.device_type), mesh, "max").tolist()
    if most != ~turned:
        with outside_modes():  # every rank has come here
            by_rank = different_summaries(mesh, {"it": {"has": here}}) or {}
        lines = lines_by_rank({rank: f"has {one['it']['has']}" for rank, one in by_rank.items()})
        raise RankDisagreementError(
            asked=asked,
            found=f"the ranks of the mesh do not agree: {'; '.join(lines) or f'this rank has {here}'}",
            do=do,
            differences=tuple(lines),
        )


def _reduced(numbers: torch.Tensor, mesh: DeviceMesh, kind: str) -> torch.Tensor:
    dims = tuple(m for m in range(mesh.ndim) if mesh.size(m) > 1)
    return groups.all_reduce(numbers, kind, mesh, dims) if dims else numbers


def check_agreement(local: torch.Tensor, spec: TensorSpec) -> None:
    """Check that ranks agree on the global shape, placements, strides and dtype and on whether a gradient is required,
    and that replicated copies are equal.

    Raises :class:`RankDisagreementError` on every rank if not.
    """
    refuse_traced(local, "check that ranks agree")
    mesh: Any = spec.mesh
    _compare(spec, local.requires_grad, "make a MeshTensor of local tensors")
    is_equal = True
    for mesh_dim, placement in enumerate(spec.placements):
        if isinstance(placement, Replicate) and mesh.size(mesh_dim) > 1:
            first = broadcast_(local.clone(memory_format=torch.contiguous_format), mesh, (mesh_dim,))
            is_equal &= torch.equal(first, local) or torch.allclose(first, local, rtol=0, atol=0, equal_nan=True)
    flag = torch.tensor([int(is_equal)], device=mesh.device_type)
    if int(_reduced(flag, mesh, "min")) == 0:
        raise RankDisagreementError(
            asked=f"make a MeshTensor {spec} of local tensors",
            found="copies that should be replicated differ between ranks",
            do="Pass the same values on every rank, or Partial() where the parts are to be added.",
        )


# By hash, because ranks delete a mesh at different times: a set of the meshes would not be the same on all of them.
_hashes: set[int] = set()
_agreed = PerWorld(_hashes, _hashes.clear)


def agree_on_generator(mesh: Mesh) -> None:
    """Give all ranks of a mesh the generator state of its first rank, once per mesh; equal meshes are one.

    Every rank draws the same random values. With different seeds the ranks would draw different ones without an error,
    or one seed would hold for all: see :func:`shardwise.comm.seed_agreement.compare_seeds`.
    """
    if not isinstance(mesh, DeviceMesh) or hash(mesh) in _agreed.now() or is_rehearsing():
        return
    from shardwise.comm.seed_agreement import compare_seeds  # a program that draws nothing does not need it

    with outside_modes():
        module = generator_of(mesh)
        if mesh.get_coordinate() is not None:
            compare_seeds(mesh, module.initial_seed())
        _agreed.now().add(hash(mesh))
        if mesh.size() == 1:
            return
        state = module.get_rng_state().to(mesh.device_type)
        broadcast_(state, mesh, range(mesh.ndim))
        module.set_rng_state(state.cpu())


def generator_of(mesh: DeviceMesh) -> Any:
    """The torch module with ``get_rng_state`` and ``set_rng_state`` for a mesh's devices."""
    return torch if mesh.device_type == "cpu" else torch.get_device_module(mesh.device_type)
