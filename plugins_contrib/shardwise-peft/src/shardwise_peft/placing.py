"""Adapters beside placed weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from shardwise import MeshTensor, Placement, Replicate
from shardwise_peft.errors import AdapterError, AdapterPlanError
from shardwise_peft.following import adapter_places, adapter_weights

__all__ = ["distribute", "mesh_of", "misplaced", "place_adapters"]

Said = Sequence[Placement] | Mapping[str, Placement] | Placement


def place_adapters(model: nn.Module, *, src_data_rank: int | None = 0) -> nn.Module:
    """Place the LoRA adapters of a model whose base weights are placed, in place; returns the model.

    For adapters that were added to a placed model, by ``get_peft_model``, ``add_adapter`` or ``load_adapter``. Each
    weight gets the placements that follow from its base weight. Whatever else is a plain tensor becomes whole on every
    rank. Call it before an optimizer is made. ``src_data_rank`` is that of :func:`shardwise.distribute_module`: by
    default the first rank's random values count.

    Raises :class:`AdapterError` for a model without placed weights, and :class:`shardwise.errors.PlacementError` for
    an adapter that is placed in another way.
    """
    wanted = _wanted(model)
    return sw.distribute_module(
        model, mesh_of(model), {_literal(name): places for name, places in wanted.items()}, src_data_rank=src_data_rank
    )


def distribute(
    model: nn.Module, mesh: DeviceMesh, partition: Mapping[str, Said], *, src_data_rank: int | None = 0
) -> nn.Module:
    """Place a model that has adapters already, by a plan for the model without them.

    ``partition`` is what :func:`shardwise.distribute_module` takes for the base model, with its names: peft's
    (``base_model.model.``, ``.base_layer``) are looked through. Raises :class:`AdapterPlanError` for a pattern that
    fits nothing.
    """
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    adapters = {name for name, _, _ in adapter_weights(model)}
    names = {name: _base_name(name) for name in tensors if name not in adapters}
    for pattern in partition:
        if not any(fnmatchcase(base, pattern) for base in names.values()):
            raise AdapterPlanError(
                asked=f"place the tensors {pattern!r} of a {type(model).__name__}",
                found="no tensor of the base model has such a name; there are "
                f"{', '.join(sorted(set(names.values())))}",
                do="Write the names that the model has without adapters.",
                pattern=pattern,
            )
    wanted = {name: _said(base, partition, mesh) for name, base in names.items()}
    for name, layer, kind in adapter_weights(model):
        of_base = next(key for key, tensor in tensors.items() if tensor is layer.get_base_layer().weight)
        wanted[name] = adapter_places(layer, kind, name, tensors[name].ndim, wanted[of_base])
    return sw.distribute_module(
        model, mesh, {_literal(name): places for name, places in wanted.items()}, src_data_rank=src_data_rank
    )


def misplaced(model: nn.Module) -> dict[str, tuple[tuple[Placement, ...] | None, tuple[Placement, ...]]]:
    """The adapter weights that do not lie as follows from their base weights: how they lie, and what follows.

    A plain tensor has ``None``. It counts as whole, and runs, but the ranks compare its gradients at every step.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    lie = {name: p.placements if isinstance(p, MeshTensor) else None for name, p in parameters.items()}
    return {name: (lie[name], places) for name, places in _wanted(model).items() if lie[name] != places}


def mesh_of(model: nn.Module) -> DeviceMesh:
    """The mesh that a model's weights lie on."""
    for parameter in model.parameters():
        if isinstance(parameter, MeshTensor):
            return parameter.device_mesh
    raise AdapterError(
        asked=f"place the adapters of a {type(model).__name__}",
        found="none of its weights is placed, so that nothing follows for them",
        do="Place the model first (shardwise.distribute_module), or place all at once with shardwise_peft.distribute.",
    )


def _wanted(model: nn.Module) -> dict[str, tuple[Placement, ...]]:
    mesh, ndims = mesh_of(model), {name: p.ndim for name, p in model.named_parameters(remove_duplicate=False)}
    wanted = {}
    for name, layer, kind in adapter_weights(model):
        weight = getattr(layer.get_base_layer(), "weight", None)
        base = weight.placements if isinstance(weight, MeshTensor) else (Replicate(),) * mesh.ndim
        wanted[name] = adapter_places(layer, kind, name, ndims[name], base)
    return wanted


def _base_name(name: str) -> str:
    """The name of a tensor in the model without adapters."""
    name = re.sub(r"\.modules_to_save\.[^.]+\.|\.(token_adapter\.)?(base_layer|original_module)\.", ".", name)
    return name.removeprefix("base_model.model.")


def _said(name: str, partition: Mapping[str, Said], mesh: DeviceMesh) -> tuple[Placement, ...]:
    said = next((said for pattern, said in partition.items() if fnmatchcase(name, pattern)), {})
    if isinstance(said, Mapping):
        return tuple(said.get(dim, Replicate()) for dim in mesh.mesh_dim_names or ()) or (Replicate(),) * mesh.ndim
    return (said,) if isinstance(said, Placement) else tuple(said)


def _literal(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)
