"""A program that makes other calls later is learned again; what was learned of it stays as it is."""

from collections import Counter
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from fake_meshes import fake_mesh
from test_automatic import WEIGHTS_ONLY, Blocks, by_itself, trained
from test_step_problem import CASES, recorded, step_in
from test_training import TIGHT
from torch import nn
from torch.nn import functional

import shardwise as sw
from shardwise import Shard
from shardwise.comm.events import observe
from shardwise.program.decisions import Decisions
from shardwise.program.earlier import hold_earlier
from shardwise.program.step_moments import StepMoments
from shardwise.steps import automatic, learning
from shardwise.steps.memory_limit import MemoryLimit
from shardwise.steps.solving import solve_graph, with_decisions
from shardwise.testing import mesh

STEPS, LATE = 10, 3
CASE = "an mlp on 2x2"


class Words(Blocks):
    """Blocks between an embedding and its projection back."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(16, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, tokens):
        return self.norm(super().forward(self.words(tokens))) @ self.words.weight.T


def generated(model, tokens):
    with torch.no_grad():
        for _ in range(3):
            tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
    return tokens


def generating(limit):
    """Train beside one device, and generate between the steps from one of them on: the collectives of the training part
    of each step, and of what generates in it; then the rounds.
    """
    with by_itself():
        if limit:
            sw.learn(memory=1 << 30)
        torch.manual_seed(0)
        reference, spread = Words().double(), Words().double()
        spread.load_state_dict(reference.state_dict())
        m = mesh((dist.get_world_size(),))
        sw.distribute_module(spread, m, {"*": [Shard(0)]})
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.02) for model in (reference, spread)]
        sent, training, generation = Counter(), [], []
        with observe(lambda event: sent.update([event.kind])):
            for step in range(STEPS):
                tokens = torch.randint(16, (8, 9))
                losses, texts = [], []
                for model, optimizer, own in zip(
                    (reference, spread), optimizers, (tokens, sw.distribute_tensor(tokens, m, [Shard(0)])), strict=True
                ):
                    sent.clear()
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten())
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.detach())
                    of_training = sent.total()
                    sent.clear()
                    texts += [generated(model, own[:4, :5])] if step >= LATE else []
                training.append(of_training)
                generation.append(sent.total())
                torch.testing.assert_close(losses[1].full_tensor(), losses[0], **TIGHT)
                if texts:
                    assert torch.equal(texts[1].full_tensor(), texts[0])
        return training, generation, learning.running().rounds


@pytest.mark.parametrize("limit", [False, True])
def test_a_program_that_generates_later_trains_as_it_did(ranks, limit):
    for training, generation, rounds in ranks.run(generating, limit):
        assert rounds == 2
        # Before that the ranks compare what they recorded, in some of the steps.
        assert training[-3:] == [training[1]] * 3, "solved anew with what generates, it would send more"
        assert training[1] < 0.6 * training[0]
        assert generation[-1] < 0.8 * generation[LATE]


OTHERS = (torch.sin, torch.cos, torch.tanh, torch.erf, torch.sigmoid, torch.atan, torch.asinh, torch.sinc)


class Changing(Blocks):
    """Blocks that end with other ops in each step."""

    number = 0

    def forward(self, x):
        x = super().forward(x)
        for _ in range(8):
            x = OTHERS[self.number % len(OTHERS)](x)
        return x


def never_the_same(most):
    """How often a program is decided on whose steps are all different, if only so many of these would gain much."""

    def change(step, model, x):
        model.number = step
        return x

    decided, real, worth = [], automatic.decided_by_all, automatic.is_worth_it
    automatic.decided_by_all = lambda *args: decided.append(1) or real(*args)
    automatic.is_worth_it = lambda learned: len(decided) <= most and worth(learned)
    try:
        with by_itself():
            _, on = trained(Changing, mesh((2,)), WEIGHTS_ONLY, change, steps=18)
            return len(decided), on.rounds
    finally:
        automatic.decided_by_all, automatic.is_worth_it = real, worth


def test_a_program_that_is_never_the_same_is_not_decided_on_for_ever(two_ranks):
    for decided, rounds in two_ranks.run(never_the_same, 1):
        assert (decided, rounds) == (3, 1), "after two that would gain little, it is left as it is"


# -- without ranks -----------------------------------------------------------------------------------------------------


def a_step(mesh):
    _, problem, costs, _ = recorded(step_in(mesh, CASE))
    return problem, costs


def test_what_earlier_decisions_say_is_done_again():
    with fake_mesh(*CASES[CASE][0]) as mesh:
        problem, costs = a_step(mesh)
        ran = problem.as_recorded()
        best = solve_graph(problem.graph)
        assert best.best.cost < ran.cost
        dear = with_decisions(problem, costs, ran, ran).decisions
        assert solve_graph(problem.graph, earlier=dear).best.cost == ran.cost
        again = solve_graph(problem.graph, earlier=best.decisions)
        assert again.best.is_same(best.best), "where results rest holds, too"


def test_calls_that_earlier_decisions_do_not_know_are_decided_on():
    with fake_mesh(*CASES[CASE][0]) as mesh:
        problem, costs = a_step(mesh)
        ran = problem.as_recorded()
        known = with_decisions(problem, costs, ran, ran).decisions
        some = evolve(known, exact=dict(list(known.exact.items())[::3]))
        found = solve_graph(problem.graph, earlier=some)
        held = hold_earlier(problem, ran, some)
        assert held is not None
        assert solve_graph(problem.graph).best.cost < found.best.cost < held.cost == ran.cost
        assert 0 < len(problem.held_rows) < len(problem.choices)
        for place in problem.held_rows:
            assert found.best.rows[place] == ran.rows[place]


def test_what_does_not_keep_the_limit_is_let_go():
    with fake_mesh(*CASES[CASE][0]) as mesh:
        problem, _ = a_step(mesh)
        limit = MemoryLimit(Fraction(4), None, 0)
        free = solve_graph(problem.graph, evolve(limit, nbytes=1 << 40))
        tight = solve_graph(problem.graph, limit)
        assert StepMoments(free.problem).peak(free.best) > StepMoments(tight.problem).peak(tight.best)
        again = solve_graph(problem.graph, limit, free.decisions)
        assert again.seconds == tight.seconds
        assert not again.problem.held_rows


def test_decisions_stay_comparable_with_earlier_ones():
    with fake_mesh(*CASES[CASE][0]) as mesh:
        problem, _ = a_step(mesh)
        decisions = solve_graph(problem.graph).decisions
        deeper = evolve(decisions, depth=decisions.depth + 3)
        assert solve_graph(problem.graph, earlier=deeper).decisions.depth == decisions.depth + 3


def test_decisions_about_other_layouts_hold_nothing():
    with fake_mesh(*CASES[CASE][0]) as mesh:
        problem, _ = a_step(mesh)
        exact = {digest: tuple(map(_turned, of)) for digest, of in solve_graph(problem.graph).decisions.exact.items()}
        others = Decisions(tuple(mesh.shape), exact)
        assert hold_earlier(problem, problem.as_recorded(), others) is None
        assert not problem.held_rows
        assert not problem.held_rests
        assert solve_graph(problem.graph, earlier=others).best.is_same(solve_graph(problem.graph).best)


def _turned(decision):
    return evolve(decision, sources=tuple(None if of is None else (Shard(7), Shard(7)) for of in decision.sources))
