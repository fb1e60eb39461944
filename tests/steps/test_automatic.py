"""Programs that say nothing are learned from their first ``distribute_module`` on, where that is safe and worth it."""

import os
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_training import TIGHT, floats
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.comm import policy
from shardwise.comm.events import observe
from shardwise.engine import decided
from shardwise.errors import LearnedLayoutWarning
from shardwise.kernel import recording  # the module: what it holds is copied to the ranks with a test
from shardwise.steps import automatic, learning
from shardwise.testing import mesh

STEPS = 5
WEIGHTS_ONLY = {"*up.weight": [Shard(0)], "*up.bias": [Shard(0)], "*down.weight": [Shard(1)]}


class Blocks(nn.Module):
    """Feed-forward blocks with a residual sum: op by op each one gathers what the next one needs."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)}) for _ in "abc")

    def forward(self, x):
        for block in self.blocks:
            x = x + block["down"](functional.gelu(block["up"](x)))
        return x


@contextmanager
def by_itself(said="auto"):
    """A program of its own in this process, which has the default (or what the setting says)."""
    before, process = os.environ.get("SHARDWISE_LEARN"), learning._process
    learning._process = learning._Process()
    os.environ["SHARDWISE_LEARN"] = said
    had_compiled, recording.recording.has_compiled = recording.recording.has_compiled, False
    on, policy.in_force.is_on = policy.in_force.is_on, False
    try:
        yield
    finally:
        if learning.running() is not None:
            learning.running().close()
        os.environ["SHARDWISE_LEARN"] = before or "off"
        learning._process, recording.recording.has_compiled, policy.in_force.is_on = process, had_compiled, on


def as_it_is(_step, _model, x):
    return x


def trained(make, m, partition, at_step=as_it_is, steps=STEPS):
    """Train beside one device: the collectives of each step, and the learning that is on."""
    torch.manual_seed(0)
    reference, spread = make().double(), make().double()
    spread.load_state_dict(reference.state_dict())
    sw.distribute_module(spread, m, partition)
    sent, counts = Counter(), []
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.02) for model in (reference, spread)]
    with observe(lambda event: sent.update([event.kind])):
        for step in range(steps):
            sent.clear()
            x = floats(8, 32)
            losses = []
            for model, optimizer, own in zip(
                (reference, spread), optimizers, (x, sw.distribute_tensor(x, m, [Replicate()] * m.ndim)), strict=True
            ):
                optimizer.zero_grad()
                loss = model(at_step(step, model, own)).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            counts.append(sum(sent.values()))
            torch.testing.assert_close(losses[1].full_tensor(), losses[0], **TIGHT)
    ours = [p.detach().full_tensor() for p in spread.parameters()]
    torch.testing.assert_close(ours, [p.detach() for p in reference.parameters()], **TIGHT)
    return counts, learning.running()


def by_default(said="auto"):
    with by_itself(said):
        counts, on = trained(Blocks, mesh((dist.get_world_size(),)), WEIGHTS_ONLY)
        return counts, type(on).__name__, None if on is None else on.rounds


def test_a_program_that_says_nothing_is_learned(ranks):
    for counts, kind, rounds in ranks.run(by_default):
        assert (kind, rounds) == ("Automatic", 1)
        assert counts[1] < 0.8 * counts[0]
        assert counts[1:] == [counts[1]] * (STEPS - 1)


def test_the_setting_turns_it_off_or_asks_for_it(two_ranks):
    for counts, kind, _ in two_ranks.run(by_default, "off"):
        assert kind == "NoneType"
        assert counts == [counts[0]] * STEPS
    for counts, kind, rounds in two_ranks.run(by_default, "on"):
        assert (kind, rounds) == ("Learning", 1)
        assert counts[1] < 0.8 * counts[0]


def after_an_answer():
    """A program that has said itself that it wants none, and one that learns within a context."""
    with by_itself():
        sw.learn(False)
        off, _ = trained(Blocks, mesh((2,)), WEIGHTS_ONLY)
    with by_itself(), sw.learn() as own:
        on, running = trained(Blocks, mesh((2,)), WEIGHTS_ONLY)
        assert running is own
    return off, on


def test_what_the_program_says_holds(two_ranks):
    for off, on in two_ranks.run(after_an_answer):
        assert off == [off[0]] * STEPS
        assert on[1] < off[1]


def reading_alone(until):
    """Rank 0 alone looks at its part of a result in the first steps."""

    def look(step, model, x):
        if dist.get_rank() == 0 and step < until and isinstance(x, sw.MeshTensor):
            model.blocks[0]["up"](x).to_local()
        return x

    with by_itself():
        counts, on = trained(Blocks, mesh((2,)), WEIGHTS_ONLY, look, steps=8)
        return counts, on.rounds


@pytest.mark.parametrize(("until", "learned_from"), [(1, 2), (2, 3), (3, 5)])
def test_a_step_that_one_rank_runs_in_another_way_is_not_learned(two_ranks, until, learned_from):
    # After three such steps in a row they are recorded at those steps only at which the ranks meet: 4, 8, ...
    for counts, rounds in two_ranks.run(reading_alone, until):
        assert rounds == 1
        assert counts[:learned_from] == [counts[0]] * learned_from
        assert counts[-1] < 0.8 * counts[0]


def with_calls_of_one_rank_alone():
    """Rank 1 alone has made so many calls before the first step that it records no more of them."""
    real, automatic._UNTRAINED = automatic._UNTRAINED, (200, 20_000, 16)

    def look(step, model, x):
        if dist.get_rank() == 1 and step == 0 and isinstance(x, sw.MeshTensor):
            with torch.no_grad():
                for _ in range(300):
                    x + 1
        return x

    try:
        with by_itself():
            counts, on = trained(Blocks, mesh((2,)), WEIGHTS_ONLY, look)
            return counts, on.rounds
    finally:
        automatic._UNTRAINED = real


def test_a_rank_that_records_no_more_holds_up_nobody(two_ranks):
    for counts, rounds in two_ranks.run(with_calls_of_one_rank_alone):
        assert rounds == 1
        assert counts[0] == counts[1] > counts[2]


def stepping_on_rank_0(late):
    """Rank 0 alone makes optimizer steps, of a program that sends what it sends on all ranks. The others may follow."""
    with by_itself():
        m = mesh((2,))
        torch.manual_seed(0)
        model = sw.distribute_module(Blocks(), m, WEIGHTS_ONLY)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        x = sw.distribute_tensor(floats(8, 32).float(), m, [Replicate()])
        for _ in range(2):
            model(x).square().mean().backward()
            if dist.get_rank() == 0:
                optimizer.step()
            dist.barrier()
        if late:
            model(x).square().mean().backward()
            optimizer.step()
        total = torch.ones(1)
        dist.all_reduce(total)  # the process group still works
        return learning.running().rounds, total.item()


@pytest.mark.parametrize("late", [pytest.param(False, marks=[pytest.mark.slow, pytest.mark.sample]), True])
def test_a_rank_that_makes_no_step_is_not_waited_for(two_ranks, late):
    assert two_ranks.run(stepping_on_rank_0, late) == [(0, 2.0)] * 2


def coming_late():
    """Rank 1 makes its first step a second after rank 0."""

    def look(step, _model, x):
        if step == 0 and isinstance(x, sw.MeshTensor) and dist.get_rank() == 1:
            time.sleep(1.0)
        return x

    with by_itself():
        return trained(Blocks, mesh((2,)), WEIGHTS_ONLY, look)[1].rounds


@pytest.mark.slow
@pytest.mark.sample
def test_a_rank_that_is_late_is_waited_for(two_ranks):
    assert two_ranks.run(coming_late) == [1, 1]


def without_training(limits, with_grad, passes):
    """A program without an optimizer: the recorder before and after many calls."""
    real, automatic._UNTRAINED = automatic._UNTRAINED, limits
    try:
        with by_itself():
            m = mesh((2,))
            model = sw.distribute_module(Blocks(), m, WEIGHTS_ONLY)
            x = sw.distribute_tensor(torch.ones(2, 32), m, [Replicate()])
            begun = recording.recording.recorder is not None
            with torch.set_grad_enabled(with_grad), warnings.catch_warnings():
                warnings.simplefilter("error")
                for _ in range(20):
                    y = model(x)
                    if passes:
                        y.sum().backward()
            return begun, recording.recording.recorder is None
    finally:
        automatic._UNTRAINED = real


@pytest.mark.parametrize(
    ("limits", "with_grad", "passes", "ends"),
    [
        ((100, 10_000, 100), False, False, True),
        ((100, 10_000, 100), True, False, False),
        ((10_000, 100, 100), True, False, True),
        ((100, 100, 100), True, True, False),
        ((100, 100, 19), True, True, True),
        ((100, 100, 20), True, True, False),
    ],
)
def test_a_program_that_does_not_train_is_recorded_no_more(two_ranks, limits, with_grad, passes, ends):
    assert two_ranks.run(without_training, limits, with_grad, passes) == [(True, ends)] * 2


def accumulating():
    """More backward passes in a step than a program has that is taken for one that trains: the rounds."""
    real, automatic._UNTRAINED = automatic._UNTRAINED, (2_000, 20_000, 3)
    try:
        with by_itself():
            m = mesh((2,))
            torch.manual_seed(0)
            model = sw.distribute_module(Blocks(), m, WEIGHTS_ONLY)
            optimizer = torch.optim.AdamW(model.parameters())
            x = sw.distribute_tensor(floats(8, 32).float(), m, [Replicate()])
            for _ in range(3):
                optimizer.zero_grad()
                for _ in range(5):
                    model(x).square().mean().backward()
                optimizer.step()
            return learning.running().rounds
    finally:
        automatic._UNTRAINED = real


def test_a_program_with_many_backward_passes_is_learned_from_its_second_step(two_ranks):
    assert two_ranks.run(accumulating) == [1, 1]


class Growing(Blocks):
    """Blocks of another width, which only later steps go through."""

    def __init__(self):
        super().__init__()
        self.late = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(32, 96), "down": nn.Linear(96, 32)}) for _ in "abc")
        self.is_late = False

    def forward(self, x):
        x = super().forward(x)
        for block in self.late if self.is_late else ():
            x = x + block["down"](torch.tanh(block["up"](x)))
        return x


def growing():
    """The collectives of steps of which those from the fourth on go through more blocks."""

    def grow(step, model, x):
        model.is_late = step >= 3
        return x

    with by_itself():
        counts, on = trained(Growing, mesh((2,)), WEIGHTS_ONLY, grow, steps=8)
        return counts, on.rounds


def test_calls_that_come_later_are_learned_where_the_ranks_meet(two_ranks):
    for counts, rounds in two_ranks.run(growing):
        # The ranks meet after the fourth step, and the fifth is recorded.
        assert rounds == 2
        assert counts[5:] == [counts[5]] * 3
        assert counts[5] < 0.8 * counts[3]


def with_a_policy():
    with by_itself(), sw.communication("warn", above=1 << 40):
        counts, on = trained(Blocks, mesh((2,)), WEIGHTS_ONLY)
        return counts, on.rounds


def with_little_to_gain():
    with by_itself():
        counts, on = trained(Blocks, mesh((2,)), {})  # whole weights: nothing is sent
        return counts, on.rounds


@pytest.mark.parametrize("program", [with_a_policy, with_little_to_gain])
def test_it_is_not_learned_where_that_is_not_wanted(two_ranks, program):
    for counts, rounds in two_ranks.run(program):
        assert rounds == 0
        assert counts == [counts[0]] * STEPS


def reading_later(first, ask=None):
    """Read a part of a result from a step on: its placements then, and what was warned of."""
    seen = []

    def read(_module, inputs):
        read = inputs[0].to_local if ask is None else getattr(inputs[0], ask)
        read()
        seen.append(inputs[0].placements)

    def look(step, model, x):
        if step == first and isinstance(x, sw.MeshTensor):
            model.blocks[1]["up"].register_forward_pre_hook(read)
        return x

    with by_itself(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(Blocks, mesh((2,)), WEIGHTS_ONLY, look)
        return seen, [(w.category, str(w.message), Path(w.filename).name) for w in caught]


def test_a_part_that_is_read_later_only_is_warned_of_once(two_ranks):
    for seen, warned in two_ranks.run(reading_later, 0):
        assert len(set(seen)) == 1  # a layout that the program knows is kept
        assert not warned
    for _, warned in two_ranks.run(reading_later, 3, "full_tensor"):
        assert not warned  # it asks for a layout
    for _, warned in two_ranks.run(reading_later, 3):
        ((category, message, file),) = warned or [(None, "", "")]
        assert category is LearnedLayoutWarning
        assert "lay as" in message
        assert file == "test_automatic.py"


def two_optimizers():
    """Two models, placed before the first step. The first one, whose optimizer steps first, has nothing to gain."""
    with by_itself():
        m = mesh((2,))
        torch.manual_seed(0)
        models = [sw.distribute_module(Blocks(), m, places) for places in ({}, WEIGHTS_ONLY)]
        optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
        x = sw.distribute_tensor(floats(8, 32).float(), m, [Replicate()])
        counts, sent = [], Counter()
        with observe(lambda event: sent.update([event.kind])):
            for _ in range(4):
                sent.clear()
                for model, optimizer in zip(models, optimizers, strict=True):
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()
                counts.append(sum(sent.values()))
        return counts, learning.running().rounds


def test_each_of_several_optimizers_has_its_turn(two_ranks):
    for counts, rounds in two_ranks.run(two_optimizers):
        assert rounds == 1
        assert counts[-1] < 0.8 * counts[0]


class Adapted(nn.Module):
    """A linear layer that is frozen, beside a product of two small matrices that is trained."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)
        self.to(torch.float64)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapting(ask):
    """A model that is placed, and then has plain adapters: its optimizer has no parameter on the mesh."""
    with by_itself("off" if ask else "auto"):
        torch.manual_seed(0)
        models = [Blocks().double() for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        sw.distribute_module(models[1], mesh((2,)), WEIGHTS_ONLY)
        if ask:
            sw.learn()
        for model in models:
            torch.manual_seed(1)
            for block in model.blocks:
                block["up"], block["down"] = Adapted(block["up"]), Adapted(block["down"])
        trained = [[p for p in model.parameters() if p.requires_grad] for model in models]
        optimizers = [torch.optim.AdamW(parameters, lr=0.02) for parameters in trained]
        counts, sent = [], Counter()
        with observe(lambda event: sent.update([event.kind])):
            for _ in range(STEPS):
                sent.clear()
                x = floats(8, 32)
                for model, optimizer, own in zip(
                    models, optimizers, (x, sw.distribute_tensor(x, mesh((2,)), [Replicate()])), strict=True
                ):
                    optimizer.zero_grad()
                    model(own).square().mean().backward()
                    optimizer.step()
                counts.append(sum(sent.values()))
        torch.testing.assert_close(trained[1], trained[0], **TIGHT)
        return counts, learning.running().rounds


@pytest.mark.parametrize("ask", [False, True], ids=["by itself", "asked"])
def test_an_optimizer_of_plain_parameters_beside_placed_ones_has_its_turn(two_ranks, ask):
    for counts, rounds in two_ranks.run(adapting, ask):
        assert rounds == 1
        assert counts[-1] < 0.8 * counts[0]


def compiling_the_step():
    """The collectives of a program of which only the optimizer's steps are compiled, and how often they are."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    with by_itself(), warnings.catch_warnings():
        warnings.simplefilter("error")
        m = mesh((2,))
        model = sw.distribute_module(Blocks(), m, WEIGHTS_ONLY)
        optimizer = torch.optim.AdamW(model.parameters())
        step, counts, sent = torch.compile(optimizer.step, backend=counter), [], Counter()
        with observe(lambda event: sent.update([event.kind])):
            for _ in range(5):
                sent.clear()
                optimizer.zero_grad()
                model(sw.distribute_tensor(floats(8, 32).float(), m, [Replicate()])).square().mean().backward()
                step()
                counts.append(sum(sent.values()))
        return counter.frame_count, counts, learning.running().rounds


def test_a_program_of_which_only_the_step_is_compiled_is_learned(two_ranks):
    for compiled, counts, rounds in two_ranks.run(compiling_the_step):
        assert (compiled, rounds) == (1, 1)  # as often as on one device
        assert counts[-1] < 0.8 * counts[0]


def saves_products(_context, op, *_args, **_kwargs):
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointing(place):
    """The losses of a program that recomputes a model by a policy, between others."""
    torch.manual_seed(0)
    first, model, last = (place(module.double()) for module in (nn.Linear(32, 32), Blocks(), nn.Linear(32, 8)))
    optimizer = torch.optim.SGD([p for part in (first, model, last) for p in part.parameters()], 0.1)
    losses = []
    for _ in range(STEPS):
        x = floats(8, 32)
        hidden = first(x if place is as_one_device else sw.distribute_tensor(x, mesh((2, 2)), [Shard(0), Replicate()]))
        hidden = checkpoint(
            model,
            hidden,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(saves_products),
        )
        optimizer.zero_grad()
        loss = last(hidden).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def as_one_device(module):
    return module


def on_four(module):
    weights = [name for name, parameter in module.named_parameters() if parameter.ndim > 1]
    plan = {name: [Replicate(), Shard(turn % 2)] for turn, name in enumerate(weights)}
    return sw.distribute_module(module, mesh((2, 2)), plan)


def checkpointed():
    with by_itself():
        found = checkpointing(on_four)
        assert learning.running().rounds == 1
    assert found == pytest.approx(checkpointing(as_one_device), rel=1e-9)


def test_a_program_with_selective_checkpoints_is_learned(pool):
    """The recomputation moves other tensors than the forward pass did; the policy's mode sees neither."""
    pool.run(checkpointed)


def compiling():
    """How often a model is compiled, and what torch says about it."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    with by_itself(), warnings.catch_warnings():
        warnings.simplefilter("error")
        m = mesh((2,))
        model = sw.distribute_module(Blocks(), m, WEIGHTS_ONLY)
        compiled = torch.compile(model, backend=counter)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            compiled(sw.distribute_tensor(floats(8, 32).float(), m, [Replicate()])).square().mean().backward()
            optimizer.step()
        return counter.frame_count, learning.running().rounds


def test_compiled_code_is_compiled_once(two_ranks):
    assert two_ranks.run(compiling) == [(1, 0)] * 2


def one_model_after_the_other():
    with by_itself():
        first, _ = trained(Blocks, mesh((2,)), WEIGHTS_ONLY)
        decisions = decided.in_force.decisions
        second, on = trained(Blocks, mesh((2,)), {"*up.weight": [Shard(1)]})
        return first, second, on.rounds, decided.in_force.decisions is decisions


def test_another_model_begins_anew(two_ranks):
    for first, second, rounds, is_the_same in two_ranks.run(one_model_after_the_other):
        assert first[1] < first[0]
        assert second[1] <= second[0]
        assert rounds <= 1
        assert not is_the_same


def on_a_part_of_the_ranks(said):
    with by_itself(said):
        m = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
        sw.distribute_module(nn.Linear(4, 4), m, {"weight": [Shard(0)]})
        return type(learning.running()).__name__, recording.recording.recorder is None


@pytest.mark.slow
@pytest.mark.sample
def test_a_program_on_a_part_of_the_ranks_is_learned_only_where_it_asks(pool):
    assert pool.run(on_a_part_of_the_ranks, "auto") == [("NoneType", True)] * 4
    assert pool.run(on_a_part_of_the_ranks, "on") == [("Learning", False)] * 4


def with_a_closure():
    """LBFGS runs the step within its own: nothing of it is recorded."""
    with by_itself():
        m = mesh((2,))
        torch.manual_seed(0)
        model = sw.distribute_module(Blocks(), m, WEIGHTS_ONLY)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        x = sw.distribute_tensor(floats(8, 32).float(), m, [Replicate()])

        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).full_tensor().item() for _ in range(4)]
        return losses[-1] < losses[0], learning.running().rounds


def test_an_optimizer_with_a_closure_is_left_alone(two_ranks):
    assert two_ranks.run(with_a_closure) == [(True, 0)] * 2


def in_a_hook_of_each_parameter():
    """Each parameter's optimizer steps as soon as the gradient is there: no step of an optimizer ends a whole step."""
    with by_itself():
        m = mesh((2,))
        torch.manual_seed(0)
        model = sw.distribute_module(Blocks(), m, WEIGHTS_ONLY)
        optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}

        def step(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        x = sw.distribute_tensor(floats(8, 32).float(), m, [Replicate()])
        counts, sent = [], Counter()
        with observe(lambda event: sent.update([event.kind])):
            for _ in range(4):
                sent.clear()
                model(x).square().mean().backward()
                counts.append(sum(sent.values()))
        return counts, learning.running().rounds


def test_an_optimizer_that_steps_in_the_backward_pass_is_left_alone(two_ranks):
    for counts, rounds in two_ranks.run(in_a_hook_of_each_parameter):
        assert rounds == 0
        assert counts == [counts[0]] * 4


def failing_on_one_rank():
    """What one rank cannot do, none does: its record of the step makes no graph."""

    def graph(self):
        raise ZeroDivisionError

    real = automatic.Recording.graph
    if dist.get_rank() == 1:
        automatic.Recording.graph = graph
    try:
        with by_itself():
            counts, on = trained(Blocks, mesh((2,)), WEIGHTS_ONLY)
            return counts, on.rounds
    finally:
        automatic.Recording.graph = real


def test_an_error_of_ours_on_one_rank_ends_no_program(two_ranks):
    for counts, rounds in two_ranks.run(failing_on_one_rank):
        assert rounds == 0
        assert counts == [counts[0]] * STEPS


def planned_as_well(plan):
    with by_itself():
        m = mesh((2,))
        sw.distribute_module(Blocks(), m, plan)
        return type(learning.running()).__name__, decided.in_force.is_written


def step_of(m):
    model = sw.distribute_module(Blocks(), m, WEIGHTS_ONLY)
    return model, sw.distribute_tensor(torch.ones(8, 32), m, [Replicate()])


def test_a_plan_is_not_learned_over(two_ranks, tmp_path):
    file = tmp_path / "blocks.plan"
    sw.plan(step_of, (2,)).save(str(file))
    for kind, is_written in two_ranks.run(partial(planned_as_well, str(file))):
        assert kind == "NoneType"
        assert is_written
    two_ranks.run(partial(decided.use_decisions, None))
