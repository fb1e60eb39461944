"""What torch has to know of the class of sharded tensors: done once, when the class is there."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch

from shardwise.engine.engine import PlanningEngine
from shardwise.errors import ShardingError
from shardwise.kernel.dispatcher import answer
from shardwise.kernel.engine import start
from shardwise.private_torch.compile_errors import raise_as_they_are
from shardwise.private_torch.conversion import convert_through_data, parametrize_through
from shardwise.private_torch.dispatch import guard_memory, hide_items, leave_out_of_graphs, support_foreach
from shardwise.private_torch.distributed import count_inside_ops
from shardwise.private_torch.scripts import guard_archives, interpret_scripts
from shardwise.private_torch.sizes import write_formulas
from shardwise.private_torch.tracing import (
    COMPARES_MEMORY,
    SETS_MEMORY,
    fold_no_collectives,
    record_constants,
    take_plain_tangents,
)
from shardwise.private_torch.transforms import ASKS_OF_TANGENTS, give_attributes
from shardwise.tensor import memory_access
from shardwise.tensor.batched import lie_alike, spec_of
from shardwise.tensor.control_flow import take_control_flow
from shardwise.tensor.graph_borders import join_in_graph, plain_tangent
from shardwise.tensor.placing_tools import refuse_placing_tools

__all__ = ["set_torch_up"]


def set_torch_up(mesh_tensor: type[Any]) -> None:
    """Have torch's tools handle tensors of this class, or refuse them by name, and start the dispatcher for it."""
    support_foreach(mesh_tensor)
    hide_items(mesh_tensor)
    _set_graphs_up(mesh_tensor)
    count_inside_ops(mesh_tensor)
    _set_memory_up(mesh_tensor)
    take_control_flow(mesh_tensor)
    interpret_scripts(mesh_tensor)
    refuse_placing_tools(mesh_tensor)
    _set_transforms_up(mesh_tensor)
    start(mesh_tensor, PlanningEngine(mesh_tensor))


def _set_graphs_up(mesh_tensor: type[Any]) -> None:
    """For compiled and exported programs."""
    for method in (mesh_tensor.__torch_dispatch__, mesh_tensor.__tensor_flatten__, mesh_tensor.__tensor_unflatten__):
        leave_out_of_graphs(method)
    # These run by themselves where a graph ends at one of them: dynamo cannot trace what they do to the tensor's own
    # dict.
    for method in (
        mesh_tensor.requires_grad_,
        mesh_tensor.__deepcopy__,
        memory_access.data.fset,
        memory_access.data_ptr,
    ):
        leave_out_of_graphs(method)
    record_constants(mesh_tensor, join_in_graph)
    fold_no_collectives()
    take_plain_tangents(mesh_tensor, plain_tangent)
    write_formulas()
    raise_as_they_are(ShardingError)


def _set_memory_up(mesh_tensor: type[Any]) -> None:
    """For what reads, lends or archives the memory of a tensor."""
    # torch.load(weights_only=True) accepts only functions and classes that are listed.
    torch.serialization.add_safe_globals([mesh_tensor])
    guard_memory(mesh_tensor, memory_access.refuse_to_lend)
    convert_through_data(mesh_tensor)
    parametrize_through(mesh_tensor, memory_access.give_values)
    guard_archives(mesh_tensor, memory_access.refuse_to_archive)
    answer(SETS_MEMORY, memory_access.set_in_graph)
    answer(COMPARES_MEMORY, memory_access.is_set_to)


def _set_transforms_up(mesh_tensor: type[Any]) -> None:
    """For ``vmap`` and forward-mode differentiation, which put tensors of their own around these."""
    answer(ASKS_OF_TANGENTS, lie_alike)
    give_attributes(
        mesh_tensor,
        {
            "spec": spec_of,
            "placements": lambda tensor: spec_of(tensor).placements,
            "device_mesh": lambda tensor: spec_of(tensor).mesh,
            **{
                name: partial(MethodType, vars(mesh_tensor)[name])
                for name in ("redistribute", "to_local", "full_tensor")
            },
        },
    )
