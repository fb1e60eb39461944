"""The dispatcher: from an op on MeshTensors to its plan, and the hot path between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch

from shardwise.kernel.engine import Handler, started
from shardwise.kernel.handlers import HANDLER_FILE, defaults, handler_source
from shardwise.kernel.known_tensors import known_without_mesh
from shardwise.kernel.nested import comparable, freeze
from shardwise.kernel.operands import PLAIN, on_meta, operand_of, operands_of
from shardwise.kernel.plan import Plan
from shardwise.kernel.precedence import Entry
from shardwise.kernel.recording import Recorder, recording
from shardwise.kernel.results import guard, new_view_of, reseat, reseat_copy, wrap_results, wrap_unknown
from shardwise.kernel.schema import RuntimeSchemaInfo
from shardwise.kernel.signature import Op, op_name
from shardwise.kernel.view_copies import watched
from shardwise.private_torch.dispatch import (
    OpMode,
    leave_out_of_graphs,
    new_wrapper,
    put_before_dispatch,
    put_before_mode,
)
from shardwise.private_torch.modes import outside_modes
from shardwise.private_torch.ops import is_composite

__all__ = [
    "PLANS_PER_OP",
    "answer",
    "at_next_dispatch",
    "check_calls",
    "clear_plans",
    "dispatch",
    "dispatch_under_mode",
    "drop_plans",
    "is_observed",
    "listen",
    "observe",
    "record",
    "rules_version",
    "tell_observers",
]

# Plans kept per op. Two generations of half that size make it least-recently-used without work on a hit.
PLANS_PER_OP = 4096


class _State:
    """The state of the dispatcher of this process."""

    def __init__(self) -> None:
        # By op, number of positional arguments and keyword names. Ops are keyed by identity: hashing an OpOverload runs
        # Python code, and overloads live as long as the process.
        self.handlers: dict[Any, Handler] = {}
        # The same, as they are without a recorder; they outlive its coming and going.
        self.generated: dict[Any, Handler] = {}
        # By op, the library that holds its first handler. Dropping it removes the handler from torch.
        self.libraries: dict[int, torch.library.Library] = {}
        # The same for handlers that are called while a mode is on.
        self.under_modes: dict[tuple[type, int], Any] = {}
        self.stores: list[_PlanStore] = []
        self.observers: list[Callable[[Plan], None]] = []
        # Those of them that wait for one dispatch, whatever its plan.
        self.waiting: set[Callable[[Plan], None]] = set()
        self.rules_version = 0


_state = _State()


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
    registry = started.engine.registry()
    if op in registry:
        handle = _state.generated.get(key)
        if handle is None:
            handle = _state.generated[key] = handler_of(registry.lookup(op), len(args), tuple(kwargs or ()))
        if recording.checks is not None:
            handle = recording.checks(handle, op)
        if recording.recorder is not None:
            handle = partial(_handle_and_tell, handle, recording.recorder.called)
    elif op in _answers:
        handle = _answers[op]
    elif is_composite(op):
        # Under inference mode torch does not decompose composite ops; their parts have the rules.
        handle = _decompose
    else:
        handle = started.engine.without_rule(op)
    _state.handlers[key] = handle
    if id(op) not in _state.libraries:
        # From now on torch calls it for exactly a MeshTensor; calls with a subclass still reach this function.
        _state.libraries[id(op)] = put_before_dispatch(op, started.tensor_class, handle)
    return handle(None, op, (), args, kwargs)


def answer(op: Op, ask: Callable[..., Any]) -> None:
    """Have a function answer an op that has no rule, because its answer on one device is about memory."""

    def handle(_cls: Any, _op: Op, _types: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
        return ask(*args, **(kwargs or {}))

    _answers[op] = handle


_answers: dict[Op, Handler] = {}


def dispatch_under_mode(mode: type[OpMode], op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """:func:`dispatch` of a call that reached a mode. From now on its op reaches the handler without the mode."""
    result = dispatch(op, args, kwargs)
    handle = _state.handlers.get((id(op), len(args), *kwargs))
    if (mode, id(op)) not in _state.under_modes and handle is not None:
        _state.under_modes[mode, id(op)] = put_before_mode(op, started.tensor_class, mode, handle)
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
    """Whether an observer listens to plans. A trace that was given up may leave some that only wait for a dispatch."""
    return len(_state.observers) > len(_state.waiting)


def listen(callback: Callable[[Plan], None]) -> None:
    """Call ``callback(plan)`` at each dispatch from now on."""
    _miss_every_call()
    _state.observers.append(callback)


def _miss_every_call() -> None:
    """Make every plan cold: a hit tells nobody of its plan, so while somebody listens every call is a miss."""
    for store in _state.stores:
        store.retire()


def _tell_of_call(plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
    """Tell observers of the plan that runs a call. A call on kept tensors comes here again, with its own plan."""
    if recording.recorder is not None:
        recording.recorder.plan = plan  # that of the call on kept tensors comes last
    if _state.observers and (plan.kept is None or plan.kept.arguments(args, kwargs) is None):
        tell_observers(plan)


def tell_observers(plan: Plan) -> None:
    """Call each observer with ``plan``. An observer may remove itself meanwhile."""
    for callback in tuple(_state.observers):
        callback(plan)


def at_next_dispatch(callback: Callable[[], None]) -> None:
    """Call ``callback()`` once, at the next dispatch."""

    def call(_: Plan) -> None:
        _state.observers.remove(call)
        _state.waiting.discard(call)
        callback()

    _state.waiting.add(call)
    listen(call)


# -- recording ---------------------------------------------------------------------------------------------------


@contextmanager
def record(recorder: Recorder) -> Iterator[None]:
    """Tell a recorder of each call of an op with a rule while the context lasts. An outer one is told of none of them,
    as of those of a program that is planned while another one learns.
    """
    before = recording.recorder
    _miss_every_call()
    recording.recorder = recorder
    _replace_handlers()
    try:
        yield
    finally:
        recording.recorder = before
        _replace_handlers()


@contextmanager
def check_calls(checks: Callable[[Handler, Op], Handler]) -> Iterator[None]:
    """Run the handlers that ``checks`` makes from those of ops with a rule, while the context lasts. Contexts nest."""
    before = recording.checks
    recording.checks = checks if before is None else lambda handle, op: checks(before(handle, op), op)
    _replace_handlers()
    try:
        yield
    finally:
        recording.checks = before
        _replace_handlers()


def _replace_handlers() -> None:
    """Have each op come here once more for its handler. Plans stay."""
    _state.handlers.clear()
    _state.libraries.clear()
    _state.under_modes.clear()


def _handle_and_tell(
    handle: Handler,
    tell: Callable[[Op, Sequence[Any], Mapping[str, Any] | None, Any], None],
    cls: Any,
    op: Op,
    types: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """A handler's call, of which a recorder is told."""
    result = handle(cls, op, types, args, kwargs)
    tell(op, args, kwargs, result)
    return result


leave_out_of_graphs(_handle_and_tell)


# -- handlers ----------------------------------------------------------------------------------------------------


def handler_of(entry: Entry, positional: int, keywords: tuple[str, ...]) -> Handler:
    """The handler of a rule's calls with this many positional arguments and these keywords."""
    op, rule = entry.op, entry.rule
    info = RuntimeSchemaInfo.of(op, rule.static, rule.writes)
    store = _PlanStore(entry, info)
    scope: dict[str, Any] = {
        "MT": started.tensor_class,
        "new": new_wrapper,
        "repeat": repeat,
        "plans": store.hot,
        "miss": store.miss,
        "symbolic": store.symbolic,
        "known_tensors": known_without_mesh,
        "other": partial(operand_of, op, False),
        "other_written": partial(operand_of, op, True),
        "others": partial(operands_of, op, False),
        "others_written": partial(operands_of, op, True),
        "guard": guard,
        "on_kept": started.engine.on_kept,
        "inference": torch.is_inference_mode_enabled,
        "new_view_of": new_view_of,
        "freeze": freeze,
        "PLAIN": PLAIN,
        "spec_of": attrgetter("_spec"),
        "local_of": attrgetter("_local_tensor"),
        "on_meta": partial(on_meta, op),
        "elsewhere": lambda args, kwargs: dispatch(op, args, kwargs),
        "raised": partial(_raised, op),
        "reseat": reseat,
        "reseat_copy": reseat_copy,
        "watched": watched,
        "after_write": started.engine.after_write,
        "link": started.engine.link,
        "wrap_results": wrap_results,
        "wrap_unknown": wrap_unknown,
        **defaults(op),
    }
    source = handler_source(op, positional, keywords, info)
    exec(compile(source, f"{HANDLER_FILE}{op_name(op)}>", "exec"), scope)  # noqa: S102  # our own text, as attrs does
    handle: Handler = scope["handle"]
    leave_out_of_graphs(handle)
    _state.stores.append(store)
    return handle


def _raised(op: Op, error: Exception) -> None:
    """What a handler does with an error of its call."""
    _leave_out_look_up(error)
    started.engine.raised(op, error)


def _leave_out_look_up(error: BaseException) -> None:
    """Take the look-up that found no plan out of what a traceback shows: it is how a miss begins, and no fault."""
    while (context := error.__context__) is not None:
        trace = context.__traceback__
        if trace is not None and trace.tb_next is None and trace.tb_frame.f_code.co_filename.startswith(HANDLER_FILE):
            error.__context__ = context.__context__
            return
        error = context


# -- the slow path -----------------------------------------------------------------------------------------------


def _meet(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
    """Have the ranks of a call's mesh agree on their rules, before one of them looks up a rule that it lacks.

    Most meshes were met where a tensor was put on them. The mesh of a tensor from a file, for example, was not.
    """
    for value in (*args, *(kwargs or {}).values()):
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(part, started.tensor_class):
                started.engine.meet(part._spec.mesh)  # type: ignore[attr-defined]
                return


def clear_plans() -> None:
    """Forget all plans and handlers: some rule changed."""
    _replace_handlers()
    _state.generated.clear()
    drop_plans()
    _state.stores.clear()
    if hasattr(started, "engine"):
        started.engine.forget()
    _state.rules_version += 1


def drop_plans() -> None:
    """Forget all plans, but no handler: other strategies are to be chosen from now on."""
    for store in _state.stores:
        store.clear()


def rules_version() -> int:
    """A number that changes when some rule does. What was made by earlier rules must not be used again."""
    return _state.rules_version


class _PlanStore:
    """The plans of one handler by key. A plan that was not used during a whole generation is dropped.

    The handler reads ``hot``. While an observer or a recorder listens ``hot`` stays empty, so that each call reaches
    :meth:`miss`. A plan that says what it sends is never hot: policies judge each of its calls.
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
        plan = started.engine.plan_symbolic(started.engine.registry().lookup(self.op), self.info, args, kwargs or {})
        if plan.sends is not None:
            started.engine.judge(plan, args, kwargs)
        if recording.recorder is not None:
            recording.recorder.plan = None
        tell_observers(plan)
        return plan

    def miss(self, key: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Plan | None:
        """The plan of a call that is not in ``hot``: from ``cold``, or a new one.

        None if its ``out=`` tensors had another shape than the results and were resized: then it is another call now.
        """
        plan = self.cold.get(key)
        if plan is not None and recording.recorder is not None and plan.sends is None and not _state.observers:
            recording.recorder.plan = plan  # most calls of a step that is recorded
            return plan
        if plan is None:
            # Values alone may be NaN.
            place = comparable(key) if self.info.by_value else key, torch.get_default_dtype()
            plan = self.apart.get(place)
            is_apart = plan is not None
            if plan is None:
                with outside_modes():
                    plan = started.engine.plan(self.entry, self.info, args, kwargs or {})
                if plan is None:
                    return None
                if place[0] is not key or plan.follows_default_dtype:
                    is_apart = True
                    if len(self.apart) >= PLANS_PER_OP:
                        self.apart.clear()
                    self.apart[place] = plan
            if is_apart:
                if plan.sends is not None:
                    started.engine.judge(plan, args, kwargs)
                _tell_of_call(plan, args, kwargs)
                return plan
        if _state.observers or recording.recorder is not None or plan.sends is not None:
            if len(self.cold) >= PLANS_PER_OP:
                self.cold.clear()
            self.cold[key] = plan
            if plan.sends is not None:
                started.engine.judge(plan, args, kwargs)
            _tell_of_call(plan, args, kwargs)
            return plan
        if len(self.hot) >= PLANS_PER_OP // 2:
            self.retire()
        self.cold.pop(key, None)
        self.hot[key] = plan
        return plan
