"""Every use of torch API that is not public, each with the reason why the public way does not do.

``tests/core/test_private_torch.py`` holds one test per function here, which fails clearly when torch takes it away.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from importlib import import_module
from typing import Any

import torch
from attrs import frozen
from torch._guards import TracingContext, detect_fake_mode
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental import symbolic_shapes
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.errors import MeshMismatchError

__all__ = [
    "CustomOpDef",
    "CustomOpParts",
    "OpLike",
    "OpOverload",
    "OpOverloadPacket",
    "assert_when_run",
    "binding_namespaces",
    "composite_kernel",
    "current_mesh",
    "custom_op_of",
    "direct_call",
    "draws",
    "fake_store",
    "fake_tensors",
    "forward_traceback",
    "functional_of",
    "disabled_torch_function",
    "graph_all_gather",
    "graph_all_reduce",
    "graph_all_to_all",
    "graph_reduce_scatter",
    "hint_of",
    "in_backward",
    "is_compiled_now",
    "is_composite",
    "is_open",
    "is_known",
    "is_python_dispatched",
    "is_rehearsing",
    "is_traced",
    "is_view_in_place",
    "is_without_data",
    "memory_of",
    "known_custom_op",
    "let_vary",
    "make_custom_op",
    "make_known",
    "is_unknowable",
    "new_wrapper",
    "outside_modes",
    "overload_of",
    "parts_of",
    "put_above_autograd",
    "put_before_dispatch",
    "python_decomposition",
    "recorded_ops",
    "rehearsing",
    "same_symbol",
    "schema_of",
    "seeing_graphs",
    "settled",
    "support_foreach",
    "swap_parameter",
    "retraced",
    "version_of",
    "watching",
    "wrap_state_dict_functions",
    "without_data",
]


def schema_of(op: Any) -> Any:
    """The ``FunctionSchema`` of an op overload. There is no public accessor; every out-of-tree backend uses this."""
    return op._schema


# Everything that people write for one op. The class behind torch.library.custom_op has no public name.
OpLike = OpOverload | CustomOpDef | OpOverloadPacket


def overload_of(op: Any) -> Any | None:
    """The op overload behind what ``torch.library.custom_op`` returns; ``None`` for anything else.

    An overload packet with one overload (``torch.ops.acme.swish``) stands for that one. Nothing public leads from the
    decorated function to its overload.
    """
    if isinstance(op, CustomOpDef):
        return op._opoverload
    if isinstance(op, OpOverloadPacket):
        names = op.overloads()  # type: ignore[no-untyped-call]
        return getattr(op, names[0]) if len(names) == 1 else None
    return None


def known_custom_op(name: str) -> Any | None:
    """What ``torch.library.custom_op`` returned for ``acme::swish`` in this process, if it made an op of that name."""
    return OPDEFS.get(name)


def custom_op_of(op: OpOverload) -> Any | None:
    """What ``torch.library.custom_op`` returned for an op overload; ``None`` for an op that was made otherwise."""
    return known_custom_op(_qualified(op).partition(".")[0])


def _qualified(op: OpOverload) -> str:
    """``aten::add.Tensor``."""
    name: str = op.name()  # type: ignore[no-untyped-call]
    return name


@frozen
class CustomOpParts:
    """What a custom op was made of: enough to make it again in another process.

    ``kernel`` is ``None`` where the op has kernels for several device types.
    """

    name: str
    schema: str
    written: tuple[str, ...]
    module: str
    kernel: Callable[..., Any] | None
    fake: Callable[..., Any] | None
    backward: Callable[..., Any] | None
    setup_context: Callable[..., Any] | None


def parts_of(definition: Any) -> CustomOpParts:
    """The functions that were registered for a custom op. ``torch.library`` takes them and gives none back."""
    kernel = definition._init_fn
    return CustomOpParts(
        definition._qualname,
        definition._schema,
        tuple(a.name for a in definition._opoverload._schema.arguments if a.alias_info and a.alias_info.is_write),
        kernel.__module__,
        kernel if set(definition._backend_fns) == {None} else None,
        definition._abstract_fn,
        definition._backward_fn,
        definition._setup_context_fn,
    )


def make_custom_op(parts: CustomOpParts) -> Any:
    """The inverse of :func:`parts_of`."""
    assert parts.kernel is not None
    made = torch.library.custom_op(parts.name, parts.kernel, mutates_args=parts.written, schema=parts.schema)
    if parts.fake is not None:
        made.register_fake(parts.fake)
    if parts.backward is not None:
        made.register_autograd(parts.backward, setup_context=parts.setup_context)
    return made


def put_before_dispatch(op: OpOverload, cls: type, handler: Callable[..., Any]) -> torch.library.Library:
    """Have torch call a handler for an op on a tensor class, for as long as the library lives that is returned.

    The public function hands a custom op's handler to the op's definition, which keeps it for ever. Where the way
    around is missing, such an op comes by ``__torch_dispatch__``.
    """
    library = torch.library.Library(op.namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    if custom_op_of(op) is None:
        torch.library.register_torch_dispatch(op, cls, handler, lib=library)
    elif hasattr(library, "_register_torch_dispatch_rule"):
        register: Any = library._register_torch_dispatch_rule
        register(_qualified(op).partition("::")[2], cls, handler)
    return library


def put_above_autograd(op: OpOverload, run: Callable[..., Any]) -> torch.library.Library:
    """Have ``run(below, args, kwargs)`` take the place of an op on tensor subclasses and under modes, above autograd,
    for as long as the library lives that is returned; ``below`` is the op as torch runs it. Plain tensors pass by.

    A composite op runs above autograd as other ops, and what it makes there of no operand is out of sight of
    ``__torch_dispatch__``. The key is the one that torch takes its snapshot for such tensors at.
    """
    key = torch._C.DispatchKey.PythonTLSSnapshot
    after = torch._C._dispatch_keyset_full_after(key)
    library = torch.library.Library(op.namespace, "IMPL")  # type: ignore[no-untyped-call]

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return run(lambda *args, **kwargs: op.redispatch(keys & after, *args, **kwargs), args, kwargs)

    library.impl(op, kernel, key.name, with_keyset=True)  # type: ignore[no-untyped-call]
    return library


# Turns __torch_function__ off for a tensor subclass. The documented spelling is this private name.
disabled_torch_function: Any = torch._C._disabled_torch_function_impl


def _portable_wrapper(cls: type, local: torch.Tensor, spec: Any, requires_grad: bool = False) -> Any:
    meta = spec.tensor_meta
    made: Any = torch.Tensor._make_wrapper_subclass(
        cls,
        meta.shape,
        strides=meta.stride,
        dtype=meta.dtype,
        device=local.device,
        layout=local.layout,
        requires_grad=requires_grad,
    )
    made._local_tensor = local
    made._spec = spec
    return made


# The C++ constructor that torch made for its own distributed tensor: it reads spec.tensor_meta, sets _spec and
# _local_tensor, and costs less than half of _make_wrapper_subclass (1.0 against 2.4 microseconds), which stays as
# the fallback where it is missing.
new_wrapper: Callable[..., Any] = getattr(torch.Tensor, "_dtensor__new__", _portable_wrapper)


def direct_call(op: Any) -> Callable[..., Any]:
    """The C++ callable behind an op overload: what ``OpOverload.__call__`` calls, without its Python frame."""
    return getattr(op, "_op", op)  # type: ignore[no-any-return]


def binding_namespaces() -> tuple[Any, ...]:
    """Where the C functions behind ops are found: the public namespaces, and what Python code in them covers up."""
    hidden = (getattr(torch._C, name, None) for name in ("_VariableFunctions", "TensorBase", "_nn"))
    return torch, torch.Tensor, torch.nn.functional, torch.special, torch.linalg, torch.fft, *hidden


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its __init_subclass__ unannotated
    """Notes each op that reaches the dispatcher, with its arguments. Documented, but in a module named private."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def recorded_ops(call: Callable[..., Any], args: Any, kwargs: Any) -> list[tuple[Any, Any, Any]]:
    """The ops that a call makes on plain tensors, each with its arguments."""
    recorder = _Recorder()
    with torch.no_grad(), recorder:
        call(*args, **kwargs)
    return recorder.ops


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as above
    """Hands each op that reaches the dispatcher to a function, which runs it and gives its result."""

    def __init__(self, run: Callable[..., Any], decomposes: Callable[[Any], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run
        self._decomposes = decomposes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._decomposes(func):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return self._run(func, args, kwargs or {})


def watching(run: Callable[..., Any], decomposes: Callable[[Any], bool]) -> AbstractContextManager[Any]:
    """A context in which ``run(op, args, kwargs)`` takes the place of every op, and of the parts of those that
    ``decomposes`` names.
    """
    return _Watcher(run, decomposes)


@contextmanager
def fake_tensors() -> Iterator[None]:
    """A context in which tensors have a device and no data, and optimizers treat them as that device's tensors.

    Tensors on the meta device, the public way, take other kernels than those of a real device: no fused attention, no
    fused or foreach optimizer.
    """
    known = [getattr(import_module(name), "_foreach_supported_types", []) for name in _FOREACH_MODULES]
    before = [list(types) for types in known]
    support_foreach(FakeTensor)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        for types, old in zip(known, before, strict=True):
            types[:] = old


def fake_store() -> Any:
    """The store of a process group in which only this rank is there; torch has it among its own tests."""
    return import_module("torch.testing._internal.distributed.fake_pg").FakeStore()


def memory_of(tensor: torch.Tensor) -> int:
    """What tells the memory of a tensor from that of others; an address would not, where there is no data."""
    found: int = tensor.untyped_storage()._cdata
    return found


def is_unknowable(error: BaseException) -> bool:
    """Whether an op without data could not go on because data decides its result."""
    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))


def forward_traceback() -> list[str]:
    """In a backward pass under anomaly detection: the stack of the forward call that the running node belongs to.

    Anomaly detection prints it when it finds something; the node that has it is not public.
    """
    # Its stub says that the dict is a method.
    node: Any = torch._C._current_autograd_node()
    return [] if node is None else list(node.metadata.get("traceback_", ()))


# torch.optim takes the names of its modules away again.
_FOREACH_MODULES = ("torch.utils._foreach_utils", "torch.optim.optimizer")


def support_foreach(cls: type) -> None:
    """Let optimizers and gradient clipping hand lists of ``cls`` to foreach ops by default, as for torch's own DTensor.

    There is no public way to say so. Where the lists are missing, users must ask with ``foreach=True``.
    """
    for name in _FOREACH_MODULES:
        types = getattr(import_module(name), "_foreach_supported_types", None)
        if types is not None and cls not in types:
            types.append(cls)


def current_mesh() -> DeviceMesh:
    """The mesh of the innermost ``with mesh:``. DeviceMesh is a context manager in public, its stack is not."""
    try:
        found: DeviceMesh = device_mesh._mesh_resources.get_current_mesh()
    except (AttributeError, RuntimeError) as error:
        raise MeshMismatchError(
            asked="make a MeshTensor without naming a mesh",
            found="no mesh is in force here",
            do="Pass device_mesh=, or enter one: `with mesh:`.",
        ) from error
    return found


def wrap_state_dict_functions(wrappers: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]) -> None:
    """Put functions around those by which ``torch.distributed.checkpoint.state_dict`` gathers and spreads tensors.

    They look for DTensor and ShardedTensor by name, and ask no other class. A function that is missing stays so.
    """
    ours = import_module("torch.distributed._state_dict_utils")
    # It takes its names when it is imported, which may be before or after this.
    taker = sys.modules.get("torch.distributed.checkpoint.state_dict")
    for name, wrap in wrappers.items():
        original = getattr(ours, name, None)
        if original is None:
            continue
        around = wrap(original)
        for module in (ours, taker):
            if getattr(module, name, None) is original:
                setattr(module, name, around)


def is_composite(op: Any) -> bool:
    """Whether torch itself writes the op in terms of others for every backend. Only the dispatcher's tables say so."""
    # Fake tensors ask for their device by an op of a namespace that the tables do not have.
    return op.namespace != "prim" and bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    )


# -- decompositions --------------------------------------------------------------------------------------------------


def python_decomposition(op: OpOverload) -> Callable[..., Any] | None:
    """Torch's own Python function that computes an op by others, if it has one.

    The table is the one that compilers decompose by. The primitive ops that its functions end in name the public
    function that they stand for themselves. Neither is public.
    """
    table: Any = import_module("torch._decomp").decomposition_table
    return table.get(op) or (getattr(op, "impl_aten", None) if op.namespace == "prims" else None)


def composite_kernel(op: OpOverload) -> Callable[..., Any] | None:
    """The C++ kernel that runs an op by others on every backend, with its own autograd formula, if it has one."""
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    if not torch._C._dispatch_has_kernel_for_dispatch_key(_qualified(op), key.name):
        return None
    return lambda *args, **kwargs: op._op_dk(key, *args, **kwargs)


def functional_of(op: OpOverload) -> OpOverload | None:
    """The op that returns what this one writes into its ``out=`` arguments or its operands: ``add`` for ``add_``.

    Found by name, as torch pairs them, and only where the other arguments are the same; nothing public pairs them.
    """
    packet, _, overload = _qualified(op).partition("::")[2].partition(".")
    overloads = [overload or "default"]
    if any(a.is_out for a in op._schema.arguments):
        # `out`, `int_out` and `dim_max` are the ones of `default`, `int` and `dim`.
        overloads = [overload.removesuffix("out").rstrip("_") or "default"]
    elif packet.endswith("_") and not packet.endswith("__"):
        packet = packet[:-1]
    else:
        return None
    functional = getattr(getattr(torch.ops, op.namespace), packet, None)
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]
    for name in (*overloads, *(functional.overloads() if functional is not None else ())):
        found = getattr(functional, name, None)
        if found is None or found is op or found._schema.is_mutable:
            continue
        if [(a.name, str(a.type)) for a in found._schema.arguments] == wanted:
            return found  # type: ignore[no-any-return]
    return None


def is_view_in_place(op: OpOverload) -> bool:
    """Whether an op changes a tensor's shape or strides and leaves its memory alone, as ``squeeze_`` does. The tags are
    documented, and their only name is this one.
    """
    return torch.Tag.inplace_view in op.tags


def draws(op: OpOverload) -> bool:
    """Whether an op draws from a generator. Its tags are documented, and their only name is this one."""
    return torch.Tag.nondeterministic_seeded in op.tags


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread. Only the engine knows its graph task."""
    return bool(torch._C._current_graph_task_id() != -1)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written in place. Autograd's notes name the counter, its attribute is not public."""
    return tensor._version


def swap_parameter(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put a tensor in a parameter's place. Assigning it is refused, and taking a parameter out and back in reorders
    ``parameters()``.
    """
    module._parameters[name] = tensor  # type: ignore[assignment]


# -- torch.compile ---------------------------------------------------------------------------------------------------

_TRACED = (FakeTensor, FunctionalTensor)


_rehearsals: list[None] = []


@contextmanager
def rehearsing() -> Iterator[None]:
    """A context in which fake tensors are what a program runs on, and not the values of a graph: see ``is_traced``."""
    _rehearsals.append(None)
    try:
        yield
    finally:
        _rehearsals.pop()


def is_rehearsing() -> bool:
    """Whether the program runs without data, on a mesh without other ranks."""
    return bool(_rehearsals)


def is_without_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for a value that is not there. Only these two private classes say so."""
    return type(tensor) is not torch.Tensor and isinstance(tensor, _TRACED)


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for a value of a graph that is being traced."""
    return is_without_data(tensor) and not _rehearsals


def is_compiled_now() -> bool:
    """Whether this thread is making a graph, at whatever stage. The public question is answered yes only inside."""
    return TracingContext.try_get() is not None


def hint_of(size: torch.SymInt) -> int:
    """The number that a symbolic size stood for when tracing began, without making that a guard of the graph."""
    # torch 2.13 has the function, earlier releases the method.
    ask = getattr(symbolic_shapes, "guarding_hint_or_throw", None)
    return int(ask(size) if ask else size.node.require_hint())


def settled(size: torch.SymInt) -> int | torch.SymInt:
    """The integer in place of a symbol that can be no other any more."""
    found = size.node.maybe_as_int()
    return size if found is None else int(found)


def same_symbol(one: Any, other: Any) -> bool:
    """Whether two sizes are the same by what is known, without asking for a guard."""
    if not isinstance(one, torch.SymInt) or not isinstance(other, torch.SymInt):
        return type(one) is type(other) and bool(one == other)
    return bool(one.node.expr == other.node.expr)


def is_known(condition: Any) -> bool:
    """Whether a condition on sizes holds by what is known of them, without asking for a guard."""
    return condition is True or bool(symbolic_shapes.statically_known_true(condition))


def let_vary(part: torch.Tensor, dims: Iterable[int]) -> None:
    """Tell dynamo, of a tensor inside another, that graphs are not guarded by its sizes along some dims.

    It goes before other marks, which stay: torch guards graphs by these. The public way marks the outer tensor, too.
    """
    part._dynamo_unbacked_indices = set(dims)  # type: ignore[attr-defined]


def is_open(size: Any) -> bool:
    """Whether a size is a symbol that stands for no number; see :func:`let_vary`. No public function says so."""
    return isinstance(size, torch.SymInt) and symbolic_shapes.has_free_unbacked_symbols(size)


def retraced(part: torch.Tensor, shape: Sequence[Any], stride: Sequence[Any]) -> torch.Tensor:
    """A tensor without data in the place of ``part`` in its trace, of other sizes; no use of its symbols is to come.
    Neither the trace's mode nor its symbols are public.
    """
    mode = _mode_of(part)
    for size in (*part.shape, *part.stride()):
        if isinstance(size, torch.SymInt):
            pending = mode.shape_env.pending_fresh_unbacked_symbols
            pending[:] = [s for s in pending if s not in size.node.expr.free_symbols]
    with _outside_modes(), mode:
        return torch.empty_strided(shape, stride, dtype=part.dtype, device=part.device)


def without_data(part: torch.Tensor) -> AbstractContextManager[Any]:
    """A context in which ops run on tensors without data, whose sizes are those of the trace that ``part`` is of."""
    stack = ExitStack()
    stack.enter_context(_outside_modes())
    stack.enter_context(_mode_of(part))
    return stack


def _mode_of(part: torch.Tensor) -> Any:
    mode = detect_fake_mode([part])
    assert mode is not None, "only a traced tensor has symbols for sizes"
    return mode


def assert_when_run(condition: torch.Tensor, message: str) -> None:
    """Make a graph raise when it runs and this is false. The public assertion looks at the value at once.

    Only the form with a message survives in a graph; the other is dropped as dead code.
    """
    torch._assert_async(condition, message)


@contextmanager
def _outside_modes() -> Iterator[None]:
    # The dispatcher for Python kernels, which a trace turns on, calls every kernel with the GIL held. A collective's
    # kernel then waits for a lock of gloo's whose holder, a thread of gloo that frees a tensor, waits for the GIL.
    tracer, _left.tracer = _left.tracer, _tracer()
    try:
        with _python_dispatch._disable_current_modes(), torch._C._DisablePythonDispatcher():
            yield
    finally:
        _left.tracer = tracer


class _Left(threading.local):
    """What writes the graph that this thread is making, while its modes are left."""

    tracer: Any = None


_left = _Left()


def _tracer() -> Any:
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return _left.tracer if mode is None else mode.tracer


def make_known(sizes: Iterable[Any]) -> None:
    """Have the graph that is being made write the formulas of sizes that were computed outside it.

    Torch does so by itself for the argument of an op. A size of which it computes first, and whose formula it has not
    written yet, it takes for its own result.
    """
    tracer = _tracer()
    if tracer is None:
        return
    # Only here, since loading it takes time.
    from torch.fx.experimental.proxy_tensor import get_proxy_slot, set_proxy_slot

    for size in sizes:
        if isinstance(size, torch.SymInt):
            with suppress(Exception):  # a formula that torch cannot write: it says so where the size is used
                set_proxy_slot(size, tracer, get_proxy_slot(size, tracer))


def outside_modes() -> AbstractContextManager[Any]:
    """A context in which tensors are real ones and kernels run without the GIL also while a graph is traced. There is
    no public way out of a mode.
    """
    if torch._C._len_torch_dispatch_stack() == 0 and not is_python_dispatched():
        return nullcontext()
    return _outside_modes()


def is_python_dispatched() -> bool:
    """Whether ops go by the dispatcher for Python kernels, as they do while a graph is traced."""
    return torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PythonDispatcher)


def seeing_graphs(see: Callable[[Any], None]) -> Callable[..., Any]:
    """A backend of ``torch.compile`` that runs each graph, forward and backward, as it is, after showing it. The way to
    write such a backend is documented, in modules that are not public.
    """
    # Only here, since loading them takes time.
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
    from torch._dynamo.backends.common import aot_autograd

    def keep(graph: Any, _: Any) -> Any:
        see(graph)
        return make_boxed_func(graph.forward)

    made: Callable[..., Any] = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    return made


# Collectives as ops of a graph; the public functional collectives would wait at once only in eager mode, and take
# a group in forms that a backend does not. Each result is waited for where it is used.
_functional = torch.ops._c10d_functional


def graph_all_gather(piece: torch.Tensor, size: int, group: Any) -> torch.Tensor:
    """The flat pieces of a process group's ranks, one behind the other."""
    gathered = _functional.all_gather_into_tensor(piece.contiguous(), size, group.group_name)
    return _functional.wait_tensor(gathered)  # type: ignore[no-any-return]


def graph_all_reduce(tensor: torch.Tensor, kind: str, group: Any) -> torch.Tensor:
    """The reduction of a tensor over a process group, in new memory."""
    return _functional.wait_tensor(_functional.all_reduce(tensor.contiguous(), kind, group.group_name))  # type: ignore[no-any-return]


def graph_reduce_scatter(pieces: torch.Tensor, kind: str, size: int, group: Any) -> torch.Tensor:
    """The reduction of this rank's share of dim 0, which is the group's size times as long."""
    found = _functional.reduce_scatter_tensor(pieces.contiguous(), kind, size, group.group_name)
    return _functional.wait_tensor(found)  # type: ignore[no-any-return]


def graph_all_to_all(flat: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: Any) -> torch.Tensor:
    """Send runs of these lengths of a flat tensor to the ranks of a process group, and receive such."""
    moved = _functional.all_to_all_single(flat.contiguous(), list(received), list(sent), group.group_name)
    return _functional.wait_tensor(moved)  # type: ignore[no-any-return]
