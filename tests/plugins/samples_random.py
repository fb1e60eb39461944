"""Sample calls of the random plugin: shapes even and uneven, size-1 and size-0 dims, other strides and dtypes."""

import torch

from shardwise.testing.values import made

aten = torch.ops.aten

SHAPES = [(8, 6), (5, 7), (24,), (3,), (1, 4), (0, 3), (), (4, 3, 5)]


def floats():
    samples = [made(shape, torch.float32) for shape in SHAPES]
    return [*samples, made((6, 5), torch.float32).t(), made((6, 8), torch.bfloat16)]


def probabilities(shape=(5, 7)):
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def each(*args, **kwargs):
    return lambda: [((x, *args), kwargs) for x in floats()]


def dropped(x, scale):
    return (x, torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.5, scale)


def rectified():
    return [((x, torch.zeros_like(x), 0.1, 0.3, training), {}) for x in floats() for training in (True, False)]


SAMPLES = {
    aten.normal_.default: each(0.5, 2.0),
    aten.uniform_.default: each(-1.0, 3.0),
    aten.bernoulli_.float: each(0.3),
    aten.exponential_.default: each(1.5),
    aten.geometric_.default: each(0.4),
    aten.cauchy_.default: each(0.0, 1.0),
    aten.log_normal_.default: each(0.0, 0.5),
    aten.random_.default: each(),
    aten.random_.to: each(9),
    getattr(aten.random_, "from"): each(-3, 9),
    aten.bernoulli_.Tensor: lambda: [
        ((made((5, 7), torch.float32), probabilities()), {}),
        ((made((8,), torch.float32), probabilities((8,))), {}),
    ],
    aten.rand_like.default: each(),
    aten.rand_like.generator: lambda: [((x,), {"generator": None}) for x in floats()],
    aten.randn_like.default: lambda: [*each()(), ((made((6, 5), torch.float32),), {"dtype": torch.float64})],
    aten.randn_like.generator: lambda: [((x,), {"generator": None}) for x in floats()],
    aten.randint_like.default: each(7),
    aten.randint_like.generator: lambda: [((x, 7), {"generator": None}) for x in floats()],
    aten.randint_like.low_dtype: each(-2, 7),
    aten.randint_like.low_generator_dtype: lambda: [((x, -2, 7), {"generator": None}) for x in floats()],
    aten.bernoulli.p: each(0.3),
    aten.normal_functional.default: each(0.5, 2.0),
    aten.uniform.default: each(-1.0, 3.0),
    aten.exponential.default: each(1.5),
    aten.geometric.default: each(0.4),
    aten.cauchy.default: each(0.0, 1.0),
    aten.log_normal.default: each(0.0, 0.5),
    aten.random.default: each(),
    aten.random.to: each(9),
    getattr(aten.random, "from"): each(-3, 9),
    aten.bernoulli.default: lambda: [((probabilities(),), {}), ((probabilities((8,)),), {})],
    aten.poisson.default: lambda: [((probabilities(),), {}), ((probabilities((8,)),), {})],
    aten.multinomial.default: lambda: [
        ((probabilities(), 2), {}),
        ((probabilities((8,)), 3), {}),
        ((probabilities((6, 3)), 9, True), {}),
    ],
    aten.randperm.generator_out: lambda: [
        ((n,), {"generator": None, "out": torch.empty(n, dtype=torch.int64)}) for n in (9, 8, 1, 0)
    ],
    aten.rrelu_with_noise.default: rectified,
    aten.rrelu_with_noise_.default: rectified,
    aten.normal.Tensor_float: lambda: [((probabilities(), 0.5), {}), ((probabilities((8,)), 0.5), {})],
    aten.normal.float_Tensor: lambda: [((0.5, probabilities()), {}), ((0.5, probabilities((8,))), {})],
    aten._standard_gamma.default: lambda: [((probabilities(),), {}), ((probabilities((8,)),), {})],
    aten._sample_dirichlet.default: lambda: [((probabilities(),), {}), ((probabilities((8,)),), {})],
    aten.normal.Tensor_Tensor: lambda: [
        ((probabilities(), probabilities()), {}),
        ((probabilities((8,)), probabilities((8,))), {}),
    ],
    aten.bernoulli.Tensor: lambda: [
        ((probabilities(), probabilities()), {}),
        ((probabilities((8,)), probabilities((8,))), {}),
    ],
    aten.binomial.default: lambda: [
        ((torch.full((5, 7), 9.0), probabilities()), {}),
        ((torch.full((8,), 4.0), probabilities((8,))), {}),
    ],
    aten.native_dropout.default: lambda: [
        ((x, p, train), {})
        for x in floats()
        if x.numel()
        for p, train in ((0.3, True), (0.0, True), (1.0, True), (0.5, False))
    ],
    aten.native_dropout_backward.default: lambda: [(dropped(x, 2.0), {}) for x in floats()],
}
