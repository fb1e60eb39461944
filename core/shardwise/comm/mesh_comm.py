"""The communication that a lowering is given, and the checks that ranks draw the same random numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch
from attrs import frozen
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import groups
from shardwise.comm.agreement import generator_of, raise_unless_equal, refuse_traced, shape_row
from shardwise.comm.async_result import AsyncResult
from shardwise.comm.group import Group
from shardwise.comm.groups import broadcast_, group_of
from shardwise.kernel.world import world_number
from shardwise.private_torch.fake import is_rehearsing
from shardwise.private_torch.modes import is_python_dispatched, outside_modes
from shardwise.rng.generator import mode
from shardwise.rule.lowering import MeshDims

__all__ = ["MeshComm"]


@frozen
class MeshComm:
    """The communication of a lowering (:class:`shardwise.rule.lowering.Comm`) over a mesh's process groups."""

    mesh: Any

    def all_reduce(self, tensor: torch.Tensor, kind: str, mesh_dims: Sequence[int]) -> torch.Tensor:
        """The reduction over some mesh dims; ``tensor`` is not modified."""
        dims = tuple(m for m in mesh_dims if self.mesh.size(m) > 1)
        return groups.all_reduce(tensor, kind, self.mesh, dims) if dims else tensor

    def all_gather(self, tensor: torch.Tensor, mesh_dim: MeshDims, *, same_shape: bool = False) -> list[torch.Tensor]:
        """The tensors of all ranks along a mesh dim. Their shapes may differ, unless ``same_shape`` is set."""
        group = group_of(self.mesh, _dims(mesh_dim))
        if group.size == 1:
            return [tensor]
        if same_shape:
            if math.prod(tensor.shape) == 0:
                return [tensor] * group.size
            piece = tensor.contiguous()
            return list(group.of(piece).all_gather(piece).unbind())
        refuse_traced(tensor, "gather tensors whose shapes only their ranks know")
        rows = group.all_gather(self._row(tensor))
        shapes = [list(tensor.shape)] * group.size if is_rehearsing() else _shapes(rows)
        return _exchange(group, [tensor] * group.size, shapes)

    def all_to_all(
        self, tensors: Sequence[torch.Tensor], mesh_dim: MeshDims, shapes: Sequence[Sequence[int]] | None = None
    ) -> list[torch.Tensor]:
        """Send ``tensors[i]`` to rank ``i`` of the mesh dim; the shapes may differ.

        ``shapes`` are those of the tensors that come back; without them the ranks exchange them first.
        """
        group = group_of(self.mesh, _dims(mesh_dim))
        if group.size == 1:
            return list(tensors)
        if shapes is None:
            refuse_traced(tensors[0], "exchange tensors whose shapes only their ranks know")
            rows = group.all_to_all(torch.stack([self._row(t) for t in tensors]))
            shapes = [list(t.shape) for t in tensors] if is_rehearsing() else _shapes(rows)
        return _exchange(group, tensors, shapes)

    def _row(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.tensor(shape_row(tensor.shape), device=self.mesh.device_type)

    def shift(
        self, tensor: torch.Tensor, mesh_dim: MeshDims, by: int = 1, shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Send to the rank ``by`` further along the mesh dim, and return the tensor of the rank ``by`` before."""
        return self.start_shift(tensor, mesh_dim, by, shape).wait()

    def start_shift(
        self, tensor: torch.Tensor, mesh_dim: MeshDims, by: int = 1, shape: Sequence[int] | None = None
    ) -> AsyncResult:
        """:meth:`shift` without waiting. While a graph is traced, the result is there at once."""
        group = group_of(self.mesh, _dims(mesh_dim))
        if by % group.size == 0:
            return AsyncResult(None, tensor)
        incoming = torch.Size(tensor.shape if shape is None else shape)
        flat = tensor.contiguous().view(-1)
        return group.of(flat).start_shift(flat, by, incoming.numel()).then(lambda received: received.view(incoming))

    def agree_on_draw(self, seed: int, number: int) -> tuple[int, int]:
        """The seed and number of the first rank, at the first draw on the mesh. Later draws are compared.

        On a CPU mesh every draw by place is compared. On other devices a comparison must wait for the device, so only
        some draws are compared. Raises :class:`RankDisagreementError` on every rank when ranks differ.
        """
        turn = _turn(self.mesh, "draws", always=mode() == "counter" and self.mesh.device_type == "cpu")
        if not turn:
            return seed, number
        with outside_modes():
            if turn > 1:
                draw = f"draw {number} of seed {seed}"
                raise_unless_equal(draw, self.mesh, _DRAW, draw, _DRAW_AGAIN)
                return seed, number
            halves = [seed & _WORD, seed >> 32, number & _WORD, number >> 32]
            words = torch.tensor(halves, device=self.mesh.device_type)
            broadcast_(words, self.mesh, range(self.mesh.ndim))
        seed_low, seed_high, number_low, number_high = words.tolist()
        return seed_low | seed_high << 32, number_low | number_high << 32

    def compare_generators(self) -> None:
        """Compare the states of the ranks' torch generators, at some calls only.

        Raises :class:`RankDisagreementError` on every rank when they differ.
        """
        # A traced draw happens when the graph runs.
        if is_python_dispatched() or is_rehearsing() or _turn(self.mesh, "torch") <= 1:
            return
        with outside_modes():
            state = generator_of(self.mesh).get_rng_state()
            said = str(crc32(state.numpy().tobytes()))
            raise_unless_equal(said, self.mesh, _DRAW, "a state of torch's generator that others have not", _SEED_AGAIN)


_WORD = 0xFFFFFFFF
_DRAW = "draw the same random numbers on every rank"
_DRAW_AGAIN = (
    "Draw on all ranks or on none, seed all with the same number, or call shardwise.manual_seed on all of them at the "
    "same point."
)
_SEED_AGAIN = (
    "Seed torch with the same number on all ranks and draw a rank's own numbers with a generator= of its own, or call "
    "shardwise.manual_seed: its numbers do not depend on the state of torch's generators."
)

# The number of draws on a mesh, by kind; the same on all its ranks. By hash, because ranks delete a mesh at different
# times.
_turns: dict[tuple[int, int, str], int] = {}
_EVERY = 16


def _turn(mesh: DeviceMesh, kind: str, *, always: bool = False) -> int:
    """The number of this draw on a mesh, from 1 on, if its ranks are to compare their states now, else 0.

    They compare always, or else at powers of two and every 16 draws.
    """
    if mesh.size() == 1:
        return 0
    key = (world_number(), hash(mesh), kind)
    turn = _turns[key] = _turns.get(key, 0) + 1
    return turn if always or turn % _EVERY == 0 or turn & (turn - 1) == 0 else 0


def _dims(mesh_dim: MeshDims) -> tuple[int, ...]:
    return (mesh_dim,) if isinstance(mesh_dim, int) else tuple(mesh_dim)


def _shapes(rows: torch.Tensor) -> list[list[int]]:
    return [row[1 : 1 + row[0]] for row in rows.tolist()]


def _exchange(group: Group, sent: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    counts = [torch.Size(s).numel() for s in shapes]
    flat = torch.cat([t.reshape(-1) for t in sent])
    received = group.of(flat).exchange(flat, [t.numel() for t in sent], counts)
    return [part.reshape(s) for part, s in zip(torch.split(received, counts), shapes, strict=True)]
