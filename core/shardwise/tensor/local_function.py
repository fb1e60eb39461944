"""``shardwise.local``: a function of this rank's parts, called with MeshTensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from attrs import field, frozen
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.rank_failures import tell
from shardwise.errors import LocalPlacementError, LocalResultError, MeshMismatchError, TracingError
from shardwise.kernel.arguments import check_flag, check_mesh, check_sizes, refuse_argument
from shardwise.kernel.placements import Placement, shard_dim, show_all
from shardwise.kernel.world import PerWorld
from shardwise.private_torch import trees as pytree
from shardwise.private_torch.dispatch import version_of
from shardwise.private_torch.fake import is_rehearsing
from shardwise.private_torch.tracing import is_traced
from shardwise.private_torch.transforms import are_transforms_active, below_transforms, is_wrapped
from shardwise.tensor import autograd, local_border
from shardwise.tensor.batched import is_on_mesh
from shardwise.tensor.local_gradients import counted, dual, in_sums, refuse_without_gradient, same_work
from shardwise.tensor.local_parts import refuse_dtensor
from shardwise.tensor.local_places import layout_of_leaf, layouts_in, mesh_dims, normal, of_arguments, spread
from shardwise.tensor.local_results import Agreed, agree, fault_of
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tensor.on_mesh import locally
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


class Crossing(NamedTuple):
    """How a tensor crosses the border: its layout, that of its gradient's parts and of the parts of their gradients,
    and by how much a part of an average counts.
    """

    layout: Layout
    grad: Layout
    again: Layout
    weight: int


Outcome = tuple[Crossing | None, Sequence[int] | None, bool]


def _kept() -> PerWorld[dict[Any, Any]]:
    known: dict[Any, Any] = {}
    return PerWorld(known, known.clear)


@frozen(eq=False)
class LocalFunction:
    """A function of local tensors, and what :func:`local` was told of it.

    What is known of its calls is kept here, so that nothing keeps the function, or what it refers to, alive.
    """

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
    _borders: PerWorld[dict[Any, Any]] = field(factory=_kept, init=False, repr=False)
    _outcomes: PerWorld[dict[Any, Any]] = field(factory=_kept, init=False, repr=False)

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
                layout = layout_of_leaf(leaf, layout_of(leaf, own), own, len(sizes), of_argument)
                layouts.append(layout)
                of_leaf.append(name)
        results = enumerate(layouts_in(normal(self.outputs, names, len(sizes), asked)))
        communicates = mesh_dims(self.communicates, names, len(sizes), asked)
        named = [(name, layout) for name, layout in zip(of_leaf, layouts, strict=True) if layout is not None]
        same = same_work(self.name, named, [(str(i), layout) for i, layout in results], sizes, communicates)
        return Border(tuple(of_leaf), tuple(layouts), same)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with this rank's parts."""
        leaves, tree = _flattened(args, kwargs)
        is_compiled = torch.compiler.is_compiling()
        transformed = not is_compiled and are_transforms_active()
        placed = [leaf for leaf in leaves if isinstance(leaf, MeshTensor) or (transformed and is_on_mesh(leaf))]
        for leaf in () if is_compiled else leaves:
            refuse_dtensor(leaf, f"call {self.name} by local, with a DTensor among its arguments")
        if not placed:
            return self.fn(*args, **kwargs)
        mesh = self.mesh if self.mesh is not None else placed[0].device_mesh
        for tensor in placed:
            if tensor.device_mesh is not mesh and tensor.device_mesh != mesh:
                raise MeshMismatchError(
                    asked=f"call {self.name} by local",
                    found=f"its arguments lie on {mesh} and on {tensor.device_mesh}",
                    do="Bring them to one mesh first: full_tensor(), then distribute_tensor().",
                )
        key = None
        if not (is_compiled or any(isinstance(t, torch.Tensor) and is_traced(t) for t in leaves)):
            key = (tree, torch.is_grad_enabled(), *map(_kind, leaves))
        known = None if key is None or tree is None else self._borders.now().get(key)
        if known is None:
            # Not `mesh.shape`: dynamo of torch 2.11 and 2.12 cannot go through it.
            sizes = tuple(mesh.size(m) for m in range(mesh.ndim))
            border = self.border(args, kwargs, mesh.mesh_dim_names or (), sizes, _placements)
            if (key is None or is_rehearsing()) and self.shapes is None:
                self._refuse_uneven(leaves, border.arguments, sizes)
            known = border, [None if own is None else _crossing(own, border.same, sizes) for own in border.arguments]
            if key is not None and tree is not None:
                _remember(self._borders.now(), key, known)
        border, crossings = known
        parts = [
            leaf if own is None else self._enter(leaf, name, own)
            for leaf, name, own in zip(leaves, border.names, crossings, strict=True)
        ]
        versions = [] if is_compiled else [_version(part) for part in parts]
        with locally():
            if tree is None:
                local_args, local_kwargs = pytree.tree_unflatten(parts, pytree.tree_structure((args, kwargs)))
                result = self.fn(*local_args, **local_kwargs)
            else:
                result = self.fn(*parts[: len(args)], **dict(zip(kwargs, parts[len(args) :], strict=True)))
        if not is_compiled and versions != [_version(part) for part in parts]:
            self._note_writes(leaves, parts, versions, border.arguments)
        return self._on_mesh(result, parts, border, mesh, key)

    def _note_writes(self, leaves: Sequence[Any], parts: Sequence[Any], versions: Sequence[int], own: Any) -> None:
        """Have autograd and copies know what the function wrote to its arguments. What it wrote to a copy is lost."""
        for leaf, part, version, layout in zip(leaves, parts, versions, own, strict=True):
            if layout is None or _version(part) == version:
                continue
            if leaf.placements != layout:
                raise LocalResultError(
                    asked=f"call {self.name} by local",
                    found=f"it writes to an argument {tuple(leaf.shape)} {show_all(leaf.placements)}, which was moved "
                    f"to {show_all(layout)}: the argument itself is not written",
                    do="Clone it in the function and return it, or redistribute it before the call.",
                )
            increment_version(leaf)

    def _enter(self, tensor: MeshTensor, name: str, crossing: Crossing) -> torch.Tensor:
        layout = crossing.layout
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
        # What a transform's tensor requires, those in it may not say.
        is_transformed = type(tensor) is torch.Tensor
        if not (is_transformed or (torch.is_grad_enabled() and tensor.requires_grad)):
            return autograd.to_local(tensor, None)
        refuse_without_gradient(self.name, f"argument {name}", layout)
        return local_border.enter(tensor, crossing.grad, crossing.again, crossing.weight)

    def _refuse_uneven(self, leaves: Sequence[Any], layouts: Sequence[Layout | None], sizes: Sequence[int]) -> None:
        """Raise :class:`TracingError` where the shapes of results cannot be told from this rank's parts."""
        for leaf, layout in zip(leaves, layouts, strict=True):
            shards = [1] * (leaf.ndim if layout is not None else 0)
            for placement, size in zip(layout or (), sizes, strict=False):
                if (dim := shard_dim(placement)) is not None:
                    shards[dim] *= size
            if any(n % count for n, count in zip(leaf.shape if shards else (), shards, strict=True)):
                _refuse_parts(self.name, tuple(leaf.shape), list(layout or ()))

    # -- its results --
    def _on_mesh(self, result: Any, parts: Sequence[Any], border: Border, mesh: DeviceMesh, key: Any) -> Any:
        """The results as MeshTensors."""
        flat, tree = ([result], None) if isinstance(result, torch.Tensor) else pytree.tree_flatten(result)
        outcome = self._outcome(result, flat, border, mesh, key)
        beside = []
        if torch.is_grad_enabled() and len(border.same) < mesh.ndim:
            beside = [t for t in parts if isinstance(t, torch.Tensor) and (t.requires_grad or _is_transformed(t))]
        for i, (part, (crossing, shape, has_gradient)) in enumerate(zip(flat, outcome, strict=True)):
            if crossing is None:
                continue
            if has_gradient:
                refuse_without_gradient(self.name, f"result {i}", crossing.layout)
            reached = beside if has_gradient and (part.dtype.is_floating_point or part.dtype.is_complex) else []
            flat[i] = local_border.leave(
                part, mesh, crossing.layout, shape, crossing.grad, crossing.again, crossing.weight, reached
            )
            if self.check:
                MeshTensor.from_local(part.detach(), mesh, crossing.layout, shape=flat[i].shape, run_check=True)
        return flat[0] if tree is None else pytree.tree_unflatten(flat, tree)

    def _outcome(self, result: Any, flat: Sequence[Any], border: Border, mesh: DeviceMesh, key: Any) -> list[Outcome]:
        """For each result how it crosses the border, its global shape if that must be said, and whether it has a
        gradient. The ranks compare at the first call of its kind, or at each with ``shapes="agree"``.
        """
        asked = f"take the results of {self.name} by local"
        told = self.shapes is not None and self.shapes != "agree"
        of_shapes = ", and parts of tensors of the global shapes in shapes=" if told else ""
        do = f"Return what outputs= says{of_shapes}, from every rank."
        known: list[Outcome] | None = None
        if key is not None and self.shapes != "agree":
            known = self._outcomes.now().get(key)
        if known is not None:
            fault = fault_of(flat, [None if one[0] is None else one[0].layout for one in known])
            if not fault:
                return known
            raise LocalResultError(asked=asked, found=fault, do=do)
        layouts: list[Layout | None] = [None] * len(flat)
        try:
            entries = spread(normal(self.outputs, mesh.mesh_dim_names or (), mesh.ndim, asked), result, asked)
            layouts = [None if entry is None else tuple(entry) for entry in entries]
            shapes = self._shapes(result, asked)
            fault = fault_of(flat, layouts)
            if told and key is not None and not fault:  # some ranks may have the part that the shape gives them
                fault = local_border.fault_of_shapes(flat, mesh, layouts, shapes)
        except LocalPlacementError as error:
            shapes, fault = [], error.found
        if key is None:
            if fault:
                raise LocalResultError(asked=asked, found=fault, do=do)
            agreed = [Agreed(None, isinstance(t, torch.Tensor) and t.requires_grad) for t in flat]
        else:
            with below_transforms():
                agreed = agree(self.name, mesh, list(zip(flat, layouts, strict=True)), fault, do)
        outcome = [
            (
                None if layout is None else _crossing(layout, border.same, mesh.shape),
                one.shape if shape is None else shape,
                torch.is_grad_enabled() and one.has_gradient,
            )
            for layout, shape, one in zip(layouts, shapes, agreed, strict=True)
        ]
        if key is not None:
            _remember(self._outcomes.now(), key, outcome)
        return outcome

    def _shapes(self, result: Any, asked: str) -> list[Any]:
        if self.shapes is None or self.shapes == "agree":
            return [None] * len(pytree.tree_leaves(result))
        is_one = all(isinstance(n, int) for n in self.shapes)
        return spread(list(self.shapes) if is_one else tuple(self.shapes), result, f"{asked}, with shapes=")


def _remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep a value; when there are too many, forget all of them: every rank does so at the same call."""
    if len(known) >= _MOST:
        known.clear()
    known[key] = value


# Types of arguments that have no tensors inside.
_LEAVES = frozenset({MeshTensor, torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None), torch.dtype})


def _flattened(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """The leaves of the arguments, and what stands for their structure: ``None`` where values are nested."""
    values = [*args, *kwargs.values()]
    for value in values:
        if type(value) not in _LEAVES:
            return pytree.tree_leaves((args, kwargs)), None
    return values, (len(args), *kwargs)


def _crossing(layout: Layout, same: frozenset[int], sizes: Sequence[int]) -> Crossing:
    return Crossing(layout, dual(layout, same), in_sums(layout), counted(layout, sizes))


def _kind(leaf: Any) -> Any:
    """What of an argument may decide the shapes of results, the same on every rank."""
    if isinstance(leaf, MeshTensor):
        return leaf.spec, leaf.requires_grad
    if _is_transformed(leaf) and is_on_mesh(leaf):
        return leaf.spec, leaf.requires_grad, "transformed"
    return type(leaf), (repr(leaf) if isinstance(leaf, (int, float, complex, str, torch.dtype, type(None))) else "")


def _placements(leaf: Any, _entry: Any) -> Layout | None:
    if isinstance(leaf, MeshTensor) or (_is_transformed(leaf) and is_on_mesh(leaf)):
        return leaf.placements  # type: ignore[no-any-return]
    return None


def _version(part: Any) -> int:
    """How often memory was written; 0 for what has no such number."""
    return version_of(part) if type(part) is torch.Tensor and not part.is_inference() else 0


def _is_transformed(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not torch.compiler.is_compiling() and is_wrapped(leaf)


@traceable
def _refuse_parts(function: str, shape: Sequence[int], layout: Sequence[Placement]) -> None:
    raise TracingError(
        asked=f"compile or rehearse {function} by local",
        found=f"an argument {tuple(shape)} {show_all(layout)} has parts of unequal shapes, and no other rank can be "
        "asked for the shapes of its results",
        do="Say the global shapes of the results: shapes=.",
    )


def _check_shapes(asked: str, shapes: Any) -> None:
    """Raise :class:`ArgumentError` unless this is None, "agree", a shape, or a tuple of these."""
    if shapes is None or shapes == "agree":
        return
    if isinstance(shapes, tuple) and not all(hasattr(n, "__index__") for n in shapes):
        for shape in shapes:
            _check_shapes(asked, shape)
        return
    check_sizes(asked, shapes, "shapes", 'shapes=(8, 4), shapes=((8, 4), (8,)) or shapes="agree"')


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
    asked = "make a local function"
    if not callable(fn):
        refuse_argument(asked, "fn", fn, "Pass the function that computes with this rank's parts.")
    if mesh is not None:
        check_mesh(asked, mesh, "mesh")
    check_flag(asked, move, "move")
    check_flag(asked, check, "check")
    _check_shapes(asked, shapes)
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
