"""Tools of torch that place or send the tensors of a program themselves: what is asked before one of them starts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from inspect import signature
from types import ModuleType
from typing import Any

import torch.distributed.tensor
from torch.distributed import ProcessGroup

from shardwise.private_torch.dispatch import leave_out_of_graphs
from shardwise.private_torch.imports import when_imported

__all__ = ["check_collectives", "check_placing_tools"]

# Where each begins, before it changes a module or sends anything: module, class, method, and what it is given there.
# Where torch lacks one of these, the tool's first collective on a MeshTensor is refused instead.
_FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState.init"
_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel.__init__"
_PIPELINE = "torch.distributed.pipelining.stage._PipelineStageBase.__init__"
_METHODS = {
    _FSDP2: ("fully_shard", "modules"),
    _FSDP1: ("FullyShardedDataParallel", "module"),
    "torch.nn.parallel.distributed.DistributedDataParallel.__init__": ("DistributedDataParallel", "module"),
    "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer.__init__": (
        "ZeroRedundancyOptimizer",
        "params",
    ),
    _PIPELINE: ("PipelineStage", "submodule"),
}
# What sends lists of lists of tensors. The dispatcher does not look into these, so a MeshTensor in one would come to
# the backend, which reads memory that it does not have.
_OF_LISTS = ("allgather", "allgather_coalesced", "gather", "scatter", "reduce_scatter")
_GATHER = ("allgather", "gather")  # the second argument is what this rank gives

Check = Callable[[str, Any, dict[str, Any]], Any]


def check_placing_tools(check: Check) -> None:
    """Call ``check(tool, value, arguments)`` before a tool starts; what it returns takes the value's place.

    ``value`` is the module, the modules, the parameters or the tensor that the tool is given.
    """
    for path, (tool, argument) in _METHODS.items():
        module, cls, method = path.rsplit(".", 2)
        when_imported(module, _method_wrapper(cls, method, tool, argument, check))
    tensor = torch.distributed.tensor
    from_local = _checked(tensor.DTensor.from_local, "DTensor.from_local", "local_tensor", check)
    tensor.DTensor.from_local = staticmethod(from_local)  # type: ignore[method-assign]
    before = tensor.distribute_tensor
    after = _checked(before, "torch.distributed.tensor.distribute_tensor", "tensor", check)
    for name, module_of_torch in list(sys.modules.items()):
        if name.startswith("torch.distributed.") and vars(module_of_torch).get("distribute_tensor") is before:
            vars(module_of_torch)["distribute_tensor"] = after


def _method_wrapper(cls: str, method: str, tool: str, argument: str, check: Check) -> Callable[[ModuleType], None]:
    def wrap(module: ModuleType) -> None:
        owner = getattr(module, cls, None)
        if owner is not None and method in vars(owner):
            setattr(owner, method, _checked(vars(owner)[method], tool, argument, check))

    return wrap


def _checked(function: Callable[..., Any], tool: str, argument: str, check: Check) -> Callable[..., Any]:
    of_function = signature(function)

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = of_function.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # raises torch's own error
        if argument in bound.arguments:
            bound.arguments[argument] = check(tool, bound.arguments[argument], bound.arguments)
        return function(*bound.args, **bound.kwargs)

    return checked


def check_collectives(cls: type, refuse: Callable[[str], Any], gathers: Callable[[str, Any], Any]) -> None:
    """Call ``refuse(name)`` before a process group sends, or writes, a ``cls`` in a list of lists, and else
    ``gathers(name, tensors)`` before it gathers those.
    """
    for name in _OF_LISTS:
        method = getattr(ProcessGroup, name, None)
        if method is not None:
            setattr(ProcessGroup, name, _group_method(method, name, cls, refuse, gathers if name in _GATHER else None))


def _group_method(
    method: Any, name: str, cls: type, refuse: Callable[[str], Any], gathers: Callable[[str, Any], Any] | None
) -> Any:
    @wraps(method)
    def send(self: Any, *args: Any, **kwargs: Any) -> Any:
        for arg in args:
            if isinstance(arg, cls) or (type(arg) in _LISTS and _holds(arg, cls)):
                refuse(name)
        if gathers is not None and len(args) > 1:
            gathers(name, args[1])
        return method(self, *args, **kwargs)

    leave_out_of_graphs(send)
    return send


_LISTS = (list, tuple)


def _holds(values: Any, cls: type) -> bool:
    return any(isinstance(v, cls) or (type(v) in _LISTS and _holds(v, cls)) for v in values)
