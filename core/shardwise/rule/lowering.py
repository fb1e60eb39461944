"""Lowerings: what a rule runs in place of the local op, where "the same op on the shards" is not enough.

A rule may have both kinds. ``local_args`` runs once, when a plan is made, and replaces static arguments (a view's local
shape, a factory's local size). ``lowering`` runs at every call, on local tensors, and may communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import torch
from attrs import field, frozen

from shardwise.kernel.placements import Placement, Replicate, shard_dim
from shardwise.kernel.signature import Call, Kind
from shardwise.kernel.spec import TensorSpec
from shardwise.private_torch.fake import is_rehearsing
from shardwise.rng import generator
from shardwise.rng.sampling import Draw, Region

__all__ = ["AsyncResult", "Comm", "LocalArgs", "LocalCall", "Lowering", "MeshDims"]

Value = TypeVar("Value")

# One mesh dim, or several whose ranks count as one line, row-major in the order given.
MeshDims = int | Sequence[int]


class AsyncResult(Protocol):
    """A tensor that another rank is sending."""

    def wait(self) -> torch.Tensor:
        """The tensor, when it has arrived; waiting again gives the same one."""
        ...


class Comm(Protocol):
    """Communication among the ranks of one mesh. Every rank of the mesh dim must make the same calls in one order."""

    def all_reduce(self, tensor: torch.Tensor, kind: str, mesh_dims: Sequence[int]) -> torch.Tensor:
        """The reduction (``sum avg max min product``) over these mesh dims; ``tensor`` is not changed."""
        ...

    def all_gather(self, tensor: torch.Tensor, mesh_dim: MeshDims, *, same_shape: bool = False) -> list[torch.Tensor]:
        """The tensors of all ranks along one mesh dim; shapes may differ between ranks.

        ``same_shape`` says that they do not. It saves exchanging the shapes, which compiled code cannot do.
        """
        ...

    def all_to_all(
        self, tensors: Sequence[torch.Tensor], mesh_dim: MeshDims, shapes: Sequence[Sequence[int]] | None = None
    ) -> list[torch.Tensor]:
        """Send ``tensors[i]`` to rank ``i`` of the mesh dim and return what each rank sent here; any shapes.

        ``shapes`` are those of the returned tensors, where they are known. It saves exchanging them, which compiled
        code cannot do.
        """
        ...

    def shift(
        self, tensor: torch.Tensor, mesh_dim: MeshDims, by: int = 1, shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Send to the rank ``by`` further along the mesh dim (wrapping round) and return what arrives here.

        ``shape`` is the shape of what arrives, that of ``tensor`` when it is not given. The dtype is that of
        ``tensor``.
        """
        ...

    def start_shift(
        self, tensor: torch.Tensor, mesh_dim: MeshDims, by: int = 1, shape: Sequence[int] | None = None
    ) -> AsyncResult:
        """:meth:`shift` in the background, while this rank does something else; ``wait()`` gives what arrived.

        Do not change ``tensor`` until then, and wait for every shift that was started. Under ``torch.compile`` it is an
        ordinary shift of the graph.
        """
        ...

    def agree_on_draw(self, seed: int, number: int) -> tuple[int, int]:
        """The seed and number of the draw that every rank takes, given those that this rank would take.

        :meth:`LocalCall.draw` calls it.
        """
        ...

    def compare_generators(self) -> None:
        """Raise on every rank if torch's generators, from which all are about to draw the same numbers, differ."""
        ...


@frozen(eq=False)
class LocalCall:
    """What a lowering knows about its call: global metas, the operands' specs, this rank's place, communication.

    ``inputs`` are the specs of the tensor operands after redistribution (lists flattened, ``out=`` excluded, ``None``
    where absent) and ``outputs`` those of the tensor results.
    """

    call: Call
    inputs: tuple[TensorSpec | None, ...]
    outputs: tuple[TensorSpec | None, ...]
    coordinate: tuple[int, ...]
    comm: Comm
    _values: dict[Any, Any] = field(factory=dict, init=False, repr=False)

    def once(self, compute: Callable[[LocalCall], Value]) -> Value:
        """``compute(self)``, computed at the first call of this plan and kept with it: for what data cannot change."""
        try:
            value: Value = self._values[compute]
        except KeyError:
            value = self._values[compute] = compute(self)
        return value

    def arg(self, name: str) -> Any:
        """A static argument's global value."""
        return self.call.args[name]

    def spec(self, name: str) -> TensorSpec:
        """The spec of a tensor operand by name (``self``, ``tensors[0]``)."""
        spec = self.inputs[self.call.operand_names.index(name)]
        if spec is None:
            raise KeyError(f"operand {name!r} is absent in {self.call}")
        return spec

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
        """Where this rank's shard starts in the global tensor, per tensor dim.

        Along a dim with a strided shard it is a :class:`Scattered`: with it, nothing can be computed.
        """
        return _place(spec, self.coordinate)[1]

    def region(self, spec: TensorSpec) -> Region:
        """The place of this rank's shard in the global tensor, for :class:`Draw`."""
        return Region(spec.shape, self.offset(spec), self.local_shape(spec))

    def counts(self, partial: TensorSpec, operand: TensorSpec | None = None, *, kind: str = "sum") -> bool:
        """Whether this rank counts a whole value beside a partial one: once a mesh dim, on the first rank along it.

        The mesh dims are those on which ``partial`` is partial of that ``kind`` and ``operand`` (all that is not a
        tensor, when none is given) is whole. A rank that does not count the value puts a neutral one in its place, by
        :func:`tensor_if` or :func:`call_if`.
        """
        return not any(self.coordinate[m] for m in self.counting_dims(partial, operand, kind=kind))

    def counting_dims(
        self, partial: TensorSpec, operand: TensorSpec | None = None, *, kind: str = "sum"
    ) -> tuple[int, ...]:
        """The mesh dims along which :meth:`counts` is true on the first rank alone."""
        others = () if operand is None else operand.placements
        return tuple(
            m
            for m, reduction in partial.reductions.items()
            if reduction == kind and (not others or isinstance(others[m], Replicate))
        )

    def draw(self) -> Draw | None:
        """The random numbers of this call. Every rank must ask for them, once.

        ``None`` says that torch's own generators draw: every rank draws the whole tensor, as one device does, and then
        keeps its part. A draw with ``by_place`` gives an element's values by its place in the global tensor; one
        without it seeds a generator of torch's for this rank's part.
        """
        draw = generator.next_draw(self.comm.agree_on_draw)
        if draw is None:
            self.comm.compare_generators()
        return draw

    def without_data(self, tensor: torch.Tensor) -> bool:
        """Whether an operand has no values, as when a call is rehearsed; a lowering then draws nothing."""
        return tensor.is_meta or is_rehearsing()

    @property
    def torch_draws(self) -> bool:
        """Whether :meth:`draw` would return ``None``; asking uses up no draw."""
        return generator.mode() == "torch"

    def sharding(self, spec: TensorSpec, *dims: int) -> tuple[int, ...]:
        """The mesh dims that shard any of these tensor dims (all tensor dims when none is given)."""
        return _sharding(spec.placements, spec.ndim, dims)


def _place(spec: TensorSpec, coordinate: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    try:
        return _cached_place(spec, coordinate)
    except TypeError:  # symbols have no hash
        return spec.local_shape_and_offset(coordinate)


# Lowerings ask at every call.
_cached_place = lru_cache(maxsize=1024)(TensorSpec.local_shape_and_offset)


@lru_cache(maxsize=1024)
def _sharding(placements: tuple[Placement, ...], ndim: int, dims: tuple[int, ...]) -> tuple[int, ...]:
    asked = [d % ndim for d in dims] if dims else range(ndim)
    return tuple(m for m, p in enumerate(placements) if shard_dim(p) in asked)


# (local call, *args, **kwargs) -> local result(s). The args are the op's schema arguments in order, defaults filled in,
# with local tensors in place of global ones; keyword-only arguments are the kwargs.
#: A function that runs in place of the local op: ``lowering(local, *args, **kwargs)``.
Lowering = Callable[..., Any]
LocalArgs = Callable[[LocalCall], Mapping[str, Any]]
