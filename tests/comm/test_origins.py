"""Ranks that issue the same collectives for other tensors, as loops over sets do: only the tensors' origins differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.errors import WorkerError
from shardwise.testing import WorkerPool
from shardwise.testing import mesh as mesh_of

ALONE = 1
NAMES = ("a", "b")


@pytest.fixture(scope="module")
def two() -> Iterator[WorkerPool]:
    """Workers of this module alone: their process groups end with each error."""
    with WorkerPool(2, start_method="forkserver") as workers:
        yield workers


def in_any_order() -> list[str]:
    """The names as a loop over a set has them: in an order of each process."""
    return list(NAMES if dist.get_rank() != ALONE else reversed(NAMES))


def tensors(**more: Any) -> dict[str, sw.MeshTensor]:
    mesh = mesh_of((dist.get_world_size(),))
    return {
        name: sw.distribute_tensor(torch.full((8, 2), value, **more), mesh, [Shard(0)])
        for name, value in zip(NAMES, (1.0, 10.0), strict=True)
    }


def gathered(names: list[str]) -> dict[str, float]:
    x = tensors()
    return {name: x[name].full_tensor()[0, 0].item() for name in names}


def moved(names: list[str]) -> dict[str, float]:
    x = tensors()
    whole = {name: x[name].redistribute(placements=[Replicate()]) for name in names}
    return {name: whole[name].to_local()[0, 0].item() for name in names}


def calculated(names: list[str]) -> dict[str, float]:
    x = tensors()
    twice = {name: x[name] * 2 for name in NAMES}
    return {name: twice[name].sum().item() for name in names}


def written(names: list[str]) -> dict[str, float]:
    x = tensors()
    total = {name: torch.zeros_like(x[name]) for name in NAMES}
    for name in NAMES:
        total[name].add_(x[name])
    return {name: total[name].sum().item() for name in names}


def written_in_a_list(names: list[str]) -> dict[str, float]:
    x = tensors()
    total = {name: torch.zeros_like(x[name]) for name in NAMES}
    torch._foreach_add_([total[name] for name in NAMES], [x[name] for name in NAMES])
    return {name: total[name].sum().item() for name in names}


def multiplied(names: list[str]) -> dict[str, float]:
    """A collective that an op needs for an operand."""
    x = tensors()
    return {name: (x[name].t() @ x[name]).full_tensor()[0, 0].item() for name in names}


def differentiated(names: list[str]) -> dict[str, float]:
    mesh = mesh_of((dist.get_world_size(),))
    weights = {
        name: sw.distribute_tensor(torch.full((2,), value), mesh, [Replicate()]).requires_grad_()
        for name, value in zip(NAMES, (1.0, 10.0), strict=True)
    }
    x = tensors()["a"]
    for name in names:
        (x * weights[name].square()).sum().backward()
    return {name: weights[name].grad[0].item() for name in names}


def of_several_results(names: list[str]) -> dict[str, float]:
    """The results of one op are two tensors."""
    found = dict(zip(NAMES, tensors()["a"].add(1).max(1), strict=True))
    return {name: found[name].double().sum().item() for name in names}


PROGRAMS = [gathered, moved, calculated, written, written_in_a_list, multiplied, differentiated, of_several_results]


def in_order(program: Callable[[list[str]], dict[str, float]]) -> dict[str, float]:
    with sw.check_ranks():
        return program(list(NAMES))


def apart(program: Callable[[list[str]], dict[str, float]]) -> dict[str, float]:
    with sw.check_ranks():
        return program(in_any_order())


def unchecked(program: Callable[[list[str]], dict[str, float]]) -> dict[str, float]:
    return program(in_any_order())


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_another_order_of_tensors_raises(two: WorkerPool, program: Any) -> None:
    right = two.run(in_order, program)
    assert right == [right[0]] * 2
    with pytest.raises(WorkerError) as caught:
        two.run(apart, program, timeout=60)
    for failure in caught.value.errors:
        assert failure is not None
        assert failure.kind == "RankDisagreementError", failure
        assert "PYTHONHASHSEED" in str(failure.error)
        first, second = failure.error.differences
        # The same collective at the same line, for another tensor.
        assert (
            first.rpartition(" (")[0].partition(": ")[2].rpartition(", for ")[0]
            == (second.rpartition(" (")[0].partition(": ")[2].rpartition(", for ")[0])
        )
        assert first.rpartition(" (")[2] != second.rpartition(" (")[2]


def test_without_the_check_the_values_mix(two: WorkerPool) -> None:
    """What the page says of it."""
    right = two.run(in_order, calculated)[0]
    assert two.run(unchecked, calculated)[0] != right


def with_work_of_its_own() -> list[float]:
    """One rank runs further ops, copies and prints; the collectives are the same, and so are their tensors."""
    torch.manual_seed(0)
    mesh = mesh_of((dist.get_world_size(),))
    model = sw.distribute_module(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)), mesh, {"0.weight": Shard(0)})
    optimizer = torch.optim.AdamW(model.parameters())
    x = tensors()["a"]
    losses = []
    for step in range(3):
        extra = x
        if dist.get_rank() == ALONE:
            extra = x.detach() * step + 1
            str(extra)
        y = model(x if step % 2 else x * 1)
        loss = y.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        del extra
    return losses


def checked(program: Callable[[], list[float]]) -> list[float]:
    with sw.check_ranks():
        return program()


def test_ops_of_one_rank_alone_are_no_difference(two: WorkerPool) -> None:
    losses = two.run(partial(checked, with_work_of_its_own), timeout=60)
    assert losses[0] == losses[1]
    # A program that is learned by itself may sum in another order.
    assert two.run(with_work_of_its_own)[0] == pytest.approx(losses[0], rel=1e-6)


def with_another_check() -> int:
    x = tensors()["a"]
    with sw.verify(1) as outer, sw.check_ranks():
        (x * 2).sum().item()
    with sw.check_ranks(), sw.verify(1) as inner:
        (x * 2).sum().item()
    (x * 2).sum().item()
    assert outer == inner
    return outer.total()


def test_calls_are_verified_as_well(two: WorkerPool) -> None:
    first, second = two.run(with_another_check)
    assert first == second > 0
