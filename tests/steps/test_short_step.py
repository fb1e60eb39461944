"""A step of many layers is solved with some of them, and no worse than with all."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction
from functools import partial

import pytest
import torch
from fake_meshes import fake_mesh
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.program import short_solution, short_step
from shardwise.program.cost_graph import FORBIDDEN
from shardwise.program.layer_fold import LayerFold
from shardwise.program.part_exchange import PartExchange
from shardwise.program.short_step import shortened
from shardwise.program.step_memory import StepMemory
from shardwise.program.step_problem import StepProblem
from shardwise.steps import solving
from shardwise.steps.costs import WorkCosts
from shardwise.steps.recording import Recording

WIDTH, LAYERS = 64, 14


class Block(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, inner, bias=False), nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, inner))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def step(mesh, inner=(4 * WIDTH,) * LAYERS):
    model = Stack(inner)
    sw.distribute_module(model, mesh, src_data_rank=None)
    return model, sw.zeros((64, WIDTH), device_mesh=mesh, placements=[Shard(0), *[Replicate()] * (mesh.ndim - 1)])


def recorded(mesh, inner=(4 * WIDTH,) * LAYERS):
    model, x = step(mesh, inner)
    recording = Recording()
    recording.name_modules(model)
    with recording.running():
        model(x).backward()
    return recording.graph()


def test_a_short_step_has_the_first_and_the_last_layers():
    with fake_mesh(2, 2) as mesh:
        graph = recorded(mesh)
        short = shortened(graph)
        named = {t.name for t in graph.tensors for call in short.graph.calls if t.number in call.operands and t.name}
        kept = {int(name.split(".")[1]) for name in named}
        assert kept == {0, 1, 2, LAYERS - 3, LAYERS - 2, LAYERS - 1}
        assert {call.number for call in short.graph.calls} == {graph.calls[place].number for place in short.places}
        made = {t for call in short.graph.calls for t in call.results}
        inputs = {t.number for t in graph.tensors if t.maker is None}
        assert {t for call in short.graph.calls for t in call.operands if t is not None} <= made | inputs


def test_what_is_done_with_gradients_in_place_belongs_to_the_layer_that_makes_them(monkeypatch):
    """Those that lie as their parameters are detached by calls of no module, whose operands no call makes."""
    found = []

    def noted(graph):
        found.extend([graph, shortened(graph).graph])

    def whole(mesh):
        model, x = step(mesh)
        return model, sw.zeros(x.shape, device_mesh=mesh, placements=[Replicate()] * mesh.ndim)

    monkeypatch.setattr(short_solution, "shortened", noted)
    sw.plan(whole, (2, 2))
    counts = []
    for graph in found:
        detached = [call for call in graph.calls if any(t in graph.moved for t in call.operands)]
        assert {call.module for call in detached} == {""}
        counts.append(len(detached))
    assert counts == [4 * LAYERS, 4 * 6]


TURNS = (4 * WIDTH, 2 * WIDTH) * 13


@pytest.mark.parametrize("inner", [(4 * WIDTH,) * LAYERS, TURNS], ids=["alike", "in turns"])
def test_an_assignment_of_a_short_step_is_one_of_all_layers(inner):
    with fake_mesh(2, 2) as mesh:
        graph = recorded(mesh, inner)
        short = shortened(graph)
        whole, part = (StepProblem(of, WorkCosts(of)) for of in (graph, short.graph))
        start = whole.as_replicated()
        again = short.whole(short.part_of(start, part.resting), start)
        assert again.is_same(start)
        assert whole.cost(again) == start.cost < FORBIDDEN


def test_every_parameter_of_a_short_step_has_its_gradient():
    """Also that of the last layer before the gap, whose gradient may be made among the calls of the next one."""
    with fake_mesh(2, 2) as mesh:
        short = shortened(recorded(mesh))
        used = {t for call in short.graph.calls for t in call.operands}
        parameters = {t.number for t in short.graph.tensors if t.name and t.number in used}
        leaves = [sink.leaf for sink in short.graph.sinks if sink.leaf is not None]
        assert sorted(leaves) == sorted(parameters)


def test_layers_of_two_assignments_are_mixed():
    with fake_mesh(2, 2) as mesh:
        graph = recorded(mesh)
        short, problem = shortened(graph), StepProblem(graph, WorkCosts(graph))
        one, other = problem.as_recorded(), problem.as_replicated()
        assert short.count == LAYERS
        assert short.mixed(one, other, 0).is_same(other)
        half = short.mixed(one, other, LAYERS // 2)
        for place, layer in enumerate(short.layers):
            first = layer is not None and layer < LAYERS // 2
            assert half.rows[place] == (one if first else other).rows[place]


@pytest.mark.parametrize("seed", range(6))
def test_layers_that_do_the_same_are_counted_once(seed):
    """What is counted is exact, also where some layers, or single calls, do something else."""
    with fake_mesh(2, 2) as mesh:
        graph = recorded(mesh)
        free = frozenset(sink.leaf for sink in graph.sinks if sink.leaf is not None)
        problem = StepProblem(graph, WorkCosts(graph), free, StepMemory(graph, Fraction(4)), Fraction(1, 7))
        short, rng = shortened(graph), random.Random(seed)  # noqa: S311  # no secret
        found = short.mixed(problem.as_recorded(), problem.as_replicated(), rng.randrange(LAYERS))
        for place in rng.sample(range(len(graph.calls)), seed):
            found.rows[place] = [rng.choice(legal) for legal in problem.choices[place].legal]
        for t in rng.sample(sorted(free), seed):
            found.rests[t] = tuple(rng.choice([Replicate(), Shard(0)]) for _ in range(2))
        each = problem.cost(found), problem.moments.held(found).tolist()
        problem.fold = LayerFold(problem, short.of_whole)
        counted = []
        cost_of_call = StepProblem.cost_of_call
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StepProblem, "cost_of_call", lambda *args: counted.append(args[-1]) or cost_of_call(*args))
            assert (problem.cost(found), problem.moments.held(found).tolist()) == each
        if seed == 0:  # the first layers and the last ones, those at the change, and one for each of the two others
            assert len(counted) < len(graph.calls) * 8 / LAYERS


def test_parts_that_hold_less_are_taken_as_far_as_a_limit_asks():
    """Each kind of parameter is a part: it is whole, or sharded, in all layers alike. The cheapest set is taken."""
    with fake_mesh(2, 2) as mesh:
        graph = recorded(mesh)
        free = frozenset(sink.leaf for sink in graph.sinks if sink.leaf is not None)
        problem = StepProblem(graph, WorkCosts(graph), free, StepMemory(graph, Fraction(4)))
        first = problem.as_replicated()
        kinds = ("norm.weight", "norm.bias", "up.weight", "down.weight")

        def sharded(*of):
            new = first.copy()
            names = {t: graph.tensors[t].name for t in free}
            new.rests.update({t: (Shard(0), Shard(0)) for t in free if names[t].endswith(of)})
            new.cost = problem.cost(new)
            return new

        every = [sharded(*of) for n in range(1, 5) for of in itertools.combinations(kinds, n)]
        every.insert(0, first)
        exchange = PartExchange(problem, shortened(graph).of_whole, first, sharded(*kinds))
        peaks = [problem.moments.peak(one) for one in every]
        assert len(set(peaks)) > 4
        for limit in set(peaks):
            found = list(exchange.within(limit))
            within = [one for one, peak in zip(every, peaks, strict=True) if peak <= limit]
            assert found[0].cost == min(one.cost for one in within)
            assert [one.cost for one in found] == sorted(one.cost for one in found)
            assert all(problem.moments.peak(one) <= limit and any(map(one.is_same, every)) for one in found)
        assert list(exchange.within(min(peaks) - 1)) == []


@pytest.mark.parametrize("inner", [(4 * WIDTH,) * 4, (*[4 * WIDTH] * 6, 2 * WIDTH, *[4 * WIDTH] * 6)])
def test_few_layers_and_such_that_differ_are_solved_as_they_are(inner):
    with fake_mesh(2, 2) as mesh:
        assert shortened(recorded(mesh, inner)) is None


def assert_the_first_and_the_last_of_turns(short):
    graph = short.graph
    named = {t.name for t in graph.tensors for call in graph.calls if t.number in call.operands and t.name}
    assert {int(name.split(".")[1]) for name in named} == {*range(6), *range(20, 26)}
    assert (short.count, short.of_whole.period) == (13, 2)


def test_layers_that_take_turns_are_solved_two_by_two():
    with fake_mesh(2, 2) as mesh:
        assert_the_first_and_the_last_of_turns(shortened(recorded(mesh, TURNS)))


def test_layers_whose_parameters_lie_otherwise_in_turns_are_solved_two_by_two():
    with fake_mesh(2, 2) as mesh:
        model = Stack((4 * WIDTH,) * 26)
        turns = {f"blocks.{n}.up.weight": [Replicate(), Shard(n % 2)] for n in range(26)}
        sw.distribute_module(model, mesh, turns, src_data_rank=None)
        recording = Recording()
        recording.name_modules(model)
        with recording.running():
            model(sw.zeros((64, WIDTH), device_mesh=mesh, placements=[Shard(0), Replicate()])).backward()
        assert_the_first_and_the_last_of_turns(shortened(recording.graph()))


@pytest.mark.parametrize("seed", range(4))
def test_turns_that_do_the_same_are_counted_once(seed):
    with fake_mesh(2, 2) as mesh:
        graph = recorded(mesh, TURNS)
        free = frozenset(sink.leaf for sink in graph.sinks if sink.leaf is not None)
        problem = StepProblem(graph, WorkCosts(graph), free, StepMemory(graph, Fraction(4)), Fraction(1, 7))
        rng = random.Random(seed)  # noqa: S311  # no secret
        found = problem.as_replicated()
        for t in rng.sample(sorted(free), 4 * seed):
            found.rests[t] = (Shard(0), Replicate())
        for place in rng.sample(range(len(graph.calls)), seed):
            found.rows[place] = [rng.choice(legal) for legal in problem.choices[place].legal]
        each = problem.cost(found), problem.moments.held(found).tolist()
        problem.fold = LayerFold(problem, shortened(graph).of_whole)
        assert (problem.cost(found), problem.moments.held(found).tolist()) == each


class WithTable(nn.Module):
    """Each block multiplies by a table that is made before all of them, as rotary embeddings are."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block(4 * WIDTH) for _ in range(LAYERS))

    def forward(self, x):
        table = self.frequencies.cos().unsqueeze(0)
        for block in self.blocks:
            x = x + block.up.weight.new_ones(()) * block(x * table.unsqueeze(0).squeeze(0))
        return x.pow(2).mean()


def recorded_without_modules(mesh):
    """As a run that is learned is recorded."""
    model = WithTable()
    sw.distribute_module(model, mesh, src_data_rank=None)
    recording = Recording(follows_modules=False)
    with recording.running():
        x = sw.zeros((64, WIDTH), device_mesh=mesh, placements=[Shard(0), *[Replicate()] * (mesh.ndim - 1)])
        model(x).backward()
    return recording.graph()


def test_what_a_layer_does_with_a_table_is_its_own_call():
    with fake_mesh(2, 2) as mesh:
        graph = recorded_without_modules(mesh)
        owners = [call.module for call in graph.calls if call.schema.op is torch.ops.aten.mul.Tensor]
        assert owners.count("") == 1  # that of the first block with the input, which comes from no module
        assert shortened(graph) is not None


def test_a_learned_step_whose_layers_do_the_same_is_solved_by_some_of_them(monkeypatch):
    whole = []
    of_some, solve_step = solving._with_layers_alike, solving.solve_step
    monkeypatch.setattr(solving, "solve_step", lambda *args: whole.append(args) or solve_step(*args))
    with fake_mesh(2, 2) as mesh:
        graph = recorded_without_modules(mesh)
        by_some = solving.solve_graph(graph)
        assert not whole
        monkeypatch.setattr(solving, "_with_layers_alike", lambda *args: (of_some(*args)[0], False))
        assert solving.solve_graph(graph).best.cost == by_some.best.cost
        assert whole
        monkeypatch.setattr(short_step, "_LEAST_LAYERS", 1000)
        assert by_some.best.cost <= 1.001 * solving.solve_graph(graph).best.cost


@pytest.mark.slow
@pytest.mark.sample
def test_a_plan_by_a_short_step_costs_no_more(monkeypatch):
    limits = (None, 3 << 20)
    short = [sw.plan(partial(step), (2, 2), ("dp", "tp"), memory=limit) for limit in limits]
    monkeypatch.setattr(short_step, "_LEAST_LAYERS", 1000)
    for limit, made in zip(limits, short, strict=True):
        whole = sw.plan(partial(step), (2, 2), ("dp", "tp"), memory=limit)
        assert made.cost <= 1.001 * whole.cost
        assert made.differences == ()
