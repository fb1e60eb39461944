"""What a program does once it is learned, seen without a mesh: what it sends is what a run sends."""

import time

import pytest
import torch
import torch.distributed as dist
from test_automatic import WEIGHTS_ONLY, Blocks, by_itself, trained
from torch import nn

import shardwise as sw
from shardwise import Replicate
from shardwise.engine.decided import in_force
from shardwise.errors import PlanError
from shardwise.steps import step_decision
from shardwise.steps.automatic import is_worth_it
from shardwise.steps.learned_step import learned_step
from shardwise.testing import mesh
from shardwise.tools.lock import lock_step
from shardwise.tools.rehearse import rehearse


def step(m):
    model = Blocks().double()
    sw.distribute_module(model, m, WEIGHTS_ONLY, src_data_rank=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    x = sw.zeros((8, 32), dtype=torch.float64, device_mesh=m, placements=[Replicate()])
    model(x).square().mean().backward()
    optimizer.step()


def run_by_default():
    with by_itself():
        return trained(Blocks, mesh((dist.get_world_size(),)), WEIGHTS_ONLY)[0]


def test_a_learned_step_sends_what_a_run_sends(two_ranks):
    counts = two_ranks.run(run_by_default)[0]
    learned = learned_step(step, (2,))
    assert is_worth_it(learned)
    first, later = (rehearse(step, (2,), plan=by).counts.total() for by in (None, learned.decisions))
    # The run hands its input out in each step, too.
    assert [1 + first, 1 + later] == counts[:2]
    assert later < first
    assert in_force.decisions is None


def test_the_lockfile_of_a_learned_step_says_so():
    learned = learned_step(step, (2,), ("tp",))
    first, later = (lock_step(step, (2,), ("tp",), plan=by).lock for by in (None, learned.decisions))
    assert (first.plan, later.plan) == ("", "learned")
    assert later.times < first.times


def test_tensors_of_one_name_may_lie_differently():
    """As in a run: two models that are placed one after the other have parameters of the same names."""

    def two_models(m):
        models = [Blocks().double() for _ in range(2)]
        for model, partition in zip(models, (WEIGHTS_ONLY, {}), strict=True):
            sw.distribute_module(model, m, partition, src_data_rank=None)
        x = sw.zeros((8, 32), dtype=torch.float64, device_mesh=m, placements=[Replicate()])
        sum(model(x).square().mean() for model in models).backward()
        torch.optim.AdamW([p for model in models for p in model.parameters()]).step()

    assert learned_step(two_models, (2,)).calls


def test_what_cannot_be_learned_is_refused():
    with pytest.raises(PlanError, match="ran no op on a mesh"):
        learned_step(lambda _: nn.Linear(2, 2)(torch.ones(2)), (2,))
    assert in_force.decisions is None


@pytest.mark.parametrize("seconds", [0.05, 60.0])
def test_a_person_who_waits_for_a_decision_is_told_so(monkeypatch, seconds):
    solve_graph = step_decision.solve_graph

    def slow(*args):
        time.sleep(0.2)
        return solve_graph(*args)

    monkeypatch.setattr(step_decision, "solve_graph", slow)
    monkeypatch.setattr(step_decision, "_SILENT", seconds)
    said = []
    monkeypatch.setattr(step_decision._log, "warning", lambda text, *values: said.append(text % values))
    learned = learned_step(step, (2,))
    assert [f"its {learned.calls} calls are decided on together" in text for text in said] == [True] * (seconds < 1)
