"""A rank's part of a tensor for ``torch.distributed.checkpoint``: a chunk of the whole tensor, or nothing.

A checkpoint does not know meshes. It stores tensors by name, and each as chunks with an offset and a size. So it can be
loaded into any other layout. If several ranks hold the same chunk (replicated mesh dims), all of them offer it under
one key, and torch's planner chooses one to write it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import CheckpointValueError, LayoutError
from shardwise.kernel.spec import TensorSpec
from shardwise.private_torch.fake import is_rehearsing

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["check_has_data", "chunks_of", "part_at", "write_items_of"]

# torch.distributed.checkpoint is imported where it is used: the import takes a tenth of a second, and few programs need
# it.


def chunks_of(spec: TensorSpec, coordinate: Sequence[int] | None = None) -> list[ChunkStorageMetadata]:
    """The chunks that the rank at ``coordinate`` (default: this process) holds: one, none, or the blocks of a part.

    A rank that is not on the mesh holds nothing. A rank with an empty shard holds nothing either: an empty shard has
    the same offset as another rank's shard, and a checkpoint tells chunks apart by their offsets. For a tensor without
    elements the ranks with the first shard hold a chunk, so that the checkpoint has an entry for the tensor. A part
    with strided shards is several chunks. Raises :class:`LayoutError` for a partial tensor.
    """
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    if spec.reductions:
        kinds = ", ".join(f"{kind} on mesh dim {dim}" for dim, kind in spec.reductions.items())
        raise LayoutError(
            asked=f"save or load {spec} in a checkpoint",
            found=f"it is partial ({kinds}): no rank holds the values of any part of it",
            do="Call redistribute() with Replicate() or Shard(d) in place of Partial() first.",
            placements=spec.placements,
        )
    if coordinate is None and isinstance(spec.mesh, DeviceMesh) and spec.mesh.get_coordinate() is None:
        return []
    where = spec.coordinate() if coordinate is None else tuple(coordinate)
    is_first = not any(where[m] for dims in spec.dim_map for m in dims)
    return [
        ChunkStorageMetadata(offsets=torch.Size(block.offset), sizes=torch.Size(block.size))
        for block in spec.blocks(where)
        if math.prod(block.size) or (is_first and not spec.tensor_meta.numel)
    ]


def part_at(offset: Sequence[int] | None, spec: TensorSpec, local: torch.Tensor) -> torch.Tensor:
    """The chunk of this rank's part that starts at ``offset`` in the whole tensor, a view; without one, the part."""
    blocks = [] if offset is None else [b for b in spec.blocks() if b.offset == tuple(offset)]
    for dim, (start, size) in enumerate(zip(blocks[0].local_offset, blocks[0].size, strict=True) if blocks else ()):
        local = local.narrow(dim, start, size)
    return local


def check_has_data(asked: str) -> None:
    """Raise :class:`CheckpointValueError` in a rehearsal: torch would fail somewhere on the way to a file."""
    if is_rehearsing():
        raise CheckpointValueError(
            asked=asked,
            found="this is a rehearsal, whose tensors have no data",
            do="Rehearse the step without it: call it where the program trains.",
        )


def write_items_of(name: str, spec: TensorSpec, local: torch.Tensor) -> list[WriteItem]:
    """The items of the tensor ``name`` that this rank offers to write: one for each of its chunks.

    Raises :class:`CheckpointValueError` in a rehearsal.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    check_has_data(f"save {spec} as {name!r} in a checkpoint")
    properties = TensorProperties.create_from_tensor(local)
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=spec.shape),
        )
        for chunk in chunks_of(spec)
    ]
