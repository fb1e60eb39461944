"""Products of partial sums and averages by factors of which some are infinite.

Parts of both signs times infinity add up to NaN, and so does a part that is zero. So an operand is reduced first where
a factor of its parts is infinite. A factor may be partial itself, over other mesh dims: the ranks that reduce the
operand hold the same part of it, and so all of them reduce it, or none does.

Factors are looked at where that needs no waiting, on a CPU; a graph cannot look.
"""

from __future__ import annotations

import cmath
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch

from shardwise.kernel.rule import running_its_op
from shardwise.kernel.spec import TensorSpec
from shardwise.private_torch.tracing import is_recorded
from shardwise.rule.lowering import LocalCall

__all__ = ["multiply", "multiply_matrices", "reduced"]


def reduced(local: LocalCall, spec: TensorSpec, x: torch.Tensor) -> torch.Tensor:
    """What the parts ``x`` of a tensor stand for; where one rank has all of it, ``x`` itself."""
    for mesh_dim, kind in reversed(spec.reductions.items()):
        x = local.comm.all_reduce(x, kind, (mesh_dim,))
    return x


def multiply(local: LocalCall, *args: Any, **named: Any) -> Any:
    """An op that multiplies the parts of sums or averages by something else, element by element; a lowering.

    Where a factor is infinite, every rank has the result: infinite or NaN, which adding or averaging it over the ranks
    leaves as it is.
    """
    return _multiplied(local, args, named, None, by_element=True)


@running_its_op
def multiply_matrices(
    local: LocalCall, *args: Any, run: Callable[[], torch.Tensor] | None = None, **named: Any
) -> torch.Tensor:
    """As :func:`multiply`, for products whose elements depend on many elements of each factor.

    ``run`` runs the op on the parts, where that takes other arguments than those of the call.
    """
    result: torch.Tensor = _multiplied(local, args, named, run, by_element=False)
    return result


def _multiplied(
    local: LocalCall,
    args: Sequence[Any],
    named: dict[str, Any],
    run: Callable[[], torch.Tensor] | None,
    *,
    by_element: bool,
) -> Any:
    parts, every_factor = local.once(_parts_and_factors)
    if not parts:
        return local.call.op(*args, **named) if run is None else run()
    infinite = [i for i in every_factor if not _is_finite(args[i])]
    numbers = {name: value for name, value in named.items() if not isinstance(value, torch.Tensor)}
    everywhere = not all(map(_is_finite, numbers.values()))
    if not infinite and not everywhere:
        return local.call.op(*args, **named) if run is None else run()
    whole = list(args)
    for i, factors in parts:
        where = [args[j] for j in factors if j in infinite]
        if where or everywhere:
            value = reduced(local, local.spec(local.call.operand_names[i]), args[i])
            at_once = everywhere or not by_element or not all(isinstance(factor, torch.Tensor) for factor in where)
            whole[i] = value if at_once else torch.where(_all_finite(where), args[i], value)
    if local.call.signature.args[0].written and whole[0] is args[0]:
        whole[0] = whole[0].clone()
    values = local.call.op(*whole, **named).clone()
    result = local.call.op(*args, **named) if run is None else run()
    return result.copy_(torch.where(values.isfinite(), result, values))


def _parts_and_factors(local: LocalCall) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], tuple[int, ...]]:
    """The places of the arguments that are partial, each with those of its factors, which are not partial over its mesh
    dims; and the places of all factors. In these ops tensors come first.
    """
    partial = {i: spec.reductions.keys() for i, spec in enumerate(local.inputs) if spec is not None and spec.reductions}
    positional = range(len(local.call.signature.positional))
    parts = tuple(
        (i, tuple(j for j in positional if dims.isdisjoint(partial.get(j, ())))) for i, dims in partial.items()
    )
    return parts, tuple(sorted({j for _, factors in parts for j in factors}))


def _all_finite(factors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where all factors are neither infinite nor NaN."""
    return reduce(torch.logical_and, (factor.isfinite() for factor in factors))


def _is_finite(factor: Any) -> bool:
    """Whether a factor has no infinity and no NaN, as far as that can be seen without waiting for a device."""
    if type(factor) is not torch.Tensor:
        return not isinstance(factor, (float, complex)) or cmath.isfinite(factor)
    if not (factor.dtype.is_floating_point or factor.dtype.is_complex) or factor.device.type != "cpu":
        return True
    if is_recorded(factor):  # a graph has no values yet
        return True
    # Nothing that is added to an infinity or to NaN makes it finite again. A sum of finite elements may be infinite.
    return cmath.isfinite(factor.sum().item()) or bool(factor.isfinite().all())
