"""The dispatcher: handlers stand where torch looks first, plans are kept and bounded, observers see every call."""

from __future__ import annotations

import traceback

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from shardwise import MeshTensor, Replicate, Shard
from shardwise.discovery.process import default_registry
from shardwise.engine import make_plan
from shardwise.engine import plan_call as call_plans
from shardwise.kernel import dispatcher
from shardwise.rule.authoring import rule

aten = torch.ops.aten


@pytest.fixture(scope="module", autouse=True)
def world():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.fixture
def x():
    mesh = init_device_mesh("cpu", (4,))
    return sw.distribute_tensor(torch.arange(32.0).view(8, 4), mesh, [Shard(0)], src_data_rank=None)


class Counting(MeshTensor):
    """Counts the calls that reach __torch_dispatch__."""

    calls = 0

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.calls += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def seen(run):
    plans = []
    with dispatcher.observe(plans.append):
        run()
    return [str(plan.schema.op) for plan in plans]


def test_after_the_first_call_torch_goes_straight_to_the_handler(x, monkeypatch):
    torch.neg(x)
    monkeypatch.setattr(dispatcher, "dispatch", None)  # a call that reached this would fail
    assert torch.equal(torch.neg(x).to_local(), -x.to_local())


def test_a_handler_sends_calls_of_other_shapes_to_theirs(x):
    torch.sum(x, 1)
    torch.sum(x, 1, True)
    torch.sum(x, 1, dtype=torch.float64)
    assert torch.sum(x, 1).shape == (8,)
    assert torch.sum(x, 1, True).shape == (8, 1)
    assert torch.sum(x, 1, dtype=torch.float64).dtype == torch.float64
    assert torch.equal(torch.add(x, x, alpha=2).to_local(), 3 * x.to_local())
    assert torch.equal(torch.add(x, 1).to_local(), 1 + x.to_local())


def test_a_subclass_comes_by_its_own_torch_dispatch(x):
    torch.neg(x)
    mine = Counting(x.to_local(), x.spec)
    before = Counting.calls
    assert torch.equal(torch.neg(mine).to_local(), -x.to_local())
    assert torch.equal((mine + x).to_local(), 2 * x.to_local())
    assert Counting.calls == before + 2


def test_a_changed_rule_takes_the_old_handler_back_from_torch(x):
    """The rule in force decides, also for an op that torch already has a handler of."""
    assert torch.neg(x).placements == (Shard(0),)
    undo = default_registry().override(rule(aten.neg.default, "m n -> m n", replicate=("m", "n")))
    assert torch.neg(x).placements == (Replicate(),)
    undo()
    assert torch.neg(x).placements == (Shard(0),)


def test_observers_see_hits_and_misses_and_nothing_after(x):
    torch.neg(x)
    assert seen(lambda: (torch.neg(x), torch.neg(x), x.t())) == ["aten.neg.default"] * 2 + ["aten.t.default"]
    inner = []
    outer = seen(lambda: inner.extend(seen(lambda: torch.neg(x))))
    assert inner == outer == ["aten.neg.default"]
    plans = []
    with dispatcher.observe(plans.append):
        torch.neg(x)
    torch.neg(x)
    assert len(plans) == 1


def test_a_plan_is_made_once(x, monkeypatch):
    made = []
    original = make_plan.make_plan
    monkeypatch.setattr(call_plans, "make_plan", lambda *args: made.append(args) or original(*args))
    torch.tanh(x)
    torch.tanh(x)
    with dispatcher.observe(lambda _: None):
        torch.tanh(x)
    torch.tanh(x)
    assert len(made) == 1


def test_plans_of_ever_new_shapes_are_bounded(monkeypatch):
    monkeypatch.setattr(dispatcher, "PLANS_PER_OP", 8)
    mesh = init_device_mesh("cpu", (4,))
    for n in range(1, 40):
        torch.sinh(sw.zeros(n, device_mesh=mesh))
        with dispatcher.observe(lambda _: None):
            torch.sinh(sw.zeros(n + 100, device_mesh=mesh))
    kept = [len(s.hot) + len(s.cold) for s in dispatcher._state.stores if s.op is aten.sinh.default]
    assert max(kept) <= 8 + 4


def test_what_is_asked_for_often_stays(monkeypatch):
    monkeypatch.setattr(dispatcher, "PLANS_PER_OP", 8)
    mesh = init_device_mesh("cpu", (4,))
    often = sw.zeros(7, device_mesh=mesh)
    torch.cosh(often)
    made = []
    original = make_plan.make_plan
    monkeypatch.setattr(call_plans, "make_plan", lambda *args: made.append(args[0].schema.specs[0]) or original(*args))
    for n in range(10, 40):
        torch.cosh(often)
        torch.cosh(sw.zeros(n, device_mesh=mesh))
    assert often.spec not in made


def plans_made(monkeypatch, run):
    made = []
    original = make_plan.make_plan
    monkeypatch.setattr(call_plans, "make_plan", lambda *args: made.append(args) or original(*args))
    run()
    return len(made)


def test_a_plan_for_nan_is_made_once_and_drives_no_other_out(x, monkeypatch):
    mask = x > 3

    def run():
        for _ in range(5):
            torch.masked_fill(x, mask, float("nan"))
            torch.nan_to_num(x, float("nan"))

    assert plans_made(monkeypatch, run) == 2


def test_the_sign_of_zero_is_part_of_a_call(x, monkeypatch):
    mask = x > 3
    assert plans_made(monkeypatch, lambda: [torch.masked_fill(x, mask, value) for value in (0.0, -0.0, 0.0)]) == 2


def test_results_have_the_default_dtype_of_their_call(x):
    numbers = x.to(torch.int64)
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            for result in (numbers / 2, numbers * 1.5, torch.sqrt(numbers), torch.where(x > 3, 1.0, 2.0)):
                assert result.dtype == result.spec.dtype == result.to_local().dtype == dtype
    finally:
        torch.set_default_dtype(before)


def test_a_plan_that_the_default_dtype_decides_is_made_once_for_each(x, monkeypatch):
    numbers = x.to(torch.int64)

    def run():
        for _ in range(3):
            torch.cosh(numbers)
            torch.set_default_dtype(torch.float64)
            torch.cosh(numbers)
            torch.set_default_dtype(torch.float32)

    assert plans_made(monkeypatch, run) == 2


# -- errors --------------------------------------------------------------------------------------------------------


def test_the_traceback_of_a_refused_call_does_not_begin_with_the_search_for_its_plan(x):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as refused:
        x @ torch.ones(3, 3)
    assert "KeyError" not in "".join(traceback.format_exception(refused.value))


def refuse_while_handling(x):
    try:
        torch.ones(2) @ torch.ones(3)
    except RuntimeError:
        x @ torch.ones(5, 5)


def test_what_the_program_was_at_stays_in_the_traceback(x):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as refused:
        refuse_while_handling(x)
    assert "inconsistent tensor size" in str(refused.value.__context__)
