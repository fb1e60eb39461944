"""Communication for lowerings, and the few agreements that ranks must come to."""

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
from shardwise.private_torch.tracing import is_python_dispatched, outside_modes
from shardwise.rng.generator import mode
from shardwise.rule.lowering import MeshDims

__all__ = ["MeshComm"]


@frozen
class MeshComm:
    """The communication of a lowering (:class:`shardwise.rule.lowering.Comm`) over a mesh's process groups."""

    mesh: Any

    def all_reduce(self, tensor: torch.Tensor, kind: str, mesh_dims: Sequence[int]) -> torch.Tensor:
        """The reduction over some mesh dims; ``tensor`` is left as it is."""
        dims = tuple(m for m in mesh_dims if self.mesh.size(m) > 1)
        return groups.all_reduce(tensor, kind, self.mesh, dims) if dims else tensor

    def all_gather(self, tensor: torch.Tensor, mesh_dim: MeshDims, *, alike: bool = False) -> list[torch.Tensor]:
        """The tensors of all ranks along a mesh dim; the shapes may differ, if not said to be alike."""
        group = group_of(self.mesh, _dims(mesh_dim))
        if group.size == 1:
            return [tensor]
        if alike:
            # Where there is nothing on any rank, nothing is sent.
            empty = math.prod(tensor.shape) == 0
            return [tensor] * group.size if empty else list(group.all_gather(tensor.contiguous()).unbind())
        refuse_traced(tensor, "gather tensors whose shapes only their ranks know")
        rows = group.all_gather(self._row(tensor))
        shapes = [list(tensor.shape)] * group.size if is_rehearsing() else _shapes(rows)
        return _exchange(group, [tensor] * group.size, shapes)

    def all_to_all(
        self, tensors: Sequence[torch.Tensor], mesh_dim: MeshDims, shapes: Sequence[Sequence[int]] | None = None
    ) -> list[torch.Tensor]:
        """Send ``tensors[i]`` to rank ``i`` of the mesh dim; any shapes."""
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
        """Send to the rank ``by`` further along the mesh dim, return what came from the rank ``by`` before."""
        return self.start_shift(tensor, mesh_dim, by, shape).wait()

    def start_shift(
        self, tensor: torch.Tensor, mesh_dim: MeshDims, by: int = 1, shape: Sequence[int] | None = None
    ) -> AsyncResult:
        """:meth:`shift` without waiting; while a graph is traced, what came is there at once."""
        group = group_of(self.mesh, _dims(mesh_dim))
        if by % group.size == 0:
            return AsyncResult(None, tensor)
        coming = torch.Size(tensor.shape if shape is None else shape)
        result = group.start_shift(tensor.contiguous().view(-1), by, coming.numel())
        return result.then(lambda flat: flat.view(coming))

    def agree_on_draw(self, seed: int, number: int) -> tuple[int, int]:
        """What the first rank would draw at the mesh's first draw; later ones are compared.

        Draws by place are compared one by one on a CPU mesh. Elsewhere the answer would have to be waited for, and the
        fast way is to be fast: there it is done from time to time.
        """
        turn = _turn(self.mesh, "draws", always=mode() == "counter" and self.mesh.device_type == "cpu")
        if not turn:
            return seed, number
        words = [seed & _WORD, seed >> 32, number & _WORD, number >> 32]
        mine = torch.tensor(words, device=self.mesh.device_type)
        with outside_modes():
            if turn > 1:
                raise_unless_equal(mine, self.mesh, _DRAW, f"draw {number} of seed {seed}", _DRAW_AGAIN)
                return seed, number
            for mesh_dim in range(self.mesh.ndim):
                broadcast_(mine, self.mesh, mesh_dim)
        found = mine.tolist()
        return found[0] | found[1] << 32, found[2] | found[3] << 32

    def compare_generators(self) -> None:
        """Raise where the ranks' torch generators have come apart; looked at from time to time."""
        # What is traced draws when it runs.
        if is_python_dispatched() or is_rehearsing() or _turn(self.mesh, "torch") <= 1:
            return
        with outside_modes():
            state = generator_of(self.mesh).get_rng_state()
            mine = torch.tensor([crc32(state.numpy().tobytes())], device=self.mesh.device_type)
            raise_unless_equal(mine, self.mesh, _DRAW, "a state of torch's generator that others have not", _SEED_ALIKE)


_WORD = 0xFFFFFFFF
_DRAW = "draw random numbers alike on every rank"
_DRAW_AGAIN = (
    "Draw on all ranks or on none, seed all with the same number, or call shardwise.manual_seed on all of them where "
    "they come together again."
)
_SEED_ALIKE = (
    "Seed torch alike on all ranks and give what is a rank's own a generator= of its own, or call "
    "shardwise.manual_seed: its numbers do not depend on what torch's generators have drawn."
)

# How often a mesh has drawn, by what; counted alike on all of its ranks. By hash: the meshes themselves go away at
# different times on different ranks.
_turns: dict[tuple[int, int, str], int] = {}
_EVERY = 16


def _turn(mesh: DeviceMesh, what: str, *, always: bool = False) -> int:
    """The number of this draw of a mesh, from 1 on, where its ranks should look at each other's state, else 0.

    That is always, or at powers of two and every so often.
    """
    if mesh.size() == 1:
        return 0
    key = (world_number(), hash(mesh), what)
    turn = _turns[key] = _turns.get(key, 0) + 1
    return turn if always or turn % _EVERY == 0 or turn & (turn - 1) == 0 else 0


def _dims(mesh_dim: MeshDims) -> tuple[int, ...]:
    return (mesh_dim,) if isinstance(mesh_dim, int) else tuple(mesh_dim)


def _shapes(rows: torch.Tensor) -> list[list[int]]:
    return [row[1 : 1 + row[0]] for row in rows.tolist()]


def _exchange(group: Group, sent: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    counts = [torch.Size(s).numel() for s in shapes]
    flat = group.exchange(torch.cat([t.reshape(-1) for t in sent]), [t.numel() for t in sent], counts)
    return [part.reshape(s) for part, s in zip(torch.split(flat, counts), shapes, strict=True)]
