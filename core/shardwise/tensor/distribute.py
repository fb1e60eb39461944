"""Make MeshTensors from whole tensors and whole modules."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.agreement import broadcast_whole
from shardwise.comm.layout_agreement import agree_on_layout, agree_on_plan
from shardwise.comm.meeting import meet
from shardwise.comm.policy import PolicyScope
from shardwise.comm.policy import communication as policy
from shardwise.engine.decided import in_force, use_decisions
from shardwise.errors import LeafError, PlacementCountError, PlacementError, PlanFitError
from shardwise.kernel.placements import REPLICATE, Placement, check_placements
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta, unexpanded
from shardwise.private_torch.distributed import current_mesh
from shardwise.private_torch.tracing import is_traced
from shardwise.program.step_plan import StepPlan, read_plan
from shardwise.tensor.autograd import check_device
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tensor.names import name_tensor, tag_by_name
from shardwise.tensor.on_mesh import enter_in_forward
from shardwise.tensor.shards import scatter_local
from shardwise.tensor.traceable import traceable

__all__ = ["distribute_module", "distribute_tensor"]

Places = Sequence[Placement] | Mapping[str, Placement]
PartitionFn = Callable[[str, nn.Module, DeviceMesh], None]

at_module: list[Callable[[], None]] = []
"""Called when a module has been distributed: what stands above this package and wants to know."""


# -- tensors -----------------------------------------------------------------------------------------------------


@traceable
def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> MeshTensor:
    """A leaf MeshTensor from a whole tensor. Every rank must call this, with the same shape, dtype and placements.

    The values are those of the mesh's first rank, which sends them to the others. ``src_data_rank=None`` uses each
    rank's own values without communication; they must be the same. Keeps ``requires_grad``; a ``Parameter`` stays a
    ``Parameter``. Placements default to replicated. Raises :class:`PlacementError`, :class:`PlacementCountError`,
    :class:`DeviceMismatchError` or :class:`LeafError` before it communicates, and :class:`RankDisagreementError` on
    every rank if the ranks differ.
    """
    mesh = current_mesh() if device_mesh is None else device_mesh
    if isinstance(tensor, MeshTensor):
        return tensor if placements is None else tensor.redistribute(mesh, placements)
    if tensor.grad_fn is not None and torch.is_grad_enabled() and not is_traced(tensor):
        raise LeafError(
            asked=f"distribute a tensor of shape {tuple(tensor.shape)}",
            found=f"only a leaf can be distributed, and this is the result of an op ({tensor.grad_fn.name()})",
            do="Use distribute_tensor to distribute leaf tensors, such as its detach(). For a gradient of that op take "
            "MeshTensor.from_local(t, mesh, [Replicate()] * mesh.ndim).redistribute(placements=placements).",
        )
    check_device(tensor, mesh)
    layout = [REPLICATE] * mesh.ndim if placements is None else placements
    spec = TensorSpec(mesh, check_placements(layout, mesh.ndim, tensor.ndim), unexpanded(TensorMeta.of(tensor)))
    meet(mesh)
    whole = tensor.detach()
    if mesh.size() > 1 and not is_traced(whole):
        if src_data_rank is not None and whole.device.type != "meta":
            whole = broadcast_whole(whole, spec, src_data_rank, requires_grad=tensor.requires_grad)
        else:
            agree_on_layout(spec, "distribute_tensor")
    sharded = MeshTensor(scatter_local(whole, spec), spec)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(sharded, requires_grad=tensor.requires_grad)  # type: ignore[return-value]
    return sharded.requires_grad_(tensor.requires_grad)


# -- modules -----------------------------------------------------------------------------------------------------


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition: Mapping[str, Places] | PartitionFn | StepPlan | str | os.PathLike[str] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
    *,
    src_data_rank: int | None = 0,
    communication: PolicyScope | str | None = None,
) -> nn.Module:
    """Replace a module's parameters and buffers by MeshTensors, in place; returns the module.

    ``partition`` maps shell patterns on qualified names (``"layers.*.wq.weight"``) to placements: a list with one per
    mesh dim, or a mapping from mesh dim names, with the other dims replicated. The first pattern that matches is used.
    Tensors without a match are replicated. ``partition`` may also be torch's ``partition_fn(name, submodule, mesh)``,
    or a plan of the whole step (:func:`shardwise.plan`, or the name of its file): it places every parameter and buffer,
    and its decisions hold for all calls from here on.
    ``input_fn(module, inputs, mesh)`` runs before ``forward`` and ``output_fn(module, outputs, mesh)`` after it; both
    may leave the module out. Tied parameters stay tied. Tensors that the forward pass makes lie on the mesh
    (:func:`shardwise.on`). ``communication`` is the policy on what forward passes of the module, and their backward
    passes, send by themselves: ``"forbid"``, for example, or ``sw.communication("warn", over="tp")``.

    Raises :class:`PlacementError` for a pattern that matches nothing, and a
    :class:`PlanError` for a plan that cannot be read or is for another mesh or module.
    """
    mesh = current_mesh() if device_mesh is None else device_mesh
    names = [n for n, _ in module.named_parameters(remove_duplicate=False)]
    names += [n for n, _ in module.named_buffers(remove_duplicate=False)]
    if isinstance(partition, (str, os.PathLike)):
        partition = read_plan(partition)
    if isinstance(partition, StepPlan):
        partition = _install(partition, type(module).__name__, names, mesh)
    if callable(partition):
        for name, submodule in module.named_modules():
            partition(name, submodule, mesh)
    patterns = dict(partition) if isinstance(partition, Mapping) else {}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise PlacementError(
                asked=f"place the tensors {pattern!r} of a {type(module).__name__}",
                found=f"no parameter or buffer has such a name; there are {', '.join(names)}",
                do="Correct the pattern (shell style, on qualified names).",
                pattern=pattern,
            )
    _replace_tensors(module, mesh, patterns, src_data_rank)
    enter_in_forward(module, mesh, policy(communication) if isinstance(communication, str) else communication)
    for tell in tuple(at_module):
        tell()
    if input_fn is not None:
        before = _with_module(input_fn)
        module.register_forward_pre_hook(lambda m, inputs: before(m, inputs, mesh))
    if output_fn is not None:
        after = _with_module(output_fn)
        module.register_forward_hook(lambda m, _, outputs: after(m, outputs, mesh))
    return module


def _install(plan: StepPlan, kind: str, names: Sequence[str], mesh: DeviceMesh) -> dict[str, Places]:
    """Have all calls go by a plan from here on; the placements of these parameters and buffers by the plan."""
    asked = f"distribute a {kind} by the plan {plan.file.source or plan.file.program}"
    plan.check_mesh(asked, tuple(mesh.shape), mesh.mesh_dim_names)
    partition: dict[str, Places] = {}
    used = set()
    for name in names:
        known = plan.file.placements_of(name)
        if known is None:
            raise PlanFitError(
                asked=asked,
                found=f"no line of [parameters] places {name!r}",
                do="Plan the program again, with this module in it.",
                name=name,
            )
        used.add(known[0])
        partition[name] = known[1]
    unused = [pattern for pattern in plan.file.parameters if pattern not in used]
    if unused:
        raise PlanFitError(
            asked=asked,
            found=f"its line {unused[0]!r} of [parameters] fits nothing in the module",
            do="Plan the program again, with this module in it.",
            name=unused[0],
        )
    agree_on_plan(mesh, plan.file.digest, plan.decisions.fingerprint)
    use_decisions(plan.decisions, is_written=True)
    return partition


def _with_module(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of module, values and mesh; torch's older form leaves the module out."""
    if len(inspect.signature(function).parameters) == len(("values", "mesh")):
        return lambda _, values, mesh: function(values, mesh)
    return function


def _replace_tensors(
    module: nn.Module, mesh: DeviceMesh, patterns: Mapping[str, Places], src_data_rank: int | None
) -> None:
    by_id: dict[int, torch.Tensor] = {}
    for prefix, submodule in module.named_modules(remove_duplicate=False):
        own = [*submodule.named_parameters(recurse=False), *submodule.named_buffers(recurse=False)]
        for key, tensor in own:
            if isinstance(tensor, MeshTensor):
                continue
            if id(tensor) not in by_id:
                name = f"{prefix}.{key}" if prefix else key
                places = _placements_for(name, tensor, mesh, patterns)
                by_id[id(tensor)] = distribute_tensor(tensor, mesh, places, src_data_rank=src_data_rank)
                name_tensor(by_id[id(tensor)], name)
                if in_force.decisions is not None:
                    tag_by_name(by_id[id(tensor)], in_force.decisions.depth)
            setattr(submodule, key, by_id[id(tensor)])  # a buffer stays persistent or not, as it was


def _placements_for(
    name: str, tensor: torch.Tensor, mesh: DeviceMesh, patterns: Mapping[str, Places]
) -> tuple[Placement, ...]:
    chosen = None if in_force.placements is None else in_force.placements(name)
    if chosen is not None and len(chosen) == mesh.ndim:
        return check_placements(chosen, mesh.ndim, tensor.ndim)
    places = next((p for pattern, p in patterns.items() if fnmatchcase(name, pattern)), ())
    if not places:
        return (REPLICATE,) * mesh.ndim
    if not isinstance(places, Mapping):
        return check_placements(places, mesh.ndim, tensor.ndim)
    names = mesh.mesh_dim_names or ()
    unknown = [n for n in places if n not in names]
    if unknown:
        raise PlacementCountError(
            asked=f"place {name!r} by mesh dim {unknown[0]!r}",
            found=f"the mesh has the dims {', '.join(names) or 'without names'}",
            do="Use the mesh's dim names, or a list with one placement per mesh dim.",
            mesh_dim=unknown[0],
        )
    return check_placements([places.get(n, REPLICATE) for n in names], mesh.ndim, tensor.ndim)
