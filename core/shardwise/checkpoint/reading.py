"""Reading a checkpoint so that nothing in it can run code, with errors that say what does not fit.

``torch.distributed.checkpoint`` unpickles the list of tensors (``.metadata``) and every value that is not a tensor,
and unpickling can run any code. Here the list may name only the classes that such a list is made of, and values are
loaded by ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import io
import pickle
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from shardwise.checkpoint.folder import is_outside
from shardwise.errors import CheckpointDtypeError, CheckpointFileError, CheckpointKeyError, CheckpointShapeError
from shardwise.kernel.placements import show_all
from shardwise.tensor.mesh_tensor import MeshTensor

__all__ = ["SafePlanner", "SafeReader", "read_metadata"]

METADATA = ".metadata"

_ALLOWED: dict[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "collections": frozenset({"OrderedDict"}),
    # Where pathlib keeps its classes differs between releases of Python.
    "pathlib": frozenset({"PosixPath", "WindowsPath"}),
    "pathlib._local": frozenset({"PosixPath", "WindowsPath"}),
}


class _Unpickler(pickle.Unpickler):
    """An unpickler that allows only the classes that a list of tensors is made of, and torch's dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not part of a list of tensors")


def read_metadata(folder: Path) -> Metadata:
    """What a checkpoint holds, by name; raises :class:`CheckpointFileError` where that cannot be read safely."""
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
    except Exception as error:
        raise CheckpointFileError(
            asked=f"read the checkpoint {folder}",
            found=f"its {METADATA} cannot be read: {type(error).__name__}: {error}",
            do="Name a folder that torch.distributed.checkpoint or shardwise.checkpoint has written to its end.",
            path=str(path),
        ) from error
    if not isinstance(metadata, Metadata):
        raise CheckpointFileError(
            asked=f"read the checkpoint {folder}",
            found=f"its {METADATA} holds a {type(metadata).__name__}",
            do="Name a folder that torch.distributed.checkpoint or shardwise.checkpoint has written.",
            path=str(path),
        )
    places = metadata.storage_data
    names = [getattr(place, "relative_path", None) for place in (places.values() if isinstance(places, dict) else ())]
    outside = [name for name in names if not isinstance(name, str) or is_outside(name)]
    if outside:
        raise CheckpointFileError(
            asked=f"read the checkpoint {folder}",
            found=f"its {METADATA} names the file {outside[0]!r}, which is outside of the folder",
            do="Do not load this checkpoint: torch.distributed.checkpoint does not write such names.",
            path=str(path),
            file=str(outside[0]),
        )
    return metadata


class SafeReader(FileSystemReader):
    """Torch's reader of a folder; code in the list of tensors is refused."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002  # torch's signature
        metadata = read_metadata(Path(self.path))
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """Torch's planner; code in values is refused, and errors name what does not fit."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        there = self.metadata.state_dict_metadata
        for name, value in self.state_dict.items():
            if name not in there:
                raise _missing(name, list(there), sum(asked not in there for asked in self.state_dict))
            _check_fit(name, value, there[name])
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # Torch's method would unpickle anything: it gets a value that was loaded safely and saved again.
        again = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), again)
        again.seek(0)
        super().load_bytes(read_item, again)


def _missing(name: str, there: list[str], number: int) -> CheckpointKeyError:
    close = get_close_matches(name, there, n=3)
    others = f" (and {number - 1} more)" if number > 1 else ""
    names, most = close or sorted(there), 3
    rest = f" and {len(names) - most} others" if len(names) > most else ""
    return CheckpointKeyError(
        asked=f"load {name!r}{others}",
        found=f"the checkpoint does not have it; it has {', '.join(map(repr, names[:most])) or 'nothing'}{rest}",
        do="Load into a state of the same names, or remove from it what the checkpoint does not have.",
        name=name,
        close=close,
    )


def _check_fit(name: str, value: Any, saved: Any) -> None:
    saved_tensor, is_tensor = isinstance(saved, TensorStorageMetadata), isinstance(value, torch.Tensor)
    if saved_tensor != is_tensor:
        kinds = {True: "a tensor", False: "a value that is not a tensor"}
        raise CheckpointShapeError(
            asked=f"load {name!r} as {kinds[is_tensor]}",
            found=f"the checkpoint has {kinds[saved_tensor]} of that name",
            do="Load it into a state like the one that was saved.",
            name=name,
        )
    if not is_tensor:
        return
    here = f"{tuple(value.shape)}, {value.dtype}" + (
        f", {show_all(value.placements)}" if isinstance(value, MeshTensor) else ""
    )
    facts = {"asked": f"load {name!r} into a tensor of {here}", "name": name}
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
