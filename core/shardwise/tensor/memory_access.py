"""What a program does with the memory of a MeshTensor, below the ops: ``x.data = y``, storages, DLPack, NumPy.

To torch a MeshTensor has the shape of the whole tensor and a storage without memory. Whatever reads or writes that
storage reads or writes address 0. So each way to the memory of a tensor either uses the memory of this rank's part,
where that is what the program means, or raises and says what to call instead.

Torch's own code asks ``data_ptr() == 0`` to see that a tensor has no memory of its own (deepcopy, the staging of
checkpoints, recurrent layers), and models ask whether an address is aligned. So :meth:`data_ptr` gives 0, as torch's
does. A Triton kernel would read there, which ends all that a process may do on its card: its launch is refused. And
``torch.cuda.make_graphed_callables`` compares addresses to see whether it must copy what it is given.
"""

from __future__ import annotations

import inspect
from types import FrameType
from typing import Any, NoReturn, cast

import torch
from torch.autograd.graph import increment_version

from shardwise.engine.first_run import refuse_nested
from shardwise.engine.plain_tensors import accept
from shardwise.errors import LayoutError, PlainTensorError, TracingError
from shardwise.kernel.engine import tensor_class
from shardwise.kernel.local_strides import other_layout
from shardwise.kernel.mesh import coordinates
from shardwise.kernel.placements import REPLICATE, Partial, Placement, Shard
from shardwise.kernel.results import wrap
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta, unexpanded
from shardwise.kernel.view_copies import fresh
from shardwise.private_torch.dispatch import get_data, new_wrapper, set_data
from shardwise.private_torch.distributed import is_staging
from shardwise.private_torch.tracing import SETS_MEMORY, end_graph, is_compiled_now, is_describing, is_traced
from shardwise.tensor.local_parts import check_device
from shardwise.tensor.names import name_of
from shardwise.tensor.shards import scatter_local

__all__ = [
    "as_subclass",
    "cuda_array_interface",
    "data",
    "data_ptr",
    "give_values",
    "is_pinned",
    "is_set_to",
    "is_shared",
    "new_empty",
    "pin_memory",
    "record_stream",
    "refuse_to_archive",
    "refuse_to_lend",
    "refusing",
    "set_",
    "set_in_graph",
    "share_memory_",
    "unmarked",
    "untyped_storage",
]


# -- .data -------------------------------------------------------------------------------------------------------


def _set_data(tensor: Any, value: Any) -> None:
    """``tensor.data = value``: the tensor has the memory, the layout and the dtype of ``value`` from now on.

    A plain value is a whole tensor, which the ranks compare as they compare plain operands. It is placed as the tensor
    is, so where the tensor is sharded the memory is not that of ``value``.
    """
    if isinstance(value, torch.Tensor) and not isinstance(value, tensor_class()):
        value = _placed_as(tensor, value)
    local: Any = None
    spec: Any = None
    if isinstance(value, tensor_class()):
        local, spec = value._local_tensor, value._spec
        if name_of(tensor):  # a parameter stays the one that decisions know, whatever its values come from
            spec = spec.with_tag(tensor._spec.tag)
        # A wrapper of its own: what two wrappers share says nothing of memory, and torch makes no graph of two that do.
        value = new_wrapper(tensor_class(), local, spec, False)
    set_data(tensor, value)  # raises as torch does, for example for an integer tensor under a parameter
    tensor._local_tensor, tensor._spec = local, spec
    tensor._follow_layout()


def give_values(tensor: Any, value: Any) -> None:
    """Other values for a tensor that stays as it is in all else: its layout, where the shape allows that, its hooks,
    and the graphs that refer to it. As after any write, those of them that need the values from before are refused.
    """
    if value is not tensor:
        here: TensorSpec = tensor._spec
        if isinstance(value, tensor_class()) and value.shape == here.shape and value._spec.mesh == here.mesh:
            value = value.redistribute(placements=here.placements)
        tensor.data = value
    increment_version(tensor)


def _placed_as(tensor: Any, value: torch.Tensor) -> Any:
    """A plain tensor placed as a MeshTensor is; replicated where its shape does not allow that.

    Raises :class:`PlainTensorError` for what may be one rank's part: its shape is that of a part, not of the whole.
    """
    here: TensorSpec = tensor._spec
    mesh: Any = here.mesh
    asked = f"set .data of {here}"
    is_ordinary = type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and not other_layout(value)
    is_whole = is_ordinary and accept(value, mesh, asked)
    if not is_whole or (
        value.shape != here.shape and any(value.shape == here.local_shape(at) for at in coordinates(mesh.shape))
    ):
        raise PlainTensorError(
            asked=asked,
            found=f"the value is a plain {type(value).__name__} of shape {tuple(value.shape)}, which has no layout",
            do="Write x.data = distribute_tensor(value, x.device_mesh, x.placements) for a whole tensor, "
            "or x.data = MeshTensor.from_local(value, x.device_mesh, x.placements, shape=x.shape) for a part.",
            shape=tuple(value.shape),
        )
    check_device(value, mesh)
    placements = tuple(p if _can_place(p, value, here) else REPLICATE for p in here.placements)
    whole = value.detach()
    if all(p == REPLICATE for p in placements):
        return wrap(whole, TensorSpec(mesh, placements, TensorMeta.of(whole)))
    spec = TensorSpec(mesh, placements, unexpanded(TensorMeta.of(whole)))
    return wrap(scatter_local(whole, spec), spec)


def _can_place(placement: Placement, value: torch.Tensor, here: TensorSpec) -> bool:
    if isinstance(placement, Partial):
        return False
    return value.shape == here.shape or (type(placement) is Shard and placement.dim < value.ndim)


_SET = ("set the memory of {}", "Assign x.data = y, where y is a MeshTensor, or x.copy_(y).")


def set_in_graph(tensor: Any, source: Any) -> NoReturn:
    """End the graph that is made before ``tensor.data = source``, which then runs by itself.

    A graph of tensors with tensors inside cannot give one of its inputs other memory. Raises :class:`LayoutError`
    outside of graphs, where only ``set_`` comes here.
    """
    if not isinstance(tensor, tensor_class()):
        refuse_to_lend(source, "set the memory of a plain tensor to that of")
    if not is_compiled_now():
        _refuse(tensor, *_SET)
    end_graph(
        SETS_MEMORY,
        TracingError(
            asked=f"set .data of {tensor._spec} in one graph",
            found="a graph cannot give a MeshTensor another part",
            do="Write x.data.copy_(y), which a graph may have, or leave out fullgraph=True: the graph then ends before "
            "the assignment.",
        ),
    )


# The getter is torch's own, and as fast.
data: Any = property(get_data, _set_data, doc="The tensor without its history; assign a MeshTensor to replace it.")


def refuse_to_lend(tensor: Any, asked: str) -> NoReturn:
    """Raise for a plain tensor, or a capsule, that would point to the memory of a MeshTensor."""
    raise LayoutError(
        asked=f"{asked} {tensor._spec}",
        found="a plain tensor has one piece of memory, and each rank holds only its part",
        do="Use to_local() for this rank's part, or full_tensor(). A module holds a MeshTensor as it is: "
        "module.weight = nn.Parameter(x).",
    )


def refuse_to_archive(tensor: Any) -> NoReturn:
    """Raise for a script that would be written with a MeshTensor in it."""
    raise LayoutError(
        asked=f"save a TorchScript program that holds {tensor._spec}",
        found="torch writes the memory of its tensors, and each rank holds only its part",
        do="Load {name: t.full_tensor() for name, t in model.state_dict().items()} into the model for one device, and "
        "trace that; or save the state, as docs/checkpoints.md says.",
    )


# -- the part of this rank is meant ------------------------------------------------------------------------------


def share_memory_(tensor: Any) -> Any:
    """Move this rank's part to shared memory; returns the tensor."""
    tensor._local_tensor.share_memory_()
    return tensor


def is_shared(tensor: Any) -> bool:
    """Whether this rank's part is in shared memory."""
    return bool(tensor._local_tensor.is_shared())


def pin_memory(tensor: Any, device: Any = None) -> Any:
    """The same tensor with this rank's part in pinned memory."""
    local = tensor._local_tensor
    pinned = local.pin_memory() if device is None else local.pin_memory(device)
    return tensor if pinned is local else new_wrapper(type(tensor), pinned, unmarked(tensor._spec), False)


def is_pinned(tensor: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether this rank's part is in pinned memory."""
    return bool(tensor._local_tensor.is_pinned(*args, **kwargs))


def new_empty(tensor: Any, *size: Any, **options: Any) -> Any:
    """A tensor of another size. Torch's own, but where ``torch.distributed.checkpoint`` copies a state to the host.

    It asks for a tensor on the host, and then gives it a copy of each slot of this one, the rank's part among them.
    """
    device = options.get("device")
    if device is not None and torch.device(device).type != tensor._spec.mesh.device_type:
        asking = cast("FrameType", inspect.currentframe()).f_back
        if is_staging(asking):
            part = torch.empty(0, dtype=tensor.dtype, device=device)
            return new_wrapper(type(tensor), part, unmarked(tensor._spec), False)
    return torch.Tensor.new_empty(tensor, *size, **options)


def record_stream(tensor: Any, s: Any) -> None:
    """Keep the memory of this rank's part until the stream has done what is queued on it now."""
    tensor._local_tensor.record_stream(s)


def is_set_to(this: Any, tensor: Any) -> bool:
    """Whether both are the same view of the same memory."""
    if not isinstance(tensor, tensor_class()):
        local: torch.Tensor = this._local_tensor
        return not isinstance(tensor, torch.Tensor) and bool(local.is_set_to(tensor))  # raises torch's error
    other: Any = tensor
    if not isinstance(this, tensor_class()):
        return False  # a plain tensor has no memory of a MeshTensor
    return this._spec is other._spec and bool(this._local_tensor.is_set_to(other._local_tensor))


def unmarked(spec: TensorSpec) -> TensorSpec:
    """The spec of a tensor with memory of its own, which may be written."""
    return spec.with_meta(spec.tensor_meta)


# -- no part is the tensor ---------------------------------------------------------------------------------------


def refusing(asked: str, do: str) -> Any:
    """A method that raises :class:`LayoutError`, because a part is not the tensor. ``{}`` stands for the spec."""

    def refuse(tensor: Any, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG001  # any signature of torch's
        _refuse(tensor, asked, do)

    return refuse


def _refuse(tensor: Any, asked: str, do: str) -> NoReturn:
    raise LayoutError(asked=asked.format(tensor._spec), found="each rank holds only its part", do=do)


def set_(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """``tensor.set_(other)`` for a MeshTensor of the same dtype: what ``tensor.data = other`` does.

    Raises :class:`LayoutError` for another source, and for a tensor that torch does not let a program write.
    """
    source = args[0] if args else kwargs.get("source")
    is_allowed = len(args) + len(kwargs) == 1 and isinstance(source, tensor_class()) and source.dtype == tensor.dtype
    if not is_allowed or (tensor.requires_grad and torch.is_grad_enabled()):
        _refuse(tensor, *_SET)
    if source is not tensor:
        tensor.data = source
    increment_version(tensor)
    return tensor


_LAUNCH = 3
"""How many frames up from ``data_ptr()`` the launch of a Triton kernel is at most: Triton makes code between them."""


def data_ptr(tensor: Any) -> int:
    """0, as torch answers for a tensor without memory of its own; to a graphed callable that of this rank's part.

    Raises :class:`LayoutError` if the launch of a Triton kernel asks, which would read at address 0.
    """
    frame = inspect.currentframe()
    callers = []
    for _ in range(_LAUNCH):
        frame = frame.f_back if frame else None
        callers.append(str(frame.f_globals.get("__name__", "")) if frame else "")
    if callers[0] == "torch.cuda.graphs":
        return fresh(tensor._local_tensor).data_ptr()
    if any(caller.partition(".")[0] == "triton" for caller in callers):
        _refuse(
            tensor,
            "run a Triton kernel on {}",
            "Launch it on to_local(), in a function that sw.local runs, or make it an op by torch.library.custom_op "
            "and give that a rule.",
        )
    return 0


def as_subclass(tensor: Any, cls: Any) -> Any:
    """The tensor as ``cls``, which it is. Raises :class:`LayoutError` for another class: it could not say where the
    parts lie.
    """
    if isinstance(cls, type) and issubclass(cls, torch.Tensor) and not issubclass(type(tensor), cls):
        _refuse(
            tensor,
            f"make a {cls.__name__} of {{}}",
            f"Pass the {type(tensor).__name__} as it is, or make the {cls.__name__} of to_local() or full_tensor().",
        )
    return torch.Tensor.as_subclass(tensor, cls)


def untyped_storage(tensor: Any) -> torch.UntypedStorage:
    """Raises :class:`LayoutError`. While a graph is made: torch's storage, whose identity alone is asked for."""
    asking = cast("FrameType", inspect.currentframe()).f_back
    if is_compiled_now() or is_traced(tensor._local_tensor) or is_describing(asking):
        return torch.Tensor.untyped_storage(tensor)
    if asking is not None and str(asking.f_globals.get("__name__")).startswith("torch.nested."):
        refuse_nested(f"make a nested tensor with values in {tensor._spec}")
    _refuse(
        tensor,
        "read or write the storage of {}",
        "Use to_local().untyped_storage(), or full_tensor().untyped_storage(); nbytes and numel() tell the size. A "
        "file of weights: save_pretrained and save_model of a placed module write it; to save_file or another writer "
        "pass {name: t.full_tensor() for name, t in model.state_dict().items()}, made on every rank.",
    )


def _cuda_array_interface(tensor: Any) -> NoReturn:
    # Readers of this protocol ask with hasattr and expect this error where it is not offered.
    raise AttributeError(
        f"{tensor._spec} has no __cuda_array_interface__: each rank holds only its part. "
        "Use to_local() or full_tensor()."
    )


cuda_array_interface: Any = property(_cuda_array_interface)
