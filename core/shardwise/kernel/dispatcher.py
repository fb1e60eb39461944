"""The dispatcher: from an op on MeshTensors to its plan, and the hot path between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from shardwise.errors import PlainTensorError, ViewError
from shardwise.kernel.engine import Engine, Handler
from shardwise.kernel.handlers import defaults, handler_source
from shardwise.kernel.known_tensors import known_without_mesh
from shardwise.kernel.nested import comparable, freeze
from shardwise.kernel.placements import REPLICATE
from shardwise.kernel.plan import Plan
from shardwise.kernel.precedence import Entry
from shardwise.kernel.schema import RuntimeSchemaInfo
from shardwise.kernel.signature import Op, op_name
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.kernel.view_copies import watched
from shardwise.private_torch.dispatch import (
    OpMode,
    leave_out_of_graphs,
    new_wrapper,
    put_before_dispatch,
    put_before_mode,
    set_data,
)
from shardwise.private_torch.ops import is_composite
from shardwise.private_torch.tracing import outside_modes

__all__ = [
    "PLANS_PER_OP",
    "at_next_dispatch",
    "clear_plans",
    "dispatch",
    "dispatch_under_mode",
    "is_observed",
    "listen",
    "observe",
    "rules_version",
    "start",
    "tell_observers",
    "tensor_class",
    "views",
    "wrap",
]

NUMBERS = (bool, int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)
"""Types of numbers that reach the dispatcher in place of a tensor: ``x + 1`` is ``add.Tensor(x, 1)``."""

# Plans kept per op. Two generations of half that size make it least-recently-used without work on a hit.
PLANS_PER_OP = 4096


class _State:
    """The state of the dispatcher of this process."""

    tensor_class: type
    engine: Engine

    def __init__(self) -> None:
        # By op, number of positional arguments and keyword names. Ops are keyed by identity: hashing an OpOverload runs
        # Python code, and overloads live as long as the process.
        self.handlers: dict[Any, Handler] = {}
        # By op, the library that holds its first handler. Dropping it removes the handler from torch.
        self.libraries: dict[int, torch.library.Library] = {}
        # The same for handlers that are called while a mode is on.
        self.under_modes: dict[tuple[type, int], Any] = {}
        self.stores: list[_PlanStore] = []
        self.observers: list[Callable[[Plan], None]] = []
        self.rules_version = 0


_state = _State()


def start(tensor_class: type, engine: Engine) -> None:
    """Dispatch ops on a tensor class by the plans of an engine; ``shardwise.tensor`` calls this once."""
    _state.tensor_class, _state.engine = tensor_class, engine


def tensor_class() -> Any:
    """The class of tensors that lie on a mesh."""
    return _state.tensor_class


def wrap(local: torch.Tensor, spec: TensorSpec) -> Any:
    """The tensor on a mesh with this local tensor and spec."""
    return new_wrapper(_state.tensor_class, local, spec, False)


def dispatch(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """Run one op on local tensors by its plan and wrap what it returns.

    The handler of an op's first call shape is registered where torch looks before ``__torch_dispatch__``, so most calls
    never reach this function.
    """
    key = (id(op), len(args), *kwargs) if kwargs else (id(op), len(args))
    handle = _state.handlers.get(key)
    if handle is not None:
        return handle(None, op, (), args, kwargs)
    _meet(args, kwargs)
    registry = _state.engine.registry()
    if op in registry:
        handle = handler_of(registry.lookup(op), len(args), tuple(kwargs or ()))
    elif is_composite(op):
        # Under inference mode torch does not decompose composite ops; their parts have the rules.
        handle = _decompose
    else:
        handle = _state.engine.without_rule(op)
    _state.handlers[key] = handle
    if id(op) not in _state.libraries:
        # From now on torch calls it for exactly a MeshTensor; calls with a subclass still reach this function.
        _state.libraries[id(op)] = put_before_dispatch(op, _state.tensor_class, handle)
    return handle(None, op, (), args, kwargs)


def dispatch_under_mode(mode: type[OpMode], op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """:func:`dispatch` of a call that reached a mode. From now on its op reaches the handler without the mode."""
    result = dispatch(op, args, kwargs)
    handle = _state.handlers.get((id(op), len(args), *kwargs))
    if (mode, id(op)) not in _state.under_modes and handle is not None:
        _state.under_modes[mode, id(op)] = put_before_mode(op, _state.tensor_class, mode, handle)
    return result


def _decompose(_cls: Any, op: Op, _types: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
    """The handler of a composite op."""
    return op.decompose(*args, **(kwargs or {}))


# -- observing ---------------------------------------------------------------------------------------------------


@contextmanager
def observe(callback: Callable[[Plan], None]) -> Iterator[None]:
    """Call ``callback(plan)`` at each dispatch while the context lasts."""
    listen(callback)
    try:
        yield
    finally:
        _state.observers.remove(callback)


def is_observed() -> bool:
    """Whether an observer listens."""
    return bool(_state.observers)


def listen(callback: Callable[[Plan], None]) -> None:
    """Call ``callback(plan)`` at each dispatch from now on."""
    # A hit calls no observer. So while one listens, every call is a miss.
    for store in _state.stores:
        store.retire()
    _state.observers.append(callback)


def tell_observers(plan: Plan) -> None:
    """Call each observer with ``plan``. An observer may remove itself meanwhile."""
    for callback in tuple(_state.observers):
        callback(plan)


def at_next_dispatch(callback: Callable[[], None]) -> None:
    """Call ``callback()`` once, at the next dispatch."""

    def call(_: Plan) -> None:
        _state.observers.remove(call)
        callback()

    listen(call)


# -- views -------------------------------------------------------------------------------------------------------


class _Views(threading.local):
    """Whether a view must share memory with its base in this thread, as the ``view`` method promises."""

    must_share = False


views = _Views()


def _guard(plan: Plan) -> None:
    """Refuse to gather for a view that must share memory; ``reshape`` and its callers may copy."""
    if not (views.must_share and plan.copies):
        return
    schema = plan.schema
    arguments = ", ".join(f"{a.name}={v}" for a, v in zip(schema.signature.args, schema.values, strict=True))
    raise ViewError(
        asked=f"run {op_name(schema.op)} with {arguments}",
        found=f"the view would need data from another rank: the tensor would have to lie as {plan.strategies[0]}",
        do="Call reshape, which may copy, or redistribute the tensor first.",
        op=op_name(schema.op),
    )


def _new_view_of(base: torch.Tensor) -> Callable[..., Any]:
    """The constructor of a view under inference mode: a view of a normal tensor is a normal tensor there too."""
    return new_wrapper if base.is_inference() else _new_normal


def _new_normal(*parts: Any) -> Any:
    with torch.inference_mode(False):
        return new_wrapper(*parts)


def _link(plan: Plan, results: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
    _state.engine.link(plan, results, args, kwargs)


def _after_write(tensors: Sequence[Any]) -> None:
    _state.engine.after_write(tensors)


def reseat(tensor: Any, local: torch.Tensor, spec: TensorSpec) -> Any:
    """Make a tensor another view of its memory, as ``x.t_()`` does."""
    # Torch's setter changes sizes and strides, which torch holds, and leaves autograd's state alone.
    set_data(tensor, new_wrapper(_state.tensor_class, local, spec, False))
    tensor._local_tensor, tensor._spec = local, spec
    tensor._follow_layout()
    return tensor


def _reseat_copy(
    plan: Plan,
    tensor: Any,
    local: torch.Tensor,
    spec: TensorSpec,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
) -> Any:
    """As :func:`reseat`, for a view that is a copy. Its base is what the tensor was: earlier views share its memory."""
    base = new_wrapper(_state.tensor_class, tensor._local_tensor, tensor._spec, False)
    reseat(tensor, local, spec)
    _link(plan, tensor, (base, *args[1:]) if args else args, kwargs)
    return tensor


def _on_meta(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The plain result on the meta device, as ``x.to("meta")`` asks for."""

    def meta(value: Any) -> Any:
        if isinstance(value, _state.tensor_class):
            return value._spec.tensor_meta.to_meta_tensor()  # type: ignore[attr-defined]
        return [meta(part) for part in value] if isinstance(value, (tuple, list)) else value

    return op(*map(meta, args), **{name: meta(value) for name, value in kwargs.items()})


# -- handlers ----------------------------------------------------------------------------------------------------


def handler_of(entry: Entry, positional: int, keywords: tuple[str, ...]) -> Handler:
    """The handler of a rule's calls with this many positional arguments and these keywords."""
    op, rule = entry.op, entry.rule
    info = RuntimeSchemaInfo.of(op, rule.static, rule.writes)
    store = _PlanStore(entry, info)
    scope: dict[str, Any] = {
        "MT": _state.tensor_class,
        "new": new_wrapper,
        "plans": store.hot,
        "miss": store.miss,
        "symbolic": store.symbolic,
        "known_tensors": known_without_mesh,
        "other": partial(operand_of, op, False),
        "other_written": partial(operand_of, op, True),
        "others": partial(operands_of, op, False),
        "others_written": partial(operands_of, op, True),
        "guard": _guard,
        "inference": torch.is_inference_mode_enabled,
        "new_view_of": _new_view_of,
        "freeze": freeze,
        "PLAIN": _PLAIN,
        "spec_of": attrgetter("_spec"),
        "local_of": attrgetter("_local_tensor"),
        "on_meta": partial(_on_meta, op),
        "elsewhere": lambda args, kwargs: dispatch(op, args, kwargs),
        "raised": lambda error: _state.engine.raised(op, error),
        "reseat": reseat,
        "reseat_copy": _reseat_copy,
        "watched": watched,
        "after_write": _after_write,
        "link": _link,
        "wrap_results": _wrap_results,
        "wrap_unknown": _wrap_unknown,
        **defaults(op),
    }
    source = handler_source(op, positional, keywords, info)
    exec(compile(source, f"<shardwise handler of {op_name(op)}>", "exec"), scope)  # noqa: S102  # our own text, as attrs does
    handle: Handler = scope["handle"]
    leave_out_of_graphs(handle)
    _state.stores.append(store)
    return handle


_PLAIN = frozenset({*NUMBERS, type(None)})


def operand_of(
    op: Op, written: bool, name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[Any, Any]:
    """Key part and local tensor of an operand that is not exactly a MeshTensor: a number, a subclass, a plain tensor.

    Raises :class:`PlainTensorError` for anything else.
    """
    if isinstance(value, torch.Tensor) and not isinstance(value, _state.tensor_class):
        return _state.engine.plain_operands(op, {name: value}, args, kwargs, written)[0], value
    return _other_operand(op, name, value)


def operands_of(
    op: Op, written: bool, name: str, values: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], list[Any]]:
    """Key part and local tensors of a list in which not all are MeshTensors; see :func:`operand_of`."""
    is_plain = [isinstance(v, torch.Tensor) and not isinstance(v, _state.tensor_class) for v in values]
    plain = {f"{name}[{i}]": v for i, v in enumerate(values) if is_plain[i]}
    keys = iter(_state.engine.plain_operands(op, plain, args, kwargs, written) if plain else ())
    pairs = [(next(keys), v) if is_plain[i] else _other_operand(op, f"{name}[{i}]", v) for i, v in enumerate(values)]
    return tuple([key for key, _ in pairs]), [local for _, local in pairs]


def _other_operand(op: Op, name: str, value: Any) -> tuple[Any, Any]:
    if value is None or isinstance(value, NUMBERS):
        return type(value), value
    if isinstance(value, _state.tensor_class):
        return value._spec, value._local_tensor  # type: ignore[attr-defined]
    raise PlainTensorError(
        asked=f"run {op_name(op)} on MeshTensors",
        found=f"its argument {name!r} is a {type(value).__name__}",
        do="Pass a tensor there.",
        op=op_name(op),
        argument=name,
        shape=None,
    )


def _wrap_results(plan: Plan, out: Sequence[Any]) -> tuple[Any, ...]:
    """Wrap the results of an op that returns several, lists among them."""
    specs = iter(plan.outs)

    def wrap(local: torch.Tensor | None) -> Any:
        spec = next(specs)
        return None if local is None else new_wrapper(_state.tensor_class, local, spec, False)

    wrapped: list[Any] = []
    for result, value in zip(plan.schema.signature.results, out, strict=True):
        if result.is_list:
            wrapped.append([wrap(part) for part in value])
        else:
            wrapped.append(wrap(value) if result.is_tensor else value)
    return tuple(wrapped)


def _wrap_unknown(plan: Plan, local: torch.Tensor | None) -> Any:
    """Wrap a result without a spec: it is undefined, or its shape depends on data and every operand was whole."""
    if local is None:
        return None
    mesh = plan.schema.mesh
    spec = TensorSpec(mesh, (REPLICATE,) * mesh.ndim, TensorMeta.of(local))
    return new_wrapper(_state.tensor_class, local, spec, False)


# -- the slow path -----------------------------------------------------------------------------------------------


def _meet(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
    """Have the ranks of a call's mesh agree on their rules, before one of them looks up a rule that it lacks.

    Most meshes were met where a tensor was put on them. The mesh of a tensor from a file, for example, was not.
    """
    for value in (*args, *(kwargs or {}).values()):
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(part, _state.tensor_class):
                _state.engine.meet(part._spec.mesh)  # type: ignore[attr-defined]
                return


def clear_plans() -> None:
    """Forget all plans and handlers: some rule changed."""
    _state.handlers.clear()
    _state.libraries.clear()
    _state.under_modes.clear()
    for store in _state.stores:
        store.clear()
    _state.stores.clear()
    if hasattr(_state, "engine"):
        _state.engine.forget()
    _state.rules_version += 1


def rules_version() -> int:
    """A number that changes when some rule does. What was made by earlier rules must not be used again."""
    return _state.rules_version


class _PlanStore:
    """The plans of one handler by key. A plan that was not used during a whole generation is dropped.

    The handler reads ``hot``. While an observer listens ``hot`` stays empty, so that each call reaches :meth:`miss`.
    ``apart`` has the plans that a key alone does not decide, with the default dtype in their keys: each of their calls
    reaches :meth:`miss`.
    """

    __slots__ = ("apart", "cold", "entry", "hot", "info", "op")

    def __init__(self, entry: Entry, info: RuntimeSchemaInfo) -> None:
        self.op = entry.op
        self.entry = entry
        self.info = info
        self.hot: dict[Any, Plan] = {}
        self.cold: dict[Any, Plan] = {}
        self.apart: dict[Any, Plan] = {}

    def clear(self) -> None:
        self.hot.clear()
        self.cold.clear()
        self.apart.clear()

    def retire(self) -> None:
        """Make the hot plans cold. The handler refers to ``hot``, so its content is moved and the dict stays."""
        if self.hot:
            self.cold.clear()
            self.cold.update(self.hot)
            self.hot.clear()

    def symbolic(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Plan:
        """A plan for one call with symbols for sizes; symbols have no hash, so no plan can be stored."""
        _meet(args, kwargs)
        plan = _state.engine.plan_symbolic(_state.engine.registry().lookup(self.op), self.info, args, kwargs or {})
        tell_observers(plan)
        return plan

    def miss(self, key: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Plan | None:
        """The plan of a call that is not in ``hot``: from ``cold``, or a new one.

        None if its ``out=`` tensors had another shape than the results and were resized: then it is another call now.
        """
        plan = self.cold.get(key)
        if plan is None:
            # Values alone may be NaN.
            place = comparable(key) if self.info.by_value else key, torch.get_default_dtype()
            plan = self.apart.get(place)
            is_apart = plan is not None
            if plan is None:
                with outside_modes():
                    plan = _state.engine.plan(self.entry, self.info, args, kwargs or {})
                if plan is None:
                    return None
                if place[0] is not key or plan.follows_default_dtype:
                    is_apart = True
                    if len(self.apart) >= PLANS_PER_OP:
                        self.apart.clear()
                    self.apart[place] = plan
            if is_apart:
                tell_observers(plan)
                return plan
        if _state.observers:
            if len(self.cold) >= PLANS_PER_OP:
                self.cold.clear()
            self.cold[key] = plan
            tell_observers(plan)
            return plan
        if len(self.hot) >= PLANS_PER_OP // 2:
            self.retire()
        self.cold.pop(key, None)
        self.hot[key] = plan
        return plan
