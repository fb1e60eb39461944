"""Rules for draws with numbers for parameters: tensors filled in place, and random tensors like another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwise.rule import LocalCall, Op, rule
from shardwise_random import distributions
from shardwise_random.distributions import Distribution
from shardwise_random.whole import gather, like_whole, part, rehearse

__all__ = ["RULES"]

aten = torch.ops.aten


def _of_any_dtype(distribution: Callable[..., Distribution]) -> Callable[..., Distribution]:
    return lambda _, *parameters: distribution(*parameters)


# The distribution of an op, by its name without the underscore: from the dtype to fill and the op's parameters.
_DISTRIBUTIONS: Mapping[str, Callable[..., Distribution]] = {
    "normal": _of_any_dtype(distributions.normal),
    "normal_functional": _of_any_dtype(distributions.normal),
    "uniform": _of_any_dtype(distributions.uniform),
    "bernoulli": _of_any_dtype(distributions.bernoulli),
    "exponential": _of_any_dtype(distributions.exponential),
    "geometric": _of_any_dtype(distributions.geometric),
    "cauchy": _of_any_dtype(distributions.cauchy),
    "log_normal": _of_any_dtype(distributions.log_normal),
    "random": distributions.integers,
    "rand_like": _of_any_dtype(distributions.uniform),
    "randn_like": _of_any_dtype(distributions.normal),
    "randint_like": distributions.integers,
}


def _distribution(op: Op, dtype: torch.dtype, parameters: tuple[Any, ...]) -> Distribution:
    name = str(op).split(".")[1].rstrip("_")
    # A single bound is the upper one.
    if "from" not in str(op) and name in ("random", "randint_like") and len(parameters) == 1:
        parameters = (0, *parameters)
    return _DISTRIBUTIONS[name](dtype, *parameters)


def fill_part(
    local: LocalCall,
    self: torch.Tensor,
    *parameters: Any,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Fill this rank's part of a tensor in place."""
    if local.without_data(self):
        rehearse(local, p=parameters[0] if parameters else None)
        return self
    spec = local.spec("self")
    draw = local.draw() if generator is None else None
    if draw is not None:
        return _distribution(local.call.op, self.dtype, parameters).fill(self, draw, local.region(spec))
    # Only probabilities may be a tensor, and the schema calls that operand p.
    parameters = tuple(gather(local, "p", value) for value in parameters)
    whole = local.call.op(like_whole(spec.tensor_meta, self.device), *parameters, generator=generator)
    return self.copy_(part(local, spec, whole))


def draw_part(
    local: LocalCall,
    self: torch.Tensor,
    *parameters: Any,
    generator: torch.Generator | None = None,
    **options: Any,
) -> torch.Tensor:
    """Draw this rank's part of a tensor like ``self``."""
    (spec,) = local.outputs
    assert spec is not None
    if "generator" in local.call.args:
        options["generator"] = generator
    if local.without_data(self):
        result: torch.Tensor = local.call.op(self, *parameters, **options)
        return result
    draw = local.draw() if generator is None else None
    if draw is not None:
        blank = torch.empty_like(self, dtype=spec.dtype)
        return _distribution(local.call.op, spec.dtype, parameters).fill(blank, draw, local.region(spec))
    whole = local.call.op(like_whole(local.spec("self").tensor_meta, self.device), *parameters, **options)
    return part(local, spec, whole).clone()


FILL = rule(
    [
        aten.normal_.default,
        aten.uniform_.default,
        aten.bernoulli_.float,
        aten.exponential_.default,
        aten.geometric_.default,
        aten.cauchy_.default,
        aten.log_normal_.default,
        aten.random_.default,
        aten.random_.to,
        getattr(aten.random_, "from"),
    ],
    "... -> ...",
    lowering={("*", "R"): fill_part},
)

FILL_BY_PROBABILITY = rule(aten.bernoulli_.Tensor, "..., ... -> ...", lowering={("*", "R"): fill_part})

LIKE = rule(
    [
        aten.rand_like.default,
        aten.rand_like.generator,
        aten.randn_like.default,
        aten.randn_like.generator,
        aten.randint_like.default,
        aten.randint_like.generator,
        aten.randint_like.low_dtype,
        aten.randint_like.low_generator_dtype,
        aten.bernoulli.p,
        aten.normal_functional.default,
        aten.uniform.default,
        aten.exponential.default,
        aten.geometric.default,
        aten.cauchy.default,
        aten.log_normal.default,
        aten.random.default,
        aten.random.to,
        getattr(aten.random, "from"),
    ],
    "... -> ...",
    lowering={("*", "R"): draw_part},
)

RULES = (FILL, FILL_BY_PROBABILITY, LIKE)
