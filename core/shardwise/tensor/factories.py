"""Factories of MeshTensors, with the names and arguments of torch's factories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from numbers import Number
from typing import Any, Protocol

import torch
from attrs import frozen
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.agreement import agree_on_generator
from shardwise.comm.meeting import meet
from shardwise.comm.mesh_comm import MeshComm
from shardwise.errors import ArgumentError, LayoutError
from shardwise.kernel.arguments import check_dtype, check_flag, check_mesh, check_sizes, kind_of, refuse_argument
from shardwise.kernel.placements import REPLICATE, Placement, check_placements
from shardwise.kernel.places import per_mesh_dim
from shardwise.kernel.plurals import counted
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.private_torch.distributed import current_mesh
from shardwise.private_torch.fake import is_rehearsing
from shardwise.private_torch.transforms import below_transforms, is_drawn_by_vmap
from shardwise.rng.generator import next_draw
from shardwise.rng.sampling import Draw, Region
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tensor.placed import note_placed
from shardwise.tensor.shards import scatter_local
from shardwise.tensor.traceable import traceable

__all__ = ["empty", "full", "ones", "rand", "randint", "randn", "randperm", "zeros"]


class Factory(Protocol):
    """A factory that takes the global size, as separate integers or as one sequence."""

    def __call__(
        self,
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
    ) -> MeshTensor:
        """A MeshTensor of the global ``size``. It is replicated by default."""
        ...


@frozen
class _Values:
    """How a random factory fills a part if torch does not draw the whole tensor.

    ``by_place`` gives values by their place in the global tensor. ``in_place`` fills a part from a torch generator.
    It is ``None`` if values depend on each other: such values are always drawn by place.
    """

    by_place: Callable[[Draw, Region, torch.dtype, torch.device], torch.Tensor]
    in_place: Callable[[torch.Tensor, torch.Generator], torch.Tensor] | None = None

    def part(self, spec: TensorSpec, dtype: torch.dtype) -> torch.Tensor | None:
        """The local tensor of this rank; ``None`` if torch's generator must draw the whole tensor."""
        size, offset = spec.local_shape_and_offset()
        device = torch.device(spec.mesh.device_type)
        if is_rehearsing():
            return torch.empty(size, dtype=dtype, device=device)
        comm = MeshComm(spec.mesh)
        draw = next_draw(comm.agree_on_draw)
        if draw is None:
            comm.compare_generators()
            return None
        # A partial tensor holds each value once, and a strided shard is no region: both are drawn whole and scattered.
        drawn_whole = bool(spec.reductions) or spec.is_strided
        region = Region.whole(spec.shape) if drawn_whole else Region(spec.shape, offset, size)
        values = torch.empty(region.size, dtype=dtype, device=device)
        if draw.by_place or self.in_place is None:
            values.copy_(self.by_place(draw, region, dtype, values.device))
        elif values.numel():
            self.in_place(values, draw.generator(values.device, region.offset))
        return scatter_local(values, spec) if drawn_whole else values


def _make(
    make: Callable[..., torch.Tensor],
    size: Sequence[Any],
    dtype: torch.dtype | None,
    layout: torch.layout,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    values: _Values | None = None,
    requires_grad: bool = False,
) -> MeshTensor:
    """A MeshTensor of the values of ``make(size, dtype=, device=)``. Only random factories pass ``values``."""
    if values is not None and is_drawn_by_vmap():
        raise LayoutError(
            asked="make a MeshTensor of random numbers in a function that vmap goes over",
            found="all of its calls would get the same numbers",
            do='Make it outside and pass it in, or say vmap(..., randomness="same").',
        )
    asked = "make a MeshTensor"
    for n in size:
        if not isinstance(n, (int, torch.SymInt)):
            is_mesh = isinstance(n, DeviceMesh)
            do = (
                "Name the mesh: device_mesh=." if is_mesh else "Give whole numbers, as in zeros(8, 4) or zeros((8, 4))."
            )
            raise ArgumentError(asked=asked, found=f"its argument 'size' has {kind_of(n)}", do=do, argument="size")
    check_sizes(asked, tuple(size), "size", "zeros(8, 4) or zeros((8, 4))")
    check_dtype(asked, dtype, "dtype")
    check_flag(asked, requires_grad, "requires_grad")
    if layout is not torch.strided:
        raise LayoutError(
            asked=f"make a MeshTensor with layout {layout}",
            found="a shard of it could not be cut or sent",
            do="Use torch.strided.",
        )
    mesh = current_mesh() if device_mesh is None else device_mesh
    check_mesh(asked, mesh)
    meta = TensorMeta.contiguous(size, make((0,), dtype=dtype, device="meta").dtype)
    places = [REPLICATE] * mesh.ndim if placements is None else per_mesh_dim(placements, mesh)
    spec = TensorSpec(mesh, check_placements(places, mesh.ndim, len(size)), meta)
    if requires_grad and not (meta.dtype.is_floating_point or meta.dtype.is_complex):
        raise ArgumentError(
            asked=f"{asked} of {meta.dtype}",
            found="its argument 'requires_grad' is True, and only floating-point and complex tensors have gradients",
            do="Give another dtype=, or leave requires_grad out.",
            argument="requires_grad",
        )
    with below_transforms():
        meet(mesh)
        part = _part(make, spec, dtype, values)
        if placements is not None and type(part) is torch.Tensor:
            note_placed(part)
        return MeshTensor(part, spec, requires_grad)


def _part(
    make: Callable[..., torch.Tensor], spec: TensorSpec, dtype: torch.dtype | None, values: _Values | None
) -> torch.Tensor:
    """The part of this rank of what is made."""
    if values is not None:
        agree_on_generator(spec.mesh)
        part = values.part(spec, spec.dtype)
        if part is not None:
            return part
    # Torch draws the whole tensor, so that numbers do not depend on the mesh. A partial tensor holds each value once.
    is_whole = values is not None or bool(spec.reductions)
    size = spec.shape if is_whole else spec.local_shape()
    made = make(size, dtype=dtype, device=spec.mesh.device_type)
    return scatter_local(made, spec) if is_whole else made


def _factory(make: Callable[..., torch.Tensor], summary: str, values: _Values | None = None) -> Factory:
    def factory(
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
    ) -> MeshTensor:
        sizes = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
        if values is not None and isinstance(dtype, torch.dtype) and not (dtype.is_floating_point or dtype.is_complex):
            do = f"Give a floating-point or complex dtype, or use randint: {make.__name__} draws no integers."
            raise ArgumentError(
                asked="make a MeshTensor of random numbers", found=f"the dtype is {dtype}", do=do, argument="dtype"
            )
        return _make(make, sizes, dtype, layout, device_mesh, placements, values, requires_grad)

    factory.__name__ = factory.__qualname__ = make.__name__
    factory.__doc__ = f"{summary} Takes the global size; replicated when no placements are given."
    return traceable(factory)


zeros = _factory(torch.zeros, "A MeshTensor of zeros.")
ones = _factory(torch.ones, "A MeshTensor of ones.")
empty = _factory(torch.empty, "A MeshTensor of undefined values.")
rand = _factory(
    torch.rand,
    "Uniform values on [0, 1), those that torch.rand gives on one device.",
    _Values(Draw.uniform, lambda part, generator: part.uniform_(generator=generator)),
)
randn = _factory(
    torch.randn,
    "Normal values, those that torch.randn gives on one device.",
    _Values(Draw.normal, lambda part, generator: part.normal_(generator=generator)),
)


@traceable
def randint(
    *bounds_and_size: Any,
    dtype: torch.dtype = torch.int64,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> MeshTensor:
    """Integers from ``low`` (default: 0) to ``high - 1``: ``randint([low,] high, size)``, as ``torch.randint``;
    replicated when no placements are given.
    """
    least, high, size = _bounds_and_size(bounds_and_size)

    def make(size: Sequence[int], **options: Any) -> torch.Tensor:
        return torch.randint(least, high, tuple(size), **options)

    def by_place(draw: Draw, region: Region, _: torch.dtype, device: torch.device) -> torch.Tensor:
        return draw.integers(region, least, high, device)

    values = _Values(by_place, lambda part, generator: part.random_(least, high, generator=generator))
    return _make(make, size, dtype, layout, device_mesh, placements, values)


def _bounds_and_size(given: tuple[Any, ...]) -> tuple[int, int, Any]:
    """What ``randint`` is called with. Raises :class:`ArgumentError` for what ``torch.randint`` takes neither."""
    do = "Write randint([low,] high, size), as in randint(10, (8, 4)) or randint(-5, 5, (8, 4))."
    if not 2 <= len(given) <= 3:  # noqa: PLR2004  # with low and without
        raise ArgumentError(
            asked="make a MeshTensor of random integers",
            found=f"it has {counted(len(given), 'argument')}, not two or three",
            do=do,
            argument="size",
        )
    *bounds, size = given
    for name, value in zip(("low", "high")[-len(bounds) :], bounds, strict=True):
        if not hasattr(value, "__index__"):
            refuse_argument("make a MeshTensor of random integers", name, value, do)
    if not isinstance(size, Sequence) or isinstance(size, str):
        refuse_argument("make a MeshTensor of random integers", "size", size, do)
    least = bounds[0] if len(bounds) > 1 else 0
    if least >= bounds[-1]:
        raise ArgumentError(
            asked="make a MeshTensor of random integers",
            found=f"there is no integer from {least} on and below {bounds[-1]}",
            do=do,
            argument="high",
        )
    return least, bounds[-1], size


@traceable
def randperm(
    n: int,
    *,
    dtype: torch.dtype = torch.int64,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> MeshTensor:
    """The integers below ``n`` in a random order, as ``torch.randperm``; replicated when no placements are given.

    Every rank computes the whole order and keeps its part.
    """

    def make(size: Sequence[int], **options: Any) -> torch.Tensor:
        return torch.randperm(size[0], **options)

    def by_place(draw: Draw, region: Region, _: torch.dtype, device: torch.device) -> torch.Tensor:
        (start,), (size,) = region.offset, region.size
        return draw.permutation(region.shape[0], device)[start : start + size]

    return _make(make, (n,), dtype, layout, device_mesh, placements, _Values(by_place))


@traceable
def full(
    size: Sequence[int],
    fill_value: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> MeshTensor:
    """A MeshTensor of the global ``size`` filled with one value; replicated when no placements are given."""
    given: Any = size
    if not isinstance(given, Sequence) or isinstance(given, str):
        do = "Give the size as a tuple, then the value, as in full((8, 4), 1.0)."
        refuse_argument("make a MeshTensor of one value", "size", size, do)
    is_number = isinstance(fill_value, (Number, torch.SymInt, torch.SymFloat, torch.SymBool))
    if not is_number and not (type(fill_value) is torch.Tensor and fill_value.ndim == 0):
        do = "Give a number. ones(...) * tensor fills a tensor with the values of another, by broadcasting."
        refuse_argument("make a MeshTensor of one value", "fill_value", fill_value, do)
    make = partial(torch.full, fill_value=fill_value)
    return _make(make, size, dtype, layout, device_mesh, placements, requires_grad=requires_grad)
