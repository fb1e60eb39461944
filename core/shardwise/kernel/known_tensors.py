"""Plain tensors that are known to be the same on every rank of a mesh, as long as nothing else writes them."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch

from shardwise.kernel.mesh import Mesh
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.private_torch.dispatch import version_of

__all__ = [
    "KnownTensor",
    "forget_failed_writes",
    "forget_known_tensors",
    "forget_tensor",
    "is_written_by_ops",
    "key_of_plain",
    "known_tensor",
    "known_without_mesh",
    "remember",
]


# By id. An entry whose tensor is gone does not hold for a new tensor with the same id.
_known: dict[int, KnownTensor] = {}

known_without_mesh: dict[int, KnownTensor] = {}
"""The same, for handlers: they do not compare the mesh. It stays empty if the program uses several meshes, or if every
use of a plain tensor is to be looked at.
"""


class KnownTensor:
    """One such tensor: what it was when the ranks compared it. ``key`` is its part of the key of a plan.

    ``is_written`` if the last write to it was that of an op on MeshTensors.
    """

    __slots__ = ("address", "is_written", "key", "mesh", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, mesh: Mesh, writes: int) -> None:
        self.tensor = weakref.ref(tensor, _Forget(id(tensor)))
        self.mesh = mesh
        self.version = version_of(tensor) + writes
        self.is_written = bool(writes) or is_written_by_ops(tensor)
        # `tensor.data = other` changes neither the object nor its version.
        self.address = tensor.data_ptr()
        self.key = key_of_plain(tensor)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it is this tensor, and nothing has written it since."""
        return self.tensor() is tensor and self.version == version_of(tensor) and self.address == tensor.data_ptr()


class _Forget:
    """Drops the entry of a tensor that is gone.

    A tensor may go after the globals of this module, when the interpreter ends: so the tables are attributes.
    """

    __slots__ = ("place",)
    tables: ClassVar = (_known, known_without_mesh)

    def __init__(self, place: int) -> None:
        self.place = place

    def __call__(self, gone: Any) -> None:
        known, without_mesh = self.tables
        entry = known.get(self.place)
        if entry is not None and entry.tensor is gone:
            del known[self.place]
            without_mesh.pop(self.place, None)


class _Key:
    """The part of a plan's key for plain tensors of one meta. Compared and hashed by identity, which is fast."""

    __slots__ = ("meta",)

    def __init__(self, meta: TensorMeta) -> None:
        self.meta = meta


_MOST = 4096  # keys that are kept; then all are dropped
_keys: dict[TensorMeta, _Key] = {}


def key_of_plain(tensor: torch.Tensor) -> Any:
    """The part of a plan's key for a plain tensor: one object per meta, of tensors without dims the dtype.

    With symbols for sizes it is the meta, which has no hash then.
    """
    if not tensor.dim():
        return tensor.dtype
    meta = TensorMeta.of(tensor)
    if meta.is_symbolic:
        return meta
    key = _keys.get(meta)
    if key is None:
        if len(_keys) >= _MOST:
            _keys.clear()
        key = _keys[meta] = _Key(meta)
    return key


def known_tensor(tensor: torch.Tensor, mesh: Mesh) -> KnownTensor | None:
    """The entry of a tensor that is known on a mesh and unchanged."""
    entry = _known.get(id(tensor))
    if entry is None or not (entry.mesh is mesh or entry.mesh == mesh) or not entry.holds(tensor):
        return None
    return entry


def is_written_by_ops(tensor: torch.Tensor) -> bool:
    """Whether the last write to a plain tensor was that of an op on MeshTensors, the same on every rank of a mesh."""
    entry = _known.get(id(tensor))
    return entry is not None and entry.is_written and entry.holds(tensor)


def remember(tensor: torch.Tensor, mesh: Mesh, writes: int, *, for_handlers: bool) -> None:
    """Note that the ranks of a mesh have the same tensor, after so many writes that are under way."""
    entry = _known[id(tensor)] = KnownTensor(tensor, mesh, writes)
    if for_handlers:
        known_without_mesh[id(tensor)] = entry


def forget_failed_writes() -> None:
    """Forget the tensors that count a write which torch has not: the op that was to write them has raised.

    The next write, whoever makes it, would pass for that one.
    """
    for place, entry in list(_known.items()):
        tensor = entry.tensor()
        if tensor is not None and entry.version > version_of(tensor):
            del _known[place]
            known_without_mesh.pop(place, None)


def forget_tensor(tensor: torch.Tensor) -> None:
    """Have the next op that a plain tensor meets look at it again."""
    if _known.pop(id(tensor), None) is not None:
        known_without_mesh.pop(id(tensor), None)


def forget_known_tensors() -> None:
    """Have the ranks compare every plain tensor again."""
    _known.clear()
    known_without_mesh.clear()
