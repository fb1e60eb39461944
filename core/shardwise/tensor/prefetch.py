"""Prefetch: gather parameters that are sharded over a data dim ahead of their use, one unit of a module at a time.

While one unit computes, the parameters of the next are gathered. The copies are freed after use and gathered again for
backward, in reverse order. Gradients are reduce-scattered while backward runs. Parameters are replaced only in a unit's
``forward``, by waiting tensors (see ``waiting``) that ask for the copy whenever they are read. So autograd saves no
copy, and a read of a copy that was freed gathers it again.

Only the program's own order starts a gather (a unit's forward, the first read of a unit in backward). Time and memory
have no influence, so all ranks issue the same collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from attrs import define
from torch import nn

from shardwise.comm.async_result import AsyncResult
from shardwise.comm.coalescing import coalesced
from shardwise.comm.redistribute import route
from shardwise.comm.run_step import Start
from shardwise.errors import ArgumentError, PlacementError
from shardwise.kernel.arguments import check_module, refuse_argument
from shardwise.kernel.placements import REPLICATE, Placement, Shard
from shardwise.kernel.spec import TensorSpec
from shardwise.private_torch.dispatch import in_backward, swap_parameter, version_of
from shardwise.tensor.autograd import reduce_later
from shardwise.tensor.grad_layouts import grad_layout
from shardwise.tensor.late_grads import late, layout_until_later
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tensor.waiting import waiting

__all__ = ["prefetch"]


def prefetch(module: nn.Module, mesh_dim: str | int, *, units: Sequence[nn.Module] | None = None) -> nn.Module:
    """Gather a module's parameters over ``mesh_dim`` ahead of their use, as fully sharded data parallelism does.

    ``module`` has parameters that are sharded over ``mesh_dim`` (a name of the mesh's, or a number), as
    :func:`shardwise.distribute_module` makes them. ``units`` are its parts in the order of its forward: the parameters
    of a unit are gathered together while the unit before it computes. By default units are the modules in the outermost
    ``ModuleList`` and ``Sequential`` containers. Parameters in no unit are gathered for the whole forward.

    Parameters, optimizer and ``state_dict`` stay as they are. In a unit's ``forward`` its parameters are whole over
    ``mesh_dim`` and cannot be written. The numbers are the same as without prefetch. Returns the module. Raises
    :class:`PlacementError` if no parameter is sharded over ``mesh_dim``.
    """
    check_module("prefetch parameters", module)
    _check_mesh_dim(module, mesh_dim)
    if units is not None:
        _check_units(module, units)
    schedule = _Schedule(module, list(_default_units(module) if units is None else units), mesh_dim)
    if not any(unit.copies for unit in (schedule.root, *schedule.units)):
        raise PlacementError(
            asked=f"prefetch the parameters of a {type(module).__name__} over mesh dim {mesh_dim!r}",
            found="none of them is a MeshTensor that is sharded over it",
            do=f"Shard them first: distribute_module(module, mesh, {{'*': {{{mesh_dim!r}: Shard(0)}}}}).",
            mesh_dim=mesh_dim,
        )
    schedule.root.attach()
    for unit in schedule.units:
        unit.attach()
    return module


def _check_mesh_dim(module: nn.Module, mesh_dim: Any) -> None:
    """Raise unless ``mesh_dim`` is a name or a number of a mesh dim of some parameter, if any lies on a mesh."""
    asked = "prefetch parameters"
    if type(mesh_dim) is not int and not isinstance(mesh_dim, str):
        refuse_argument(asked, "mesh_dim", mesh_dim, 'Give the name of a mesh dim, such as "dp", or its number.')
    meshes = dict.fromkeys(p.device_mesh for p in module.parameters() if isinstance(p, MeshTensor))
    dims = [dim for mesh in meshes for dim in (*(mesh.mesh_dim_names or ()), *range(mesh.ndim))]
    if dims and mesh_dim not in dims:
        raise PlacementError(
            asked=f"prefetch the parameters of a {type(module).__name__} over mesh dim {mesh_dim!r}",
            found=f"their mesh has the dims {', '.join(map(str, dict.fromkeys(dims)))}",
            do="Give the name or the number of one of them.",
            mesh_dim=mesh_dim,
        )


def _check_units(module: nn.Module, units: Any) -> None:
    """Raise :class:`ArgumentError` unless ``units`` is a list of modules that are parts of ``module``."""
    asked, do = "prefetch parameters", "Give a list of its submodules, as in units=list(model.layers)."
    if isinstance(units, (str, nn.Module)) or not isinstance(units, Iterable):
        refuse_argument(asked, "units", units, do)
    parts = set(module.modules())
    for unit in units:
        if not isinstance(unit, nn.Module):
            refuse_argument(asked, "units", unit, do)
        if unit not in parts:
            raise ArgumentError(
                asked=asked,
                found=f"its argument 'units' has a {type(unit).__name__} that is no part of the "
                f"{type(module).__name__}",
                do=do,
                argument="units",
            )


def _default_units(module: nn.Module) -> Iterator[nn.Module]:
    """The modules in the outermost containers."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        yield from module
    else:
        for child in module.children():
            yield from _default_units(child)


# -- copies ------------------------------------------------------------------------------------------------------


@define(eq=False)
class _Content:
    """What a parameter holds at one time. Either number changes with a write, the local tensor with ``p.data = y``."""

    local: torch.Tensor
    written: int
    local_written: int

    @classmethod
    def of(cls, leaf: Any) -> _Content:
        return cls(leaf._local_tensor, version_of(leaf), version_of(leaf._local_tensor))

    def is_in(self, leaf: Any) -> bool:
        """Whether the parameter holds it still."""
        local = leaf._local_tensor
        return local is self.local and version_of(leaf) == self.written and version_of(local) == self.local_written


class _Copy:
    """The gathered copy of one parameter: under way, complete, or freed."""

    def __init__(self, leaf: Any, target: TensorSpec, gather: Start) -> None:
        self.leaf = leaf
        self._gather = gather
        self.gathered_from = leaf._spec
        # The spec marks it as a copy, to which writing is refused: a write would not reach the parameter.
        self.spec = target.as_copy()
        self._result: AsyncResult | None = None
        self._gathered: _Content | None = None

    def is_of(self, leaf: Any) -> bool:
        """Whether it is the copy of this parameter in the layout that it has now."""
        return self.leaf is leaf and self.gathered_from is leaf._spec

    def start(self) -> None:
        """Start to gather, unless the copy is complete or under way."""
        if self._result is None or self._gathered is None or not self._gathered.is_in(self.leaf):
            self._gathered = _Content.of(self.leaf)
            self._result = self._gather(self._gathered.local)

    def wait(self) -> torch.Tensor:
        self.start()
        assert self._result is not None
        return self._result.wait()

    def free(self) -> None:
        self._result = self._gathered = None

    def tensor(self, unit: _Unit) -> Any:
        """The tensor that replaces the parameter in its unit's forward."""
        if torch.is_grad_enabled() and self.leaf.requires_grad:
            return _Gather.apply(self.leaf, self, unit)  # type: ignore[no-untyped-call]
        return waiting(_Use(self, unit), self.spec, self.leaf.device)


class _Use:
    """The copy in one forward and its backward; the source of a waiting tensor."""

    final = False

    def __init__(self, copy: _Copy, unit: _Unit) -> None:
        self._copy = copy
        self._unit = unit
        self._content = _Content.of(copy.leaf)

    def wait(self) -> torch.Tensor:
        if not self._content.is_in(self._copy.leaf):
            raise RuntimeError(
                f"a parameter of shape {tuple(self._copy.leaf.shape)} that is needed for a gradient was modified by an "
                "inplace operation after forward; run backward first"
            )
        self._unit.enter()
        return self._copy.wait()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Any, copy: _Copy, unit: _Unit) -> Any:
        ctx.copy, ctx.grad = copy, grad_layout(leaf._spec.placements)
        ctx.set_materialize_grads(False)
        return waiting(_Use(copy, unit), copy.spec, leaf.device)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        # By now every op that used the parameter has run its backward.
        ctx.copy.free()
        if grad is not None and not _waits(grad, ctx.grad):
            grad = reduce_later(grad, ctx.grad)
        return grad, None, None


def _waits(grad: Any, placements: Sequence[Placement]) -> bool:
    """Whether a gradient is to reach its leaf as it is, which then lets it wait."""
    return late.is_open and layout_until_later(grad, grad._spec.with_placements(placements)) is not None


# -- units -------------------------------------------------------------------------------------------------------


class _Unit:
    """A module whose own parameters are gathered together."""

    def __init__(self, schedule: _Schedule, module: nn.Module, inner: Sequence[nn.Module]) -> None:
        self.schedule = schedule
        self.module = module
        others = {id(m) for unit in inner for m in unit.modules()}
        owners = [m for m in module.modules() if id(m) not in others]
        self.places = [(m, name) for m in owners for name, _ in m.named_parameters(recurse=False)]
        self.copies: dict[int, _Copy] = {}
        self._swapped: list[tuple[nn.Module, str, Any]] = []
        self.refresh()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "copies": {}}  # a copied or saved module has no collectives under way

    def attach(self) -> None:
        self.module.register_forward_pre_hook(self.before, prepend=True)
        self.module.register_forward_hook(self.after, always_call=True)

    def refresh(self) -> None:
        """Look the parameters up again: loading a checkpoint may have replaced them, ``p.data = y`` their layouts."""
        copies: dict[int, _Copy] = {}
        for owner, name in self.places:
            leaf: Any = getattr(owner, name)
            if id(leaf) in copies:
                continue
            known = self.copies.get(id(leaf))
            copy = known if known is not None and known.is_of(leaf) else self._copy_of(leaf)
            if copy is not None:
                copies[id(leaf)] = copy
        self.copies = copies

    def _copy_of(self, leaf: Any) -> _Copy | None:
        target = _gathered_placements(leaf, self.schedule.mesh_dim)
        if target is None:
            return None
        spec, steps = route(leaf._spec, target)
        return None if steps is None or steps.start is None else _Copy(leaf, spec, steps.start)

    def start(self) -> None:
        with coalesced():
            for copy in self.copies.values():
                copy.start()

    def free(self) -> None:
        for copy in self.copies.values():
            copy.free()

    def enter(self) -> None:
        """Called when the unit's parameters are needed."""
        self.schedule.enter(self)

    def before(self, _: nn.Module, __: Any) -> None:
        if self._swapped:  # called from within its own forward
            return
        if self is self.schedule.root:
            self.schedule.begin()
        else:
            self.refresh()
        self.enter()
        tensors = {key: copy.tensor(self) for key, copy in self.copies.items()}
        for owner, name in self.places:
            leaf = getattr(owner, name)
            if id(leaf) in tensors:
                self._swapped.append((owner, name, leaf))
                swap_parameter(owner, name, tensors[id(leaf)])

    def after(self, _: nn.Module, __: Any, ___: Any) -> None:
        for owner, name, leaf in self._swapped:
            swap_parameter(owner, name, leaf)
        self._swapped = []
        self.schedule.leave(self)


def _gathered_placements(leaf: Any, mesh_dim: str | int) -> list[Placement] | None:
    """A parameter's placements once it is whole over the mesh dim; None if it is not sharded over it."""
    if not isinstance(leaf, MeshTensor):
        return None
    names = leaf.device_mesh.mesh_dim_names or ()
    if isinstance(mesh_dim, str) and mesh_dim not in names:
        return None
    at = names.index(mesh_dim) if isinstance(mesh_dim, str) else mesh_dim
    if at >= leaf.device_mesh.ndim or not isinstance(leaf.placements[at], Shard):
        return None
    return [REPLICATE if m == at else p for m, p in enumerate(leaf.placements)]


class _Schedule:
    """Which units are gathered: the one that computes, the next one in the direction of the pass, and the root."""

    def __init__(self, module: nn.Module, modules: Sequence[nn.Module], mesh_dim: str | int) -> None:
        self.mesh_dim = mesh_dim
        self.root = _Unit(self, module, modules)
        # A unit that is part of another unit gathers its own parameters. ``Module`` compares by identity.
        self.units = [_Unit(self, m, [o for o in modules if o is not m and o in m.modules()]) for m in modules]
        self._current: _Unit | None = None

    def begin(self) -> None:
        """Called when the whole module's forward begins. Copies of the previous pass are stale."""
        self._current = None
        for unit in (self.root, *self.units):
            unit.free()
            unit.refresh()
        self.root.start()
        if self.units:
            self.units[0].start()

    def enter(self, unit: _Unit) -> None:
        """Gather a unit that is read, and the next one; free the others."""
        if unit is self.root or unit is self._current:
            return
        self._current = unit
        at = self.units.index(unit) + (-1 if in_backward() else 1)
        ahead = self.units[at] if 0 <= at < len(self.units) else None
        for other in self.units:
            if other is not unit and other is not ahead:
                other.free()
        unit.start()
        if ahead is not None:
            ahead.start()

    def leave(self, unit: _Unit) -> None:
        """Called when a unit's forward ends. The last unit stays gathered, because backward begins with it."""
        if in_backward():  # a recomputation, whose parameters are read next
            return
        if unit is not self.root:
            self._current = None
        stays = torch.is_grad_enabled() and unit in (self.root, self.units[-1] if self.units else None)
        if not stays:
            unit.free()
