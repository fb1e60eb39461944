"""Intercept ops: handlers, modes and wrapper tensors. Also the state of autograd and of a tensor's memory."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.errors import TorchPartError
from shardwise.private_torch.ops import custom_op_of, for_class, qualified_name
from shardwise.private_torch.parts import find_part, refuse, torch_part
from shardwise.private_torch.snapshot import with_snapshot
from shardwise.private_torch.trees import tree_leaves

__all__ = [
    "OpMode",
    "base_of",
    "disabled_torch_function",
    "forward_traceback",
    "get_data",
    "guard_memory",
    "in_backward",
    "hide_items",
    "is_batched",
    "is_zero_tensor",
    "leaf_of_hook",
    "leaf_to_accumulate",
    "leave_out_of_graphs",
    "memory_of",
    "name_of_running_node",
    "new_wrapper",
    "put_above_autograd",
    "put_before_dispatch",
    "put_before_mode",
    "recorded_ops",
    "run_under_watchers",
    "set_data",
    "support_foreach",
    "swap_parameter",
    "version_of",
    "watching",
    "with_memory",
]


def put_before_dispatch(op: OpOverload, cls: type, handler: Callable[..., Any]) -> torch.library.Library:
    """Have torch call a handler for an op on a tensor class, for as long as the returned library lives.

    The public function gives a custom op's handler to the op's definition, which keeps it for ever. If the private
    method is missing, such an op goes through ``__torch_dispatch__``.
    """
    library = torch.library.Library(op.namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    if custom_op_of(op) is None:
        torch.library.register_torch_dispatch(op, cls, handler, lib=library)
    elif (register := find_part("torch.library.Library._register_torch_dispatch_rule")) is not None:
        register(library, qualified_name(op).partition("::")[2], cls, handler)
    return library


def leave_out_of_graphs(function: Callable[..., Any]) -> None:
    """Have dynamo run a function that torch calls from C++, and what it calls, as they are.

    Between two graphs of a compiled function dynamo would compile them: it sees them as calls of the program.
    """
    # Without it: slower, and ranks may compile other graphs.
    set_strategy = find_part("torch._C._dynamo.eval_frame.set_code_exec_strategy")
    skip = find_part("torch._C._dynamo.eval_frame._FrameAction.SKIP")
    strategy = find_part("torch._C._dynamo.eval_frame._FrameExecStrategy")
    if set_strategy is not None and skip is not None and strategy is not None:
        set_strategy(function.__code__, strategy(skip, skip))


def put_before_mode(op: OpOverload, cls: type, mode: type[OpMode], handler: Callable[..., Any]) -> Any:
    """Have torch call a handler for calls on a tensor class while a mode is on, for as long as the result lives.

    Without it torch calls the mode, and the mode the handler: several times the cost of an op.
    """
    alone = (cls,)

    def handle(on: OpMode, op: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types == alone:
            return handler(None, op, types, args, kwargs)
        return on.run(op, types, args, kwargs or {})

    return put_before_dispatch(op, mode, handle)


def put_above_autograd(op: OpOverload, run: Callable[..., Any]) -> torch.library.Library:
    """Replace an op by ``run(below, args, kwargs)``, above autograd, for as long as the returned library lives.

    It applies to tensor subclasses and under modes, not to plain tensors. ``below`` is the op as torch runs it. A
    composite op runs as other ops above autograd, and ``__torch_dispatch__`` does not see the tensors that it creates
    there from no operand. The key is the one at which torch takes its snapshot for such tensors.
    """
    key = torch._C.DispatchKey.PythonTLSSnapshot
    after = torch._C._dispatch_keyset_full_after(key)
    library = torch.library.Library(op.namespace, "IMPL")  # type: ignore[no-untyped-call]

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        def below(*args: Any, **kwargs: Any) -> Any:
            return with_snapshot(partial(op.redispatch, keys & after), args, kwargs)

        return run(below, args, kwargs)

    leave_out_of_graphs(kernel)
    library.impl(op, kernel, key.name, with_keyset=True)  # type: ignore[no-untyped-call]
    return library


def _portable_disabled_torch_function(
    _cls: type, function: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **(kwargs or {}))


# Turns __torch_function__ off for a tensor subclass. Torch documents this private name. The fallback costs a frame.
disabled_torch_function: Any = getattr(
    torch._C, "_disabled_torch_function_impl", classmethod(_portable_disabled_torch_function)
)


def _portable_wrapper(cls: type, local: torch.Tensor, spec: Any, requires_grad: bool = False) -> Any:
    meta = spec.tensor_meta
    wrapper: Any = torch.Tensor._make_wrapper_subclass(
        cls,
        meta.shape,
        strides=meta.stride,
        dtype=meta.dtype,
        device=local.device,
        layout=local.layout,
        requires_grad=requires_grad,
    )
    wrapper._local_tensor = local
    wrapper._spec = spec
    return wrapper


# The C++ constructor that torch has for its own DTensor. It reads spec.tensor_meta and sets _spec and _local_tensor.
# It costs less than half of _make_wrapper_subclass (1.0 against 2.4 microseconds), which is the fallback.
new_wrapper: Callable[..., Any] = getattr(torch.Tensor, "_dtensor__new__", _portable_wrapper)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its __init_subclass__ unannotated
    """Records each op that reaches the dispatcher, with its arguments. Documented, in a module with a private name."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[tuple[Any, Any, Any]] = []
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append((func, args, kwargs or {}))
        return self._run(func, args, kwargs or {})


def _as_it_is(op: Any, args: Any, kwargs: Any) -> Any:
    return op(*args, **kwargs)


def recorded_ops(
    call: Callable[..., Any], args: Any, kwargs: Any, run: Callable[..., Any] = _as_it_is
) -> list[tuple[Any, Any, Any]]:
    """The ops that a function calls on plain tensors, each with its arguments; ``run(op, args, kwargs)`` runs one."""
    recorder = _Recorder(run)
    with torch.no_grad(), recorder:
        call(*args, **kwargs)
    return recorder.ops


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as above
    """Passes each op that reaches the dispatcher to a function, which runs it and returns its result."""

    def __init__(
        self, run: Callable[..., Any], decomposes: Callable[[Any], bool], run_higher: Callable[..., Any]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run
        self._decomposes = decomposes
        self.run_higher = run_higher

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._decomposes(func):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return self._run(func, args, kwargs or {})


def watching(
    run: Callable[..., Any], decomposes: Callable[[Any], bool], run_higher: Callable[..., Any] = _as_it_is
) -> AbstractContextManager[Any]:
    """A context in which ``run(op, args, kwargs)`` replaces every op. Ops that ``decomposes`` accepts are decomposed
    first. ``run_higher`` replaces operators of higher order on plain tensors, such as :func:`run_under_watchers` knows.
    """
    return _Watcher(run, decomposes, run_higher)


def run_under_watchers(op: Any, cls: type[torch.Tensor]) -> None:
    """Let an operator of higher order, for which ``cls`` has a function, run in a context of :func:`watching`.

    Torch refuses such an operator under a mode without a function for it. This one leaves a call on ``cls`` to the
    function of ``cls``, with the mode on.
    """

    def run(mode: _Watcher, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, cls) for leaf in tree_leaves((args, kwargs))):
            return NotImplemented
        return mode.run_higher(op, args, kwargs)

    for_class(op, _Watcher, run)


class OpMode(TorchDispatchMode, ABC):  # type: ignore[no-untyped-call]  # as above
    """Calls :meth:`run` for each op that reaches the dispatcher, with the mode off.

    Compiled code takes no notice of it: torch would run such code eagerly under a mode that sees into it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @abstractmethod
    def run(self, op: OpOverload, types: Any, args: Any, kwargs: Any) -> Any:
        """Run one op; ``types`` are those of its operands that are no plain tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, types, args, kwargs or {})

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def memory_of(tensor: torch.Tensor) -> int:
    """An identity of a tensor's memory. An address does not serve: tensors without data have none."""
    identity: int = torch.Tensor.untyped_storage(tensor)._cdata
    return identity


def forward_traceback() -> list[str]:
    """In a backward pass under anomaly detection: the stack of the forward call that created the running node.

    Anomaly detection prints this stack when it finds an anomaly. The node that holds it is not public.
    """
    node = _current_node()
    return [] if node is None else list(node.metadata.get("traceback_", ()))


# By name: torch.optim deletes the names of its own modules.
FOREACH_TYPES = (
    "torch.utils._foreach_utils._foreach_supported_types",
    "torch.optim.optimizer._foreach_supported_types",
)


def support_foreach(cls: type) -> None:
    """Let optimizers and gradient clipping use foreach ops on ``cls`` by default, as for torch's own DTensor.

    There is no public API for this. If the lists are missing, users must pass ``foreach=True``.
    """
    for types in map(find_part, FOREACH_TYPES):
        if types is not None and cls not in types:
            types.append(cls)


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread. Only autograd's engine knows its graph task."""
    return bool(torch._C._current_graph_task_id() != -1)


# The stub wrongly says that a node's dict is a method.
_current_node: Callable[[], Any] = torch_part(
    "torch._C._current_autograd_node", "tell which node of a backward pass runs"
)
_will_run: Callable[[Any], bool] = torch_part(
    "torch._C._will_engine_execute_node", "tell whether a backward pass accumulates in a leaf"
)


def name_of_running_node() -> str:
    """In a backward pass: the name of the running node, such as ``MmBackward0``; else nothing."""
    node = _current_node()
    return "" if node is None else str(node.name())


def leaf_of_hook() -> Any:
    """In a hook of a leaf: that leaf; else None."""
    return getattr(_current_node(), "variable", None)


def leaf_to_accumulate() -> Any:
    """In a hook of a leaf: that leaf, if autograd is about to accumulate the gradient in it; else None.

    ``torch.autograd.grad`` returns the gradient and accumulates nothing. A hook cannot refer to its leaf by itself:
    ``swap_tensors`` refuses a tensor with weak references, and a strong one would be a cycle.
    """
    node = _current_node()
    leaf = getattr(node, "variable", None)
    try:
        return leaf if leaf is not None and _will_run(node) else None
    except TorchPartError:
        raise
    except RuntimeError:  # torch says by an error that this is autograd.grad
        return None


def is_batched(tensor: Any) -> bool:
    """Whether a tensor is one of ``vmap``'s, which hides the tensors that it holds. No public function says so."""
    return isinstance(tensor, torch.Tensor) and (_is_batched(tensor) or _is_batched_as_before(tensor))


_is_batched: Callable[[Any], bool] = torch_part(
    "torch._C._functorch.is_batchedtensor", "tell tensors of vmap from others"
)
# Those of the older vmap, which autograd still uses. A torch without the function is one without such tensors.
_is_batched_as_before: Callable[[Any], bool] = find_part("torch._C._functorch.is_legacy_batchedtensor") or (
    lambda _tensor: False
)


def is_zero_tensor(value: Any) -> bool:
    """Whether a value is a tensor without memory that stands for zeros, as forward-mode differentiation makes them."""
    return isinstance(value, torch.Tensor) and bool(_is_zeros(value))


_is_zeros: Callable[[Any], bool] = torch_part("torch.Tensor._is_zerotensor", "tell tangents that are zero from others")


def with_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with elements in memory: zeros for one that only stands for them, as the gradient of ``sgn`` does.

    Below the Python key, where local ops run, torch's kernels read the memory of such a tensor, and there is none.
    """
    if is_zero_tensor(tensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor


def hide_items(cls: type) -> None:
    """Let torch see a tensor class with a ``__getitem__`` of its own as a tensor, not as a sequence.

    Python fills the slot for items of sequences for any class that defines ``__getitem__``; the C class of tensors
    leaves it empty. Where torch reads a list of numbers, as ``torch.tensor([x.sum(), 1.0])`` does, it would ask a
    tensor with that slot for its length. Only C code can empty a slot. Indexing uses another one and stays as it is.
    Nothing happens where classes do not lie in memory as expected.
    """

    class WithItems:
        def __getitem__(self, index: Any) -> Any: ...

    class WithoutItems: ...

    slot = _item_slot(cls)
    if slot.value and slot.value == _item_slot(WithItems).value and not _item_slot(WithoutItems).value:
        slot.value = None


def _item_slot(cls: type) -> ctypes.c_void_p:
    """``cls->tp_as_sequence->sq_item``: the eleventh pointer of a class, and the fourth one there."""
    pointer = ctypes.sizeof(ctypes.c_void_p)
    head = object.__basicsize__ + pointer
    sequence = ctypes.c_void_p.from_address(id(cls) + head + 10 * pointer).value
    assert sequence is not None, "a class made by Python code has these slots"
    return ctypes.c_void_p.from_address(sequence + 3 * pointer)


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that a view was taken of. Torch documents the attribute in its notes on autograd only."""
    return tensor._base


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written in place. Torch documents the counter, but its attribute is not public."""
    return tensor._version


def swap_parameter(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replace a parameter by a tensor. A module refuses the assignment, and removing a parameter and adding it again
    changes the order of ``parameters()``.
    """
    parameters = vars(module).get("_parameters")
    if parameters is None:
        refuse("torch.nn.Module._parameters", f"replace the parameter {name}")
    parameters[name] = tensor


# Torch's own `.data`, below what `guard_memory` puts in front of it.
_DATA: Any = torch.Tensor.data
get_data: Callable[[Any], Any] = _DATA.__get__
set_data: Callable[[Any, Any], None] = _DATA.__set__


def guard_memory(cls: type, refuse: Callable[[Any, str], Any]) -> None:
    """Call ``refuse(tensor, asked)`` before a plain tensor, or a DLPack capsule, gets the memory of a ``cls``.

    ``plain.data = tensor`` and ``torch.to_dlpack(tensor)`` copy the pointer to the storage. A wrapper's pointer is 0,
    and the next read ends the interpreter. Both are C functions that ask neither ``__torch_function__`` nor
    ``__torch_dispatch__`` of a wrapper, and a flag of the storage would cost each new wrapper a call. So the attribute
    ``torch.Tensor.data`` and the function ``to_dlpack`` are replaced. Reading ``.data`` still calls torch's getter.
    """

    def set_checked(tensor: Any, value: Any) -> None:
        # A wrapper has a setter of its own. It ends here too: under a mode, torch looks the setter up again.
        if isinstance(value, cls) and not isinstance(tensor, cls):
            refuse(value, "set .data of a plain tensor to")
        set_data(tensor, value)

    to_capsule: Any = vars(torch.utils.dlpack)["to_dlpack"]

    def to_dlpack(tensor: Any) -> Any:
        if isinstance(tensor, cls):
            refuse(tensor, "make a DLPack capsule of")
        return to_capsule(tensor)

    to_dlpack.__doc__ = to_capsule.__doc__
    torch.Tensor.data = property(get_data, set_checked, _DATA.__delete__, _DATA.__doc__)  # type: ignore[assignment]
    for module in (torch, torch.utils.dlpack):
        vars(module)["to_dlpack"] = to_dlpack
