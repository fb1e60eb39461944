"""Rules for draws in which each value has parameters of its own: they may be sharded as the values are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.rule import Call, Flow, LocalCall, einop, row_major, rule, rule_from
from shardwise_random import distributions
from shardwise_random.distributions import Distribution
from shardwise_random.whole import gather, part, rehearse

__all__ = ["RULES"]

aten = torch.ops.aten


def _of(make: Callable[..., Distribution], *names: str) -> Callable[..., Tensor]:
    """The lowering of ops; ``names`` are the names of their parameters, in the order of ``make``'s arguments."""

    def draw_part(local: LocalCall, *args: Any, generator: torch.Generator | None = None) -> Tensor:
        (result,) = local.outputs
        assert result is not None
        parameters = dict(zip((a.name for a in local.call.signature.positional), args, strict=True))
        first = next(value for value in parameters.values() if isinstance(value, Tensor))
        if local.without_data(first):
            rehearse(local, **parameters)
            return first.new_empty(local.local_shape(result), dtype=result.dtype)
        draw = local.draw() if generator is None else None
        if draw is None:
            whole = local.call.op(*(gather(local, n, v) for n, v in parameters.items()), generator=generator)
            return part(local, result, whole).clone()
        _check(local, parameters)
        blank = first.new_empty(local.local_shape(result), dtype=result.dtype)
        return make(*(parameters[name] for name in names)).fill(blank, draw, local.region(result))

    return draw_part


def _check(local: LocalCall, parameters: dict[str, Any]) -> None:
    """Refuse wrong parameters as torch does; if they are wrong on one rank, every rank raises."""
    name, least, most = ("std", 0.0, float("inf")) if "std" in parameters else ("p", 0.0, 1.0)
    name_of_tensor = name if name in parameters else "self"
    value = parameters[name_of_tensor]
    if isinstance(value, Tensor):
        wrong = not bool(((value >= least) & (value <= most)).all())
        sharding = local.sharding(local.spec(name_of_tensor))
        if sharding:
            flag = torch.tensor([int(wrong)], device=value.device)
            wrong = bool(local.comm.all_reduce(flag, "max", sharding))
    else:
        wrong = not least <= value <= most
    if wrong:
        raise RuntimeError(f"Expected {'p_in' if name == 'p' else name} >= {least:g} && <= {most:g}")


ONE = rule(aten.bernoulli.default, "... -> ...", lowering={("*", "R"): _of(distributions.bernoulli, "self")})
PROBABILITIES = rule(aten.bernoulli.Tensor, "..., ... -> ...", lowering={("*", "R"): _of(distributions.bernoulli, "p")})
NORMAL = rule(
    [aten.normal.Tensor_float, aten.normal.float_Tensor],
    "... -> ...",
    lowering={("*", "R"): _of(distributions.normal, "mean", "std")},
)


@rule_from(aten.normal.Tensor_Tensor, lowering=_of(distributions.normal, "mean", "std"), results=row_major)
def NORMALS() -> Callable[[Call], Flow]:
    """..., ... -> ...: every row, the whole one included."""
    return einop("..., ... -> ...", lowered=("*", "R"))


# -- by rejection ----------------------------------------------------------------------------------------------------


def _draw_whole(local: LocalCall, *args: Any) -> Any:
    """Draw all values by a generator for this draw alone: a value needs an unknown number of random numbers."""
    *parameters, generator = args
    if generator is None and not local.without_data(parameters[0]):
        draw = local.draw()
        generator = None if draw is None else draw.generator(parameters[0].device)
    return local.call.op(*parameters, generator)


REJECTED = rule(
    [
        aten.poisson.default,
        aten._standard_gamma.default,  # an aten op's name
        aten._sample_dirichlet.default,
    ],
    "R -> R",
    lowering={("*", "R"): _draw_whole},
)
BINOMIAL = rule(aten.binomial.default, "R, R -> R", lowering={("*", "R"): _draw_whole})

RULES = (ONE, PROBABILITIES, NORMAL, NORMALS, REJECTED, BINOMIAL)
