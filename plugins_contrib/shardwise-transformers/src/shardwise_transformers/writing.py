"""Placements written as a plan of transformers, for its own tensor and expert parallelism.

Two styles may place a weight alike and differ in what they do to activations: after ``colwise`` a rank goes on with its
own outputs, after ``colwise_gather_output`` it has all of them. So the words of one layer depend on its neighbours. A
block (the layers of one attention, of one MLP) whose parameters all lie as the model's own plan says keeps the words of
that plan. In every other block each layer is said by itself, its input and its output whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from shardwise import MeshTensor, Placement, Replicate, Shard
from shardwise_transformers.errors import ModelPlanError, PlacementStyleError
from shardwise_transformers.names import generic, owner
from shardwise_transformers.reading import placements_by_entry

__all__ = ["to_ep_plan", "to_tp_plan"]

Partition = Mapping[str, Mapping[str, Placement]]


def to_tp_plan(model: nn.Module, partition: Partition | None = None, mesh_dim: str = "tp") -> dict[str, str]:
    """The ``tp_plan`` that says how parameters lie along one mesh dim.

    Without ``partition``, a plan for :func:`shardwise.distribute_module` by the names of mesh dims, these are the
    placements that the model has. A layer that the model's own plan cuts and these placements do not is
    ``"replicate"``, because transformers adds a plan to the model's own one.

    Raises :class:`PlacementStyleError` for a parameter whose placement no style says, and :class:`ModelPlanError` for a
    model that is not placed on a mesh with this dim.
    """
    return _written(model, partition, mesh_dim, "tp_plan")


def to_ep_plan(model: nn.Module, partition: Partition | None = None, mesh_dim: str = "ep") -> dict[str, str]:
    """The same as an ``ep_plan``: each rank has some of the experts."""
    return _written(model, partition, mesh_dim, "ep_plan")


def _written(model: nn.Module, partition: Partition | None, mesh_dim: str, kind: str) -> dict[str, str]:
    own = dict(getattr(model, kind, None) or {})
    places = _by_generic_name(_places(model, partition, mesh_dim), kind)
    by_own = {generic(name): place for name, place in placements_by_entry(model, kind, own, None).items()}
    modules = {generic(name): module for name, module in model.named_modules()}
    other = {_block(name, modules) for name, place in places.items() if place != by_own[name]}
    plan = {}
    for key, style in own.items():
        if key in modules or key in places:  # a model's own plan has entries for parts that this one lacks
            plan[key] = "replicate" if _block(key, modules) in other else style
    for name, place in places.items():
        if _block(name, modules) in other and place != Replicate():
            plan.update(_said_alone(name, places, modules, kind))
    return plan


def _places(model: nn.Module, partition: Partition | None, mesh_dim: str) -> dict[str, Placement]:
    """The placement of every parameter along the mesh dim."""
    places: dict[str, Placement] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if partition is not None:
            said = next((said for pattern, said in partition.items() if fnmatchcase(name, pattern)), {})
            places[name] = said.get(mesh_dim, Replicate())
        elif isinstance(parameter, MeshTensor) and mesh_dim in (parameter.device_mesh.mesh_dim_names or ()):
            names = parameter.device_mesh.mesh_dim_names or ()
            places[name] = parameter.placements[names.index(mesh_dim)]
        else:
            raise ModelPlanError(
                asked=f"write how {name!r} lies along the mesh dim {mesh_dim!r}",
                found="it is a plain tensor" if not isinstance(parameter, MeshTensor) else "its mesh has no such dim",
                do="Place the model first, or give the partition= that distribute_module would take.",
                parameter=name,
            )
    return places


def _by_generic_name(places: Mapping[str, Placement], kind: str) -> dict[str, Placement]:
    """One placement for all layers, because a plan has no numbers of layers."""
    found: dict[str, Placement] = {}
    for name, place in places.items():
        if found.setdefault(generic(name), place) != place:
            raise PlacementStyleError(
                asked=f"write the placement {place} of {name!r} in a {kind}",
                found=f"the same parameter of another layer lies as {found[generic(name)]}, and an entry is for all",
                do="Place all layers in the same way.",
                parameter=name,
                placement=str(place),
            )
    return found


def _block(name: str, modules: Mapping[str, nn.Module]) -> str:
    """The block of a module or a parameter: what holds its module, or its module where that holds others itself."""
    module = name if name in modules else owner(name)
    return module if any(True for _ in modules[module].children()) and module == owner(name) else owner(module)


def _said_alone(
    name: str, places: Mapping[str, Placement], modules: Mapping[str, nn.Module], kind: str
) -> dict[str, str]:
    """The entries for a layer whose neighbours are not known, by one of its parameters."""
    key = owner(name)
    module = modules[key]
    own = {parameter: places[f"{key}.{parameter}"] for parameter, _ in module.named_parameters(recurse=False)}
    if isinstance(module, nn.Linear):
        bias = {"bias"} & own.keys()
        if own == {"weight": Shard(0), **dict.fromkeys(bias, Shard(0))}:
            return {key: "colwise_gather_output"}
        if own == {"weight": Shard(1), **dict.fromkeys(bias, Replicate())}:
            return {key: "rowwise_split_input"}
    if isinstance(module, nn.Embedding) and own in ({"weight": Shard(0)}, {"weight": Shard(1)}):
        return {key: "embedding_rowwise" if own["weight"] == Shard(0) else "embedding_colwise"}
    if kind == "ep_plan" and hasattr(module, "num_experts") and set(own.values()) == {Shard(0)}:
        return {**{f"{key}.{parameter}": "grouped_gemm" for parameter in own}, key: "ep_dispatch_experts"}
    raise _refusal(name, places[name], module, own, kind)


def _refusal(
    name: str, place: Placement, module: nn.Module, own: Mapping[str, Placement], kind: str
) -> PlacementStyleError:
    kept = "" if len(own) == 1 else f", among {', '.join(f'{key}: {value}' for key, value in own.items())}"
    is_experts = kind == "tp_plan" and hasattr(module, "num_experts") and place == Shard(0)
    experts = " Whole experts on each rank are for to_ep_plan." if is_experts else ""
    return PlacementStyleError(
        asked=f"write the placement {place} of {name!r} in a {kind}",
        found=f"no style says it of a {type(module).__name__}{kept}",
        do="A linear layer is cut by outputs (weight and bias Shard(0)) or by inputs (weight Shard(1), bias whole), an "
        f"embedding by dim 0 or 1, and a block with other layers as the model's own plan says.{experts}",
        parameter=name,
        placement=str(place),
    )
