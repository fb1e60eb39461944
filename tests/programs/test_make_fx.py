"""Graphs that ``make_fx`` makes: they compute what the function does, also for other numbers, or are refused."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from shardwise import MeshTensor, Partial, Replicate, Shard, distribute_tensor
from shardwise.errors import TracingError
from shardwise.testing import mesh

ROUTES = [
    (Shard(0), Replicate()),
    (Partial(), Replicate()),
    (Partial(), Shard(1)),
    (Shard(0), Shard(1)),
    (Partial("max"), Replicate()),
]


def numbers(seed):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def programs(m, src, dst):
    """A function of this rank's part, and its gradient."""

    def program(local):
        x = MeshTensor.from_local(local, m, [src])
        return (x.redistribute(m, [dst]) * 2).to_local() + 1

    def gradient(local):
        leaf = local.detach().requires_grad_()
        return torch.autograd.grad(program(leaf).pow(2).sum(), leaf)[0]

    return program, gradient


def runs_as_traced(src, dst):
    m = mesh((2,))
    rank = m.get_local_rank()
    for function in programs(m, src, dst):
        for mode in ("real", "fake"):
            graph = make_fx(function, tracing_mode=mode)(numbers(rank))
            for seed in (rank, 10 + rank):
                torch.testing.assert_close(graph(numbers(seed)), function(numbers(seed)), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("src", "dst"), ROUTES, ids=str)
def test_a_function_of_local_tensors(two_ranks, src, dst):
    two_ranks.run(runs_as_traced, src, dst)


def records_whole_tensors():
    m = mesh((2,))

    def program(x, y):
        return (x @ y).relu().sum(0)

    x, other = (distribute_tensor(numbers(seed), m, [Shard(1)]) for seed in (0, 1))
    y = distribute_tensor(numbers(2).T, m, [Shard(0)])
    graph = make_fx(program)(x, y)
    torch.testing.assert_close(graph(other, y).full_tensor(), program(other, y).full_tensor(), rtol=1e-12, atol=0)


def test_a_function_of_whole_tensors(two_ranks):
    two_ranks.run(records_whole_tensors)


def refuses_the_part(name):
    x = distribute_tensor(numbers(0), mesh((2,)), [Shard(0)])
    ask = {
        "to_local": lambda x: (x * 2).to_local(),
        "full_tensor": lambda x: (x * 2).full_tensor(),
        "redistribute": lambda x: x.redistribute(placements=[Replicate()]),
    }
    with pytest.raises(TracingError, match="make_fx records ops on the whole tensor"):
        make_fx(ask[name])(x)
    torch.testing.assert_close(x.full_tensor(), numbers(0))


@pytest.mark.parametrize("name", ["to_local", "full_tensor", "redistribute"])
def test_the_part_of_a_tensor_in_the_graph(two_ranks, name):
    """It would be a constant of the graph."""
    two_ranks.run(refuses_the_part, name)


def takes_constants_whole():
    m = mesh((2,))
    x, other, weight = (distribute_tensor(numbers(seed), m, [Shard(0)]) for seed in (0, 1, 2))

    def program(x):
        return (weight.cos() * x).cumsum(0)

    graph = make_fx(program)(x)
    torch.testing.assert_close(graph(other).full_tensor(), program(other).full_tensor(), rtol=1e-12, atol=0)

    tangent = distribute_tensor(numbers(3), m, [Shard(0)])
    result, derivative = torch.func.linearize(program, x)
    expected = torch.func.jvp(program, (x,), (tangent,))
    for actual, wanted in zip((result, derivative(tangent)), expected, strict=True):
        torch.testing.assert_close(actual.full_tensor(), wanted.full_tensor(), rtol=1e-12, atol=0)


def test_a_tensor_from_elsewhere_is_a_constant(two_ranks):
    """The graph takes its input for what it is, and not the number that the input had in the trace."""
    two_ranks.run(takes_constants_whole)


def refuses_what_has_graph_values_inside():
    m = mesh((2,))
    x, weight = (distribute_tensor(numbers(seed), m, [Shard(0)]) for seed in (0, 1))
    with pytest.raises(TracingError, match="and of this tensor ops on its part"):
        make_fx(lambda x: weight.redistribute(placements=[Replicate()]) * x)(x)


def test_a_tensor_with_graph_values_inside_is_refused(two_ranks):
    two_ranks.run(refuses_what_has_graph_values_inside)
