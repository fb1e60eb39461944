"""A whole model on a mesh by its own plans, its inputs beside it, and generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from shardwise import MeshTensor, Placement, Replicate, Shard
from shardwise_transformers.errors import ModelPlanError
from shardwise_transformers.experts import run_experts_locally
from shardwise_transformers.names import entry_for, patterns_for
from shardwise_transformers.order import agree_on_order
from shardwise_transformers.reading import Plan, placements_by_name, plan_of
from shardwise_transformers.sequences import shard_sequences
from shardwise_transformers.styles import Place

__all__ = ["distribute", "generate", "place_batch"]


def distribute(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    tp: str = "tp",
    ep: str = "ep",
    tp_plan: Plan | None = None,
    ep_plan: Plan | None = None,
    styles: Mapping[str, Place] | None = None,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Place a model by its own plans, in place; returns it.

    Its ``tp_plan`` is for the mesh dim ``tp`` and its ``ep_plan`` for ``ep``; a plan whose mesh dim the mesh does not
    have is not used. Both may be one mesh dim: there, what the ``ep_plan`` names is placed by it alone, as in
    transformers. Along every other mesh dim parameters are whole: it is for the batch, see :func:`place_batch`. Each
    rank runs the experts, or the parts of experts, that it has (:func:`run_experts_locally`).

    ``tp_plan``, ``ep_plan`` and ``styles`` are as in :func:`tensor_parallel`, ``src_data_rank`` is that of
    :func:`shardwise.distribute_module`. Raises :class:`ModelPlanError` where the mesh has neither dim and where the
    model has no plan for one that it has.
    """
    dims = {dim: kind for dim, kind in ((tp, "tp_plan"), (ep, "ep_plan")) if dim in (mesh.mesh_dim_names or ())}
    if not dims:
        raise ModelPlanError(
            asked=f"place a {type(model).__name__} by its plans over the mesh dims {tp!r} and {ep!r}",
            found=f"the mesh has the dims {', '.join(mesh.mesh_dim_names or ()) or 'without names'}",
            do="Name a mesh dim that is there, tp=... or ep=..., or make the mesh with mesh_dim_names=.",
        )
    given = {"tp_plan": tp_plan, "ep_plan": ep_plan}
    by_dim = {dim: placements_by_name(model, kind, given[kind], styles) for dim, kind in dims.items()}
    if tp == ep and tp in dims:
        by_dim[tp] = _of_both(model, tp_plan, ep_plan, styles)
    partition = {
        pattern: dict(places)
        for pattern, places in patterns_for(_joined(by_dim), frozenset[tuple[str, Placement]]()).items()
    }
    sw.distribute_module(model, mesh, partition, src_data_rank=src_data_rank)
    if tp in dims:
        shard_sequences(model, plan_of(model, "tp_plan") if tp_plan is None else tp_plan, tp)
    run_experts_locally(model, mesh)
    return model


def _of_both(
    model: nn.Module, tp_plan: Plan | None, ep_plan: Plan | None, styles: Mapping[str, Place] | None
) -> dict[str, Placement]:
    """Both plans on one mesh dim."""
    entries = plan_of(model, "ep_plan") if ep_plan is None else ep_plan
    by_tp = placements_by_name(model, "tp_plan", tp_plan, styles)
    by_ep = placements_by_name(model, "ep_plan", ep_plan, styles)
    return {name: by_tp[name] if entry_for(name, entries) is None else by_ep[name] for name in by_tp}


def _joined(by_dim: Mapping[str, Mapping[str, Placement]]) -> dict[str, frozenset[tuple[str, Placement]]]:
    """By name: the mesh dims along which a tensor is not whole, each with its placement."""
    names = next(iter(by_dim.values()))
    return {
        name: frozenset((dim, places[name]) for dim, places in by_dim.items() if places[name] != Replicate())
        for name in names
    }


def place_batch(
    batch: Mapping[str, Any], mesh: DeviceMesh, over: str | None = None, *, src_data_rank: int | None = 0
) -> dict[str, Any]:
    """What a tokenizer or a collator returned, its tensors cut by their first dim over one mesh dim.

    ``over`` is ``"dp"`` by default if the mesh has such a dim, else the batch is whole on every rank. Every rank gives
    the whole batch; what is not a plain tensor stays as it is.
    """
    names = mesh.mesh_dim_names or ()
    if over is not None and over not in names:
        raise ModelPlanError(
            asked=f"cut a batch over the mesh dim {over!r}",
            found=f"the mesh has the dims {', '.join(names) or 'without names'}",
            do="Name a dim that is there, or leave over= out for a batch that is whole on every rank.",
        )
    over = over if over is not None or "dp" not in names else "dp"
    placed = {}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor) and not isinstance(value, MeshTensor):
            places = {} if over is None or value.ndim == 0 else {over: Shard(0)}
            placed[key] = sw.distribute_tensor(value, mesh, places, src_data_rank=src_data_rank)
        else:
            placed[key] = value
    return placed


def generate(
    model: nn.Module, input_ids: torch.Tensor, mesh: DeviceMesh, *, over: str | None = None, **options: Any
) -> Any:
    """``model.generate(input_ids, **options)`` on the mesh, with the prompts cut over a mesh dim: whole tokens.

    Every rank must call this, with the same prompts and options, and gets the same tokens. Tensors among the options
    (``attention_mask``) are placed as the prompts. What ``return_dict_in_generate`` returns is passed on as it is.
    Raises :class:`ModelPlanError` on every rank where ranks would make the masks of a model with several kinds of
    layers in another order.
    """
    agree_on_order(model, mesh)
    tensors = {key: value for key, value in options.items() if isinstance(value, torch.Tensor)}
    placed = place_batch({"input_ids": input_ids, **tensors}, mesh, over)
    with sw.on(mesh):
        tokens = model.generate(**{**options, **placed})  # type: ignore[operator]
    return tokens.full_tensor() if isinstance(tokens, MeshTensor) else tokens
