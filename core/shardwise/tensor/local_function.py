"""``shardwise.local``: a function of this rank's parts, called with MeshTensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from attrs import field, frozen
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from shardwise.comm.rank_failures import tell
from shardwise.errors import LocalPlacementError, LocalResultError, MeshMismatchError, TracingError
from shardwise.kernel.placements import Placement, check_placements, shard_dim, show_all
from shardwise.kernel.world import PerWorld
from shardwise.private_torch.tracing import is_traced
from shardwise.tensor import autograd
from shardwise.tensor.local_gradients import counted, dual, in_sums, refuse_without_gradient, same_work
from shardwise.tensor.local_places import AS_IT_LIES, layouts_in, normal, of_arguments, spread
from shardwise.tensor.local_results import Agreed, agree
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tensor.on_mesh import on
from shardwise.tensor.traceable import traceable

__all__ = ["Border", "LocalFunction", "local"]

Layout = tuple[Placement, ...]

_MOST = 1024  # calls of all local functions that are remembered


class Border(NamedTuple):  # dynamo traces named tuples
    """How the values of one call of a local function lie: a layout per leaf, ``None`` for what is not a MeshTensor.

    ``names`` are those of the arguments that the leaves belong to, and ``same`` are the mesh dims along which all
    ranks do the same work.
    """

    names: tuple[str, ...]
    arguments: tuple[Layout | None, ...]
    same: frozenset[int]


@frozen(eq=False)
class LocalFunction:
    """A function of local tensors, and what :func:`local` was told of it."""

    fn: Callable[..., Any]
    inputs: Any
    outputs: Any
    mesh: DeviceMesh | None = None
    shapes: Any = None
    move: bool = True
    communicates: tuple[int | str, ...] = ()
    check: bool = False
    name: str = field(init=False)
    parameters: tuple[str, ...] = field(init=False)

    @name.default
    def _name(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    @parameters.default
    def _parameters(self) -> tuple[str, ...]:
        try:
            described = inspect.signature(self.fn).parameters.values()
        except (TypeError, ValueError):  # a builtin
            return ()
        return tuple(
            p.name for p in described if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        )

    # -- one call --
    def border(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        names: Sequence[str],
        sizes: Sequence[int],
        layout_of: Callable[[Any, Any], Layout | None],
    ) -> Border:
        """How the arguments of a call are to lie, and what follows for the gradients.

        ``layout_of`` gives the placements of a leaf, which has some entry, and ``None`` if it lies on no mesh. Raises
        :class:`LocalPlacementError` for entries that do not fit.
        """
        asked = f"call {self.name} by local"
        layouts: list[Layout | None] = []
        of_leaf: list[str] = []
        for name, entry, value in of_arguments(self.inputs, self.parameters, args, kwargs, asked):
            of_argument = f"{asked}, with argument {name}"
            for own, leaf in zip(
                spread(normal(entry, names, len(sizes), of_argument), value, of_argument),
                pytree.tree_leaves(value),
                strict=True,
            ):
                layout = _layout(leaf, layout_of(leaf, own), own, len(sizes), of_argument)
                layouts.append(layout)
                of_leaf.append(name)
        results = enumerate(layouts_in(normal(self.outputs, names, len(sizes), asked)))
        communicates = _mesh_dims(self.communicates, names, len(sizes), asked)
        named = [(name, layout) for name, layout in zip(of_leaf, layouts, strict=True) if layout is not None]
        same = same_work(self.name, named, [(str(i), layout) for i, layout in results], sizes, communicates)
        return Border(tuple(of_leaf), tuple(layouts), same)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with this rank's parts."""
        leaves, tree = pytree.tree_flatten((args, kwargs))
        placed = [leaf for leaf in leaves if isinstance(leaf, MeshTensor)]
        if not placed:
            return self.fn(*args, **kwargs)
        mesh = self.mesh if self.mesh is not None else placed[0].device_mesh
        for tensor in placed:
            if tensor.device_mesh != mesh:
                raise MeshMismatchError(
                    asked=f"call {self.name} by local",
                    found=f"its arguments lie on {mesh} and on {tensor.device_mesh}",
                    do="Bring them to one mesh first: full_tensor(), then distribute_tensor().",
                )
        sizes = [mesh.size(m) for m in range(mesh.ndim)]
        border = self.border(args, kwargs, mesh.mesh_dim_names or (), sizes, _placements)
        parts = [
            self._enter(leaf, name, layout, border.same, sizes) if layout is not None else leaf
            for leaf, name, layout in zip(leaves, border.names, border.arguments, strict=True)
        ]
        if torch.compiler.is_compiling() and self.shapes is None:
            self._refuse_uneven(leaves, border.arguments, sizes)
        local_args, local_kwargs = pytree.tree_unflatten(parts, tree)
        with on(None):
            result = self.fn(*local_args, **local_kwargs)
        return self._on_mesh(result, leaves, parts, border, mesh, sizes)

    def _enter(
        self, tensor: MeshTensor, name: str, layout: Layout, same: frozenset[int], sizes: Sequence[int]
    ) -> torch.Tensor:
        if tensor.placements != layout:
            if not self.move:
                raise LocalPlacementError(
                    asked=f"call {self.name} by local, with argument {name} {tuple(tensor.shape)}",
                    found=f"it lies {show_all(tensor.placements)}, and inputs= says {show_all(layout)}",
                    do=f"Redistribute it first: x.redistribute(placements={list(layout)}), or say move=True.",
                    placements=tensor.placements,
                    expected=layout,
                )
            tensor = tensor.redistribute(placements=layout)
        if not (torch.is_grad_enabled() and tensor.requires_grad):
            return tensor.to_local()
        refuse_without_gradient(self.name, f"argument {name}", layout)
        return autograd.enter(tensor, dual(layout, same), in_sums(layout), counted(layout, sizes))

    def _refuse_uneven(self, leaves: Sequence[Any], layouts: Sequence[Layout | None], sizes: Sequence[int]) -> None:
        """Raise :class:`TracingError` where the shapes of results cannot be told from this rank's parts."""
        for leaf, layout in zip(leaves, layouts, strict=True):
            shards = [1] * (leaf.ndim if layout is not None else 0)
            for placement, size in zip(layout or (), sizes, strict=False):
                if (dim := shard_dim(placement)) is not None:
                    shards[dim] *= size
            if any(n % count for n, count in zip(leaf.shape if shards else (), shards, strict=True)):
                _refuse_parts(self.name, tuple(leaf.shape), list(layout or ()))

    def _on_mesh(
        self,
        result: Any,
        leaves: Sequence[Any],
        parts: Sequence[Any],
        border: Border,
        mesh: DeviceMesh,
        sizes: Sequence[int],
    ) -> Any:
        """The results as MeshTensors."""
        asked = f"take the results of {self.name} by local"
        flat, tree = pytree.tree_flatten(result)
        names = mesh.mesh_dim_names or ()
        fault = ""
        entries: list[Any] = [None] * len(flat)
        try:
            entries = spread(normal(self.outputs, names, mesh.ndim, asked), result, asked)
            shapes = self._shapes(result, asked)
        except LocalPlacementError as error:
            fault, shapes = error.found, []
        layouts = [None if entry is None else tuple(entry) for entry in entries]
        fault = fault or _fault(flat, layouts)
        agreed = self._agreed(flat, layouts, leaves, mesh, fault)
        beside = []
        if torch.is_grad_enabled() and len(border.same) < mesh.ndim:
            beside = [t for t in parts if isinstance(t, torch.Tensor) and t.requires_grad]
        for i, (part, layout) in enumerate(zip(flat, layouts, strict=True)):
            if layout is None:
                continue
            has_gradient = torch.is_grad_enabled() and agreed[i].has_gradient
            if has_gradient:
                refuse_without_gradient(self.name, f"result {i}", layout)
            flat[i] = autograd.leave(
                part,
                mesh,
                layout,
                agreed[i].shape if shapes[i] is None else shapes[i],
                dual(layout, border.same),
                in_sums(layout),
                counted(layout, sizes),
                beside if has_gradient and part.dtype.is_floating_point | part.dtype.is_complex else [],
            )
            if self.check:
                MeshTensor.from_local(part.detach(), mesh, layout, shape=flat[i].shape, run_check=True)
        return pytree.tree_unflatten(flat, tree)

    def _shapes(self, result: Any, asked: str) -> list[Any]:
        if self.shapes is None or self.shapes == "agree":
            return [None] * len(pytree.tree_leaves(result))
        is_one = all(isinstance(n, int) for n in self.shapes)
        return spread(list(self.shapes) if is_one else tuple(self.shapes), result, f"{asked}, with shapes=")

    def _agreed(
        self, flat: Sequence[Any], layouts: Sequence[Layout | None], leaves: Sequence[Any], mesh: DeviceMesh, fault: str
    ) -> list[Agreed]:
        """What the ranks agree on; they compare at the first call of its kind, or at each with ``shapes="agree"``."""
        do = "Return what outputs= says, from every rank."
        if torch.compiler.is_compiling() or any(isinstance(t, torch.Tensor) and is_traced(t) for t in (*flat, *leaves)):
            if fault:
                raise LocalResultError(asked=f"take the results of {self.name} by local", found=fault, do=do)
            return [Agreed(None, isinstance(t, torch.Tensor) and t.requires_grad) for t in flat]
        key = (self, torch.is_grad_enabled(), *map(_kind, leaves))
        agreed = None if self.shapes == "agree" else _agreements.now().get(key)
        if agreed is None:
            agreed = agree(self.name, mesh, list(zip(flat, layouts, strict=True)), fault, do)
            if len(_known) >= _MOST:
                _known.clear()
            _known[key] = agreed
        elif fault or len(agreed) != len(flat):
            raise LocalResultError(
                asked=f"take the results of {self.name} by local",
                found=fault or f"it returns {len(flat)} values, and {len(agreed)} at an earlier call of this kind",
                do=do,
            )
        return agreed


_known: dict[Any, list[Agreed]] = {}
_agreements = PerWorld(_known, _known.clear)


def _kind(leaf: Any) -> Any:
    """What of an argument may decide the shapes of results, the same on every rank."""
    if isinstance(leaf, MeshTensor):
        return leaf.spec, leaf.requires_grad
    return type(leaf), (repr(leaf) if isinstance(leaf, (int, float, complex, str, torch.dtype, type(None))) else "")


def _placements(leaf: Any, _entry: Any) -> Layout | None:
    return leaf.placements if isinstance(leaf, MeshTensor) else None


def _layout(leaf: Any, lies: Layout | None, entry: Any, mesh_ndim: int, asked: str) -> Layout | None:
    """The placements that a leaf is to have, ``None`` for one that is passed as it is."""
    if lies is None:
        if entry is not None and entry is not AS_IT_LIES:
            what = "a plain tensor" if isinstance(leaf, torch.Tensor) else f"{leaf!r}, no tensor"
            raise LocalPlacementError(
                asked=asked,
                found=f"it is {what}, and inputs= has placements for it",
                do="Distribute it first (distribute_tensor, from_local), or put None in its place: then each rank "
                "passes its own.",
            )
        return None
    if entry is None:
        raise LocalPlacementError(
            asked=asked,
            found=f"it is a MeshTensor {show_all(lies)}, and inputs= has no placements for it",
            do="Give its placements, one per mesh dim; by name for an argument passed by keyword.",
        )
    return lies if entry is AS_IT_LIES else check_placements(entry, mesh_ndim, leaf.ndim)


def _mesh_dims(dims: Sequence[int | str], names: Sequence[str], ndim: int, asked: str) -> frozenset[int]:
    known = set()
    for dim in dims:
        if isinstance(dim, str) and dim in names:
            known.add(list(names).index(dim))
        elif isinstance(dim, int) and -ndim <= dim < ndim:
            known.add(dim % ndim)
        else:
            raise LocalPlacementError(
                asked=asked,
                found=f"communicates= names the mesh dim {dim!r}, and there are {', '.join(names) or ndim}",
                do="Use names or numbers of mesh dims.",
            )
    return frozenset(known)


@traceable
def _refuse_parts(function: str, shape: Sequence[int], layout: Sequence[Placement]) -> None:
    raise TracingError(
        asked=f"compile {function} by local",
        found=f"an argument {tuple(shape)} {show_all(layout)} has parts of unequal shapes, and a graph cannot wait for "
        "what other ranks answer",
        do="Say the global shapes of the results: shapes=.",
    )


def _fault(flat: Sequence[Any], layouts: Sequence[Layout | None]) -> str:
    for i, (value, layout) in enumerate(zip(flat, layouts, strict=True)):
        if isinstance(value, MeshTensor):
            return f"result {i} is a MeshTensor {show_all(value.placements)}, not a part of this rank"
        if isinstance(value, torch.Tensor) and layout is None:
            return f"result {i} is a tensor {tuple(value.shape)}, and outputs= has no placements for it"
        if not isinstance(value, torch.Tensor) and layout is not None:
            return f"result {i} is a {type(value).__name__}, no tensor, and outputs= says {show_all(layout)}"
    return ""


def local(
    fn: Callable[..., Any] | None = None,
    *,
    inputs: Any = None,
    outputs: Any,
    mesh: DeviceMesh | None = None,
    shapes: Any = None,
    move: bool = True,
    communicates: Sequence[int | str] | int | str = (),
    check: bool = False,
) -> Callable[..., Any]:
    """``fn``, which computes with this rank's parts, as a function of MeshTensors; also a decorator.

    ``inputs`` says how the tensors among the arguments are to lie: a tuple with an entry per positional argument, a
    dict from argument names to entries, or one entry for all tensors. By default each argument lies as it does. An
    entry is a placement (on a mesh of one dim), a list with one placement per mesh dim, a dict ``{mesh dim:
    placement}`` with the other dims replicated, or ``None`` for what is passed as it is. A tuple has an entry for each
    part of a nested argument. An argument with other placements is redistributed, or refused with ``move=False``.

    ``outputs`` says in the same way how the results lie. The ranks agree on the global shapes at the first call with
    arguments of these layouts and send nothing afterwards; ``shapes`` gives them instead (a shape, or a tuple of
    shapes), and ``shapes="agree"`` compares at every call, for results whose shapes depend on data.

    Placements of gradients are derived, see docs/local-code.md. ``communicates`` names the mesh dims over which ``fn``
    communicates itself, by collectives whose backward is their transpose. With ``check`` the ranks compare replicated
    results at every call. ``fn`` runs under ``shardwise.on(None)``: tensors that it makes are local. Without a
    MeshTensor among the arguments ``fn`` is called as it is, so a program also runs on one device.

    Raises :class:`LocalPlacementError` for placements that do not fit, :class:`LocalResultError` on every rank for
    results that are not what ``outputs`` says, and :class:`LocalGradientError` for a partial max, min or product that
    needs a gradient.
    """
    if fn is None:
        return lambda function: local(
            function,
            inputs=inputs,
            outputs=outputs,
            mesh=mesh,
            shapes=shapes,
            move=move,
            communicates=communicates,
            check=check,
        )
    dims = (communicates,) if isinstance(communicates, (int, str)) else tuple(communicates)
    function = LocalFunction(fn, inputs, outputs, mesh, shapes, move, dims, check)

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except Exception as error:
            tell(error, function.name)
            raise

    call = wraps(fn)(call) if hasattr(fn, "__name__") else call
    call.local_function = function  # type: ignore[attr-defined]
    return call
