"""Experts that run where they are: each rank its own, or its own part of each.

Experts of transformers are one module with a tensor per matrix, [expert, out, in], that is called with tokens, the
experts chosen for each and their weights. Which tokens an expert gets depends on data, and a tensor whose size depends
on data is whole on every rank: outside of this module, every rank would run every expert on every token, with weights
that it has been sent. Here a rank runs the experts' own code on its own tensors, and no weights are sent:

==================================================  =================================================================
the tensors are, along a mesh dim                   the ranks along it
==================================================  =================================================================
whole                                               run the experts on the tokens that they have
cut by experts                                      run their experts on all tokens, and add up the results
cut inside experts: outputs first, inputs second    run their part of each expert on all tokens, and add up the results
==================================================  =================================================================

Experts that lie in another way are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from shardwise import MeshTensor, Partial, Placement, Replicate, Shard
from shardwise.kernel.placements import strided_shard
from shardwise_transformers.styles import PACKED

__all__ = ["run_experts_locally"]


def run_experts_locally(model: nn.Module, mesh: DeviceMesh) -> list[str]:
    """Let each rank run its own experts, in the modules of a placed model where they are cut; returns their names."""
    found = []
    for name, module in model.named_modules():
        layout = _layout(module, mesh)
        if layout is not None and "forward" not in vars(module):
            module.forward = _LocalExperts(module, layout)
            found.append(name)
    return found


@frozen
class _Layout:
    """The tensors of an experts module, and how they lie: the mesh dims that cut experts, and inside of experts."""

    names: tuple[str, ...]
    by_experts: tuple[int, ...]
    inside: tuple[int, ...]


def _layout(module: nn.Module, mesh: DeviceMesh) -> _Layout | None:
    """``None`` for another module, for experts that are whole and for those that lie in a way that adds nothing up."""
    own = dict(module.named_parameters(recurse=False))
    if not hasattr(module, "_is_expert_parallel") or not own or any(_has_tensors(child) for child in module.children()):
        return None
    placements = {name: _placements(p, mesh) for name, p in own.items()}
    if None in placements.values():
        return None
    by_experts, inside = [], []
    for dim in range(mesh.ndim):
        places = {name: all_dims[dim] for name, all_dims in placements.items() if all_dims is not None}
        if all(place == Replicate() for place in places.values()):
            continue
        if all(place == Shard(0) for place in places.values()):
            by_experts.append(dim)
        elif _is_cut_inside(module, places):
            inside.append(dim)
        else:
            return None
    if not by_experts and not inside:
        return None
    return _Layout(tuple(own), tuple(by_experts), tuple(inside))


def _placements(tensor: torch.Tensor, mesh: DeviceMesh) -> tuple[Placement, ...] | None:
    return tensor.placements if isinstance(tensor, MeshTensor) and tensor.device_mesh == mesh else None


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _is_cut_inside(module: nn.Module, places: dict[str, Placement]) -> bool:
    """The first product's outputs are cut, gate and up alike, and the second's inputs; a bias would be added twice."""
    outputs, inputs = (2, 1) if getattr(module, "is_transposed", False) else (1, 2)
    if getattr(module, "has_gate", True):
        first: dict[str, Placement] = {"gate_up_proj": strided_shard(outputs, PACKED)}
        if not getattr(module, "is_concatenated", True):
            return False
    else:
        first = {"up_proj": Shard(outputs)}
    return places == {**first, "down_proj": Shard(inputs)}


class _LocalExperts:
    """The forward of an experts module: its own one, with this rank's tensors."""

    def __init__(self, module: nn.Module, layout: _Layout) -> None:
        self._module = module
        self._whole = module.forward
        self._layout = layout
        self._calls: dict[tuple[Placement, ...], Callable[..., Any]] = {}

    def __call__(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Any:
        tensors = dict(self._module.named_parameters(recurse=False))
        # An adapter's layer has its own tensors in place of these (torch's parametrizations).
        if not isinstance(hidden, MeshTensor) or tuple(tensors) != self._layout.names:
            return self._whole(hidden, chosen, weights)
        tokens = self._tokens(hidden)
        if tokens not in self._calls:
            self._calls[tokens] = self._call(tokens, hidden.device_mesh)
        return self._calls[tokens](hidden, chosen, weights, *tensors.values())

    def _tokens(self, hidden: MeshTensor) -> tuple[Placement, ...]:
        """Tokens stay cut along the mesh dims that do not cut the experts."""
        cut = {*self._layout.by_experts, *self._layout.inside}
        return tuple(
            place if place == Shard(0) and dim not in cut else Replicate()
            for dim, place in enumerate(hidden.placements)
        )

    def _call(self, tokens: tuple[Placement, ...], mesh: DeviceMesh) -> Callable[..., Any]:
        def experts_of_rank(
            hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, *tensors: torch.Tensor
        ) -> Any:
            return self._run(mesh, hidden, chosen, weights, dict(zip(self._layout.names, tensors, strict=True)))

        cut = {*self._layout.by_experts, *self._layout.inside}
        added = tuple(Partial() if dim in cut else place for dim, place in enumerate(tokens))
        as_they_lie = [p.placements for p in self._module.parameters(recurse=False) if isinstance(p, MeshTensor)]
        return sw.local(experts_of_rank, inputs=(tokens, tokens, tokens, *as_they_lie), outputs=added)

    def _run(
        self,
        mesh: DeviceMesh,
        hidden: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        tensors: dict[str, torch.Tensor],
    ) -> Any:
        first = self._first(mesh)  # of the whole tensors, which the module has now
        with _with_tensors(self._module, tensors):
            if not self._layout.by_experts:
                return self._whole(hidden, chosen, weights)
            own = next(iter(tensors.values())).shape[0]
            token, choice = ((chosen >= first) & (chosen < first + own)).nonzero(as_tuple=True)
            result = torch.zeros_like(hidden)
            if token.numel() == 0:
                return result
            # One row for each choice of an expert of this rank.
            rows = self._whole(
                hidden[token], (chosen[token, choice] - first).unsqueeze(1), weights[token, choice].unsqueeze(1)
            )
            return result.index_add(0, token, rows.to(result.dtype))

    def _first(self, mesh: DeviceMesh) -> int:
        """The first expert of this rank."""
        experts = next(p for _, p in self._module.named_parameters(recurse=False))
        start, size = 0, experts.shape[0]
        coordinate = mesh.get_coordinate() or [0] * mesh.ndim
        for dim in self._layout.by_experts:
            ranks = mesh.size(dim)
            part = -(-size // ranks)
            offset = min(coordinate[dim] * part, size)
            start, size = start + offset, min(part, size - offset)
        return start


@contextmanager
def _with_tensors(module: Any, tensors: dict[str, torch.Tensor]) -> Iterator[None]:
    """The module with tensors of a rank in place of its parameters, and with their number of experts."""
    before, experts = dict(module._parameters), module.num_experts
    module._parameters.update(tensors)
    module.num_experts = next(iter(tensors.values())).shape[0]
    try:
        yield
    finally:
        module._parameters.update(before)
        module.num_experts = experts
