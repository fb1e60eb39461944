"""Lowerings: a rule's own way of running the local op, where "the same op on the shards" is not enough.

There are two, and a rule may have both. ``local_args`` runs once, when a plan is made, and replaces static arguments (a
view's local shape, a factory's local size). ``lowering`` runs at every call, on local tensors, and may communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import torch
from attrs import field, frozen

from shardwise.kernel.placements import Placement, Replicate, Shard
from shardwise.kernel.signature import Call, Kind
from shardwise.kernel.spec import TensorSpec
from shardwise.private_torch.fake import is_rehearsing
from shardwise.rng import generator
from shardwise.rng.sampling import Draw, Region

__all__ = ["AsyncResult", "Comm", "LocalArgs", "LocalCall", "Lowering", "MeshDims"]

Found = TypeVar("Found")

# One mesh dim, or several whose ranks count as one line, row-major in the order given.
MeshDims = int | Sequence[int]


class AsyncResult(Protocol):
    """A tensor on its way from another rank."""

    def wait(self) -> torch.Tensor:
        """The tensor, once it is here; waiting again gives the same one."""
        ...


class Comm(Protocol):
    """Communication among the ranks of one mesh; every rank of the mesh dim must call it alike."""

    def all_reduce(self, tensor: torch.Tensor, kind: str, mesh_dims: Sequence[int]) -> torch.Tensor:
        """The reduction (``sum avg max min product``) over these mesh dims; ``tensor`` is left as it is."""
        ...

    def all_gather(self, tensor: torch.Tensor, mesh_dim: MeshDims, *, alike: bool = False) -> list[torch.Tensor]:
        """The tensors of all ranks along one mesh dim; shapes may differ between ranks.

        ``alike`` says that they do not: it saves asking for them, which compiled code cannot.
        """
        ...

    def all_to_all(
        self, tensors: Sequence[torch.Tensor], mesh_dim: MeshDims, shapes: Sequence[Sequence[int]] | None = None
    ) -> list[torch.Tensor]:
        """Send ``tensors[i]`` to rank ``i`` of the mesh dim and return what each rank sent here; any shapes.

        ``shapes`` are those of what comes, where they are known: it saves asking for them, which compiled code cannot.
        """
        ...

    def shift(
        self, tensor: torch.Tensor, mesh_dim: MeshDims, by: int = 1, shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Send to the rank ``by`` further along the mesh dim (wrapping round), return what came, of ``shape``.

        ``shape`` is that of ``tensor`` when it is not given; dtypes are alike.
        """
        ...

    def start_shift(
        self, tensor: torch.Tensor, mesh_dim: MeshDims, by: int = 1, shape: Sequence[int] | None = None
    ) -> AsyncResult:
        """:meth:`shift`, under way while this rank does something else; ``wait()`` gives what came.

        Leave ``tensor`` as it is until then, and wait for every one that was started. Under ``torch.compile`` it is an
        ordinary shift of the graph.
        """
        ...

    def agree_on_draw(self, seed: int, number: int) -> tuple[int, int]:
        """The seed and the number of a draw that every rank takes, from those that this rank would; see
        :meth:`LocalCall.draw`, which calls it.
        """
        ...

    def compare_generators(self) -> None:
        """Raise on every rank where torch's generators, from which all are about to draw alike, are not alike."""
        ...


@frozen(eq=False)
class LocalCall:
    """What a lowering knows about its call: global metas, the specs in force, this rank's place, communication.

    ``inputs`` are the specs of the tensor operands after redistribution (lists flattened, ``out=`` excluded, ``None``
    where absent) and ``outputs`` those of the tensor results.
    """

    call: Call
    inputs: tuple[TensorSpec | None, ...]
    outputs: tuple[TensorSpec | None, ...]
    coordinate: tuple[int, ...]
    comm: Comm
    _found: dict[Any, Any] = field(factory=dict, init=False, repr=False)

    def once(self, compute: Callable[[LocalCall], Found]) -> Found:
        """``compute(self)``, computed at the first call of this plan and kept with it: for what data cannot change."""
        try:
            found: Found = self._found[compute]
        except KeyError:
            found = self._found[compute] = compute(self)
        return found

    def arg(self, name: str) -> Any:
        """A static argument's global value."""
        return self.call.args[name]

    def spec(self, name: str) -> TensorSpec:
        """The spec of a tensor operand by name (``self``, ``tensors[0]``)."""
        found = self.inputs[self.call.operand_names.index(name)]
        if found is None:
            raise KeyError(f"operand {name!r} is absent in {self.call}")
        return found

    def specs(self, name: str) -> tuple[TensorSpec | None, ...]:
        """The specs of a list operand by name."""
        arg = next(a for a in self.call.signature.tensor_args if a.name == name)
        if arg.kind is not Kind.TENSORS:
            return (self.spec(name),)
        return tuple(
            s for s, n in zip(self.inputs, self.call.operand_names, strict=True) if n.rpartition("[")[0] == name
        )

    def local_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        return _place(spec, self.coordinate)[0]

    def offset(self, spec: TensorSpec) -> tuple[int, ...]:
        """Where this rank's shard starts in the global tensor, per tensor dim."""
        return _place(spec, self.coordinate)[1]

    def region(self, spec: TensorSpec) -> Region:
        """The place of this rank's shard in the global tensor, for :class:`Draw`."""
        return Region(spec.shape, self.offset(spec), self.local_shape(spec))

    def counts(self, partial: TensorSpec, operand: TensorSpec | None = None, *, kind: str = "sum") -> bool:
        """Whether this rank counts a whole value beside a partial one: once a mesh dim, on the first rank along it.

        The mesh dims are those on which ``partial`` is partial of that ``kind`` and ``operand`` (all that is not a
        tensor, when none is given) is whole. A rank that does not count the value puts a neutral one in its place.
        """
        others = () if operand is None else operand.placements
        return not any(
            self.coordinate[m]
            for m, reduction in partial.reductions.items()
            if reduction == kind and (not others or isinstance(others[m], Replicate))
        )

    def draw(self) -> Draw | None:
        """The random numbers of this call, to be taken once, on every rank alike.

        ``None`` says that torch's own generators draw: the whole tensor on every rank, as one device does, which then
        keeps its part. A draw with ``by_place`` gives an element's values by its place in the global tensor; one
        without seeds a generator of torch's for this rank's part.
        """
        found = generator.next_draw(self.comm.agree_on_draw)
        if found is None:
            self.comm.compare_generators()
        return found

    def without_data(self, tensor: torch.Tensor) -> bool:
        """Whether an operand has no values, as where a call is rehearsed: then nothing is to be drawn."""
        return tensor.is_meta or is_rehearsing()

    @property
    def torch_draws(self) -> bool:
        """Whether :meth:`draw` would answer ``None``; asking takes no draw."""
        return generator.mode() == "torch"

    def sharding(self, spec: TensorSpec, *dims: int) -> tuple[int, ...]:
        """The mesh dims that shard any of these tensor dims (all tensor dims when none is given)."""
        return _sharding(spec, dims)


def _place(spec: TensorSpec, coordinate: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    try:
        return _kept_place(spec, coordinate)
    except TypeError:  # symbols have no hash
        return spec.local_shape_and_offset(coordinate)


# Lowerings ask at every call.
@lru_cache(maxsize=1024)
def _kept_place(spec: TensorSpec, coordinate: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return spec.local_shape_and_offset(coordinate)


def _sharding(spec: TensorSpec, dims: tuple[int, ...]) -> tuple[int, ...]:
    return _kept_sharding(spec.placements, spec.ndim, dims)


@lru_cache(maxsize=1024)
def _kept_sharding(placements: tuple[Placement, ...], ndim: int, dims: tuple[int, ...]) -> tuple[int, ...]:
    wanted = [d % ndim for d in dims] if dims else range(ndim)
    return tuple(m for m, p in enumerate(placements) if isinstance(p, Shard) and p.dim in wanted)


# (local call, *args, **kwargs) -> local result(s); args are the op's schema arguments in order, defaults filled in,
# with local tensors in place of global ones; keyword-only ones come as keywords.
Lowering = Callable[..., Any]
LocalArgs = Callable[[LocalCall], Mapping[str, Any]]
