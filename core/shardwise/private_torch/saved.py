"""What a checkpoint of ``torch.distributed.checkpoint`` is made of besides public classes."""

from __future__ import annotations

from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormat  # noqa: N811  # it is a class
from torch.serialization import _get_layout as layout_named

__all__ = ["MemoryFormat", "StorageInfo", "layout_named"]

# The list of tensors names these three in its pickle: where an entry lies in which file, and how torch writes a memory
# format and a layout, which have no pickle of their own. Torch 2.11 to 2.13 have them at these places.
