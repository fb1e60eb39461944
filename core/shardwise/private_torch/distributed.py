"""Meshes, state dicts, and collectives as ops of a graph."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import traceback

from shardwise.errors import MeshMismatchError
from shardwise.private_torch.imports import when_imported
from shardwise.private_torch.parts import find_part, missing_parts, refuse, torch_part

__all__ = [
    "calls_go_unseen",
    "calls_of",
    "connection_to",
    "GraphOp",
    "count_inside_ops",
    "current_mesh",
    "default_store",
    "graph_all_gather",
    "graph_all_reduce",
    "graph_all_to_all",
    "graph_reduce_scatter",
    "is_saving_on_host",
    "is_staging",
    "new_local_group",
    "share_gloo_device",
    "wrap_graph_collectives",
    "wrap_state_dict_functions",
]


def current_mesh() -> DeviceMesh:
    """The mesh of the innermost ``with mesh:``. The context manager is public, but its stack is not."""
    asked, do = (
        "make a MeshTensor without naming a mesh",
        ("Pass device_mesh=, or enter one: `with mesh:`. (`with sw.on(mesh):` is for torch's own factories.)"),
    )
    current = find_part("torch.distributed.device_mesh._mesh_resources.get_current_mesh")
    if current is None:
        refuse("torch.distributed.device_mesh._mesh_resources.get_current_mesh", asked, "Pass device_mesh=.")
    try:
        mesh: DeviceMesh = current()
    except RuntimeError as error:
        raise MeshMismatchError(
            asked=asked,
            found="no mesh is in force here",
            do=do,
        ) from error
    return mesh


def default_store() -> Any | None:
    """The store of the default process group, by a connection of its own: a call that blocks does not hold it up.

    None where there is no other rank that could read it. The store can be handed to ``init_process_group`` but not be
    asked for. The fallback is that of the default group: the same store, with a prefix before each key.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or "fake" in str(dist.get_backend()):
        return None
    get = find_part("torch.distributed.distributed_c10d._get_default_store")
    world: Any = dist.group.WORLD
    store: Any = world.get_group_store() if get is None else get()
    try:
        return store.clone()
    except (AttributeError, RuntimeError):  # a store in memory has no connections
        return store


def share_gloo_device(interface: str) -> None:
    """Let all gloo groups that this process makes from now on use one device, of the network interface of this name.

    torch makes a device for each group, and the thread of each wakes a hundred times a second: with the groups of
    some dozens of meshes idle processes take a large part of a small machine. torch takes no options for gloo groups.
    Nothing happens where torch cannot do it, or where there is no such interface: several names are none.
    """
    try:
        base: Any = dist.ProcessGroupGloo
        device = base.create_device(interface=interface)
        trial = base._Options()
        trial._devices, trial._threads, trial._timeout = [device], trial._threads, trial._timeout
    except (AttributeError, RuntimeError, ValueError):
        return

    class GlooGroup(base):  # type: ignore[misc]
        """A gloo group on the shared device."""

        def __init__(self, store: Any, rank: int, size: int, timeout: Any, **more: Any) -> None:
            if any(more.values()):  # what no options can say
                super().__init__(store, rank, size, timeout, **more)
                return
            options = base._Options()
            options._devices, options._threads, options._timeout = [device], 2, timeout
            super().__init__(store, rank, size, options)

    private: Any = distributed_c10d
    private.ProcessGroupGloo = GlooGroup


def new_local_group(ranks: Sequence[int], name: str) -> Any:
    """A process group of some ranks, made by these alone under a name that they all give.

    ``new_group(..., use_local_synchronization=True)`` makes the name from the number of groups that this process has,
    and ranks with another number would wait for each other for ever.
    """
    names: Any = distributed_c10d
    before = getattr(names, "_process_group_name", None)
    if before is None:
        missing = "torch.distributed.distributed_c10d._process_group_name"
        refuse(missing, f"make a process group of the ranks {sorted(ranks)} without the other ranks")
    names._process_group_name = lambda ranks, use_hashed_name: name  # noqa: ARG005  # torch passes them by name
    try:
        return dist.new_group(sorted(ranks), use_local_synchronization=True)
    finally:
        names._process_group_name = before


def calls_of(process_group: Any) -> int:
    """How many calls this rank has issued over a process group; 0 where the backend does not count them."""
    try:
        return int(process_group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):
        return 0


def connection_to(store: Any) -> socket.socket | None:
    """A connection of our own to the process that has a store, over which nothing is ever sent. It ends with that
    process. None for a store that no process has, as one of files.

    Torch does not say whether its connection has ended but by an error, of which it writes a native stack.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not hasattr(store, "port"):
        return None
    try:
        connection = socket.create_connection((store.host, store.port), timeout=5.0)
    except OSError:
        return None
    connection.setblocking(False)
    return connection


def wrap_state_dict_functions(wrappers: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]) -> None:
    """Wrap the functions by which torch gathers, distributes, broadcasts and offloads the tensors of state dicts.

    ``wrappers`` has ``gather``, ``distribute``, ``broadcast`` and ``offload``. Torch's functions handle only DTensor
    and ShardedTensor, by name. Where one is missing, the functions of ``torch.distributed.checkpoint.state_dict`` raise
    :class:`TorchPartError` instead. Their modules import dozens of others, so they are not imported for this: what has
    not been imported yet is changed right after its first import.
    """
    when_imported(_STATE_DICTS, lambda module: _wrap(module, wrappers))
    when_imported(_USERS, lambda module: _refuse(module, wrappers))


_STATE_DICTS = "torch.distributed._state_dict_utils"
_USERS = "torch.distributed.checkpoint.state_dict"
_FUNCTIONS = {
    "gather": "torch.distributed._state_dict_utils._gather_state_dict",
    "distribute": "torch.distributed._state_dict_utils._distribute_state_dict",
    "broadcast": "torch.distributed._state_dict_utils._broadcast_state_dict",
    "offload": "torch.distributed._state_dict_utils._offload_state_dict_to_cpu",
}
_PUBLIC = {
    *("get_state_dict", "get_model_state_dict", "get_optimizer_state_dict"),
    *("set_state_dict", "set_model_state_dict", "set_optimizer_state_dict"),
}


def _wrap(owner: ModuleType, wrappers: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]) -> None:
    # It copies the names when it is imported, which may be before or after this.
    user = sys.modules.get(_USERS)
    for short, wrap in wrappers.items():
        name = _FUNCTIONS[short].rpartition(".")[2]
        original = getattr(owner, name, None)
        if original is None:
            continue
        wrapped = wrap(original)
        for module in (owner, user):
            if getattr(module, name, None) is original:
                setattr(module, name, wrapped)


def _refuse(users: ModuleType, names: Iterable[str]) -> None:
    """Have the public functions raise if one of these is missing: they would take shards for whole tensors."""
    for missing in missing_parts(_FUNCTIONS[name] for name in names):
        for public in _PUBLIC.intersection(vars(users)):
            setattr(users, public, torch_part(missing, "gather or load a state dict"))


# Collectives as ops of a graph. The public functional collectives wait at once only in eager mode, and take a group in
# forms that a backend does not take. Each result is waited for where it is used.
_functional: Any = torch.ops._c10d_functional
_numbers = count(1)


def _graph_op(name: str) -> Any:
    if not hasattr(_functional, name):
        refuse(f"torch.ops._c10d_functional.{name}", "put a collective into a graph")
    return getattr(_functional, name)


@contextmanager
def _in_its_pass() -> Iterator[None]:
    """What a backward pass sends stays in the graph of the backward pass.

    Torch moves calls that need no tangent into the forward graph where that saves memory, which differs from rank to
    rank with the sizes of the shards, and a rank whose results are constants moves others.
    """
    meta = traceback.current_meta
    if meta.get("partitioner_tag") != "is_backward":
        yield
        return
    meta["partitioner_tag"] = "must_be_in_backward"
    try:
        yield
    finally:
        meta["partitioner_tag"] = "is_backward"


def _unmerged(tensor: torch.Tensor) -> torch.Tensor:
    """The contiguous tensor as an operand that no other call of the graph has.

    Torch merges equal calls, and whether two are equal can differ from rank to rank: what a rank sends is a copy on one
    and a view on another, or a constant where a rank has nothing. A rank that sends once what others send twice waits
    for ever. The last of ``n`` rows that share the tensor's memory costs nothing when the graph runs.
    """
    n = next(_numbers)
    return tensor.contiguous().expand(n, *tensor.shape).select(0, n - 1)


@_in_its_pass()
def graph_all_gather(piece: torch.Tensor, size: int, group: Any) -> torch.Tensor:
    """The flat pieces of a process group's ranks, concatenated."""
    gathered = _graph_op("all_gather_into_tensor")(_unmerged(piece), size, group.group_name)
    return _graph_op("wait_tensor")(gathered)  # type: ignore[no-any-return]


@_in_its_pass()
def graph_all_reduce(tensor: torch.Tensor, kind: str, group: Any) -> torch.Tensor:
    """The reduction of a tensor over a process group, in new memory."""
    return _graph_op("wait_tensor")(_graph_op("all_reduce")(_unmerged(tensor), kind, group.group_name))  # type: ignore[no-any-return]


@_in_its_pass()
def graph_reduce_scatter(pieces: torch.Tensor, kind: str, size: int, group: Any) -> torch.Tensor:
    """The reduction over a process group, of which this rank gets its share of dim 0: 1 / ``size`` of it."""
    reduced = _graph_op("reduce_scatter_tensor")(_unmerged(pieces), kind, size, group.group_name)
    return _graph_op("wait_tensor")(reduced)  # type: ignore[no-any-return]


@_in_its_pass()
def graph_all_to_all(flat: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: Any) -> torch.Tensor:
    """Exchange flat pieces within a process group: ``sent`` and ``received`` hold a length per rank."""
    exchanged = _graph_op("all_to_all_single")(_unmerged(flat), list(received), list(sent), group.group_name)
    return _graph_op("wait_tensor")(exchanged)  # type: ignore[no-any-return]


@frozen
class GraphOp:
    """An op by which a graph issues a collective: what it sends, and at which place of its arguments the process group
    and the reduction are. ``is_uneven`` says that what a rank sends may depend on the rank. ``run`` runs it.
    """

    kind: str
    place_of_group: int
    place_of_reduction: int | None
    is_uneven: bool
    run: Callable[..., Any]


_ISSUING = {
    "all_gather": ("all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_gather_into_tensor_out"),
    "all_reduce": ("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_"),
    "broadcast": ("broadcast", "broadcast_"),
    "exchange": ("all_to_all_single",),
    "reduce_scatter": ("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "reduce_scatter_tensor_out"),
}


def wrap_graph_collectives(
    issuing: Callable[[GraphOp], Callable[..., Any]], waiting: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Have graphs call ``issuing(op)`` in place of each op that issues a collective, and ``waiting(wait)`` to wait.

    A graph calls the overload, and that calls its function ``_op``. The public way to be called there is a kernel in
    Python for every caller of the op, C++ too. Where an overload has no such function, what graphs send goes unnoticed.
    """
    for kind, names in _ISSUING.items():
        for name in names:
            overload: Any = getattr(getattr(_functional, name, None), "default", None)
            if hasattr(overload, "_op"):
                places = {argument.name: i for i, argument in enumerate(overload._schema.arguments)}
                op = GraphOp(kind, places["group_name"], places.get("reduce_op"), kind == "exchange", overload._op)
                overload._op = _InPlaceOf(overload._op, issuing(op))
    wait: Any = getattr(getattr(_functional, "wait_tensor", None), "default", None)
    if hasattr(wait, "_op"):
        wait._op = _InPlaceOf(wait._op, waiting(wait._op))


def calls_go_unseen() -> bool:
    """Whether graphs that are compiled now call collectives where :func:`wrap_graph_collectives` sees nothing.

    With Inductor's C++ wrapper a graph calls the C++ function of a collective, past the op.
    """
    # A setting of users, in a module that only Inductor imports.
    return bool(getattr(sys.modules.get("torch._inductor.config"), "cpp_wrapper", False))


class _InPlaceOf:
    """What runs in place of the function of an op. The hash of an op is that of its function, and torch has tables of
    ops: with another hash it would not find there that collectives are never run again in a backward pass.
    """

    __slots__ = ("_hash", "_run")

    def __init__(self, function: Callable[..., Any], run: Callable[..., Any]) -> None:
        self._hash, self._run = hash(function), run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __hash__(self) -> int:
        return self._hash


def count_inside_ops(cls: type) -> None:
    """Have torch's ``CommDebugMode`` count the collectives inside of ops on ``cls``, as inside of those on ``DTensor``,
    and its ``DebugMode`` write what this rank computes there.

    They know ``DTensor`` by name, and run the ops of any other class with themselves off.
    """
    for module, name in (("torch.distributed.tensor.debug", "CommDebugMode"), ("torch.utils._debug_mode", "DebugMode")):
        when_imported(module, partial(_count_inside_ops, name=name, cls=cls))


def _count_inside_ops(module: ModuleType, name: str, cls: type) -> None:
    mode: Any = getattr(module, name, None)
    if mode is None:
        return  # it counts between ops alone
    run = mode.__torch_dispatch__

    def leave_to_class(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, cls) for kind in types):
            return NotImplemented
        return run(self, func, types, args, kwargs)

    mode.__torch_dispatch__ = leave_to_class


def is_staging(call: FrameType | None) -> bool:
    """Whether a call is that of torch which copies a state to the host before it is saved.

    It asks each tensor for an empty one there, which for a wrapper is no tensor of the program. No public function says
    so. A torch with another module for it gets the error for an op that leaves the mesh's devices.
    """
    return call is not None and call.f_globals.get("__name__") == _STAGES


def is_saving_on_host(call: FrameType | None) -> bool:
    """Whether a call is that of ``torch.autograd.graph.save_on_cpu``, which brings the tensor back for the backward.

    It asks as a program that wants numbers does. Where torch moves it, each saved tensor is whole on the host.
    """
    return call is not None and call.f_globals.get("__name__") == "torch.autograd.graph"


_STAGES = "torch.distributed.checkpoint._state_dict_stager"
