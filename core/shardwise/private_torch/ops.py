"""Ops as torch knows them: schemas, overloads, decompositions and functional forms, and custom ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from shardwise.private_torch.parts import find_part, refuse

__all__ = [
    "CustomOpDef",
    "CustomOpParts",
    "HigherOrderOperator",
    "OpLike",
    "OpOverload",
    "OpOverloadPacket",
    "binding_namespaces",
    "composite_kernel",
    "control_flow",
    "custom_op_of",
    "define_op",
    "direct_call",
    "draws",
    "for_class",
    "functional_of",
    "higher_order_operators",
    "is_composite",
    "is_view_in_place",
    "known_custom_op",
    "make_custom_op",
    "op_named",
    "overload_of",
    "ignores_addend",
    "overwritten_arg",
    "packet_name",
    "parts_of",
    "python_decomposition",
    "schema_of",
]


def schema_of(op: Any) -> Any:
    """The ``FunctionSchema`` of an op overload. It has no public accessor; other backends use this, too."""
    return op._schema


# The types of objects that name one op. The class behind torch.library.custom_op has no public name.
OpLike = OpOverload | CustomOpDef | OpOverloadPacket


def overload_of(op: Any) -> Any | None:
    """The op overload of a custom op, or of an overload packet with one overload; ``None`` for anything else.

    ``torch.ops.acme.swish`` is such a packet. No public API leads from the function that ``torch.library.custom_op``
    returns to its overload.
    """
    if isinstance(op, CustomOpDef):
        return _attribute(op, "torch._library.custom_ops.CustomOpDef._opoverload", "find the overload of a custom op")
    if isinstance(op, OpOverloadPacket):
        names = op.overloads()  # type: ignore[no-untyped-call]
        return getattr(op, names[0]) if len(names) == 1 else None
    return None


def for_class(op: Any, cls: type, function: Callable[..., Any]) -> None:
    """Have ``function`` run in place of an operator of higher order for operands of ``cls``, below autograd.

    ``cls`` may also be a mode's, which ``function`` gets first; the mode is off inside.
    Such an operator does not ask ``__torch_dispatch__``. Neither its class nor its method ``py_impl`` is documented. A
    class is registered once.
    """
    if not hasattr(op, "py_impl"):
        refuse("torch._ops.HigherOrderOperator.py_impl", f"run {op} on tensors of a mesh")
    op.py_impl(cls)(function)


def higher_order_operators() -> list[Any]:
    """The operators that take functions and that torch has defined so far. No public name lists them."""
    return list((find_part("torch._ops._higher_order_ops") or {}).values())


def control_flow(name: str) -> Any | None:
    """Torch's function of control flow with this name, such as ``scan``; ``None`` if it has none.

    Some have no public name yet. Torch exports the others from there.
    """
    return getattr(find_part("torch._higher_order_ops"), name, None)


def known_custom_op(name: str) -> Any | None:
    """The custom op of this name (``acme::swish``) that this process defined, or ``None``."""
    return OPDEFS.get(name)


def custom_op_of(op: OpOverload) -> Any | None:
    """The custom op of an op overload; ``None`` for any other op."""
    return known_custom_op(qualified_name(op).partition(".")[0])


def op_named(name: str) -> OpOverload | None:
    """The op that torch prints as ``acme::mix`` or ``acme::mix.out``; None if no library has registered it.

    ``torch.ops`` is public. That an op which is not there is an AttributeError is not written down.
    """
    packet, _, overload = name.partition(".")
    namespace, _, op = packet.partition("::")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), op), overload or "default")
    except AttributeError:
        return None
    return found if isinstance(found, OpOverload) else None


def qualified_name(op: OpOverload) -> str:
    """``aten::add.Tensor``."""
    name: str = op.name()  # type: ignore[no-untyped-call]
    return name


def packet_name(op: OpOverload) -> str:
    """``add`` for ``aten::add.Tensor``."""
    return qualified_name(op).partition("::")[2].partition(".")[0]


@frozen
class CustomOpParts:
    """The parts of a custom op: enough to define it again in another process.

    ``kernel`` is ``None`` if the op has kernels for several device types.
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
    """The functions that are registered for a custom op. ``torch.library`` takes them, but does not return them."""
    purpose = "send a custom op to another process"
    kernel, name, schema, kernels, fake, backward, setup = (_attribute(definition, n, purpose) for n in _PARTS)
    arguments = schema_of(overload_of(definition)).arguments
    return CustomOpParts(
        name,
        schema,
        tuple(a.name for a in arguments if a.alias_info and a.alias_info.is_write),
        kernel.__module__,
        kernel if set(kernels) == {None} else None,
        fake,
        backward,
        setup,
    )


_PARTS = (
    "torch._library.custom_ops.CustomOpDef._init_fn",
    "torch._library.custom_ops.CustomOpDef._qualname",
    "torch._library.custom_ops.CustomOpDef._schema",
    "torch._library.custom_ops.CustomOpDef._backend_fns",
    "torch._library.custom_ops.CustomOpDef._abstract_fn",
    "torch._library.custom_ops.CustomOpDef._backward_fn",
    "torch._library.custom_ops.CustomOpDef._setup_context_fn",
)


def _attribute(definition: Any, name: str, to: str) -> Any:
    attribute = name.rpartition(".")[2]
    if not hasattr(definition, attribute):
        refuse(name, to)
    return getattr(definition, attribute)


def make_custom_op(parts: CustomOpParts) -> Any:
    """Define a custom op from the parts that :func:`parts_of` returned."""
    assert parts.kernel is not None
    definition = torch.library.custom_op(parts.name, parts.kernel, mutates_args=parts.written, schema=parts.schema)
    if parts.fake is not None:
        definition.register_fake(parts.fake)
    if parts.backward is not None:
        definition.register_autograd(parts.backward, setup_context=parts.setup_context)
    return definition


def define_op(schema: str, kernel: Callable[..., Any], meta_kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Define an op (``acme::swish(Tensor x) -> Tensor``) with a kernel for every device, and return it.

    ``torch.library.custom_op`` and ``register_fake`` do the same, but look for their caller in all modules that there
    are, which is a tenth of the time of ``import shardwise``.
    """
    name, _, rest = schema.partition("(")
    torch.library.define(name, f"({rest}", tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(name, "CompositeExplicitAutograd", kernel)
    torch.library.impl(name, "Meta", meta_kernel)
    namespace, _, packet = name.partition("::")
    op: OpOverload = getattr(getattr(torch.ops, namespace), packet).default
    return op


def direct_call(op: Any) -> Callable[..., Any]:
    """The C++ callable that ``OpOverload.__call__`` calls: it runs the op without that Python frame."""
    return getattr(op, "_op", op)  # type: ignore[no-any-return]


def binding_namespaces() -> tuple[Any, ...]:
    """Namespaces with the C functions behind ops: the public ones, and those that Python code hides."""
    hidden = map(find_part, ("torch._C._VariableFunctions", "torch._C.TensorBase", "torch._C._nn"))
    return torch, torch.Tensor, torch.nn.functional, torch.special, torch.linalg, torch.fft, *hidden


def is_composite(op: Any) -> bool:
    """Whether torch implements the op by other ops for every backend. Only the dispatcher's tables say so."""
    # The tables do not have the namespace `prim`, from which fake tensors call an op to get their device.
    return op.namespace != "prim" and bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    )


# -- decompositions --------------------------------------------------------------------------------------------------


def python_decomposition(op: OpOverload) -> Callable[..., Any] | None:
    """Torch's own Python function that computes an op by other ops, if it has one.

    Compilers decompose by this table. Its functions end in primitive ops, and each of those has an attribute for the
    function that it stands for. Neither is public.
    """
    table = find_part("torch._decomp.decomposition_table")
    if table is None:
        refuse("torch._decomp.decomposition_table", f"decompose {op}, which has no rule")
    return table.get(op) or (getattr(op, "impl_aten", None) if op.namespace == "prims" else None)


def composite_kernel(op: OpOverload) -> Callable[..., Any] | None:
    """The C++ kernel that runs an op by other ops on every backend, with its own autograd formula, if it has one.

    The kernel of a custom op has the same key, and is none: it may do to the memory of tensors what it likes.
    """
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    if custom_op_of(op) is not None or not torch._C._dispatch_has_kernel_for_dispatch_key(qualified_name(op), key.name):
        return None

    def run(*args: Any, **kwargs: Any) -> Any:
        # A mode for functions, as the context of a device is one, would call the op itself instead.
        with torch._C.DisableTorchFunction():
            return kernel_at(op, key)(*args, **kwargs)

    return run


def kernel_at(op: Any, key: Any) -> Callable[..., Any]:
    """The kernel of an op for one key of the dispatcher."""
    if not hasattr(op, "_op_dk"):
        refuse("torch._ops.OpOverload._op_dk", f"run {op} by other ops")
    return partial(op._op_dk, key)


def functional_of(op: OpOverload) -> OpOverload | None:
    """The op that returns what this one writes into its ``out=`` arguments or its operands: ``add`` for ``add_``.

    Torch pairs the two by name, and so does this function, if the other arguments are the same. No public API does.
    """
    packet, _, overload = qualified_name(op).partition("::")[2].partition(".")
    overloads = [overload or "default"]
    if any(a.is_out for a in op._schema.arguments):
        # `out`, `int_out` and `dim_max` belong to `default`, `int` and `dim`.
        overloads = [overload.removesuffix("out").rstrip("_") or "default"]
    elif packet.endswith("_") and not packet.endswith("__"):
        packet = packet[:-1]
    else:
        return None
    functional = getattr(getattr(torch.ops, op.namespace), packet, None)
    arguments = [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]
    for name in (*overloads, *(functional.overloads() if functional is not None else ())):
        candidate = getattr(functional, name, None)
        if candidate is None or candidate is op or candidate._schema.is_mutable:
            continue
        if [(a.name, str(a.type)) for a in candidate._schema.arguments] == arguments:
            return candidate  # type: ignore[no-any-return]
    return None


def is_view_in_place(op: OpOverload) -> bool:
    """Whether an op changes a tensor's shape or strides but not its memory, as ``squeeze_`` does. The tags are
    documented, but have only this private name.
    """
    return torch.Tag.inplace_view in op.tags


def draws(op: OpOverload) -> bool:
    """Whether an op draws from a generator. Its tags are documented, but have only this private name."""
    return torch.Tag.nondeterministic_seeded in op.tags


_OVERWRITING = {
    *("bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_"),
    *("log_normal_", "normal_", "random_", "uniform_", "zero_"),
}


def overwritten_arg(op: OpOverload) -> bool:
    """Whether an op replaces all elements of what it writes, and reads none of them. No schema says so."""
    name = packet_name(op)
    return op.namespace == "aten" and (name in _OVERWRITING or any(a.is_out for a in op._schema.arguments))


def ignores_addend(op: OpOverload, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call that gives ``beta * self + alpha * product`` reads nothing of ``self``, as torch documents
    it for ``beta=0``. No schema says so.
    """
    if kwargs.get("beta", 1) != 0 or op.namespace != "aten":
        return False
    return {a.name for a in op._schema.arguments if a.kwarg_only} >= {"beta", "alpha"}
