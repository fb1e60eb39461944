"""Tracing a graph: traced tensors, what a graph holds as constants or as one call, and what torch does with both."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cache, partial, wraps
from types import CodeType, FrameType
from typing import Any, NoReturn

import torch
from torch._guards import TracingContext, detect_fake_mode
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, in_kernel_invocation_manager
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._pytree import tree_leaves

from shardwise.private_torch.fake import is_rehearsing
from shardwise.private_torch.imports import when_imported
from shardwise.private_torch.modes import leave_modes, outside_modes, recording_mode, tracer_now
from shardwise.private_torch.parts import find_part, missing_parts, torch_part

__all__ = [
    "COMPARES_MEMORY",
    "SETS_MEMORY",
    "assert_when_run",
    "constant_in_graphs",
    "end_graph",
    "enter_in_traces",
    "fold_no_collectives",
    "graph_calls",
    "graph_that_is_made",
    "is_compiled_now",
    "is_describing",
    "is_layout_only",
    "is_recorded",
    "is_recorded_constant",
    "is_recorded_whole",
    "is_traced",
    "is_without_data",
    "may_vary_between_ranks",
    "record_call",
    "record_constants",
    "retraced",
    "seeing_graphs",
    "take_plain_tangents",
    "without_data",
]

_TRACED = (FakeTensor, FunctionalTensor)

SETS_MEMORY: Any = torch.ops.aten.set_.source_Tensor
"""The op that stands in a graph for ``x.data = y``. Outside of graphs torch sets the data without an op."""

COMPARES_MEMORY: Any = torch.ops.aten.is_set_to.default
"""The op that a plain tensor asks whether another tensor is the same view of the same memory."""


def is_without_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for a value that does not exist yet. Only these two private classes say so."""
    return type(tensor) is not torch.Tensor and isinstance(tensor, _TRACED)


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for a value of a graph that is being traced."""
    return is_without_data(tensor) and not is_rehearsing()


def is_recorded(tensor: torch.Tensor) -> bool:
    """Whether ops on a tensor go into a graph: those on a traced tensor, and all that ``make_fx`` sees of real ones."""
    # In one piece, because every redistribution calls it.
    if type(tensor) is not torch.Tensor and isinstance(tensor, _TRACED):
        return not is_rehearsing()
    return recording_mode() is not None and not is_rehearsing()


def is_recorded_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor with tensors inside is itself a value of a graph of ``make_fx``. What is inside is then unknown
    to the graph. No public function says so.
    """
    mode = recording_mode()
    if mode is None:
        return False
    # Imported here, because loading it takes time.
    from torch.fx.experimental.proxy_tensor import get_proxy_slot

    return get_proxy_slot(tensor, mode.tracer, None) is not None


def is_recorded_constant(tensor: Any) -> bool:
    """Whether a tensor with tensors inside is from outside of a graph of ``make_fx`` that records such tensors."""
    mode = recording_mode()
    if mode is None or not any(isinstance(t, type(tensor)) for t in mode.tracer.tensor_tracker):
        return False
    # Imported here, because loading it takes time.
    from torch.fx.experimental.proxy_tensor import get_proxy_slot

    inside = (getattr(tensor, name) for name in _inside(tensor))
    return all(get_proxy_slot(t, mode.tracer, None) is None for t in (tensor, *inside))


def record_call(call: Callable[..., Any], operand: torch.Tensor, run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The result of ``run()``, in the graph of ``make_fx`` as one call of a function with the operand, a value or a
    constant of the graph. Nothing that runs in it is recorded.
    """
    module = torch_part("torch.fx.experimental.proxy_tensor", _RECORDS)
    tracer = recording_mode().tracer
    with outside_modes():
        result = run()
    _record(module, tracer, call, operand, result)
    return result


def _record(module: Any, tracer: Any, call: Callable[..., Any], operand: torch.Tensor, result: torch.Tensor) -> None:
    _track_constant(module, tracer, operand)
    proxy = tracer.create_proxy("call_function", call, (module.get_proxy_slot(operand, tracer).proxy,), {})
    module.track_tensor(result, proxy, constant=None, tracer=tracer)


def _track_constant(module: Any, tracer: Any, tensor: torch.Tensor) -> None:
    if not module.has_proxy_slot(tensor, tracer):
        proxy = tracer.proxy(tracer.create_arg(tensor))
        module.track_tensor(tensor, proxy, constant=None, tracer=tracer)


def record_constants(cls: type, join: Callable[[Any], tuple[torch.Tensor, Callable[..., Any]]]) -> None:
    """Have ``make_fx`` take tensors of a class that meet values of its graph as constants of the graph, whole. Have it
    know those whole that it returns, or that meet others, and of which it knows what is inside.

    Torch would hand an op on constants and values to the class, whose ops on what is inside the values are unknown to
    the graph: it would return the numbers of the trace for every input. So it would for a tensor of the class that it
    returns. ``join(tensor)`` gives what is inside a tensor, and a function that makes the tensor of it. Where torch
    lacks a part that this needs, ``make_fx`` raises :class:`TorchPartError` for tensors of the class.
    """
    when_imported("torch.fx.experimental.proxy_tensor", lambda module: _record_constants(module, cls, join))


_RECORDS = "record MeshTensors with make_fx"
_OF_GRAPHS = tuple(
    f"torch.fx.experimental.proxy_tensor.{n}" for n in ("proxy_call", "track_tensor", "has_proxy_slot", "wrap_key")
)


def _record_constants(module: Any, cls: type, join: Callable[[Any], tuple[torch.Tensor, Callable[..., Any]]]) -> None:
    for missing in missing_parts(_OF_GRAPHS):
        module.make_fx = _refusing(module.make_fx, cls, torch_part(missing, _RECORDS))
        return
    call_in_graph, wrap_traced = module.proxy_call, module.wrap_key

    def join_known(tensor: Any, tracer: Any) -> None:
        """Have the graph know a tensor whole of which it knows what is inside."""
        has = partial(module.has_proxy_slot, tracer=tracer)
        if not has(tensor) and any(has(getattr(tensor, name)) for name in _inside(tensor)):
            part, call = join(tensor)
            _record(module, tracer, call, part, tensor)

    def proxy_call(mode: Any, op: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        tracer = mode.tracer
        operands: list[Any] = [t for t in tree_leaves((args, kwargs)) if isinstance(t, cls)]
        constants = [t for t in operands if not module.has_proxy_slot(t, tracer)]
        if constants and (len(constants) < len(operands) or any(isinstance(t, cls) for t in tracer.tensor_tracker)):
            for tensor in constants:
                join_known(tensor, tracer)
                _track_constant(module, tracer, tensor)
        return call_in_graph(mode, op, pre_dispatch, args, kwargs)

    def wrap_key(function: Callable[..., Any], tensors: Any, tracer: Any, pre_dispatch: bool) -> Any:
        @wraps(function)
        def traced(*inputs: Any) -> Any:
            results = function(*inputs)
            for tensor in tree_leaves(results):
                if isinstance(tensor, cls):
                    join_known(tensor, tracer)
            return results

        return wrap_traced(traced, tensors, tracer, pre_dispatch)

    module.proxy_call, module.wrap_key = proxy_call, wrap_key


def enter_in_traces(context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Have ``make_fx`` run what it traces in ``context()``. No public function is called where a trace begins.

    A mode that a program has entered lies above the mode that records, whichever came first.
    """
    when_imported("torch.fx.experimental.proxy_tensor", partial(_enter_in_traces, context=context))


def _enter_in_traces(module: Any, context: Callable[[], AbstractContextManager[Any]]) -> None:
    wrap_traced = getattr(module, "wrap_key", None)
    if wrap_traced is None:
        return  # then make_fx takes no MeshTensors

    def wrap_key(function: Callable[..., Any], tensors: Any, tracer: Any, pre_dispatch: bool) -> Any:
        @wraps(function)
        def traced(*inputs: Any) -> Any:
            with context():
                return function(*inputs)

        return wrap_traced(traced, tensors, tracer, pre_dispatch)

    module.wrap_key = wrap_key


def fold_no_collectives() -> None:
    """Have ``torch.func.linearize`` leave the collectives of a graph where they are.

    It computes what does not depend on the tangents once, and copies each result. A collective's is copied before it
    has come: the function that waits for it says that it has an effect, and stays in the graph.
    """
    when_imported("torch.fx.experimental.const_fold", _fold_no_collectives)


def _fold_no_collectives(module: Any) -> None:
    # By its default value, as dynamo knows the function by identity.
    split = module.split_const_subgraphs
    named = inspect.signature(split).parameters
    if split.__kwdefaults__ is None and "skip_folding_node_fn" in named:
        defaults = {name: p.default for name, p in named.items() if p.default is not p.empty}
        split.__defaults__ = tuple({**defaults, "skip_folding_node_fn": _is_collective}.values())


def _is_collective(node: Any) -> bool:
    return getattr(node.target, "namespace", None) == "_c10d_functional"


def _refusing(make_fx: Any, cls: type, refuse: Callable[[], Any]) -> Any:
    @wraps(make_fx)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        trace = make_fx(*args, **kwargs)

        def checked(*inputs: Any) -> Any:
            return refuse() if any(isinstance(t, cls) for t in tree_leaves(inputs)) else trace(*inputs)

        return checked

    return refusing


def _inside(tensor: Any) -> Sequence[str]:
    names: Sequence[str] = tensor.__tensor_flatten__()[0]
    return names


def is_layout_only(tensor: torch.Tensor) -> bool:
    """Whether only the layout of a traced tensor matters: dynamo computes it for each line, and records nothing."""
    return is_traced(tensor) and isinstance(tensor, FakeTensor) and tracer_now() is None


def is_compiled_now() -> bool:
    """Whether this thread is compiling a graph, at any stage. The public function is true only inside the graph."""
    return TracingContext.try_get() is not None


def end_graph(op: Any, error: Exception) -> NoReturn:
    """End the graph that dynamo makes before a call, which then runs by itself. Where one graph is asked for, ``error``
    comes out.

    Dynamo ends a graph for few classes of errors. It looks at the cause of what it catches, and makes that the cause of
    its own error.
    """
    known = DataDependentOutputException(op)
    known.__cause__ = error
    raise DataDependentOutputException(op) from known


def is_describing(call: FrameType | None) -> bool:
    """Whether a call is that of torch which describes a tensor, to make one like it without data.

    It asks for the identity of the tensor's memory. ``torch.export`` makes its inputs before any public function says
    that it exports.
    """
    return call is not None and call.f_code is _describes()


@cache
def _describes() -> CodeType | None:
    function = find_part("torch._subclasses.meta_utils.MetaTensorDescriber.describe_tensor")
    return None if function is None else getattr(inspect.unwrap(function), "__code__", None)


def retraced(part: torch.Tensor, shape: Sequence[Any], stride: Sequence[Any]) -> torch.Tensor:
    """A tensor without data, of other sizes, that replaces ``part`` in its trace. The symbols of ``part`` may then stay
    unused. Neither the trace's mode nor its symbols are public.
    """
    mode = _mode_of(part)
    for size in (*part.shape, *part.stride()):
        if isinstance(size, torch.SymInt):
            fresh = mode.shape_env.pending_fresh_unbacked_symbols
            fresh[:] = [s for s in fresh if s not in size.node.expr.free_symbols]
    with leave_modes(), mode:
        replacement = torch.empty_strided(shape, stride, dtype=part.dtype, device=part.device)
    offset = part.storage_offset()
    if isinstance(offset, torch.SymInt) or offset:
        # As torch itself does for inputs that lie so.
        with torch.no_grad(), in_kernel_invocation_manager(mode):
            replacement.set_(replacement.untyped_storage(), offset, tuple(shape), tuple(stride))
    # Torch refers weakly to what stands for a tensor. Whatever reads the tensor again, as an optimizer's step does with
    # the gradient of a parameter, would make new symbols if this one were gone.
    replacement.shardwise_replaces = part  # type: ignore[attr-defined]
    return replacement


def without_data(part: torch.Tensor) -> AbstractContextManager[Any]:
    """A context in which ops run on tensors without data, with the symbolic sizes of the trace of ``part``."""
    stack = ExitStack()
    stack.enter_context(leave_modes())
    stack.enter_context(_mode_of(part))
    return stack


def _mode_of(part: torch.Tensor) -> Any:
    mode = detect_fake_mode([part])
    assert mode is not None, "only a traced tensor has symbols for sizes"
    return mode


def assert_when_run(condition: torch.Tensor, message: str) -> None:
    """Make a graph raise at run time if the condition is false. The public assertion reads the value at once.

    Only the form with a message stays in a graph. The other form is removed as dead code.
    """
    _assert_async(condition, message)


# The function is a binding of the op.
_assert_async: Callable[[torch.Tensor, str], Any] = find_part("torch._assert_async") or torch.ops.aten._assert_async.msg


def may_vary_between_ranks(tensor: torch.Tensor) -> bool:
    """Whether a traced tensor may have another value on another rank: it depends on an input of the graph that is being
    made, or on random numbers. False as well in a first pass that makes no graph. Torch has no API to ask a trace.
    """
    tracer = tracer_now()
    if tracer is None:
        return False
    # Imported here, because loading it takes time.
    from torch.fx.experimental.proxy_tensor import get_proxy_slot

    inner = _of_functional(tensor.elem) if isinstance(tensor, FunctionalTensor) else tensor
    # A number that autograd keeps for the backward pass may be traced without being functional.
    if isinstance(tensor, FunctionalTensor) or _is_functional(tensor):
        _sync(tensor)
    slot = get_proxy_slot(inner, tracer, None)
    if slot is None:
        return True
    waiting, seen = [slot.proxy.node], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op in ("placeholder", "get_attr"):
            return True
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return True
        waiting += node.all_input_nodes
    return False


_of_functional: Callable[[Any], Any]
_is_functional: Callable[[Any], bool]
_sync: Callable[[Any], None]
_of_functional, _is_functional, _sync = (
    torch_part(name, "tell whether a value of a compiled graph is the same on all ranks")
    for name in ("torch._from_functional_tensor", "torch._is_functional_tensor", "torch._sync")
)


def constant_in_graphs(function: Callable[..., None]) -> Callable[..., None]:
    """Have dynamo call a function while it makes a graph, and leave it out of the graph.

    ``torch.compiler.assume_constant_result`` sets this attribute, and imports dynamo, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def graph_that_is_made() -> Any:
    """An object that stands for the graph that ``torch.compile`` makes now, forward and backward; None if it makes
    none. Torch has its own state there, and no public name for it.
    """
    return TracingContext.try_get()


def seeing_graphs(see: Callable[[Any], None]) -> Callable[..., Any]:
    """A backend of ``torch.compile`` that calls ``see`` with each graph, forward and backward, and runs it unchanged.
    Torch documents how to write such a backend, with modules that are not public.
    """
    # Imported here, because loading it takes time.
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]

    aot_autograd = torch_part("torch._dynamo.backends.common.aot_autograd", "show the graphs of a compiled program")

    def keep(graph: Any, _: Any) -> Any:
        see(graph)
        return make_boxed_func(graph.forward)

    backend: Callable[..., Any] = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    return backend


def take_plain_tangents(cls: type, make: Callable[[torch.Tensor, Any], Any]) -> None:
    """Where compiled code expects the gradient of an output of class ``cls`` and gets a plain tensor, call
    ``make(gradient, metadata)``, with the metadata that ``__tensor_flatten__`` returned for the output.

    Autograd makes plain zeros for an output without a gradient. Torch asks the gradient itself for another class, and
    an ordinary tensor does not answer: this makes it answer for ``cls`` alone. The name of the method is not public.
    """

    def coerce(tensor: torch.Tensor, metadata: Any, expected: type | None = None) -> Any:
        return make(tensor, metadata) if expected is cls else None

    torch.Tensor.__coerce_same_metadata_as_tangent__ = coerce  # type: ignore[attr-defined]


graph_calls: list[Callable[..., Any]] = []
"""Dynamo knows the functions by identity, and these references keep them alive."""
