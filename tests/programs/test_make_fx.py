"""Graphs that ``make_fx`` makes: they compute what the function does, also for other numbers, or are refused."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import shardwise as sw
from shardwise import MeshTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
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


def leaves_and_moves(name):
    m = mesh((2,))
    x, other, weight = (distribute_tensor(numbers(seed), m, [Shard(0)]) for seed in (0, 1, 2))
    program = {
        "to_local": lambda x: (x * 2).to_local() + 1,
        "full_tensor": lambda x: (x * 2).full_tensor() * 2,
        "redistribute": lambda x: x.redistribute(placements=[Partial()]).redistribute(placements=[Shard(1)]) * 2,
        "a weight": lambda x: weight.redistribute(placements=[Replicate()]) * x,
        "the part of a weight": lambda x: MeshTensor.from_local(weight.to_local() * 2, m, [Shard(0)]) * x,
        "gradient": lambda x: torch.autograd.grad(x.redistribute(placements=[Replicate()]).sin().sum(), x)[0],
    }[name]
    # Torch takes no constants beside tensors without data.
    for mode in ("real",) if "weight" in name else ("real", "fake"):
        if name == "gradient":
            x, other = x.detach().requires_grad_(), other.detach().requires_grad_()
        graph = make_fx(program, tracing_mode=mode)(x)
        for each in (x, other):
            actual, expected = graph(each), program(each)
            assert type(actual) is type(expected)
            if isinstance(actual, MeshTensor):
                actual, expected = actual.full_tensor(), expected.full_tensor()
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)


MOVES = ["to_local", "full_tensor", "redistribute", "a weight", "the part of a weight", "gradient"]


@pytest.mark.parametrize("name", MOVES)
def test_moves_are_calls_of_the_graph(two_ranks, name):
    two_ranks.run(leaves_and_moves, name)


def returns_what_it_joins():
    m = mesh((2,))
    rank = m.get_local_rank()
    graph = make_fx(lambda local: MeshTensor.from_local(local * 2, m, [Shard(0)]))(numbers(rank))
    for seed in (rank, 10 + rank):
        torch.testing.assert_close(graph(numbers(seed)).to_local(), numbers(seed) * 2, rtol=1e-12, atol=0)


def test_a_tensor_that_is_made_in_the_graph_is_returned(two_ranks):
    """It would be a constant of the graph."""
    two_ranks.run(returns_what_it_joins)


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


def linearizes(program, x, tangent):
    result, derivative = torch.func.linearize(program, x)
    expected = torch.func.jvp(program, (x,), (tangent,))
    for actual, wanted in zip((result, derivative(tangent)), expected, strict=True):
        torch.testing.assert_close(actual.full_tensor(), wanted.full_tensor(), rtol=1e-12, atol=0)


def linearizes_moves():
    m = mesh((2,))
    x, weight, tangent = (distribute_tensor(numbers(seed), m, [Shard(0)]) for seed in (0, 1, 3))

    def on_mesh(x):
        return (x.redistribute(placements=[Replicate()]) * weight.redistribute(placements=[Shard(1)])).sin()

    def of_plain(x):
        return (distribute_tensor(x, m, [Shard(0)]) @ weight.t()).sin()  # which gathers the weight

    linearizes(on_mesh, x, tangent)
    linearizes(of_plain, numbers(0), numbers(3))
    assert linearizes_alone(torch.sin)


def linearizes_alone(function):
    """Without a mesh, after dynamo is there."""
    x, tangent = numbers(0), numbers(1)
    torch._dynamo.reset()
    return torch.allclose(torch.func.linearize(function, x)[1](tangent), tangent * x.cos())


def test_linearized_moves(two_ranks):
    two_ranks.run(linearizes_moves)


class Masked(torch.nn.Module):
    """Makes tensors of its own in its forward pass."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (torch.nn.Linear(8, 8, dtype=torch.float64) for _ in range(2))

    def forward(self, x):
        hidden = torch.nn.functional.gelu(self.up(x)) * torch.arange(8) + torch.zeros(4, 8)
        return self.down(hidden.masked_fill(torch.ones(4, 8, dtype=torch.bool).tril(), 0.5))


def is_linear_map(found, program, x, tangent):
    for actual, wanted in zip(found, torch.func.jvp(program, (x,), (tangent,)), strict=True):
        torch.testing.assert_close(actual.full_tensor(), wanted.full_tensor(), rtol=1e-12, atol=1e-12)


def takes_modules():
    m = mesh((2,))
    torch.manual_seed(0)
    model = distribute_module(Masked(), m, {"up.*": [Shard(0)]})
    x, other, tangent = (distribute_tensor(numbers(seed), m, [Shard(0)]) for seed in (0, 1, 3))
    for _ in range(2):  # warm ops have another way through the mode
        wanted = model(other).full_tensor()
    graph = make_fx(model)(x)
    torch.testing.assert_close(graph(other).full_tensor(), wanted, rtol=1e-12, atol=1e-12)
    result, derivative = torch.func.linearize(model, x)
    is_linear_map((result, derivative(tangent)), model, x, tangent)


def test_a_placed_module(two_ranks):
    """Its forward pass is under ``sw.on``. The graph takes the input for what it is."""
    two_ranks.run(takes_modules)


def takes_functions_on_a_mesh():
    m = mesh((2,))
    x, other, tangent = (distribute_tensor(numbers(seed), m, [Shard(0)]) for seed in (0, 1, 3))

    def program(x):
        return torch.nn.functional.gelu(x) * torch.arange(8)

    def on_mesh(x):
        with sw.on(m):
            return program(x)

    with sw.on(m):
        wanted = [program(other).full_tensor() for _ in range(2)][-1]
        inside = make_fx(program)(x)
        result, derivative = torch.func.linearize(program, x)
        assert type(torch.arange(8)) is MeshTensor  # it is on again
    for graph in (inside, make_fx(on_mesh)(x)):
        torch.testing.assert_close(graph(other).full_tensor(), wanted, rtol=1e-12, atol=1e-12)
    is_linear_map((result, derivative(tangent)), program, x, tangent)


def test_a_trace_on_a_mesh(two_ranks):
    two_ranks.run(takes_functions_on_a_mesh)


def wakes_after_an_error():
    m = mesh((2,))

    def program(x):
        raise ZeroDivisionError

    with sw.on(m):
        with pytest.raises(ZeroDivisionError):
            make_fx(program)(numbers(0))
        assert type(torch.arange(8)) is MeshTensor


def test_a_trace_on_a_mesh_that_fails(two_ranks):
    two_ranks.run(wakes_after_an_error)
