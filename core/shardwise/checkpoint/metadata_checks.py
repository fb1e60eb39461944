"""Whether a list of tensors is whole: its types, the files it names, and that the pieces of each tensor are all of it.

``torch.distributed.checkpoint`` looks at none of this: a tensor of which a piece is missing keeps what was in memory.
"""

from __future__ import annotations

import math
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwise.kernel.foreign_files import leads_out, short
from shardwise.private_torch.saved import StorageInfo

__all__ = ["MetadataError", "check_metadata"]


Box = tuple[Sequence[int], Sequence[int]]
"""The offsets and the sizes of a piece."""


class MetadataError(ValueError):
    """What is wrong, as the end of a sentence; ``file`` is the file that it is about."""

    def __init__(self, found: str, file: str = "") -> None:
        super().__init__(found)
        self.file = file


def check_metadata(metadata: Any, folder: Path) -> Metadata:
    """Raise :class:`MetadataError` unless this is a whole list of tensors, whose files are in the folder."""
    if type(metadata) is not Metadata:
        raise MetadataError(f"holds a {type(metadata).__name__}")
    there, places = _table(metadata, "state_dict_metadata"), _table(metadata, "storage_data")
    if not (getattr(metadata, "storage_meta", None) is None or type(metadata.storage_meta) is StorageMeta):
        raise MetadataError(f"has a {type(metadata.storage_meta).__name__} for its storage")
    _check_paths(metadata, there)
    sizes = _check_files(places, folder)
    for name, entry in there.items():
        if type(name) is not str:
            raise MetadataError(f"has a {type(name).__name__} as a name")
        pieces = [(None, 0)]
        if type(entry) is TensorStorageMetadata:
            pieces = _pieces_of(name, entry)
        elif type(entry) is not BytesStorageMetadata:
            raise MetadataError(f"has a {type(entry).__name__} for {short(name)!r}")
        for offset, size in pieces:
            place = places.get(MetadataIndex(name, offset))
            if place is None:
                raise MetadataError(f"does not say where {_piece(name, offset)} lies")
            if size > place.length and not getattr(place, "transform_descriptors", None):
                found = f"has {place.length} bytes for {_piece(name, offset)}, which takes {size}"
                raise MetadataError(found, place.relative_path)
            if place.offset + place.length > sizes[place.relative_path]:
                found = (
                    f"says that {_piece(name, offset)} ends at byte {place.offset + place.length} of "
                    f"{short(place.relative_path)}, which has {sizes[place.relative_path]}"
                )
                raise MetadataError(found, place.relative_path)
    return metadata


def _table(metadata: Metadata, name: str) -> dict[Any, Any]:
    table = getattr(metadata, name, None)
    if not isinstance(table, dict):
        raise MetadataError(f"has a {type(table).__name__} for its {name}")
    return table


def _piece(name: str, offset: Sequence[int] | None) -> str:
    return repr(short(name)) + (f" from {tuple(offset)} on" if offset and any(offset) else "")


def _check_paths(metadata: Metadata, there: dict[Any, Any]) -> None:
    """The way to each entry in nested dicts and lists."""
    paths = getattr(metadata, "planner_data", None)
    if paths is None:
        return
    if not isinstance(paths, dict):
        raise MetadataError(f"has a {type(paths).__name__} for the structure of the state")
    longest: dict[tuple[Any, ...], int] = {}  # of each list, by the way to it
    for name, path in paths.items():
        if name not in there:
            raise MetadataError(f"has a place in the state for {short(name)!r}, and not what is there")
        parts = path if type(path) is tuple and path else (None,)
        if not all(type(part) is str or (type(part) is int and part >= 0) for part in parts):
            raise MetadataError(f"has a place in the state for {short(name)!r} that is not made of keys and numbers")
        for i, part in enumerate(parts):
            if type(part) is int:
                longest[parts[:i]] = max(longest.get(parts[:i], 0), part + 1)
    # What has no tensor and no value has no place, so lists may have some gaps; a far one would take memory for all.
    if sum(longest.values()) > 4 * len(paths) + 1024:
        raise MetadataError(f"has lists of {sum(longest.values())} places in the state, for {len(paths)} values")


def _check_files(places: dict[Any, Any], folder: Path) -> dict[str, int]:
    """The sizes of the files that entries lie in."""
    sizes: dict[str, int] = {}
    for index, place in places.items():
        if type(index) is not MetadataIndex or type(place) is not StorageInfo:
            raise MetadataError(f"has a {type(place).__name__} for where {short(index)} lies")
        name: Any = getattr(place, "relative_path", None)
        numbers = (getattr(place, "offset", None), getattr(place, "length", None))
        if any(type(n) is not int or n < 0 for n in numbers):
            raise MetadataError(f"has {short(repr(numbers))} for where {short(index)} starts and how long it is")
        if name not in sizes:
            sizes[name] = _size_of(name, folder)
    return sizes


def _size_of(name: Any, folder: Path) -> int:
    if type(name) is not str or leads_out(folder, name):
        raise MetadataError(f"names the file {short(repr(name))}, which is outside of the folder", short(name))
    try:
        status = (folder / name).stat()
    except OSError as error:
        raise MetadataError(f"names the file {short(name)}: {error.strerror}", short(name)) from error
    if not stat.S_ISREG(status.st_mode):
        raise MetadataError(f"names {short(name)}, which is not a file", short(name))
    return status.st_size


# -- tensors -----------------------------------------------------------------------------------------------------------


def _pieces_of(name: str, entry: TensorStorageMetadata) -> list[tuple[Any, int]]:
    """The offset and the bytes of each piece of a tensor."""
    parts: list[Any] = [getattr(entry, part, None) for part in ("properties", "size", "chunks")]
    properties, size, chunks = parts
    dtype = getattr(properties, "dtype", None)
    if type(properties) is not TensorProperties or not isinstance(dtype, torch.dtype):
        raise MetadataError(f"does not say which dtype {short(name)!r} has")
    boxes: list[Box] = []
    for chunk in chunks if type(chunks) is list else [None]:
        offsets: Any = getattr(chunk, "offsets", None)
        sizes: Any = getattr(chunk, "sizes", None)
        if type(chunk) is not ChunkStorageMetadata or not _is_within(offsets, sizes, size):
            raise MetadataError(f"has a piece of {short(name)!r} that is not inside of the tensor")
        boxes.append((offsets, sizes))
    if not _tile(size, boxes):
        raise MetadataError(
            f"has {len(boxes)} pieces of {short(name)!r}, which are not the whole tensor, each part once"
        )
    return [(offsets, math.prod(sizes) * dtype.itemsize) for offsets, sizes in boxes]


def _is_within(offsets: Any, sizes: Any, whole: Any) -> bool:
    if not all(type(of) is torch.Size for of in (offsets, sizes, whole)):
        return False
    return len(offsets) == len(sizes) == len(whole) and all(
        o + n <= total for o, n, total in zip(offsets, sizes, whole, strict=True)
    )


def _tile(whole: Sequence[int], boxes: Iterable[Box]) -> bool:
    """Whether boxes inside of a whole have each of its elements exactly once."""
    full = [box for box in boxes if math.prod(box[1])]
    if sum(math.prod(sizes) for _, sizes in full) != math.prod(whole):
        return False
    if len(full) < 2:  # noqa: PLR2004  # one box of that many elements is the whole
        return True
    # In the order of the dim with the most starts, a box is compared with those before it that reach its start.
    dim = max(range(len(whole)), key=lambda d: len({offsets[d] for offsets, _ in full}))
    open_boxes: list[Box] = []
    for box in sorted(full, key=lambda box: box[0][dim]):
        open_boxes = [other for other in open_boxes if other[0][dim] + other[1][dim] > box[0][dim]]
        if any(_meet(box, other) for other in open_boxes):
            return False
        open_boxes.append(box)
    return True


def _meet(one: Box, other: Box) -> bool:
    return all(a < b + m and b < a + n for a, n, b, m in zip(one[0], one[1], other[0], other[1], strict=True))
