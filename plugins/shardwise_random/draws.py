"""Rules for draws: tensors filled in place, random tensors like another, and samples from given probabilities."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.rule import LocalCall, rule
from shardwise_random.whole import like_whole, part

__all__ = ["RULES"]

aten = torch.ops.aten


def fill_part(local: LocalCall, self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Fill a whole tensor as one device would and copy this rank's part in place."""
    spec = local.spec("self")
    whole = local.call.op(like_whole(spec.tensor_meta, self.device), *args, **kwargs)
    return self.copy_(part(local, spec, whole))


def draw_part(local: LocalCall, self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Draw a whole tensor like ``self`` as one device would and keep this rank's part."""
    (result,) = local.outputs
    assert result is not None
    whole: torch.Tensor = local.call.op(like_whole(local.spec("self").tensor_meta, self.device), *args, **kwargs)
    return part(local, result, whole).clone()


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
    lowering=fill_part,
    lowered="*",
)

# The probabilities are needed for every element of the draw, so they are whole; what is filled may lie anyhow.
FILL_BY_PROBABILITY = rule(aten.bernoulli_.Tensor, "..., R -> ...", lowering=fill_part, lowered="*")

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
    ],
    "... -> ...",
    lowering=draw_part,
    lowered="*",
)

# Each value is drawn with parameters of its own: every rank draws all of them.
FROM_PARAMETERS = (
    rule(
        [
            aten.bernoulli.default,
            aten.poisson.default,
            aten.multinomial.default,
            aten.normal.Tensor_float,
            aten.normal.float_Tensor,
            aten._standard_gamma.default,  # an aten op's name
            aten._sample_dirichlet.default,
        ],
        "R -> R",
    ),
    rule([aten.normal.Tensor_Tensor, aten.bernoulli.Tensor, aten.binomial.default], "R, R -> R"),
)

RULES = (FILL, FILL_BY_PROBABILITY, LIKE, *FROM_PARAMETERS)
