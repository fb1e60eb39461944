"""The settings that check a whole program, in processes that start with them."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise import Shard
from shardwise.comm import collective_log, standstill
from shardwise.errors import RankDisagreementError, WrongRuleError
from shardwise.kernel import recording
from shardwise.rule import rule
from shardwise.testing import WorkerPool


def a_program():
    """What is on, what a right program computes, and what a planted wrong rule and a planted extra call raise."""
    mesh = init_device_mesh("cpu", (2,))
    x = sw.distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    weight = torch.nn.Parameter(sw.distribute_tensor(torch.ones(()), mesh, None))
    optimizer = torch.optim.SGD([weight], 0.1)
    (x * weight).sum().backward()
    optimizer.step()
    is_on = len(collective_log.comparing), recording.recording.checks is not None, standstill._limit()
    raised = []
    with sw.override(rule(torch.ops.aten.cumsum.default, "i -> i")):
        try:
            x.cumsum(0)
        except WrongRuleError as error:
            raised.append(error.op)
    with torch.no_grad():
        weight.to_local().add_(torch.distributed.get_rank())
    try:
        optimizer.step()
    except RankDisagreementError as error:
        raised.append(error.tensor)
    total = x.sum()
    try:
        total.item() if torch.distributed.get_rank() else total.full_tensor()
    except RankDisagreementError as error:
        raised.append(len(error.differences))
    return is_on, raised


@pytest.mark.slow
@pytest.mark.sample
def test_settings_check_a_whole_program(monkeypatch):
    for name, value in {"CHECK_RANKS": "1", "CHECK_REPLICAS": "1", "VERIFY": "1", "WAIT_LIMIT": "60"}.items():
        monkeypatch.setenv(f"SHARDWISE_{name}", value)
    with WorkerPool(2, start_method="spawn") as pool:
        for is_on, raised in pool.run(a_program, timeout=120):
            assert is_on == (1, True, 60.0)
            assert raised == ["aten.cumsum.default", "parameter 0 of group 0", 2]
