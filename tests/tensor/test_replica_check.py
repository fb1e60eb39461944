"""Copies that should be the same: what is compared, and that a difference of one bit names the tensor and the ranks."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.errors import RankDisagreementError, SettingsError
from shardwise.tensor import replica_check
from shardwise.tensor.replica_check import copies
from shardwise.testing import mesh as mesh_with

R, S0 = Replicate(), Shard(0)


def trained(steps, damage=None, every=None):
    """A model on a 2x2 mesh that has taken some steps; ``damage`` sees it before the last one."""
    mesh = mesh_with((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    sw.distribute_module(model, mesh, {"0.weight": {"tp": S0}, "0.bias": {"tp": S0}, "*": {}})
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    handle = sw.check_replicas(model, optimizer, every=every) if every else None
    x = sw.distribute_tensor(torch.randn(8, 4), mesh, [S0, R])
    for step in range(steps):
        if damage is not None and step == steps - 1:
            damage(model, optimizer)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model, optimizer, handle


def outcome(run):
    try:
        run()
    except RankDisagreementError as error:
        return error.tensor, error.ranks, str(error)
    return None


def everything_is_the_same():
    model, optimizer, handle = trained(3, every=1)
    sw.check_replicas(model, optimizer)
    handle.remove()
    found = {copy.name: copy.mesh_dims for copy in copies(model, optimizer)}
    alone = [copy.name for copy in copies(None, optimizer)]
    return found, alone


def test_a_training_run_keeps_its_copies(pool):
    found, alone = pool.run(everything_is_the_same)[0]
    assert found["0.weight"] == (0,)
    assert found["1.weight"] == found["1.bias"] == (0, 1)
    assert found["0.weight, state 'exp_avg'"] == (0,)
    assert found["1.bias, state 'step'"] == (0, 1)
    assert len(alone) == len(found)
    assert alone[0] == "parameter 0 of group 0"


def flip_a_bit(model, name, rank):
    if dist.get_rank() == rank:
        local = dict(model.named_parameters())[name].to_local().detach()
        bits = local.view(-1).view(torch.int32)
        bits[0] = int(bits[0]) ^ (1 << 20)


def one_bit_of_a_copy(name, rank):
    model, optimizer, _ = trained(1)
    flip_a_bit(model, name, rank)
    return outcome(lambda: sw.check_replicas(model, optimizer))


# 0.weight has two copies of each shard. Nobody can say which is right; the first counts as right.
@pytest.mark.parametrize(("name", "rank"), [("1.weight", 2), ("0.weight", 3)])
def test_one_bit_names_tensor_and_rank_on_all_ranks(pool, name, rank):
    answers = pool.run(partial(one_bit_of_a_copy, name, rank))
    assert len(set(answers)) == 1, "all ranks raise the same"
    tensor, ranks, text = answers[0]
    assert text.startswith("compare replicated tensors now: 1 of ")
    assert (tensor, ranks) == (name, (rank,))


def one_copy_is_written_before_a_step():
    def damage(model, _):
        if dist.get_rank() == 2:
            model[1].bias.to_local().detach().add_(1)

    return outcome(lambda: trained(2, damage, every=2))


def test_a_copy_that_is_written_on_one_rank_is_found_after_the_step(pool):
    for _, ranks, text in pool.run(one_copy_is_written_before_a_step):
        assert text.startswith("compare replicated tensors after step 2: ")
        assert "1.bias on rank 2" in text
        assert 2 in ranks


def a_state_is_nan():
    def damage(model, optimizer):
        if dist.get_rank() == 1:
            optimizer.state[model[1].bias]["exp_avg"].to_local()[0] = math.nan

    model, optimizer, _ = trained(2)
    damage(model, optimizer)
    first = outcome(lambda: sw.check_replicas(model, optimizer))
    for state in optimizer.state.values():
        state["exp_avg"].to_local().fill_(math.nan)
    return first, outcome(lambda: sw.check_replicas(None, optimizer))


def test_a_state_with_a_nan_is_found_and_equal_nans_are_equal(pool):
    (tensor, ranks, _), second = pool.run(a_state_is_nan)[0]
    assert (tensor, ranks) == ("1.bias, state 'exp_avg'", (1,))
    assert second is None


def states_on_one_rank_only():
    model, optimizer, _ = trained(1)
    if dist.get_rank() == 0:
        optimizer.state.clear()
    return outcome(lambda: sw.check_replicas(model, optimizer))


def test_ranks_with_different_states_say_so(pool):
    for tensor, _, text in pool.run(states_on_one_rank_only):
        assert tensor == ""
        assert "do not have the same ones" in text


def by_the_setting():
    replica_check.replica_steps.cache_clear()
    before, replica_check.read_settings = replica_check.read_settings, lambda: sw.settings.Settings(check_replicas=2)
    try:
        return outcome(lambda: trained(2, lambda model, _: flip_a_bit(model, "1.bias", 0)))
    finally:
        replica_check.read_settings = before
        replica_check.replica_steps.cache_clear()


def test_the_setting_checks_every_optimizer(pool):
    for tensor, ranks, _ in pool.run(by_the_setting):
        assert tensor.startswith("parameter ")
        assert 0 in ranks


def test_every_needs_an_optimizer():
    with pytest.raises(SettingsError, match="no optimizer"):
        sw.check_replicas(nn.Linear(2, 2), every=3)
    with pytest.raises(SettingsError, match="below 1"):
        sw.check_replicas(None, torch.optim.SGD(nn.Linear(2, 2).parameters()), every=0)
