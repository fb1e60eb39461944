"""The collectives of one call, listed without issuing them: those of its redistributions, and of its lowering.

No process group. Bytes are those of the rank at coordinate 0 of every mesh dim, whose shards are the largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from attrs import field, frozen

from shardwise.comm.agreement import SHAPE_BYTES
from shardwise.comm.async_result import AsyncResult
from shardwise.engine.local_arguments import local_statics
from shardwise.kernel.mesh import Mesh
from shardwise.kernel.precedence import Entry
from shardwise.kernel.schema import OpSchema
from shardwise.kernel.signature import Call
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import memory_order
from shardwise.planning.cost import KINDS
from shardwise.planning.path import Path
from shardwise.private_torch.fake import has_cuda
from shardwise.rng.generator import preserved_state
from shardwise.rule.lowering import LocalCall, MeshDims

__all__ = ["Collective", "Issued", "in_lowering", "in_path"]


@frozen
class Collective:
    """One collective: its kind, mesh dims, the number of ranks, the bytes that a rank sends in, and what it is for.

    ``purpose`` is the operand that it moves, or ``lowering`` for one that the rule's lowering issues.
    """

    kind: str
    mesh_dims: tuple[int, ...]
    ranks: int
    nbytes: int
    purpose: str

    def __str__(self) -> str:
        dims = ", ".join(map(str, self.mesh_dims))
        return f"{self.kind} over mesh dim {dims} of {self.ranks} ranks, {self.nbytes:,} bytes a rank ({self.purpose})"


def in_path(src: TensorSpec, path: Path, operand: str) -> list[Collective]:
    """The collectives of a redistribution, in order."""
    issued = []
    for step in path.steps:
        if step.kind in KINDS and step.held:
            ranks = _ranks(src.mesh_shape, step.mesh_dims)
            issued.append(Collective(step.kind, step.mesh_dims, ranks, step.held, operand))
    return issued


def _ranks(mesh_shape: Sequence[int], mesh_dims: Iterable[int]) -> int:
    return prod(mesh_shape[m] for m in mesh_dims)


# -- lowerings -------------------------------------------------------------------------------------------------------


@frozen
class Issued:
    """What a lowering issues, in order; ``complete`` is false where data decides what comes after these."""

    collectives: tuple[Collective, ...]
    complete: bool = True


def in_lowering(
    entry: Entry,
    schema: OpSchema,
    described: Sequence[Any],
    call: Call,
    inputs: Sequence[TensorSpec | None],
    results: Sequence[TensorSpec | None],
    coordinate: tuple[int, ...] | None = None,
) -> Issued:
    """Run a rule's lowering on meta tensors of the local shapes, and note the collectives that it asks for.

    ``described`` are the schema arguments in order, with a spec for each tensor. The rank is the one at ``coordinate``
    (default: the first). Any error, on tensors without data,
    ends the list.
    """
    assert entry.rule.lowering is not None
    comm = _Comm(schema.mesh)
    operands = tuple(inputs[: len(call.operands)])
    place = (0,) * schema.mesh.ndim if coordinate is None else coordinate
    local = LocalCall(call, operands, tuple(results), place, comm)
    # A rehearsal takes no numbers from the generators: ranks whose generators differ would draw different numbers.
    on_cuda = schema.mesh.device_type == "cuda" and has_cuda()
    devices = [torch.cuda.current_device()] if on_cuda else []
    try:
        with torch.random.fork_rng(devices), preserved_state():
            # Inside, too: a rule may use what only a real mesh has.
            statics = local_statics(entry, schema, local)
            args, kwargs = schema.signature.unbind(_local_values(schema, described, inputs, statics, place))
            entry.rule.lowering(local, *args, **kwargs)
    except Exception:  # noqa: BLE001  # a plugin's code, run on what it was not written for
        return Issued(tuple(comm.issued), complete=False)
    return Issued(tuple(comm.issued))


def _local_values(
    schema: OpSchema,
    described: Sequence[Any],
    inputs: Sequence[TensorSpec | None],
    statics: Sequence[Any] | None,
    coordinate: tuple[int, ...],
) -> list[Any]:
    """The schema arguments as the lowering gets them, with local meta tensors."""
    flat = iter(inputs)
    replaced = None if statics is None else iter(statics)
    values: list[Any] = []
    for arg, value in zip(schema.signature.args, described, strict=True):
        if arg in schema.signature.tensor_args:
            if isinstance(value, tuple):
                values.append([_local_tensor(next(flat), coordinate) for _ in value])
            elif not (value is None and arg.is_list):
                spec = next(flat)
                values.append(_local_tensor(spec, coordinate) if isinstance(value, TensorSpec) else value)
            else:
                values.append(None)
        elif replaced is not None and arg.name in schema.info.by_value:
            values.append(next(replaced))
        else:
            values.append(value)
    return values


def _local_tensor(spec: TensorSpec | None, coordinate: tuple[int, ...]) -> torch.Tensor | None:
    """A meta tensor like a rank's local tensor; its strides have the order of the global tensor's."""
    if spec is None:
        return None
    shape = spec.local_shape(coordinate)
    order = memory_order(spec.tensor_meta)
    inverse = [order.index(d) for d in range(len(order))]
    return torch.empty([shape[d] for d in order], dtype=spec.dtype, device="meta").permute(inverse)


@frozen
class _Comm:
    """A :class:`shardwise.rule.lowering.Comm` that notes its calls, and answers as if all ranks held the same data."""

    mesh: Mesh
    issued: list[Collective] = field(factory=list)

    def _note(self, kind: str, mesh_dims: tuple[int, ...], nbytes: int) -> None:
        ranks = _ranks(tuple(self.mesh.shape), mesh_dims)
        self.issued.append(Collective(kind, mesh_dims, ranks, nbytes, "lowering"))

    def all_reduce(self, tensor: torch.Tensor, kind: str, mesh_dims: Sequence[int]) -> torch.Tensor:  # noqa: ARG002  # the protocol
        dims = tuple(m for m in mesh_dims if self.mesh.size(m) > 1)
        if dims and tensor.numel():
            self._note("all_reduce", dims, tensor.nbytes)
        return tensor.clone() if dims else tensor

    def all_gather(self, tensor: torch.Tensor, mesh_dim: MeshDims, *, same_shape: bool = False) -> list[torch.Tensor]:
        dims, n = self._line(mesh_dim)
        if n > 1 and same_shape:
            self._note("all_gather", dims, tensor.nbytes)
        elif n > 1:
            self._note("all_gather", dims, SHAPE_BYTES)
            self._note("all_to_all", dims, n * tensor.nbytes)
        return [tensor.clone() for _ in range(n)]

    def all_to_all(
        self, tensors: Sequence[torch.Tensor], mesh_dim: MeshDims, shapes: Sequence[Sequence[int]] | None = None
    ) -> list[torch.Tensor]:
        dims, n = self._line(mesh_dim)
        if n > 1:
            if shapes is None:
                self._note("all_to_all", dims, len(tensors) * SHAPE_BYTES)
            self._note("all_to_all", dims, sum(t.nbytes for t in tensors))
        return [tensors[0].clone() for _ in tensors] if shapes is None else [tensors[0].new_empty(s) for s in shapes]

    def shift(
        self, tensor: torch.Tensor, mesh_dim: MeshDims, by: int = 1, shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        dims, n = self._line(mesh_dim)
        if by % n:
            self._note("shift", dims, tensor.nbytes)
        return tensor.clone() if shape is None else tensor.new_empty(shape)

    def start_shift(
        self, tensor: torch.Tensor, mesh_dim: MeshDims, by: int = 1, shape: Sequence[int] | None = None
    ) -> AsyncResult:
        return AsyncResult(None, self.shift(tensor, mesh_dim, by, shape))

    def agree_on_draw(self, seed: int, number: int) -> tuple[int, int]:
        return seed, number

    def compare_generators(self) -> None:
        """There is no other rank to compare with."""

    def _line(self, mesh_dim: MeshDims) -> tuple[tuple[int, ...], int]:
        """The mesh dims as a tuple, and the number of their ranks."""
        dims = (mesh_dim,) if isinstance(mesh_dim, int) else tuple(mesh_dim)
        return dims, _ranks(tuple(self.mesh.shape), dims)
