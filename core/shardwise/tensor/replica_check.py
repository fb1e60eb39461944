"""Replica drift: whether copies that should be the same are, bit by bit.

A tensor that is replicated on a mesh dim lies on all ranks along it, and nothing sends it again. If one copy changes (a
write on some ranks only, a kernel that adds in any order, faulty memory), the ranks compute with different numbers from
then on. So every so many optimizer steps the ranks compare a digest of the bytes of each copy: of parameters, buffers
and optimizer states, on the mesh dims on which they are replicated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any, cast
from zlib import crc32

import torch
from attrs import frozen
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import Optimizer

from shardwise.comm.contents import device_digest
from shardwise.comm.groups import backend_of, group_of
from shardwise.errors import LayoutError, RankDisagreementError, SettingsError
from shardwise.kernel.arguments import check_module, refuse_argument
from shardwise.kernel.placements import Replicate
from shardwise.private_torch.fake import is_rehearsing
from shardwise.private_torch.modes import outside_modes
from shardwise.settings import read_settings
from shardwise.tensor.mesh_tensor import MeshTensor

__all__ = ["check_after_step", "check_replicas", "copies", "replica_steps"]

_STEPS = "_shardwise_steps"  # an attribute of optimizers; torch leaves it out of pickles and copies
_SHOWN = 8  # tensors that a message names


def check_replicas(
    model: torch.nn.Module | None, optimizer: Optimizer | None = None, *, every: int | None = None
) -> Any:
    """Compare the copies of all replicated tensors of a model and of an optimizer's states.

    Without ``every`` they are compared now. With ``every=n`` they are compared after each n-th step of the optimizer,
    until ``remove()`` of the returned object is called. Every rank of the mesh must call this at the same point. The
    setting ``check-replicas`` does the same for all optimizers of a program.

    Raises :class:`RankDisagreementError` on every rank where copies differ; its fields ``tensor`` and ``ranks`` name
    the first such tensor and the ranks whose bytes are not those of most ranks, and ``differences`` has a line per
    tensor. Raises :class:`LayoutError` for a model that was not distributed, and :class:`SettingsError` for an
    ``every`` without an optimizer, or below 1.
    """
    if model is not None:
        check_module("check replicas", model, "model")
    if every is not None and type(every) is not int:
        refuse_argument("check replicas", "every", every, "Give a whole number of steps.")
    if every is not None and (optimizer is None or every < 1):
        raise SettingsError(
            asked=f"check replicas every {every} steps",
            found="there is no optimizer whose steps could be counted" if optimizer is None else "every is below 1",
            do="Pass the optimizer and every=n with n from 1 on, or neither to compare once.",
            setting="check-replicas",
        )
    if model is not None:
        _refuse_plain(model)
    if every is None:
        _compare(model, optimizer, "now")
        return None
    assert optimizer is not None
    done = Counter[str]()

    def after(stepped: Optimizer, _args: Any, _kwargs: Any) -> None:
        done["steps"] += 1
        if done["steps"] % every == 0:
            _compare(model, stepped, f"after step {done['steps']}")

    return optimizer.register_step_post_hook(after)


def _refuse_plain(model: torch.nn.Module) -> None:
    """Raise :class:`LayoutError` for a module of which nothing lies on a mesh: it was not distributed yet."""
    tensors = [*model.parameters(), *model.buffers()]
    if tensors and not any(isinstance(t, MeshTensor) for t in tensors):
        raise LayoutError(
            asked=f"check the replicas of a {type(model).__name__}",
            found="not one of its parameters and buffers lies on a mesh, so there is nothing to compare",
            do="Call distribute_module(model, mesh, ...) first.",
        )


@cache
def replica_steps() -> int:
    """The setting ``check-replicas``."""
    return read_settings().check_replicas


def check_after_step(optimizer: Optimizer) -> None:
    """An optimizer has stepped: compare its parameters and states after each so many steps as the setting says."""
    steps = optimizer.__dict__[_STEPS] = optimizer.__dict__.get(_STEPS, 0) + 1
    if steps % replica_steps() == 0:
        _compare(None, optimizer, f"after step {steps}")


# -- what is compared ------------------------------------------------------------------------------------------------


@frozen(eq=False)
class Copy:
    """The copy on this rank of a tensor that is replicated on some dims of a mesh."""

    name: str
    local: torch.Tensor
    mesh: DeviceMesh
    mesh_dims: tuple[int, ...]


def copies(model: torch.nn.Module | None, optimizer: Optimizer | None) -> Iterator[Copy]:
    """The replicated tensors of a model and of an optimizer, in an order that is the same on every rank."""
    names: dict[int, str] = {}
    if model is not None:
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            names[id(tensor)] = name
            yield from _copy(name, tensor, None)
    for i, group in enumerate(() if optimizer is None else optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), "")
            if not name:
                given = group.get("param_names")
                name = given[j] if given else f"parameter {j} of group {i}"
                yield from _copy(name, parameter, None)
            mesh = parameter._spec.mesh if isinstance(parameter, MeshTensor) else None
            state = cast("Optimizer", optimizer).state.get(parameter, {})
            for key in sorted(state, key=str):
                yield from _copy(f"{name}, state {key!r}", state[key], mesh)


def _copy(name: str, tensor: Any, mesh: Any) -> Iterator[Copy]:
    """The copy that a tensor is, if it is one. A plain state of a parameter on a mesh is replicated."""
    if isinstance(tensor, MeshTensor):
        mesh, placements = tensor._spec.mesh, tensor._spec.placements
        dims = tuple(m for m, p in enumerate(placements) if isinstance(p, Replicate) and mesh.size(m) > 1)
        if dims and isinstance(mesh, DeviceMesh):
            yield Copy(name, tensor._local_tensor, mesh, dims)
    elif isinstance(tensor, torch.Tensor) and isinstance(mesh, DeviceMesh) and mesh.size() > 1:
        yield Copy(name, tensor, mesh, tuple(m for m in range(mesh.ndim) if mesh.size(m) > 1))


# -- comparing -------------------------------------------------------------------------------------------------------


def _compare(model: torch.nn.Module | None, optimizer: Optimizer | None, when: str) -> None:
    """Raise on every rank of a mesh unless all copies on it are the same."""
    by_mesh: dict[DeviceMesh, list[Copy]] = {}
    for copy in copies(model, optimizer):
        by_mesh.setdefault(copy.mesh, []).append(copy)
    for mesh, here in by_mesh.items():
        if mesh.get_coordinate() is None or is_rehearsing() or backend_of(mesh) == "fake":
            continue
        with outside_modes(), torch.no_grad():
            _compare_on(mesh, here, when)


def _compare_on(mesh: DeviceMesh, here: list[Copy], when: str) -> None:
    names = crc32("\n".join(f"{copy.name} {copy.mesh_dims}" for copy in here).encode())
    # Ranks with different lists would send different sizes.
    if len(set(map(tuple, _gathered(mesh, torch.tensor([len(here), names]))))) > 1:
        raise RankDisagreementError(
            asked=f"compare replicated tensors {when}",
            found=f"the ranks of the mesh do not have the same ones; this rank has {len(here)}",
            do="Pass the same model and optimizer on every rank, after the same steps.",
            tensor="",
            ranks=(),
            differences=(),
        )
    numbers = _gathered(mesh, torch.stack([device_digest(copy.local).to(mesh.device_type) for copy in here]))
    differ = ((copy.name, _different_ranks(copy, [row[i] for row in numbers])) for i, copy in enumerate(here))
    different = [(name, ranks) for name, ranks in differ if ranks]
    if different:
        lines = [f"{name} on rank{'s' if len(r) > 1 else ''} {', '.join(map(str, r))}" for name, r in different]
        rest = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        raise RankDisagreementError(
            asked=f"compare replicated tensors {when}",
            found=f"{len(lines)} of {len(here)} have other bytes on some ranks: {'; '.join(lines[:_SHOWN])}{rest}",
            do="Go back to the last checkpoint. Look for a write to local tensors on these ranks only, an op that does "
            "not give the same bits each time (torch.use_deterministic_algorithms), or a faulty device.",
            tensor=different[0][0],
            ranks=tuple(different[0][1]),
            differences=tuple(lines),
        )


def _gathered(mesh: DeviceMesh, row: torch.Tensor) -> list[list[int]]:
    """The rows of all ranks of a mesh, in row-major order of their coordinates."""
    dims = tuple(m for m in range(mesh.ndim) if mesh.size(m) > 1)
    rows: list[list[int]] = group_of(mesh, dims).all_gather(row.to(mesh.device_type)).tolist()
    return rows


def _different_ranks(copy: Copy, numbers: list[int]) -> list[int]:
    """The ranks whose copy is not the one that most ranks have, by the numbers of all ranks of the mesh.

    Of copies that as many ranks have, the one that comes first on the mesh counts as right.
    """
    mesh = copy.mesh
    sharded = [m for m in range(mesh.ndim) if m not in copy.mesh_dims]
    along = math.prod(mesh.size(m) for m in copy.mesh_dims)

    def in_rows(values: torch.Tensor) -> list[list[int]]:
        """A row for each coordinate on the other mesh dims."""
        rows: list[list[int]] = values.permute(*sharded, *copy.mesh_dims).reshape(-1, along).tolist()
        return rows

    wrong: list[int] = []
    for ranks, row in zip(in_rows(mesh.mesh), in_rows(torch.tensor(numbers).view(mesh.mesh.shape)), strict=True):
        right = Counter(row).most_common(1)[0][0]
        wrong += [rank for rank, number in zip(ranks, row, strict=True) if number != right]
    return sorted(wrong)
