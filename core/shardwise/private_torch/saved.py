"""What a checkpoint of ``torch.distributed.checkpoint`` is made of besides public classes."""

from __future__ import annotations

from torch import serialization
from torch.distributed.checkpoint import filesystem, metadata

from shardwise.private_torch.parts import require

__all__ = ["MemoryFormat", "StorageInfo", "layout_named"]

# The list of tensors names these three in its pickle: where an entry lies in which file, and how torch writes a memory
# format and a layout, which have no pickle of their own. Torch 2.11 to 2.15 have them at these places.
PARTS = (
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.serialization._get_layout",
)
require(PARTS, "read or write a checkpoint")

StorageInfo = filesystem._StorageInfo
MemoryFormat = metadata._MEM_FORMAT_ENCODING
layout_named = serialization._get_layout
