"""The first run of a plan: from then on its results lie in memory as their specs say.

A spec has the strides that torch's meta kernel returns. The kernel of a device may return others, and so may a
lowering. The strides of a kernel's results follow from those of its operands, so one look at a plan's first results is
enough: if they differ from the spec's, the plan copies such results from then on. Each rank decides this for itself,
since a copy communicates nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NoReturn

import torch

from shardwise.engine.lowered_results import first_results
from shardwise.errors import LayoutError
from shardwise.kernel.local_strides import in_order, lies_as, other_layout, restrided
from shardwise.kernel.nested import tensors_in
from shardwise.kernel.plan import Plan
from shardwise.kernel.signature import Kind, Op, Result, op_name
from shardwise.kernel.spec import SymbolicSpec, TensorSpec
from shardwise.planning.strategies import merged
from shardwise.private_torch.tracing import is_without_data

__all__ = ["CHECK_STRIDES", "put_in_order", "refuse_other_layout"]

CHECK_STRIDES = "SHARDWISE_CHECK_STRIDES"
"""The environment variable that has every run of every plan checked, operands and views included: for tests."""


def put_in_order(plan: Plan) -> Plan:
    """Have a new plan look at the strides of its first results."""
    if CHECK_STRIDES in os.environ:
        plan.run_by(_CheckedRuns(plan))
    else:
        plan.run_by(_FirstRun(plan) if plan.schema.signature.makes_tensors else _FirstView(plan))
    return plan


class _FirstRun:
    """The local call of a plan that has not run yet."""

    __slots__ = ("_call", "_plan")

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._call = plan.call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan, call = self._plan, self._call
        out = first_results(plan, call, args, kwargs)
        is_usual = type(out) is torch.Tensor and not other_layout(out) and out.is_contiguous()
        if is_usual and plan.out is not None and _is_row_major(plan.out):
            plan.run_by(call)
            return out
        for local in tensors_in(out):
            refuse_other_layout(plan.schema.op, local)
        parts = _new_results(plan, out)
        wrong = {i for i, (local, spec) in enumerate(parts) if not _lies_as(local, spec)}
        # A value of a graph that is being traced has the strides that torch expects, not those of a kernel.
        if not any(is_without_data(local) for local, _ in parts):
            plan.run_by((lambda *args, **kwargs: _put_in_order(plan, call(*args, **kwargs), wrong)) if wrong else call)
        return _put_in_order(plan, out, wrong) if wrong else out


def refuse_other_layout(op: Op, result: torch.Tensor) -> None:
    """Raise :class:`LayoutError` for a result that is sparse, opaque, nested or quantized."""
    if layout := other_layout(result):
        raise LayoutError(
            asked=f"run {op_name(op)} on MeshTensors",
            found=f"its result has the layout {layout}, and placements say how dense memory is divided",
            do="Ask for a dense result, as nn.Embedding(..., sparse=False) does, or run the op on to_local().",
            op=op_name(op),
            layout=layout,
        )


def refuse_nested(asked: str) -> NoReturn:
    """Raise :class:`LayoutError` for a nested tensor that a program would make of MeshTensors."""
    raise LayoutError(
        asked=asked,
        found="a nested tensor has parts of several lengths, and placements say how dense memory is divided",
        do="Pad the parts to one length (torch.nn.utils.rnn.pad_sequence) and pass a mask of what is real, or run "
        "these steps on to_local() of tensors that are sharded along the batch at most.",
        layout="nested",
    )


class _FirstView:
    """The local call of a plan of a view that has not run yet.

    Torch gives dims of one element the strides that come easiest, and tells memory formats by them.
    """

    __slots__ = ("_call", "_plan")

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._call = plan.call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan, call = self._plan, self._call
        out = first_results(plan, call, args, kwargs)
        has_moved = is_traced = False

        def look(local: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
            nonlocal has_moved, is_traced
            if is_without_data(local):
                is_traced = True
                return local
            view = _as_view(local, spec)
            has_moved = has_moved or view is not local
            return view

        out = _changed(plan, out, look, views=True)
        if not is_traced:
            plan.run_by(
                (lambda *args, **kwargs: _changed(plan, call(*args, **kwargs), _as_view, views=True))
                if has_moved
                else call
            )
        return out


def _as_view(local: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A view as its spec says, where only dims of one element differ; else as it is."""
    if _lies_as(local, spec):
        return local
    view = restrided(local, spec.tensor_meta)
    return local if view is None else view


class _CheckedRuns:
    """The local call of a plan of which each run is checked."""

    __slots__ = ("_call", "_inputs", "_plan", "_wrong")

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._call = plan.call
        self._inputs = merged(plan.schema, plan.strategies)[0]
        self._wrong: set[int] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan = self._plan
        for name, local, spec in zip(
            plan.schema.operand_names, _operands(plan, args, kwargs), self._inputs, strict=True
        ):
            _check(plan, f"its operand {name!r}", local, spec)
        out = first_results(plan, self._call, args, kwargs)
        for local in tensors_in(out):
            refuse_other_layout(plan.schema.op, local)
        parts = _new_results(plan, out)
        wrong = {i for i, (local, spec) in enumerate(parts) if not _lies_as(local, spec)}
        if self._wrong is None and not any(is_without_data(local) for local, _ in parts):
            self._wrong = wrong
        elif self._wrong is not None and not wrong <= self._wrong:
            local, spec = parts[min(wrong - self._wrong)]
            _check(plan, "a result of a later run", local, spec)
        out = _put_in_order(plan, out, wrong) if wrong else out

        def check(local: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
            if not is_without_data(local):
                local = _as_view(local, spec)
            _check(plan, "a view", local, spec)
            return local

        return _changed(plan, out, check, views=True)


def _operands(plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    signature = plan.schema.signature
    flat: list[Any] = []
    for arg, value in zip(signature.args, signature.bind(args, kwargs), strict=True):
        if arg.kind is Kind.TENSOR:
            flat.append(value)
        elif arg.kind is Kind.TENSORS:
            flat.extend(value or ())
    return flat


def _check(plan: Plan, what: str, local: Any, spec: TensorSpec | None) -> None:
    if spec is None or not isinstance(local, torch.Tensor) or _lies_as(local, spec):
        return
    raise LayoutError(
        asked=f"run {op_name(plan.schema.op)} with {CHECK_STRIDES}",
        found=f"{what} is {spec} with strides {spec.stride}, and its local tensor of shape {tuple(local.shape)} has "
        f"strides {local.stride()}",
        do="Whatever made the tensor must give the local tensor the order of the global strides.",
        op=op_name(plan.schema.op),
    )


def _lies_as(local: torch.Tensor, spec: TensorSpec) -> bool:
    stride = local.stride()
    # Of a whole tensor, the usual case. Symbols are not compared: the answers would be guards of the graph.
    if not isinstance(spec, SymbolicSpec) and stride == spec.stride and local.shape == spec.shape:
        return True
    return lies_as(spec.tensor_meta, local.shape, stride)


def _is_row_major(spec: TensorSpec) -> bool:
    expected = 1
    for n, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if stride != expected:
            return False
        expected *= n
    return True


def _new_results(plan: Plan, out: Any) -> list[tuple[torch.Tensor, TensorSpec]]:
    """The tensors that an op made, with their specs."""
    parts: list[tuple[torch.Tensor, TensorSpec]] = []

    def note(local: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        parts.append((local, spec))
        return local

    _changed(plan, out, note)
    return parts


def _put_in_order(plan: Plan, out: Any, wrong: set[int]) -> Any:
    """The results of an op with those of some numbers, counted among the new ones, put into the right order."""
    numbers = count()
    return _changed(plan, out, lambda t, spec: in_order(t, spec.tensor_meta) if next(numbers) in wrong else t)


def _changed(
    plan: Plan, out: Any, change: Callable[[torch.Tensor, TensorSpec], torch.Tensor], *, views: bool = False
) -> Any:
    """What an op returned, with a change of each tensor that it made, or of each view of an operand."""
    results = plan.schema.signature.results
    if not results:  # a foreach op in place
        return out
    specs = iter(plan.outs)

    def part(local: Any, result: Result) -> Any:
        spec = next(specs, None)
        if local is None or spec is None or result.written or (result.alias is not None) is not views:
            return local
        return change(local, spec)

    changed = [
        value if not result.is_tensor else [part(v, result) for v in value] if result.is_list else part(value, result)
        for result, value in zip(results, out if len(results) > 1 else (out,), strict=True)
    ]
    return changed[0] if len(results) == 1 else tuple(changed)
