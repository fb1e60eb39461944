"""Learning: from the second step on a program runs by decisions for the whole step, and its numbers stay."""

import copy
import io
import itertools
import pickle
import warnings
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from fake_meshes import fake_mesh
from test_training import DP_TP, MLP, MLP_CASES, SAMPLE, TIGHT, TRANSFORMER_CASES, ConvNet, Transformer, floats, ids
from torch import nn
from torch.nn import functional

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.comm.events import observe
from shardwise.engine import decided
from shardwise.errors import NoPlanError, RankDisagreementError
from shardwise.kernel import recording  # the module: what it holds is copied to the ranks with a test
from shardwise.kernel.placements import strided_shard
from shardwise.steps import learning, step_decision
from shardwise.steps import recording as step_recording
from shardwise.tensor import optimizer_step as stepping
from shardwise.testing import mesh

STEPS = 5


def train(model, x, target, after_step=lambda: None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=True)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        after_step()
    return losses, list(model.parameters())


def compare(make, x, target, mesh_of, partition, data, hook=None):
    """Train a model that is learned beside one device; returns what was learned, and the collectives of each step."""
    m = mesh(*mesh_of)
    torch.manual_seed(0)
    reference = make().double()
    spread = make().double()
    spread.load_state_dict(reference.state_dict())
    losses, parameters = train(reference, x, target)
    sw.distribute_module(spread, m, partition)
    if hook is not None:
        hook(spread)
    placements = [p.placements for p in spread.parameters()]
    x, target = sw.distribute_tensor(x, m, data), sw.distribute_tensor(target, m, data[: m.ndim])
    counts, sent = [0], Counter()

    def saw(event):
        sent[len(counts) - 1] += 1

    with sw.learn() as learned_here, observe(saw):
        ours, own = train(spread, x, target, lambda: counts.append(0))
        learned, known = learned_here.learned, decided.in_force.known
    assert decided.in_force.decisions is None
    torch.testing.assert_close([loss.full_tensor() for loss in ours], losses, **TIGHT)
    torch.testing.assert_close([p.detach().full_tensor() for p in own], [p.detach() for p in parameters], **TIGHT)
    assert [p.placements for p in own] == placements
    assert [p.grad.placements for p in own] == placements
    return {
        "before": learned.before,
        "after": learned.after,
        "torn": learned.torn,
        "known": known,
        "rounds": learned_here.rounds,
        "sent": [sent[step] for step in range(STEPS)],
    }


def is_cheaper(learned):
    # Gradients that wait for a collective take other ops than those that do not: a small program is learned twice.
    assert learned["rounds"] <= 2
    assert learned["before"] is None or learned["after"] <= learned["before"]
    assert learned["known"] > 0
    assert learned["sent"][-1] == learned["sent"][-2] < learned["sent"][0]


# The other layouts are for .ci/run's sample.
EVERYDAY = ("data and tensor 2x2",)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in EVERYDAY else SAMPLE) for case in MLP_CASES],
)
def test_a_learned_mlp_trains_as_on_one_device(pool, case):
    mesh_of, partition, data = MLP_CASES[case]
    is_cheaper(pool.run(compare, MLP, floats(7, 6), ids(5, 7), mesh_of, partition, data)[0])


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in EVERYDAY else SAMPLE) for case in TRANSFORMER_CASES],
)
def test_a_learned_transformer_trains_as_on_one_device(pool, case):
    mesh_of, partition, data, hook = TRANSFORMER_CASES[case]
    learned = pool.run(compare, Transformer, ids(12, 7, 6), ids(12, 7, 6), mesh_of, partition, data, hook)[0]
    is_cheaper(learned)


@pytest.mark.slow
@pytest.mark.sample
def test_a_learned_convolutional_net_trains_as_on_one_device(pool):
    partition = {"first.*": {"tp": Shard(0)}, "second.*": {"tp": Shard(0)}}
    data = [Shard(0), Replicate()]
    is_cheaper(pool.run(compare, ConvNet, floats(5, 3, 8, 8), ids(5, 5), DP_TP, partition, data)[0])


# -- programs that change ----------------------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5)
        self.other = nn.Linear(6, 5)

    def forward(self, x, branch):
        return self.other(x).tanh() if branch else self.second(torch.relu(self.first(x)))


def branching(learns):
    """Losses of steps whose branch and batch change, on the mesh or on one device."""
    torch.manual_seed(0)
    model = Branches().double()
    m = mesh((2,)) if learns else None
    if m is not None:
        sw.distribute_module(model, m, {"first.*": [Shard(0)], "second.weight": [Shard(1)], "other.weight": [Shard(0)]})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, rounds = [], 0
    here = sw.learn() if learns else None
    for step in range(10):
        x, target = floats(8 + step % 3, 6), ids(5, 8 + step % 3)
        if m is not None:
            x, target = (sw.distribute_tensor(t, m, [Shard(0)]) for t in (x, target))
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x, step % 4 == 3), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if here is not None:
        losses, rounds = [loss.full_tensor() for loss in losses], here.rounds
        here.close()
    return losses, rounds


def test_another_branch_and_other_batches_are_learned_too(two_ranks):
    expected, _ = branching(False)
    for losses, rounds in two_ranks.run(branching, True):
        torch.testing.assert_close(losses, expected, **TIGHT)
        assert rounds > 1


class WritesInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x, _branch):
        x = self.first(x)
        scale = x.square().mean(-1, keepdim=True).add_(1e-6).rsqrt()
        return self.second(x * scale)


def unknown_calls(make, every, foreach, passes=1):
    """Per step of a program, how many calls the decisions did not know, and how many steps were learned by then."""
    model = make().double()
    m = mesh((2,))
    sw.distribute_module(model, m, {"*.weight": [Shard(0)]})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=foreach)
    x, target = (sw.distribute_tensor(t, m, [Shard(0)]) for t in (floats(8, 6), ids(5, 8)))
    unknown = []
    with sw.learn() as here:
        for step in range(12):
            optimizer.zero_grad()
            before, rounds = decided.in_force.unknown, here.rounds
            with sw.accumulate() if passes > 1 else nullcontext():
                for _ in range(passes):
                    functional.cross_entropy(model(x, step % every == 1), target).backward()
            unknown.append((decided.in_force.unknown - before, rounds))
            optimizer.step()
    return unknown


@pytest.mark.parametrize("foreach", [True, False])
def test_a_call_behind_one_that_writes_its_operand_is_known(two_ranks, foreach):
    for unknown in two_ranks.run(unknown_calls, WritesInPlace, 1, foreach):
        # What the optimizer does is no reason to record the step again.
        assert unknown[1][0] <= 4
        assert unknown[4:] == [(0, 1)] * 8


def test_gradients_that_wait_are_known(two_ranks):
    for unknown in two_ranks.run(unknown_calls, WritesInPlace, 1, True, 2):
        # The gradients of weights that need no reduction any more are not among those that wait.
        assert unknown[1][0] <= 3
        assert unknown[3:] == [(0, 1)] * 9


def test_a_branch_that_every_other_step_takes_is_learned(two_ranks):
    for unknown in two_ranks.run(unknown_calls, Branches, 2, True):
        assert unknown[1][0] > 0
        assert unknown[-4:] == [(0, 2)] * 4


def parting():
    """Rank 1 runs one more call than rank 0 in the step that is recorded."""
    m = mesh((2,))
    model = nn.Linear(4, 4)
    sw.distribute_module(model, m, {"weight": [Shard(0)]})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sw.learn():
        loss = model(sw.distribute_tensor(torch.ones(2, 4), m, [Replicate()])).square().sum()
        if dist.get_rank() == 1:
            loss = loss * 1.0
        loss.backward()
        try:
            optimizer.step()
        except RankDisagreementError as error:
            return str(error)
    return "nothing was raised"


def test_ranks_that_ran_different_calls_all_raise(two_ranks):
    messages = two_ranks.run(parting)
    assert all("the ranks of the mesh ran different calls" in message for message in messages)
    assert "aten.mul" in messages[1]


def without_a_plan():
    """Learn a program on ranks of which the first finds no plan; the warnings, and whether decisions are in force."""
    m = mesh((2,))
    model = nn.Linear(4, 4)
    sw.distribute_module(model, m, {"weight": [Shard(0)]})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    real = step_decision.solve_graph

    def failing(*_):
        raise NoPlanError(asked="plan", found="nothing", do="wait.")

    step_decision.solve_graph = failing
    try:
        with sw.learn(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model(sw.distribute_tensor(torch.ones(2, 4), m, [Replicate()])).sum().backward()
                optimizer.step()
            return [str(warning.message) for warning in caught], decided.in_force.decisions
    finally:
        step_decision.solve_graph = real


def test_a_program_without_a_plan_goes_on_with_a_warning(two_ranks):
    for messages, decisions in two_ranks.run(without_a_plan):
        assert decisions is None
        assert "NoPlanError: plan" in messages[0]
        assert "goes on as before" in messages[0]


def drawn_losses(learns):
    """Losses of steps with an op whose result no kernel describes before it runs, and whether they were learned."""
    m = mesh((2,))
    torch.manual_seed(0)
    model = nn.Linear(4, 4).double()
    sw.distribute_module(model, m, {"weight": [Shard(0)]})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = sw.distribute_tensor(floats(6, 4), m, [Shard(0)])
    losses = []
    with warnings.catch_warnings(), sw.learn(learns) as learned_here:
        warnings.simplefilter("error")
        for _ in range(3):
            optimizer.zero_grad()
            h = model(x)
            loss = (h * torch.distributions.Dirichlet(h.detach().abs() + 1).sample()).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.full_tensor().detach())
        return losses, learned_here.learned is not None


def test_a_program_with_a_result_that_is_known_only_afterwards_is_learned(two_ranks):
    for (plain, _), (losses, is_learned) in zip(
        two_ranks.run(drawn_losses, False), two_ranks.run(drawn_losses, True), strict=True
    ):
        assert is_learned
        torch.testing.assert_close(losses, plain, **TIGHT)


def begun_before_the_step(with_closure):
    """Learning that begins between a backward pass and the optimizer's step, or whose steps run in closures."""
    m = mesh((2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    sw.distribute_module(model, m, {"0.weight": [Shard(0)], "2.weight": [Shard(1)]})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = sw.distribute_tensor(floats(8, 16).float(), m, [Replicate()])

    def backward():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    backward()
    with sw.learn() as here:
        optimizer.step()
        for _ in range(3):
            if with_closure:
                optimizer.step(backward)
            else:
                backward()
                optimizer.step()
        return here.rounds


def test_a_step_of_which_nothing_was_recorded_is_not_the_one_that_is_learned(two_ranks):
    assert two_ranks.run(begun_before_the_step, False) == [1, 1]
    assert two_ranks.run(begun_before_the_step, True) == [0, 0]


def turned_off():
    m = mesh((2,))
    model = nn.Linear(4, 4)
    sw.distribute_module(model, m, {"weight": [Shard(0)]})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    here = sw.learn()
    sw.learn(False)
    model(sw.distribute_tensor(torch.ones(2, 4), m, [Replicate()])).sum().backward()
    optimizer.step()
    return here.learned


def test_learning_can_be_turned_off(two_ranks):
    assert two_ranks.run(turned_off) == [None, None]


def unending():
    """What is recorded of a program that has no optimizer, and what it says."""
    m = mesh((2,))
    model = nn.Linear(4, 4)
    sw.distribute_module(model, m, {"weight": [Shard(0)]})
    x = sw.distribute_tensor(torch.ones(2, 4), m, [Replicate()])
    messages, real = [], learning._MOST_CALLS
    learning._log.addFilter(kept := lambda entry: messages.append(entry.getMessage()))
    learning._MOST_CALLS = 10
    try:
        with sw.learn(), torch.no_grad():
            for _ in range(9):
                y = model(x)
            return recording.recording.recorder, messages, y.full_tensor()
    finally:
        learning._MOST_CALLS = real
        learning._log.removeFilter(kept)


def test_a_program_without_an_optimizer_is_not_recorded_for_ever(two_ranks):
    for recorder, messages, y in two_ranks.run(unending):
        assert recorder is None
        assert messages == ["10 calls without an optimizer's step: the program is not learned"]
        assert y.shape == (2, 4)


def added(h, kept):
    kept.add_(h.detach())
    return kept


def viewed(h, kept):
    kept.view(-1).add_(1.0)
    return kept


@pytest.mark.parametrize("write", [added, viewed])
def test_a_step_that_writes_strided_shards_goes_on_as_before(write):
    with fake_mesh(2, 2) as m:
        model = sw.distribute_module(nn.Linear(8, 8), m)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = sw.distribute_tensor(torch.ones(8, 8), m, [Shard(0), Replicate()])
        kept = sw.distribute_tensor(torch.zeros(8, 8), m, [Replicate(), strided_shard(0, 2)])
        with sw.learn() as learned_here:
            h = model(x)
            (h * write(h, kept)).sum().backward()
            with pytest.warns(UserWarning, match=r"decide for the \d+ calls .* goes on as before") as told:
                optimizer.step()
            assert told[0].filename == __file__
            assert learned_here.learned is None


def test_the_optimizer_of_a_recorded_step_runs_on_local_tensors():
    with fake_mesh(2) as m:
        model = sw.distribute_module(nn.Linear(4, 8), m, {"weight": [Shard(0)]})
        optimizer = torch.optim.AdamW(model.parameters())
        with sw.learn() as learned_here:
            model(sw.distribute_tensor(torch.ones(2, 4), m)).sum().backward()
            assert learned_here.records
            optimizer.step()
            assert learned_here.learned is not None
    assert stepping._TWIN in optimizer.__dict__


def carried(model, m):
    """Steps with a state that each takes from the one before; how many collectives each sends."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sent, state = [], None
    for _ in range(STEPS):
        x = sw.distribute_tensor(torch.ones(4, 6), m, [Shard(0), Replicate()], src_data_rank=None)
        counted = [0]
        with observe(lambda _, to=counted: to.__setitem__(0, to[0] + 1)):
            h = torch.tanh(model[0](x))
            h = h if state is None else h + torch.tanh(state @ model[0].weight)[:, :1]
            state = h.detach()
            optimizer.zero_grad()
            model[1:](h).square().mean().backward()
        optimizer.step()
        sent.append(counted[0])
    return sent


def test_a_state_that_goes_from_step_to_step_is_known():
    with fake_mesh(2, 2) as m, sw.learn() as learned_here:
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        places = {"*.weight": {"tp": Shard(0)}, "*.bias": {"tp": Shard(0)}}
        sw.distribute_module(model, m, places, src_data_rank=None)
        sent = carried(model, m)
        assert learned_here.rounds <= 2
        assert sent[-1] < sent[0]


def test_parameters_that_were_loaded_in_a_later_step_are_known():
    with fake_mesh(2, 2) as m, sw.learn() as learned_here:
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        sw.distribute_module(model, m, {"*.weight": {"tp": Shard(0)}}, src_data_rank=None)
        sent = []
        for step in range(STEPS + 1):
            if step == 1:
                kept = io.BytesIO()
                torch.save(model.state_dict(), kept)
                kept.seek(0)
                model.load_state_dict(torch.load(kept, weights_only=False), assign=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            x = sw.distribute_tensor(torch.ones(4, 6), m, [Shard(0), Replicate()], src_data_rank=None)
            counted = [0]
            with observe(lambda _, to=counted: to.__setitem__(0, to[0] + 1)):
                model(x).square().mean().backward()
            sent.append(counted[0])
            optimizer.step()
        assert learned_here.rounds <= 2
        assert sent[-1] < sent[0]


def assigned(model):
    """As an optimizer that steps back writes it: what is assigned is the result of an op."""
    for parameter in model.parameters():
        parameter.data = parameter.detach() * 1.0
    return model


def loaded(model):
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    return model


OTHER_TENSORS = {
    "deep copy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "x.data = y": assigned,
    "load_state_dict with assign": loaded,
}


@pytest.mark.parametrize("way", OTHER_TENSORS)
def test_parameters_that_were_given_other_values_stay_known(way):
    with fake_mesh(2, 2) as m, sw.learn() as learned_here:
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        sw.distribute_module(model, m, {"*.weight": {"tp": Shard(0)}}, src_data_rank=None)
        unknown = []
        for step in range(STEPS):
            if step:
                model = OTHER_TENSORS[way](model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            x = sw.distribute_tensor(torch.ones(4, 6), m, [Shard(0), Replicate()], src_data_rank=None)
            before = decided.in_force.unknown
            model(x).square().mean().backward()
            unknown.append(decided.in_force.unknown - before)
            optimizer.step()
        assert learned_here.learned is not None
        assert unknown == [0] * STEPS  # what makes the values, between the steps, does not count


@pytest.mark.parametrize("way", ["deep copy", "pickle"])
def test_a_copy_that_is_made_in_the_recorded_step_is_another_tensor(way):
    with fake_mesh(2, 2) as m, sw.learn() as learned_here:
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        sw.distribute_module(model, m, {"*.weight": {"tp": Shard(0)}}, src_data_rank=None)
        x = sw.distribute_tensor(torch.ones(4, 6), m, [Shard(0), Replicate()], src_data_rank=None)
        model(x)
        other = OTHER_TENSORS[way](model)
        (model(x) - other(x)).square().mean().backward()
        leaves = learned_here._recording.leaves
        copies = list(other.parameters())
        assert all(any(leaf is parameter for leaf in leaves) for parameter in copies)
        torch.optim.SGD([*model.parameters(), *copies], lr=0.1).step()
        assert learned_here.rounds == 1


def test_a_tensor_of_an_earlier_run_is_not_one_of_the_step(monkeypatch):
    """A file that was written while a step was recorded is read while another one is, in another process."""
    with fake_mesh(2, 2) as m:
        written = []
        for step in range(2):
            monkeypatch.setattr(step_recording, "_tokens", itertools.count())  # as a process has it that has just begun
            with sw.learn() as learned_here:
                model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
                sw.distribute_module(model, m, {"*.weight": {"tp": Shard(0)}}, src_data_rank=None)
                x = sw.distribute_tensor(torch.ones(4, 6), m, [Shard(0), Replicate()], src_data_rank=None)
                if step:
                    model = pickle.loads(written[0])
                loss = model(x).square().mean()
                written.append(pickle.dumps(model))
                loss.backward()
                torch.optim.SGD(model.parameters(), lr=0.1).step()
                assert learned_here.rounds == 1
