"""What a lowering returns is what its op returns: as many results, tensors of the shapes that this rank's shards have.

So it is with kernels: torch computes shapes without data, and the kernel of a device may return others.

A plan looks once, at its first results. A shard of another shape would be taken for a part of the global tensor, and
the program would go on with wrong numbers or fail at another op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shardwise.kernel.arguments import kind_of
from shardwise.kernel.authored import noted, refuse_answer
from shardwise.kernel.plan import Plan
from shardwise.kernel.plurals import counted
from shardwise.kernel.signature import Result
from shardwise.kernel.spec import SymbolicSpec, TensorSpec
from shardwise.private_torch.tracing import is_without_data

__all__ = ["first_results"]


def first_results(plan: Plan, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the local call of a plan for the first time. Raises :class:`RuleError` for what no lowering may return, and
    for results of a kernel that have other shapes than their specs say.
    """
    if not any(strategy.lowered for strategy in plan.strategies):
        out = call(*args, **kwargs)
        _check_kernel(plan, out)
        return out
    with noted(plan.schema.op, plan.entry.rule.source):
        out = call(*args, **kwargs)
    _check(plan, out)
    return out


def _check_kernel(plan: Plan, out: Any) -> None:
    """Check what the kernel made; an operand that it wrote is as it was."""
    results = plan.schema.signature.results
    values = out if len(results) > 1 else (out,)
    specs = iter(plan.outs)
    for result, value in zip(results, values, strict=False):
        for local in _listed(result, value) if result.is_tensor else ():
            spec = next(specs, None)
            if not result.written and _is_other(local, spec):
                assert spec is not None
                refuse_answer(
                    plan.schema.op,
                    plan.entry.rule.source,
                    f"kernel for {local.device.type}",
                    f"a tensor of shape {tuple(local.shape)} for {spec}, of which this rank has {spec.local_shape()}",
                    "Say by results= what the kernels of this device return",
                )


def _listed(result: Result, value: Any) -> Sequence[Any]:
    return value if result.is_list and isinstance(value, (tuple, list)) else (value,)


def _check(plan: Plan, out: Any) -> None:
    results = plan.schema.signature.results
    if not results:  # an op in place, on lists
        return
    values = out if len(results) > 1 else (out,)
    if not isinstance(values, (tuple, list)) or len(values) != len(results):
        found = f"{len(values)}" if isinstance(values, (tuple, list)) else kind_of(out)
        _refuse(plan, f"{found} for {counted(len(results), 'result')}", "Return a tuple with every result of the op")
    specs = iter(plan.outs)
    for result, value in zip(results, values, strict=True):
        for part in _tensors(plan, result, value):
            _check_shape(plan, part, next(specs, None))


def _tensors(plan: Plan, result: Result, value: Any) -> Iterator[Any]:
    """The tensors of one result, None for an undefined one."""
    if not result.is_tensor:
        return
    if result.is_list and not isinstance(value, (tuple, list)):
        _refuse(plan, f"{kind_of(value)} for a list of tensors", "Return what the op returns, with local tensors")
    for part in value if result.is_list else (value,):
        if part is not None and not isinstance(part, torch.Tensor):
            _refuse(plan, f"{kind_of(part)} for a tensor", "Return what the op returns, with local tensors")
        yield part


def _check_shape(plan: Plan, local: torch.Tensor | None, spec: TensorSpec | None) -> None:
    if local is not None and spec is not None and _is_other(local, spec):
        found = f"a tensor of shape {tuple(local.shape)} for {spec}, of which this rank has {spec.local_shape()}"
        _refuse(plan, found, "Return this rank's part of the result")


def _is_other(local: Any, spec: Any) -> bool:
    """Whether a local tensor has another shape than its spec says; what has no data is not asked."""
    if not isinstance(local, torch.Tensor) or spec is None or isinstance(spec, SymbolicSpec) or is_without_data(local):
        return False
    return bool(tuple(local.shape) != spec.local_shape())


def _refuse(plan: Plan, answer: str, do: str) -> None:
    refuse_answer(plan.schema.op, plan.entry.rule.source, "lowering", answer, do)
