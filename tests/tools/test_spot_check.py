"""Spot checks: a right program passes with every call checked, and a planted wrong rule is named on all ranks."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.demo.model import build
from shardwise.demo.run import TENSOR_PARALLEL
from shardwise.demo.settings import RunSettings
from shardwise.errors import RankDisagreementError, SettingsError, WrongRuleError
from shardwise.kernel import dispatcher
from shardwise.rule import rule
from shardwise.testing import mesh as mesh_with

aten = torch.ops.aten
R, S0, S1 = Replicate(), Shard(0), Shard(1)

# A running sum needs what lies before, and this rule says that each shard can have its own.
WRONG = rule(aten.cumsum.default, "i -> i")


def mesh_of(*shape):
    return mesh_with(shape, ("dp", "tp")[-len(shape) :])


def a_gpt_trains(share):
    """Steps of the demo's model: a first run, one that counts its calls, and one with a share of its calls checked.

    The first step of a process has more calls: it does not know yet which gradients may be sent later.
    """
    settings = RunSettings(mesh=(2, 2), layers=1, width=16, heads=2, context=8, batch=4)
    losses, checked, calls = [], None, 0

    def count(plan):
        nonlocal calls
        calls += torch.Tag.nondeterministic_seeded not in plan.schema.op.tags

    for of_calls in (None, 0.0, share):
        mesh = mesh_of(2, 2)
        torch.manual_seed(0)
        model = build(settings)
        sw.distribute_module(model, mesh, TENSOR_PARALLEL)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        ids = sw.distribute_tensor(torch.randint(0, 200, (4, 8)), mesh, [S0, R])
        with sw.verify(of_calls or 0.0) as counts:
            for _ in range(2):
                with dispatcher.observe(count) if of_calls == 0 else nullcontext():
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()  # on local tensors: no calls
                losses.append(loss.item())
        checked = counts
    return losses, dict(checked), calls


@pytest.mark.parametrize("share", [0.05, pytest.param(1.0, marks=[pytest.mark.slow, pytest.mark.sample])])
def test_a_training_run_passes_with_its_calls_checked(pool, share):
    answers = pool.run(partial(a_gpt_trains, share), timeout=120)
    before, checked, calls = answers[0]
    assert before[:2] == before[2:4] == before[4:]
    assert sum(checked.values()) == int(calls * share)
    assert share < 1 or {"aten.mm.default", "aten.embedding.default"} <= set(checked)
    assert all(other == answers[0] for other in answers)


def a_wrong_rule():
    mesh = mesh_of(4)
    x = sw.distribute_tensor(torch.arange(8.0), mesh, [S0])
    x.cumsum(0).full_tensor()
    with sw.override(WRONG), sw.verify(1.0):
        try:
            x.cumsum(0)
        except WrongRuleError as error:
            return error.op, error.plugin, error.row, error.wrong, str(error)
    return None


def test_a_wrong_rule_is_named_on_all_ranks(pool):
    for op, plugin, row, wrong, text in pool.run(a_wrong_rule):
        assert op == "aten.cumsum.default"
        assert plugin in text
        assert row
        assert "at (2,) 2.0, on one device 3.0" in wrong
        assert "test_spot_check.py:" in text


def ops_of_all_kinds():
    """In-place, out=, views, foreach, unwritten memory, random, partial operands, uneven shards, a dim of data."""
    mesh = mesh_of(4)
    with sw.verify(1.0) as checked:
        x = sw.distribute_tensor(torch.randn(7, 4), mesh, [S0])
        x.add_(1).mul_(x)
        torch.add(x, 1, out=sw.distribute_tensor(torch.empty(7, 4), mesh, [S0]))
        x.t().unsqueeze(0).expand(3, 4, 7).sum(2)
        x.new_empty(3, 3), torch.empty_like(x), nn.functional.dropout(x, 0.5)
        torch._foreach_add_([x, x.clone()], 1.0)
        part = sw.MeshTensor.from_local(torch.ones(4), mesh, [Partial()])
        part.abs(), part + part
        (x > 1).nonzero()
        x[1:5].zero_()
        x.argmax(0), x.sort(1), x.long().sum()
        x.to(torch.bfloat16).softmax(1).sum()
        x.to(torch.complex64).mul(1j).sum()
    return dict(checked)


def test_ops_of_all_kinds_pass(pool):
    checked = pool.run(ops_of_all_kinds)[0]
    for op in ("add_.Tensor", "add.out", "t.default", "new_empty.default", "_foreach_add_.Scalar", "zero_.default"):
        assert f"aten.{op}" in checked, checked
    assert "aten.native_dropout.default" not in checked


def a_share(share, calls):
    mesh = mesh_of(4)
    x = sw.distribute_tensor(torch.ones(4), mesh, [S0])
    x + 1
    with sw.verify(share) as checked:
        for _ in range(calls):
            x + 1
    return sum(checked.values())


def test_one_call_in_so_many(pool):
    assert pool.run(partial(a_share, 0.1, 55)) == [5] * 4


def another_call_on_one_rank():
    mesh = mesh_of(4)
    x = sw.distribute_tensor(torch.ones(4), mesh, [S0])
    with sw.verify(0.5):
        if torch.distributed.get_rank() == 1:
            x * 2
        try:
            x + 1, x + 2, x - 3
        except RankDisagreementError as error:
            return str(error)
    return "nothing"


def test_ranks_that_check_other_calls_say_so(pool):
    for text in pool.run(another_call_on_one_rank):
        assert "another rank verifies another call" in text


def test_a_share_above_one_is_refused():
    with pytest.raises(SettingsError, match="not from 0 to 1"), sw.verify(2.0):
        pass
