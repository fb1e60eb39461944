"""Place models that torchao has quantised: the tensors that a weight is made of, each as the weight is to lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

import torch
from attrs import frozen
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchao.quantization import Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor
from torchao.utils import TorchAOBaseTensor

import shardwise as sw
from shardwise.errors import PlacementError
from shardwise.rule import AbstractMesh, Placement, Replicate, Shard, TensorMeta, TensorSpec, show_all

__all__ = ["distribute_module", "distribute_quantised"]

# The kinds whose values have the dims of the weight. The others are packed: a dim of theirs is no dim of the weight.
PLAIN = (Int8Tensor, Float8Tensor, IntxUnpackedToInt8Tensor)
VALUES = "qdata"
OF_BLOCKS = ("scale", "zero_point")


def distribute_module(
    module: nn.Module, device_mesh: DeviceMesh, partition: Mapping[str, Any] | None = None, **options: Any
) -> nn.Module:
    """``shardwise.distribute_module`` for a module with weights that torchao has quantised, in place.

    ``partition`` maps shell patterns on qualified names to placements, as there; ``options`` are those of there. A
    pattern that fits a quantised weight places its values, and its scales and zero points with them. A quantised weight
    without a match is replicated. One that lies on the mesh already is moved.

    Raises :class:`PlacementError` where the ranks would cut a block of values with one scale, for weights in a packed
    layout, and for a pattern that matches nothing. Then the module is as it was.
    """
    patterns = dict(partition or {})
    quantised = _quantised(module)
    chosen = {weight.name: _first(weight.name, patterns) for weight in quantised}
    _check_effect(module, patterns, chosen)
    placed: dict[int, nn.Parameter] = {}
    for weight in quantised:
        if id(weight.tensor) not in placed:
            pattern = chosen[weight.name]
            places = None if pattern is None else patterns[pattern]
            source = {"src_data_rank": options["src_data_rank"]} if "src_data_rank" in options else {}
            new = _named(weight.name, pattern, weight.tensor, device_mesh, places, source)
            placed[id(weight.tensor)] = nn.Parameter(new, requires_grad=weight.tensor.requires_grad)
    names = [name for name, _ in _tensors(module) if name not in chosen]
    others = {p: places for p, places in patterns.items() if any(fnmatchcase(name, p) for name in names)}
    after = [weight.tensor for weight in quantised]
    # shardwise places what is not quantised; a parameter that is None is none of a module's.
    for weight in quantised:
        setattr(weight.owner, weight.key, None)
    try:
        sw.distribute_module(module, device_mesh, others, **options)
        after = [placed[id(weight.tensor)] for weight in quantised]
    finally:
        for weight, tensor in zip(quantised, after, strict=True):
            setattr(weight.owner, weight.key, tensor)
    return module


def distribute_quantised(
    tensor: torch.Tensor, device_mesh: DeviceMesh, placements: Any = None, *, src_data_rank: int | None = 0
) -> torch.Tensor:
    """A quantised tensor of torchao, made of MeshTensors. Every rank must call this.

    ``placements`` are as for ``shardwise.distribute_tensor``: those of the values. A scale lies with the values that it
    is for; what belongs to activations is replicated. Raises :class:`PlacementError` for a tensor in a packed layout,
    for placements other than ``Shard`` and ``Replicate``, and where the ranks would cut a block of values with one
    scale.
    """
    _check_plain(tensor)
    names, attributes = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # torchao's tensors have it
    inner = {name: getattr(tensor, name) for name in names}
    values = sw.distribute_tensor(inner[VALUES], device_mesh, placements, src_data_rank=src_data_rank)
    layout = tuple(values.placements)
    _check_placements(tensor, layout)
    for name in names:
        if name == VALUES:
            inner[name] = values
            continue
        places: list[Placement] = [Replicate()] * len(layout)
        if name in OF_BLOCKS and inner[name].ndim == tensor.ndim:
            places = [_of_blocks(p, inner[name]) for p in layout]
            _check_cuts(tensor, inner[name], layout, places, device_mesh)
        inner[name] = sw.distribute_tensor(inner[name], device_mesh, places, src_data_rank=src_data_rank)
    made: torch.Tensor = type(tensor).__tensor_unflatten__(  # type: ignore[attr-defined]  # as above
        inner, attributes, tensor.shape, tensor.stride()
    )
    return made


# -- the weights of a module -------------------------------------------------------------------------------------


@frozen
class _Weight:
    """A quantised parameter and where it is."""

    owner: nn.Module
    key: str
    name: str
    tensor: nn.Parameter


def _quantised(module: nn.Module) -> list[_Weight]:
    return [
        _Weight(owner, key, f"{prefix}.{key}" if prefix else key, tensor)
        for prefix, owner in module.named_modules(remove_duplicate=False)
        for key, tensor in owner.named_parameters(recurse=False, remove_duplicate=False)
        if isinstance(tensor, TorchAOBaseTensor)
    ]


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _first(name: str, patterns: Mapping[str, Any]) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def _check_effect(module: nn.Module, patterns: Mapping[str, Any], chosen: Mapping[str, str | None]) -> None:
    """Each pattern must be the first that fits some name, as ``shardwise.distribute_module`` asks, too."""
    names = [name for name, _ in _tensors(module)]
    used = {*chosen.values(), *(_first(name, patterns) for name in names)}
    for pattern in patterns:
        if pattern not in used:
            fitting = [name for name in names if fnmatchcase(name, pattern)]
            found = f"no parameter or buffer has such a name; there are {', '.join(names)}"
            if fitting:
                found = f"earlier patterns take all that it fits: {_first(fitting[0], patterns)!r} takes {fitting[0]!r}"
            raise PlacementError(
                asked=f"place the tensors {pattern!r} of a {type(module).__name__}",
                found=found,
                do="Correct the pattern (shell style, on qualified names), or put it first.",
                pattern=pattern,
            )


def _named(
    name: str, pattern: str | None, tensor: torch.Tensor, mesh: DeviceMesh, places: Any, source: Mapping[str, Any]
) -> torch.Tensor:
    """The tensor on the mesh. Errors name the parameter and the pattern."""
    try:
        return distribute_quantised(tensor, mesh, places, **source)
    except PlacementError as error:
        by = "" if pattern is None else f" by the pattern {pattern!r}"
        raise type(error)(
            asked=f"place {name!r}{by}: {error.asked}", found=error.found, do=error.do, **error.fields
        ) from None


# -- what may be placed how --------------------------------------------------------------------------------------


def _shown(tensor: torch.Tensor) -> str:
    return f"a weight of shape {tuple(tensor.shape)} ({type(tensor).__name__})"


def _check_plain(tensor: torch.Tensor) -> None:
    if not isinstance(tensor, PLAIN):
        kinds = ", ".join(kind.__name__ for kind in PLAIN)
        is_packed = isinstance(tensor, TorchAOBaseTensor)
        raise PlacementError(
            asked=f"place {_shown(tensor)} with its scales",
            found="its values are packed, so that a dim of theirs is no dim of the weight"
            if is_packed
            else "torchao has not quantised it",
            do=f"Quantise with a layout whose values have the weight's dims ({kinds})."
            if is_packed
            else f"Give one of torchao's tensors ({kinds}), or use shardwise.distribute_tensor.",
        )


def _check_placements(tensor: torch.Tensor, layout: Sequence[Placement]) -> None:
    if not all(type(placement) in {Shard, Replicate} for placement in layout):
        raise PlacementError(
            asked=f"place {_shown(tensor)} as {show_all(layout)}",
            found="a scale is for whole values, which are neither partial nor sharded inside of a dim",
            do="Use Shard and Replicate.",
        )


def _of_blocks(placement: Placement, scales: torch.Tensor) -> Placement:
    """The placement of scales beside values: sharded where there are several along the dim."""
    return placement if isinstance(placement, Shard) and scales.shape[placement.dim] > 1 else Replicate()


def _check_cuts(
    tensor: torch.Tensor,
    scales: torch.Tensor,
    layout: Sequence[Placement],
    places: Sequence[Placement],
    mesh: DeviceMesh,
) -> None:
    """Where values and scales are sharded, each rank must have the scales of its values and no others."""
    grid = AbstractMesh(tuple(mesh.shape))
    values, of_blocks = _spec(grid, layout, tensor), _spec(grid, places, scales)
    shards = [
        (*values.local_shape_and_offset(at), *of_blocks.local_shape_and_offset(at))
        for at in product(*map(range, grid.shape))
    ]
    for dim in sorted({p.dim for p in places if isinstance(p, Shard)}):
        size = tensor.shape[dim] // scales.shape[dim]
        if all(
            range(start[dim], start[dim] + shape[dim]) == range(first[dim] * size, (first[dim] + blocks[dim]) * size)
            for shape, start, blocks, first in shards
        ):
            continue
        starts = ", ".join(map(str, sorted({start[dim] for _, start, _, _ in shards})))
        raise PlacementError(
            asked=f"place {_shown(tensor)} as {show_all(layout)} on a mesh of shape {grid.shape}",
            found=f"dim {dim} has {scales.shape[dim]} blocks of {size} values with one scale each, and the ranks would "
            f"start at {starts}, inside of blocks",
            do="Quantise in blocks that the ranks can divide among them, shard another dim, or replicate it.",
            dim=dim,
        )


def _spec(grid: AbstractMesh, layout: Sequence[Placement], tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(grid, tuple(layout), TensorMeta.of(torch.empty(tensor.shape, device="meta")))
