"""What a rank's part of a tensor is to ``torch.distributed.checkpoint``: a chunk of the whole, or nothing.

A checkpoint knows no mesh. It knows tensors by name, and of each the chunks that were saved, by offset and size; so it
can be loaded into any other layout. A chunk that several ranks hold (replicated mesh dims) is offered by all of them
under one key, and torch's planner has one of them write it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import LayoutError
from shardwise.kernel.spec import TensorSpec

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["chunk_of", "chunks_of", "write_items_of"]

# torch.distributed.checkpoint is imported where it is used: it takes a tenth of a second, and few programs need it.


def chunk_of(spec: TensorSpec, coordinate: Sequence[int] | None = None) -> ChunkStorageMetadata | None:
    """The chunk that the rank at ``coordinate`` (default: this process) holds; None where it holds nothing.

    A rank that is not on the mesh holds nothing, nor does one whose shard is empty: the place where an empty shard
    starts is that of another rank's shard, and a checkpoint tells chunks apart by where they start. Of a tensor
    without elements the ranks with the first shard hold a chunk, so that the checkpoint knows of it. Raises
    :class:`LayoutError` for a partial tensor.
    """
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    _refuse_partial(spec)
    if coordinate is None and isinstance(spec.mesh, DeviceMesh) and spec.mesh.get_coordinate() is None:
        return None
    where = spec.coordinate() if coordinate is None else tuple(coordinate)
    sizes, offsets = spec.local_shape_and_offset(where)
    if math.prod(sizes) == 0 and (spec.tensor_meta.numel or any(where[m] for dims in spec.dim_map for m in dims)):
        return None
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))


def chunks_of(spec: TensorSpec) -> list[ChunkStorageMetadata]:
    """The chunks of this rank: one or none."""
    chunk = chunk_of(spec)
    return [] if chunk is None else [chunk]


def write_items_of(name: str, spec: TensorSpec, local: torch.Tensor) -> list[WriteItem]:
    """What this rank offers to write of the tensor ``name``: one item or none."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties.create_from_tensor(local)
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=spec.shape),
        )
        for chunk in chunks_of(spec)
    ]


def _refuse_partial(spec: TensorSpec) -> None:
    if spec.reductions:
        kinds = ", ".join(f"{kind} on mesh dim {dim}" for dim, kind in spec.reductions.items())
        raise LayoutError(
            asked=f"save or load {spec} in a checkpoint",
            found=f"it is partial ({kinds}): no rank holds the values of any part of it",
            do="Call redistribute() with Replicate() or Shard(d) in place of Partial() first.",
            placements=spec.placements,
        )
