"""What is learned keeps a limit on memory: the one that was asked for, or what the device has left."""

import warnings
from fractions import Fraction

import pytest
import torch
from fake_meshes import fake_mesh
from test_step_problem import CASES, recorded, step_in
from test_training import MLP, TIGHT, floats, ids
from torch import nn
from torch.nn import functional

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.errors import MemoryPlanError, PlanError
from shardwise.program.step_moments import StepMoments
from shardwise.steps.memory_limit import MemoryLimit
from shardwise.steps.solving import solve_graph
from shardwise.testing import mesh

FAR = 2**40
SAMPLE = pytest.mark.slow, pytest.mark.sample


def held(solved):
    return StepMoments(solved.problem).peak(solved.best)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == "an mlp on 2x2" else SAMPLE) for case in CASES]
)
def test_decisions_keep_a_limit_and_a_higher_one_costs_no_more(case):
    with fake_mesh(*CASES[case][0]) as mesh:
        graph = recorded(step_in(mesh, case))[1].graph
        free = solve_graph(graph, MemoryLimit(Fraction(4), FAR, None))
        assert free.seconds == solve_graph(graph).seconds, "a limit that is far away changes nothing"
        tight = solve_graph(graph, MemoryLimit(Fraction(4), None, 0))
        most = StepMoments(tight.problem).peak(tight.recorded)
        assert held(tight) <= most < held(free), "without spare memory no more than was recorded"
        assert free.seconds < tight.seconds <= tight.recorded_seconds
        between = (most + held(free)) // 2
        some = solve_graph(graph, MemoryLimit(Fraction(4), between, None))
        assert held(some) <= between
        assert free.seconds <= some.seconds <= tight.seconds
        same = solve_graph(graph, MemoryLimit(Fraction(4), None, between - most))
        assert same.seconds == some.seconds, "spare memory is beyond what was recorded"
        with pytest.raises(MemoryPlanError, match="every plan holds at least"):
            solve_graph(graph, MemoryLimit(Fraction(4), most // 4, None))


# -- on ranks ----------------------------------------------------------------------------------------------------------


def train(memory):
    """Train a model on one device, and then on two ranks; the seconds of what was learned, and the warnings.

    The optimizer of the model on one device steps first: that is no step to learn.
    """
    m = mesh((2,))
    torch.manual_seed(0)
    whole, spread = MLP().double(), MLP().double()
    spread.load_state_dict(whole.state_dict())
    sw.distribute_module(spread, m, {"*": [Replicate()]})
    x, target = floats(64, 6), ids(5, 64)
    placed = [sw.distribute_tensor(t, m, [Replicate()]) for t in (x, target)]
    losses = []
    with sw.learn(memory=memory) as learning, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for model, batch in ((whole, (x, target)), (spread, placed)):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
            losses.append([])
            for _ in range(4):
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(batch[0]), batch[1])
                loss.backward()
                optimizer.step()
                losses[-1].append(loss.detach())
        learned = learning.learned
    torch.testing.assert_close([loss.full_tensor() for loss in losses[1]], losses[0], **TIGHT)
    return None if learned is None else learned.after, [str(w.message) for w in caught]


@pytest.fixture(scope="module")
def free(two_ranks):
    (seconds, messages), *_ = two_ranks.run(train, None)
    assert messages == []
    return seconds


def test_a_program_learned_within_a_limit_has_the_numbers_of_one_device(two_ranks, free):
    for seconds, messages in two_ranks.run(train, 25_000):
        assert messages == []
        assert seconds > free, "it takes another plan than without the limit"


def test_where_nothing_keeps_the_limit_every_rank_warns_and_goes_on(two_ranks):
    for seconds, messages in two_ranks.run(train, 1000):
        assert seconds is None
        assert "every plan holds at least" in messages[0]
        assert "goes on as before" in messages[0]


@pytest.mark.parametrize("memory", [0, -1, True, 1.5, "64GiB"])
def test_a_limit_that_is_no_number_of_bytes_is_refused(memory):
    with pytest.raises(PlanError, match="a number of bytes above 0"):
        sw.learn(memory=memory)


# -- what the device has left ------------------------------------------------------------------------------------------


def stepped(mesh):
    """An optimizer after its first step, of a sharded parameter of 4 by 8 and a plain one of 3 numbers."""
    spread = nn.Linear(8, 4, bias=False)
    sw.distribute_module(spread, mesh, {"weight": [Shard(0)]}, src_data_rank=None)
    plain = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([{"params": [spread.weight]}, {"params": [plain]}])
    spread.weight.grad, plain.grad = torch.ones_like(spread.weight), torch.ones(3)
    optimizer.step()
    return optimizer


class Device:
    """What torch says of an accelerator of which 60 bytes of 1,000 are another program's."""

    def __init__(self, monkeypatch):
        self.now, self.peak = 300, 400
        for name, value in {
            "current_accelerator": lambda: torch.device("cpu"),
            "get_memory_info": lambda: (1000 - 60 - self.now, 1000),
            "memory_reserved": lambda: self.now,
            "max_memory_reserved": lambda: self.peak,
        }.items():
            monkeypatch.setattr(torch.accelerator, name, value)


def test_a_device_leaves_what_was_never_reserved_less_the_new_states(monkeypatch):
    with fake_mesh(2) as mesh:
        optimizer = stepped(mesh)
        Device(monkeypatch)
        limit = MemoryLimit.after(optimizer, "cpu", None)
        states = 2 * (2 * 8 + 3) * 4 + 2 * 4  # two of each parameter's part, and the number of each one's steps
        assert limit == MemoryLimit(2 + Fraction(states, (2 * 8 + 3) * 4), None, 1000 - 60 - 400 - states)
        assert limit.of(50) == 50 + limit.spare
        later = MemoryLimit.after(optimizer, "cpu", None, is_first=False)
        assert later.spare == limit.spare + states, "the states were there when the most was reserved"
        asked = MemoryLimit.after(optimizer, "cpu", 777)
        assert asked.of(50) == 777
        assert MemoryLimit.after(optimizer, "cuda", None) is None, "another device than the mesh has"


def test_a_device_that_is_full_leaves_nothing(monkeypatch):
    with fake_mesh(2) as mesh:
        optimizer = stepped(mesh)
        Device(monkeypatch).peak = 940
        assert MemoryLimit.after(optimizer, "cpu", None).spare == 0


def test_without_an_accelerator_and_a_limit_there_is_none():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    assert MemoryLimit.after(optimizer, "cpu", None) is None
    assert MemoryLimit.after(optimizer, "cpu", 100) == MemoryLimit(Fraction(2), 100, None)
