"""Make the parameters and buffers of whole modules MeshTensors."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.layout_agreement import agree_on_plan
from shardwise.comm.policy import PolicyScope, check_mesh_dims, know_mesh
from shardwise.comm.policy import communication as policy
from shardwise.comm.rank_failures import telling
from shardwise.engine.decided import in_force, use_decisions
from shardwise.engine.replaced_parameters import new_of
from shardwise.errors import (
    ArgumentError,
    LayoutError,
    PlacementError,
    PlanError,
    PlanFitError,
    PlanFitWarning,
    warn_user,
)
from shardwise.kernel.arguments import (
    check_arity,
    check_flag,
    check_function,
    check_mesh,
    check_module,
    refuse_argument,
)
from shardwise.kernel.placements import Placement
from shardwise.kernel.places import Places
from shardwise.private_torch.distributed import current_mesh
from shardwise.program.step_plan import StepPlan, read_plan
from shardwise.tensor.distribute import distribute_tensor
from shardwise.tensor.loaded_state import place_assigned
from shardwise.tensor.local_parts import check_dense, refuse_dtensor
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tensor.names import name_tensor, tag_by_name
from shardwise.tensor.on_mesh import enter_in_forward
from shardwise.tensor.patterns import check_patterns, check_placed, check_tied, placements_for
from shardwise.tensor.placed import is_unplaced, note_placed
from shardwise.tensor.replaced import replace, replace_in_attributes
from shardwise.tensor.sync_batch_norm import refuse_partial_statistics, take_whole_batches
from shardwise.tensor.weight_files import give_whole_to_files

__all__ = ["at_module", "distribute_module"]

PartitionFn = Callable[[str, nn.Module, DeviceMesh], None]

at_module: list[Callable[[DeviceMesh], None]] = []
"""Called with the mesh when a module has been distributed: what stands above this package and wants to know."""


@telling
def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition: Mapping[str, Places] | PartitionFn | StepPlan | str | os.PathLike[str] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
    *,
    src_data_rank: int | None = 0,
    communication: PolicyScope | str | None = None,
    loose: bool = False,
) -> nn.Module:
    """Replace a module's parameters and buffers by MeshTensors, in place; returns the module.

    ``partition`` maps shell patterns on qualified names (``"layers.*.wq.weight"``) to placements: a list with one per
    mesh dim, or a mapping from mesh dim names, with the other dims replicated. The first pattern that matches is used.
    Tensors without a match are replicated. Parameters that were made under :func:`shardwise.on` are placed as plain
    ones. A buffer that is not strided (sparse, of mkldnn) stays a plain tensor, unless a pattern is its full name.
    ``partition`` may also be torch's ``partition_fn(name, submodule, mesh)``, or a plan of the whole step
    (:func:`shardwise.plan`, or the name of its file): it places every parameter and buffer, and its decisions hold
    for all calls from here on. With ``loose``, a parameter that the plan does not place is replicated and a line
    that fits nothing is left out, each with a :class:`PlanFitWarning`; else they are errors.
    ``input_fn(module, inputs, mesh)`` runs before ``forward`` and ``output_fn(module, outputs, mesh)`` after it; both
    may leave the module out. Tied parameters stay tied, hooks on gradients and attributes of a parameter move to the
    new one; a gradient that it has already does not. What a program holds of the old parameters and buffers, in an
    optimizer, a list or a closure, stands for the new ones from here on. Tensors that the forward pass makes lie on the
    mesh (:func:`shardwise.on`). ``communication`` is the policy on what forward passes of the module, and their
    backward passes, send by themselves: ``"forbid over tp"``, for example, or what ``sw.communication`` returned.

    Raises :class:`PlacementError` for a pattern that matches nothing, :class:`LayoutError` for a parameter that is made
    of other tensors (a quantised weight) or has no shape yet (that of a lazy module), :class:`ArgumentError` for a
    module that ``torch.jit.script`` has compiled or a ``SyncBatchNorm`` with a process group, and a :class:`PlanError`
    for a plan that cannot be read or is for another mesh or module. All of these leave the module as it was.
    """
    check_module("distribute a module", module)
    mesh = current_mesh() if device_mesh is None else device_mesh
    asked = f"distribute a {type(module).__name__}"
    check_mesh(asked, mesh)
    _check_around_forward(asked, input_fn=input_fn, output_fn=output_fn)
    check_flag(asked, loose, "loose")
    scope = _scope_of(asked, communication, mesh)
    patterns = _patterns_of(partition, module, mesh, loose)
    _refuse_on_another_mesh(module, mesh)
    _replace_tensors(module, mesh, patterns, src_data_rank)
    take_whole_batches(module)
    replace_in_attributes(module)
    place_assigned(module)
    give_whole_to_files(module)
    enter_in_forward(module, mesh, scope)
    for tell in tuple(at_module):
        tell(mesh)
    _call_around_forward(module, mesh, input_fn, output_fn)
    return module


def _check_around_forward(asked: str, **functions: Callable[..., Any] | None) -> None:
    """Raise :class:`ArgumentError` for an ``input_fn`` or ``output_fn`` that cannot be called as one."""
    for name, function in functions.items():
        check_function(asked, function, name)
        values = name.replace("_fn", "s")
        if function is not None:
            check_arity(asked, function, name, (("module", values, "mesh"), (values, "mesh")))


def _scope_of(asked: str, given: object, mesh: DeviceMesh) -> PolicyScope | None:
    """The policy that was given, before anything is placed: one that is refused leaves the module as it was."""
    if not isinstance(given, (str, PolicyScope, NoneType)):
        do = 'Give "allow", "warn" or "forbid", or what sw.communication(...) returned.'
        refuse_argument(asked, "communication", given, do)
    scope = policy(given) if isinstance(given, str) else given
    if scope is not None:
        know_mesh(mesh)
        check_mesh_dims(scope.policy, f"{asked} under")
    return scope


def _refuse_on_another_mesh(module: nn.Module, mesh: DeviceMesh) -> None:
    """Raise :class:`PlacementError` for a module all of whose tensors lie on another mesh: nothing would be placed."""
    tensors = [*module.parameters(), *module.buffers()]
    others = [t.device_mesh for t in tensors if isinstance(t, MeshTensor) and t.device_mesh != mesh]
    if tensors and len(others) == len(tensors):
        raise PlacementError(
            asked=f"distribute a {type(module).__name__} on {mesh}",
            found=f"all its parameters and buffers lie on {others[0]} already, from an earlier call",
            do="Distribute a module once. Make it anew for another mesh, or load a checkpoint of it there.",
        )


def _patterns_of(partition: Any, module: nn.Module, mesh: DeviceMesh, loose: bool) -> Mapping[str, Places]:
    """The placements by pattern that a partition says; a function of submodules is called, and says none."""
    kind = type(module).__name__
    names = [n for n, _ in module.named_parameters(remove_duplicate=False)]
    buffers = list(module.named_buffers(remove_duplicate=False))
    names += [n for n, _ in buffers]
    if isinstance(partition, (str, os.PathLike)):
        partition = read_plan(partition)
    if isinstance(partition, StepPlan):
        undivided = {n for n, b in buffers if _has_no_parts(b)}
        partition = _install(partition, kind, [n for n in names if n not in undivided], mesh, loose)
    elif loose:
        raise PlanError(
            asked=f"distribute a {kind} with loose=True",
            found="there is no plan whose lines could fit nothing: the partition is not one",
            do="Give a plan or the name of its file, or leave loose out.",
        )
    _check_partition(kind, partition)
    if callable(partition):
        check_arity(f"distribute a {kind}", partition, "partition", (("name", "module", "mesh"),))
        for name, submodule in module.named_modules():
            partition(name, submodule, mesh)
    patterns = dict(partition) if isinstance(partition, Mapping) else {}
    check_patterns(kind, patterns, names)
    return patterns


def _check_partition(kind: str, partition: object) -> None:
    if not (partition is None or callable(partition) or isinstance(partition, Mapping)):
        do = 'Give placements by pattern, as in {"*.weight": [Shard(0)]}, a function (name, module, mesh), or a plan.'
        refuse_argument(f"distribute a {kind}", "partition", partition, do)


def _install(plan: StepPlan, kind: str, names: Sequence[str], mesh: DeviceMesh, loose: bool) -> dict[str, Places]:
    """Have all calls go by a plan from here on; the placements of these parameters and buffers by the plan."""
    asked = f"distribute a {kind} by the plan {plan.file.source or plan.file.program}"
    plan.check_mesh(asked, tuple(mesh.shape), mesh.mesh_dim_names)
    partition: dict[str, Places] = {}
    used = set()
    for name in names:
        known = plan.file.placements_of(name)
        if known is None:
            _fits_not(asked, f"no line of [parameters] places {name!r}", name, loose)
            continue
        used.add(known[0])
        partition[name] = known[1]
    for pattern in plan.file.parameters:
        if pattern not in used:
            _fits_not(asked, f"its line {pattern!r} of [parameters] fits nothing in the module", pattern, loose)
    agree_on_plan(mesh, plan.file.digest, plan.decisions.fingerprint)
    use_decisions(plan.decisions, is_written=True)
    return partition


def _fits_not(asked: str, found: str, name: str, loose: bool) -> None:
    """Raise, or with ``loose`` warn, that the plan and the module do not have the same parameters."""
    error = PlanFitError(asked=asked, found=found, do="Plan the program again, with this module in it.", name=name)
    if not loose:
        raise error
    warn_user(str(error), PlanFitWarning)


def _call_around_forward(
    module: nn.Module, mesh: DeviceMesh, input_fn: Callable[..., Any] | None, output_fn: Callable[..., Any] | None
) -> None:
    if input_fn is not None:
        before = _with_module(input_fn)
        module.register_forward_pre_hook(lambda m, inputs: before(m, inputs, mesh))
    if output_fn is not None:
        after = _with_module(output_fn)
        module.register_forward_hook(lambda m, _, outputs: after(m, outputs, mesh))


def _with_module(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of module, values and mesh; torch's older form leaves the module out."""
    if len(inspect.signature(function).parameters) == len(("values", "mesh")):
        return lambda _, values, mesh: function(values, mesh)
    return function


def _refuse_what_cannot_be_placed(module: nn.Module) -> None:
    """Before anything is replaced: raise for a module or a tensor that placements say nothing about."""
    refuse_partial_statistics(module)
    for name, submodule in module.named_modules():
        _refuse_scripted(name, submodule)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not isinstance(tensor, MeshTensor):
            _refuse_uninitialized(name, tensor)
            refuse_dtensor(tensor, f"place {name!r}")
            _refuse_made_of_others(name, tensor)


def _refuse_scripted(name: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.RecursiveScriptModule):  # type: ignore[attr-defined]  # it is public, but not in __all__
        kind = module.original_name
        raise ArgumentError(
            asked="distribute a module",
            found=f"{f'its submodule {name!r}' if name else 'it'} is a {kind} that torch.jit.script has compiled or "
            "torch.jit.load has read, and TorchScript takes no hooks and no tensors of another class",
            do=f"Distribute the {kind} that was compiled, with load_state_dict(scripted.state_dict()) for its values, "
            "and use torch.compile. torch.jit.trace takes a module that is placed.",
            argument="module",
        )


def _refuse_uninitialized(name: str, tensor: Any) -> None:
    if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        raise LayoutError(
            asked=f"place {name!r}",
            found="it belongs to a lazy module and has no shape before the module's first forward",
            do="Run the module once on a whole batch, as on one device, and distribute it then.",
            name=name,
        )


def _refuse_made_of_others(name: str, tensor: Any) -> None:
    """Raise :class:`LayoutError` for a tensor that has others inside, as libraries make for quantised weights."""
    if hasattr(tensor, "__tensor_flatten__"):
        inside = ", ".join(tensor.__tensor_flatten__()[0])
        raise LayoutError(
            asked=f"place {name!r} of shape {tuple(tensor.shape)}",
            found=f"it is a {type(tensor).__name__}, which is made of other tensors ({inside}), and placements say how "
            "one tensor is divided",
            do="Place the tensors that it is made of. For models that torchao has quantised, "
            "shardwise_torchao.distribute_module does that (shardwise plugins search torchao); or place the model "
            "first, and quantise it then.",
            name=name,
        )


def _replace_tensors(
    module: nn.Module, mesh: DeviceMesh, patterns: Mapping[str, Places], src_data_rank: int | None
) -> None:
    _refuse_what_cannot_be_placed(module)
    names_of: dict[int, list[str]] = {}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for one, tensor in tensors:
        names_of.setdefault(id(tensor), []).append(one)
    check_tied(type(module).__name__, patterns, list(names_of.values()), mesh)
    _check_all_places(tensors, names_of, mesh, patterns)
    by_id: dict[int, MeshTensor] = {}
    placed_here: set[int] = set()
    for prefix, submodule in module.named_modules(remove_duplicate=False):
        own = [*submodule.named_parameters(recurse=False), *submodule.named_buffers(recurse=False)]
        for key, tensor in own:
            name = f"{prefix}.{key}" if prefix else key
            if isinstance(tensor, MeshTensor) and id(tensor) in placed_here:
                continue  # before by_id is asked: the id may be that of an old tensor that is gone
            is_known = id(tensor) in by_id
            earlier = None if is_known else new_of(tensor)  # tied to a parameter of a module that was placed before
            is_placed = earlier is None and not is_known and isinstance(tensor, MeshTensor)
            if is_placed and not is_unplaced(tensor, mesh):
                check_placed(name, tensor, mesh, patterns)
                continue
            if earlier is not None:
                check_placed(name, earlier, mesh, patterns)
                by_id[id(tensor)] = earlier
            elif not is_known:
                names = names_of.get(id(tensor), [name])
                if _stays_whole(tensor, names, patterns):
                    setattr(submodule, key, tensor.to(mesh.device_type))
                    continue
                places = placements_for(names, tensor, mesh, patterns)
                by_id[id(tensor)] = _placed(tensor, mesh, places, src_data_rank)
                placed_here.add(id(by_id[id(tensor)]))
                note_placed(by_id[id(tensor)]._local_tensor)
                if by_id[id(tensor)] is not tensor:
                    replace(tensor, by_id[id(tensor)])
                name_tensor(by_id[id(tensor)], name)
                if in_force.decisions is not None:
                    tag_by_name(by_id[id(tensor)], in_force.decisions.depth)
            setattr(submodule, key, by_id[id(tensor)])  # a buffer stays persistent or not, as it was


def _check_all_places(
    tensors: Sequence[tuple[str, torch.Tensor]],
    names_of: Mapping[int, Sequence[str]],
    mesh: DeviceMesh,
    patterns: Mapping[str, Places],
) -> None:
    """Raise for placements that a tensor cannot have before the first one is placed: the module stays as it was."""
    for name, tensor in tensors:
        names = names_of[id(tensor)]
        placed = tensor if isinstance(tensor, MeshTensor) else new_of(tensor)
        if placed is not None and not is_unplaced(placed, mesh):
            check_placed(name, placed, mesh, patterns)
        elif not _stays_whole(tensor, names, patterns):
            check_dense(tensor)
            placements_for(names, tensor, mesh, patterns)


def _stays_whole(tensor: torch.Tensor, names: Sequence[str], patterns: Mapping[str, Places]) -> bool:
    """Whether it is a buffer that has no parts and that nobody placed by its full name."""
    return not isinstance(tensor, nn.Parameter) and _has_no_parts(tensor) and patterns.keys().isdisjoint(names)


def _has_no_parts(tensor: torch.Tensor) -> bool:
    """Whether placements cannot say which part of it a rank has: it is sparse, or its memory is opaque."""
    return not isinstance(tensor, MeshTensor) and tensor.layout is not torch.strided


def _placed(tensor: Any, mesh: DeviceMesh, places: Sequence[Placement], src_data_rank: int | None) -> MeshTensor:
    """A leaf with these placements, of a plain tensor or of one that was made on the mesh: the same on every rank."""
    if not isinstance(tensor, MeshTensor):
        return distribute_tensor(tensor, mesh, places, src_data_rank=src_data_rank)
    if tensor.placements != tuple(places):
        values: Any = tensor.detach()
        tensor.data = values.redistribute(mesh, places)  # it stays the object that it is
    return tensor
