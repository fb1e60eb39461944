"""Compiled programs whose batch changes: how many graphs they need, and their numbers, on gloo ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.comm import events
from shardwise.demo.compiled import prove
from shardwise.demo.model import GPT
from shardwise.demo.run import TENSOR_PARALLEL
from shardwise.demo.settings import RunSettings
from shardwise.testing import mesh

TIGHT = {"rtol": 1e-9, "atol": 1e-11}
SINGLE = {"rtol": 1e-4, "atol": 1e-4}


class MLP(nn.Module):
    """Vectors in, scores out."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 16), nn.Linear(16, 12)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


class Pictures(nn.Module):
    """Pictures in, scores out; statistics over the batch."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 4, 3, stride=2, padding=1), nn.Linear(4 * 4, 12)

    def forward(self, x):
        x = functional.max_pool2d(torch.relu(self.norm(self.first(x))), 2)
        return self.head(torch.flatten(self.second(x), 1))


class Split(nn.Module):
    """Ids in, scores out: attention written out, by views of one projection, over sizes that it asks for."""

    def __init__(self, width=16, heads=4, context=6):
        super().__init__()
        self.heads, self.width = heads, width
        self.embed, self.places = nn.Embedding(12, width), nn.Embedding(context, width)
        self.qkv, self.out, self.head = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, 12)
        self.register_buffer("past", torch.tril(torch.ones(context, context)).view(1, 1, context, context) == 1)

    def forward(self, ids):
        batch, time = ids.size()
        x = self.embed(ids) + self.places.weight[:time]
        parts = self.qkv(x).split(self.width, dim=2)
        q, k, v = (p.view(batch, time, self.heads, -1).transpose(1, 2) for p in parts)
        scores = (q @ k.transpose(-2, -1) / k.size(-1) ** 0.5).masked_fill(~self.past, -1e9)
        mixed = (functional.softmax(scores, -1) @ v).transpose(1, 2).contiguous().view(batch, time, self.width)
        return self.head(x + self.out(mixed))


def small_gpt():
    return GPT(layers=1, width=8, heads=4, context=6)


def loss_of(model, x, target):
    scores = model(x)
    return functional.cross_entropy(scores.flatten(0, -2), target.flatten())


def data(model, batch, dtype):
    g = torch.Generator().manual_seed(batch)
    if isinstance(model, (GPT, Split)):
        return torch.randint(12, (2, batch, 6), generator=g).unbind()
    shape = (batch, 3, 8, 8) if isinstance(model, Pictures) else (batch, 6)
    return torch.randn(shape, generator=g, dtype=dtype), torch.randint(12, (batch,), generator=g)


def run(make, mesh_of, partition, placements, batches, backend="aot_eager", dynamic=None, mark=False):
    """The number of graphs after each batch. Every loss and gradient must be that of one device."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    dtype, tolerance = (torch.float64, TIGHT) if backend != "inductor" else (torch.float32, SINGLE)
    m = mesh(*mesh_of)
    torch.manual_seed(0)
    reference = make().to(dtype)
    model = sw.distribute_module(copy.deepcopy(reference), m, partition)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(loss_of, backend=counter, fullgraph=True, dynamic=dynamic)
    issued, counts = [], []
    for batch in batches:
        whole = data(reference, batch, dtype)
        operands = [sw.distribute_tensor(t, m, placements) for t in whole]
        if mark:
            for t in operands:
                torch._dynamo.mark_dynamic(t, 0)
        reference.zero_grad()
        model.zero_grad()
        expected = loss_of(reference, *whole)
        expected.backward()
        with events.observe(issued.append):
            result = compiled(model, *operands)
            result.backward()
        torch.testing.assert_close(result.full_tensor(), expected, **tolerance)
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad, **tolerance)
        counts.append(counter.frame_count)
    assert issued == [], "a collective ran outside the graphs"
    return counts


ONE, TWO = ((4,), ("dp",)), ((2, 2), ("dp", "tp"))
ROWS, BOTH = [Shard(0)], [Shard(0), Replicate()]
OVER_DATA = {"*weight": {"dp": Shard(0)}}


def test_a_second_batch_size_makes_one_graph_more_and_a_third_none(ranks):
    mesh_of = ((ranks.world_size,), ("dp",))
    counts = ranks.run(run, MLP, mesh_of, {}, ROWS, (8, 12, 16, 8), timeout=240)
    assert counts == [[1, 2, 2, 2]] * ranks.world_size


@pytest.mark.slow
@pytest.mark.sample
def test_a_batch_that_does_not_divide_makes_a_graph_for_its_like(pool):
    answers = pool.run(run, MLP, ONE, OVER_DATA, ROWS, (8, 12, 11, 15, 7, 16), timeout=240)
    assert answers == [[1, 2, 3, 3, 4, 4]] * 4


SLOW = {
    "demo, data": (small_gpt, ONE, {}, ROWS, (8, 12, 16, 7)),
    "demo, data and tensor": (small_gpt, TWO, TENSOR_PARALLEL, BOTH, (4, 6, 8, 7)),
    "demo, parameters over data": (small_gpt, ONE, OVER_DATA, ROWS, (8, 12, 16)),
    "views": (Split, ONE, {}, ROWS, (8, 12, 16, 6)),
    "pictures": (Pictures, ONE, {}, ROWS, (8, 12, 16, 7)),
}


def check_slow(case, backend, mark):
    counts = run(*SLOW[case], backend=backend, mark=mark)
    first = 1 if mark else 2
    assert counts[:3] == [1, first, first], counts


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_models_of_all_kinds(pool, case):
    pool.run(check_slow, case, "aot_eager", False, timeout=280)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_models_of_all_kinds_in_inductor(pool, case):
    pool.run(check_slow, case, "inductor", False, timeout=280)


def proof():
    settings = RunSettings(mesh=(2, 2), layers=1, width=8, heads=4, context=6)
    steps = prove(settings, (4, 6, 8, 4))
    # Forward and backward, once for a number and once for a symbol.
    assert [step.graphs for step in steps] == [2, 2, 0, 0]
    assert all(step.outside == 0 for step in steps)
    assert all("all_reduce" in step.collectives for step in steps[:2])
    assert max(step.difference for step in steps) < 1e-12


@pytest.mark.slow
@pytest.mark.sample
def test_the_proof_that_the_demo_gives(pool):
    pool.run(proof, timeout=280)


# -- redistributions --------------------------------------------------------------------------------------------------

PLACES = {"S(0)": Shard(0), "S(1)": Shard(1), "R": Replicate(), "P": Partial()}


def moved(x, w, targets):
    """``x @ w``, which lies as the operands do, under each of several placements."""
    y = torch.tanh(x) @ w
    return [torch.sin(y.redistribute(placements=[target])) for target in targets]


def all_ways_from(source, sizes):
    """The number of graphs after each size. Results and gradients must be those of one device."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    m = mesh((dist.get_world_size(),), ("tp",))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(moved, backend=counter, fullgraph=True, dynamic=True)
    where = {"P": (Shard(2), Shard(0))}.get(source, (PLACES[source], Replicate()))
    targets = [p for name, p in PLACES.items() if name not in (source, "P")]
    counts = []
    for size in sizes:
        g = torch.Generator().manual_seed(0)
        x, w = (torch.randn(s, generator=g, dtype=torch.float64) for s in (size, (size[2], 5)))
        x.requires_grad_()
        w.requires_grad_()
        a, b = (sw.distribute_tensor(t.detach(), m, [p]).requires_grad_() for t, p in zip((x, w), where, strict=True))
        ys, zs = moved_whole(x, w, len(targets)), compiled(a, b, targets)
        assert [z.placements for z in zs] == [(p,) for p in targets]
        weights = [torch.randn(y.shape, generator=g, dtype=y.dtype) for y in ys]
        torch.autograd.backward(ys, weights)
        torch.autograd.backward(zs, [sw.distribute_tensor(t, m, [Replicate()]) for t in weights])
        for z, y in zip((*zs, a.grad, b.grad), (*ys, x.grad, w.grad), strict=True):
            torch.testing.assert_close(z.full_tensor(), y, **TIGHT)
        counts.append(counter.frame_count)
    return counts


def moved_whole(x, w, count):
    y = torch.tanh(x) @ w
    return [torch.sin(y) for _ in range(count)]


EVEN, UNEVEN = [(8, 12, 16), (12, 16, 8)], [(11, 15, 19), (15, 19, 11)]


@pytest.mark.slow
@pytest.mark.sample
def test_every_redistribution_is_compiled_once_for_sizes_that_change(two_ranks):
    assert two_ranks.run(all_ways_from, "R", UNEVEN, timeout=240) == [[1, 1]] * 2


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("sizes", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("source", PLACES)
def test_every_redistribution_is_compiled_once_on_four_ranks(pool, source, sizes):
    assert pool.run(all_ways_from, source, sizes, timeout=240) == [[1, 1]] * pool.world_size


OF_THE_SAMPLE = pytest.param("R", marks=[pytest.mark.slow, pytest.mark.sample])


@pytest.mark.parametrize(
    "source", [OF_THE_SAMPLE, *(pytest.param(name, marks=pytest.mark.slow) for name in ("S(0)", "S(1)", "P"))]
)
def test_a_size_that_leaves_each_rank_one_element_is_compiled_for_itself(two_ranks, source):
    assert two_ranks.run(all_ways_from, source, [(2, 4, 6), (4, 6, 8)], timeout=240) == [[1, 2]] * 2


def sequence_block(x, w, v):
    hidden = torch.tanh(functional.linear(x.redistribute(placements=[Replicate()]), w))
    return functional.linear(hidden, v).redistribute(placements=[Shard(1)])


def blocks_of_sequences(lengths):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    m = mesh((dist.get_world_size(),), ("tp",))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(sequence_block, backend=counter, fullgraph=True, dynamic=True)
    torch.manual_seed(0)
    weights = [torch.randn(16, 8).double().requires_grad_(), torch.randn(8, 16).double().requires_grad_()]
    parts = [sw.distribute_tensor(t.detach(), m, [Shard(d)]).requires_grad_() for d, t in enumerate(weights)]
    for length in lengths:
        x = torch.randn(2, length, 8).double()
        first, second = weights
        y = functional.linear(torch.tanh(functional.linear(x, first)), second)
        z = compiled(sw.distribute_tensor(x, m, [Shard(1)]), *parts)
        y.square().sum().backward()
        z.square().sum().backward()
        assert z.placements == (Shard(1),)
        torch.testing.assert_close(z.full_tensor(), y, **TIGHT)
        for part, weight in zip(parts, weights, strict=True):
            torch.testing.assert_close(part.grad.full_tensor(), weight.grad, **TIGHT)
    return counter.frame_count


@pytest.mark.slow
@pytest.mark.sample
def test_a_sequence_parallel_block_is_compiled_once_for_lengths_that_change(ranks):
    assert ranks.run(blocks_of_sequences, (12, 16, 20), timeout=240) == [1] * ranks.world_size
    # The first length is the width, too: torch takes sizes that are equal for one symbol.
    assert ranks.run(blocks_of_sequences, (8, 12, 16), timeout=240) == [2] * ranks.world_size
