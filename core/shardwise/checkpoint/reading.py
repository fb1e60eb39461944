"""Reading a checkpoint so that nothing in it can run code, with errors that say what does not fit.

``torch.distributed.checkpoint`` unpickles the list of tensors (``.metadata``) and every value that is not a tensor,
and unpickling can run any code. Here the list is read by :mod:`shardwise.checkpoint.metadata_pickle`, and entries by
:mod:`shardwise.checkpoint.entries`.
"""

from __future__ import annotations

import io
import math
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from shardwise.checkpoint.entries import load_entry
from shardwise.checkpoint.folder import METADATA
from shardwise.checkpoint.metadata_checks import MetadataError, check_metadata
from shardwise.checkpoint.metadata_pickle import load_metadata
from shardwise.errors import CheckpointDtypeError, CheckpointFileError, CheckpointKeyError, CheckpointShapeError
from shardwise.kernel.foreign_files import LARGEST, leads_out, read_bytes, reason, short
from shardwise.kernel.placements import show_all
from shardwise.tensor.mesh_tensor import MeshTensor

__all__ = ["SafePlanner", "SafeReader", "read_metadata"]


def read_metadata(folder: Path) -> Metadata:
    """What a checkpoint holds, by name; raises :class:`CheckpointFileError` where that cannot be read safely, or is
    not whole.
    """
    path = folder / METADATA
    try:
        return check_metadata(load_metadata(_bytes_of(folder)), folder)
    except MetadataError as error:
        raise CheckpointFileError(
            asked=f"read the checkpoint {folder}",
            found=f"its {METADATA} {error}",
            do="Name a folder that torch.distributed.checkpoint or shardwise.checkpoint has written to its end, with "
            "all its files and no others.",
            path=str(path),
            file=error.file or METADATA,
        ) from error
    except Exception as error:
        raise CheckpointFileError(
            asked=f"read the checkpoint {folder}",
            found=f"its {METADATA} cannot be read: {reason(error)}",
            do="Name a folder that torch.distributed.checkpoint or shardwise.checkpoint has written to its end.",
            path=str(path),
            file=METADATA,
        ) from error


def _bytes_of(folder: Path) -> bytes:
    if leads_out(folder, METADATA):
        raise MetadataError("is a link to a file outside of the folder")
    return read_bytes(folder / METADATA, _LARGEST)


_LARGEST = 4 << 30  # a list has some 500 bytes for each piece of a tensor


class SafeReader(FileSystemReader):
    """Torch's reader of a folder, by a list of tensors that was read safely; errors name the file.

    ``verify`` compares the checksums of what is read: see :func:`shardwise.checkpoint.entries.load_entry`.
    """

    def __init__(self, folder: Path, metadata: Metadata, *, verify: bool) -> None:
        super().__init__(folder)
        self.metadata = metadata
        self.verify = verify

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002  # torch's signature
        metadata = self.metadata
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read entry by entry. Torch's method reads the same, and trusts what an entry says of itself."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.metadata.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            with (Path(self.path) / name).open("rb") as file:
                for item in items:
                    self._read_item(file, name, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_item(self, file: BinaryIO, name: str, item: ReadItem, planner: LoadPlanner) -> None:
        index = item.storage_index
        try:
            place = self.metadata.storage_data[index]
            file.seek(place.offset)
            described = getattr(place, "transform_descriptors", None) or ()
            data = io.BytesIO(file.read(place.length))
            if described:  # an extension of torch's, such as compression, which may make much of little
                most = _most_bytes(self.metadata.state_dict_metadata[index.fqn], index)
                data = io.BytesIO(self.transforms.transform_load_stream(item, described, data).read(most + 1))
                if data.getbuffer().nbytes > most:
                    raise ValueError(f"it grows to more than {most} bytes")  # noqa: TRY301
            value = load_entry(data, verify=self.verify)
            if item.type == LoadItemType.BYTE_IO:
                again = io.BytesIO()
                torch.save(value, again)
                again.seek(0)
                planner.load_bytes(item, again)
                return
            self._check_tensor(index, value)
            target = planner.resolve_tensor(item).detach()
            target.copy_(_part(value, item, target.shape))
            planner.commit_tensor(item, target)
        except Exception as error:
            raise CheckpointFileError(
                asked=f"load {short(index.fqn)!r} from the checkpoint {self.path}",
                found=f"{name} cannot be read there: {reason(error)}",
                do="Load another checkpoint, and look at where this one comes from.",
                path=str(Path(self.path) / name),
                file=name,
                name=index.fqn,
            ) from error

    def _check_tensor(self, index: MetadataIndex, value: Any) -> None:
        listed = self.metadata.state_dict_metadata[index.fqn]
        assert isinstance(listed, TensorStorageMetadata)
        sizes = next((tuple(c.sizes) for c in listed.chunks if tuple(c.offsets) == tuple(index.offset or ())), None)
        asked = (sizes, listed.properties.dtype)
        have = (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
        if asked != have:
            raise ValueError(f"the list of tensors says {asked}, and the file has {have}")


def _most_bytes(listed: Any, index: MetadataIndex) -> int:
    """How large an entry can be: a tensor's bytes, and what torch.save writes around them."""
    if not isinstance(listed, TensorStorageMetadata):
        return LARGEST
    sizes = next(chunk.sizes for chunk in listed.chunks if tuple(chunk.offsets) == tuple(index.offset or ()))
    return math.prod(sizes) * listed.properties.dtype.itemsize + (1 << 20)


def _part(tensor: torch.Tensor, item: ReadItem, shape: torch.Size) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    if tensor.shape != shape:  # copy_ would expand it
        raise ValueError(f"a part of {tuple(tensor.shape)} for one of {tuple(shape)}")
    return tensor


class SafePlanner(DefaultLoadPlanner):
    """Torch's planner; code in values is refused, and errors name what does not fit."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        there = self.metadata.state_dict_metadata
        for name, value in self.state_dict.items():
            if name not in there:
                raise _missing(self.folder, name, list(there), sum(asked not in there for asked in self.state_dict))
            _check_fit(self.folder, name, value, there[name])
        return super().create_local_plan()


def _missing(folder: Path, name: str, there: list[str], number: int) -> CheckpointKeyError:
    close = get_close_matches(name, there, n=3)
    others = f" (and {number - 1} more)" if number > 1 else ""
    names, most = [short(n) for n in close or sorted(there)], 3
    rest = f" and {len(names) - most} others" if len(names) > most else ""
    return CheckpointKeyError(
        asked=f"load {folder}: {name!r}{others}",
        found=f"the checkpoint does not have it; it has {', '.join(map(repr, names[:most])) or 'nothing'}{rest}",
        do="Load into a state of the same names, or remove from it what the checkpoint does not have.",
        name=name,
        close=close,
    )


def _check_fit(folder: Path, name: str, value: Any, saved: Any) -> None:
    saved_tensor, is_tensor = isinstance(saved, TensorStorageMetadata), isinstance(value, torch.Tensor)
    if saved_tensor != is_tensor:
        kinds = {True: "a tensor", False: "a value that is not a tensor"}
        raise CheckpointShapeError(
            asked=f"load {folder}: {name!r} as {kinds[is_tensor]}",
            found=f"the checkpoint has {kinds[saved_tensor]} of that name",
            do="Load it into a state like the one that was saved.",
            name=name,
        )
    if not is_tensor:
        return
    here = f"{tuple(value.shape)}, {value.dtype}" + (
        f", {show_all(value.placements)}" if isinstance(value, MeshTensor) else ""
    )
    facts = {"asked": f"load {folder}: {name!r} into a tensor of {here}", "name": name}
    if tuple(saved.size) != tuple(value.shape):
        raise CheckpointShapeError(
            found=f"the checkpoint has one of shape {tuple(saved.size)}",
            do="Make the model with the sizes that it was saved with.",
            **facts,
        )
    if saved.properties.dtype != value.dtype:
        raise CheckpointDtypeError(
            found=f"the checkpoint has {saved.properties.dtype}",
            do="Convert the model to that dtype, load, and convert it back; or use torch.distributed.checkpoint.load, "
            "which converts.",
            **facts,
        )
