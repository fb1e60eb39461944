"""Calls that no tag tells apart do the same, and a run does what was predicted for all of them."""

import random

import pytest
import torch
from test_step_problem import CASES, chain, fake_mesh, recorded, step_in
from torch import nn
from torch.nn import functional

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.program.cost_graph import FORBIDDEN
from shardwise.program.deciding import decide
from shardwise.program.replay import replayed
from shardwise.program.step_solution import solve_step
from shardwise.steps import solving


class Experts(nn.Module):
    """Every expert on every token. The first layer's activations lie as the program has placed its input."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.gate = nn.Linear(256, 8, bias=False)
        self.up = nn.Parameter(torch.randn(8, 256, 512))
        self.down = nn.Parameter(torch.randn(8, 512, 256))

    def forward(self, x):
        normal = self.norm(x)
        weights = self.gate(normal).softmax(-1)
        hidden = functional.silu(torch.einsum("btd,edh->ebth", normal, self.up))
        return x + torch.einsum("ebtd,bte->btd", torch.einsum("ebth,ehd->ebtd", hidden, self.down), weights)


class Mixture(nn.Sequential):
    """Its loss squares its results, and the power is none that a plan looks at: forward and backward look the same."""

    def forward(self, x):
        return super().forward(x).pow(2).mean()


def experts(mesh):
    model = Mixture(Experts(), Experts())
    sw.distribute_module(model, mesh, src_data_rank=None)
    x = torch.zeros(8, 64, 256, device=mesh.device_type)
    return model, (sw.distribute_tensor(x, mesh, [Shard(0), Replicate()], src_data_rank=None),)


@pytest.mark.slow
@pytest.mark.sample
def test_a_plan_that_wants_two_things_of_calls_that_look_the_same_is_verified():
    planned = sw.plan(experts, (2, 4), ("dp", "tp"))
    assert planned.torn == 0
    assert planned.differences == ()
    # What the optimum costs that a run cannot follow, and no more than 1 % beyond it.
    assert 36.7e-3 < planned.cost < 37.6e-3


def changed(problem, seed):
    """The best assignment with other rows for some calls."""
    draw = random.Random(seed)  # noqa: S311  # no secret
    best = solve_step(problem, [problem.as_recorded()])
    for place in draw.sample(range(len(problem.choices)), len(problem.choices) // 3):
        candidate = best.copy()
        candidate.rows[place] = [draw.choice(of) for of in problem.choices[place].legal]
        candidate.cost = problem.cost(candidate)
        if problem.choices[place].allows(candidate.rows[place]) and candidate.cost < FORBIDDEN:
            best = candidate
    return best


@pytest.mark.parametrize(("case", "depth"), [("an mlp on 2x2", 0), ("a transformer on (4,)", 1)])
def test_what_is_replayed_wants_one_thing_of_each_call(case, depth):
    with fake_mesh(*CASES[case][0]) as mesh:
        _, problem, _, _ = recorded(step_in(mesh, case))
        one = changed(problem, depth)
        followed = replayed(problem, one, depth)
        assert followed is not None
        assert followed.cost == problem.cost(followed) < FORBIDDEN
        assert decide(problem, followed, depth)[1] == {} != decide(problem, one, depth)[1]


def test_what_a_run_follows_already_stays_as_it_is():
    with fake_mesh(2, 2) as mesh:
        _, problem, _, _ = recorded(chain(mesh, 0))
        best = solve_step(problem, [problem.as_recorded()])
        assert decide(problem, best)[1] == {}
        followed = replayed(problem, best, 4)
        assert followed is not None
        assert followed.is_same(best)


@pytest.mark.parametrize("case", ["an mlp on 2x2", "a transformer on (4,)"])
def test_what_a_run_makes_of_the_best_is_no_dearer_than_what_was_recorded(case, monkeypatch):
    with fake_mesh(*CASES[case][0]) as mesh:
        _, problem, costs, recording = recorded(step_in(mesh, case))
        as_recorded = problem.as_recorded()
        one = changed(problem, 0)
        followed = solving.with_decisions(problem, costs, as_recorded, one)
        assert followed.best.cost > as_recorded.cost
        monkeypatch.setattr(solving, "solve_step", lambda *_args, **_options: one)
        solved = solving.solve_graph(recording.graph())
        assert solved.best.cost <= as_recorded.cost
        assert solved.torn == 0
        assert solved.seconds == solved.recorded_seconds
