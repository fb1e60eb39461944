"""Optimizer steps on local tensors: the numbers of one device, and nothing that a user could tell from the long way."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import optim
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from shardwise import MeshTensor, Partial, Replicate, Shard
from shardwise.discovery.process import default_registry
from shardwise.errors import RuleError
from shardwise.kernel import dispatcher
from shardwise.kernel.precedence import Origin
from shardwise.kernel.registry import Registrar
from shardwise.tensor import optimizer_step as stepping

LAYOUTS = ([Shard(0)], [Replicate()], [Shard(1)])
SHAPES = ((8, 4), (4, 3), (6, 8), (2, 5))
OPTIMIZERS = {
    "AdamW foreach": lambda ps: optim.AdamW(ps, lr=0.1, foreach=True),
    "AdamW fused": lambda ps: optim.AdamW(ps, lr=0.1, fused=True),
    "AdamW loop": lambda ps: optim.AdamW(ps, lr=0.1, foreach=False),
    "AdamW amsgrad": lambda ps: optim.AdamW(ps, lr=0.1, amsgrad=True, foreach=True),
    "Adam capturable-free tensor lr": lambda ps: optim.Adam(ps, lr=torch.tensor(0.1), foreach=False),
    "SGD": lambda ps: optim.SGD(ps, lr=0.1),
    "SGD nesterov": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "ASGD": lambda ps: optim.ASGD(ps, lr=0.1),
    "Adadelta": lambda ps: optim.Adadelta(ps, lr=0.1),
    "Adagrad": lambda ps: optim.Adagrad(ps, lr=0.1),
    "Adamax": lambda ps: optim.Adamax(ps, lr=0.1),
    "NAdam": lambda ps: optim.NAdam(ps, lr=0.1),
    "RAdam": lambda ps: optim.RAdam(ps, lr=0.1),
    "RMSprop": lambda ps: optim.RMSprop(ps, lr=0.1, centered=True, momentum=0.5),
    "Rprop": lambda ps: optim.Rprop(ps, lr=0.1),
    "two groups": lambda ps: optim.AdamW([{"params": ps[:1]}, {"params": ps[1:], "lr": 0.2}], lr=0.1),
}


@pytest.fixture(scope="module", autouse=True)
def world():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.fixture
def mesh():
    return init_device_mesh("cpu", (4,))


def wholes(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def placed(mesh):
    layouts = [LAYOUTS[i % len(LAYOUTS)] for i in range(len(SHAPES))]
    return [
        sw.distribute_tensor(t, mesh, layout, src_data_rank=None).requires_grad_()
        for t, layout in zip(wholes(), layouts, strict=True)
    ]


def set_gradients(parameters, step):
    for p, grad in zip(parameters, wholes(seed=step + 1), strict=True):
        p.grad = sw.distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None) if is_ours(p) else grad


def is_ours(tensor):
    return isinstance(tensor, MeshTensor)


def part(tensor, like):
    """This rank's part of a whole tensor."""
    return sw.distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None).to_local()


def steps_taken(optimizer, run):
    """How many of the steps went the short way."""
    taken = []
    before = stepping._Twin.hand_back
    stepping._Twin.hand_back = lambda twin, o: taken.append(o) or before(twin, o)
    try:
        run()
    finally:
        stepping._Twin.hand_back = before
    return sum(o is optimizer for o in taken)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_numbers_are_those_of_one_device(mesh, name):
    ours, reference = placed(mesh), [t.requires_grad_() for t in wholes()]
    mine, one = OPTIMIZERS[name](ours), OPTIMIZERS[name](reference)

    def run():
        for step in range(4):
            for parameters, optimizer in ((ours, mine), (reference, one)):
                set_gradients(parameters, step)
                optimizer.step()
                optimizer.zero_grad()

    assert steps_taken(mine, run) == 4
    for p, whole in zip(ours, reference, strict=True):
        assert torch.equal(p.to_local(), part(whole.detach(), p)), p
        assert mine.state[p].keys() == one.state[whole].keys()
        for key, value in mine.state[p].items():
            wanted = one.state[whole][key]
            if isinstance(wanted, torch.Tensor) and wanted.shape == whole.shape:
                assert is_ours(value)
                assert value.placements == p.placements
                assert torch.equal(value.to_local(), part(wanted, p)), key
            else:
                assert value == wanted, key


def both_ways(mesh, prepare):
    """Parameters after three steps by the short way and by the long one."""
    found = []
    for observe in (False, True):
        parameters = placed(mesh)
        optimizer = optim.AdamW(parameters[:], lr=0.1, foreach=True)
        for step in range(3):
            set_gradients(parameters[: len(SHAPES)], step)
            prepare(parameters, optimizer, step)
            if observe:
                with dispatcher.observe(lambda _: None):
                    optimizer.step()
            else:
                optimizer.step()
        found.append([p.to_local() for p in parameters])
    return found


def same(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def test_both_ways_give_the_same_bits(mesh):
    assert same(*both_ways(mesh, lambda *_: None))


def test_a_missing_gradient_leaves_its_parameter_alone(mesh):
    def prepare(parameters, _, step):
        parameters[step].grad = None

    assert same(*both_ways(mesh, prepare))


def test_settings_changed_between_steps_hold(mesh):
    def prepare(_, optimizer, step):
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        optimizer.param_groups[0]["weight_decay"] = 0.1 * step

    assert same(*both_ways(mesh, prepare))


def test_states_that_are_replaced_or_emptied_hold(mesh):
    def prepare(parameters, optimizer, step):
        if step == 1:
            optimizer.state[parameters[0]] = {}
            optimizer.state[parameters[1]]["exp_avg"] = torch.ones_like(parameters[1])
        if step == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    assert same(*both_ways(mesh, prepare))


def test_a_group_added_later_is_stepped(mesh):
    def prepare(parameters, optimizer, step):
        if step == 1:
            more = sw.ones(4, 4, device_mesh=mesh, placements=[Shard(0)], dtype=torch.float64).requires_grad_()
            optimizer.add_param_group({"params": [more]})
            parameters.append(more)
        if step >= 1:
            parameters[-1].grad = torch.full_like(parameters[-1].detach(), 0.5)

    found = both_ways(mesh, prepare)
    assert len(found[0]) == len(SHAPES) + 1
    assert same(*found)


def one_step(optimizer, parameters, step=None):
    set_gradients(parameters, 0)
    return steps_taken(optimizer, step or optimizer.step)


@pytest.mark.parametrize(
    ("name", "make"),
    {
        "a closure": lambda _, o: lambda: o.step(lambda: torch.tensor(0.0)),
        "a gradient that lies elsewhere": lambda ps, o: (
            lambda: (
                setattr(ps[0], "grad", ps[0].grad.redistribute(placements=[Replicate()])),
                o.step(),
            )
        ),
        "someone who observes": lambda _, o: lambda: observed_step(o),
    }.items(),
)
def test_what_does_not_fit_goes_the_long_way_with_the_same_numbers(mesh, name, make):
    parameters, others = placed(mesh), placed(mesh)
    mine, other = (optim.SGD(ps, lr=0.1) for ps in (parameters, others))
    assert one_step(mine, parameters, make(parameters, mine)) == 0, name
    assert one_step(other, others) == 1
    assert same([p.to_local() for p in parameters], [p.to_local() for p in others])


def test_gradients_that_are_still_under_way_are_taken(mesh):
    parameters = placed(mesh)
    optimizer = optim.SGD(parameters, lr=0.1)
    set_gradients(parameters, 0)
    first = parameters[0]
    whole = first.grad.redistribute(placements=[Replicate()])
    first.grad = whole.redistribute(placements=[Shard(1)]).redistribute(placements=first.placements, async_op=True)
    assert type(first.grad) is not MeshTensor
    assert steps_taken(optimizer, optimizer.step) == 1


def observed_step(optimizer):
    plans = []
    with dispatcher.observe(plans.append):
        optimizer.step()
    assert plans


def test_a_state_of_what_is_no_parameter_is_left_alone(mesh):
    """load_state_dict keeps such entries."""
    parameters = placed(mesh)
    optimizer = optim.AdamW(parameters, lr=0.1)
    optimizer.state[99] = {"exp_avg": torch.ones(2)}
    optimizer.state["note"] = 3
    assert one_step(optimizer, parameters) == 1
    assert one_step(optimizer, parameters) == 1
    assert optimizer.state["note"] == 3
    assert torch.equal(optimizer.state[99]["exp_avg"], torch.ones(2))
    assert optimizer.state[parameters[0]]["step"] == 2


def test_settings_that_hold_mesh_tensors_go_the_long_way(mesh):
    half = sw.full((), 0.5, device_mesh=mesh, dtype=torch.float64)
    parameters = placed(mesh)
    optimizer = optim.AdamW(parameters, lr=0.1)
    for setting in (half, (half, 0.9)):
        optimizer.param_groups[0]["of mine"] = setting
        assert one_step(optimizer, parameters) == 0


def test_a_subclass_or_an_unnamed_optimizer_goes_the_long_way(mesh):
    class Mine(optim.SGD):
        pass

    parameters = placed(mesh)
    assert one_step(Mine(parameters, lr=0.1), parameters) == 0


def test_partial_parameters_and_plain_ones(mesh):
    partials = sw.zeros(4, device_mesh=mesh, placements=[Replicate()]).redistribute(placements=[Partial()])
    partials.requires_grad_()
    partials.grad = sw.zeros(4, device_mesh=mesh, placements=[Replicate()])
    optimizer = optim.SGD([partials], lr=0.1)
    assert not stepping._Twin(optimizer).take_gradients()
    parameters = placed(mesh)
    plain = torch.ones(3, requires_grad=True)
    mixed = optim.SGD([*parameters, plain], lr=0.5)
    set_gradients(parameters, 0)
    plain.grad = torch.ones(3)
    assert steps_taken(mixed, mixed.step) == 1
    assert torch.equal(plain.detach(), torch.full((3,), 0.5))
    assert plain.grad is not None


def test_a_step_counts_as_a_write(mesh):
    parameters = placed(mesh)
    optimizer = optim.SGD(parameters, lr=0.1)
    w = parameters[0]
    loss = (w * w).sum()
    set_gradients(parameters, 0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_failing_step_leaves_the_optimizer_as_it_was(mesh):
    parameters = placed(mesh)
    optimizer = optim.AdamW(parameters, lr=0.1)
    one_step(optimizer, parameters)
    states, groups = optimizer.state, optimizer.param_groups
    optimizer.param_groups[0]["betas"] = None
    set_gradients(parameters, 1)
    with pytest.raises(TypeError):
        optimizer.step()
    assert optimizer.state is states
    assert optimizer.param_groups is groups
    assert all(is_ours(p) for p in optimizer.param_groups[0]["params"])
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 2


def test_schedulers_scalers_and_hooks_see_the_optimizer_itself(mesh):
    parameters = placed(mesh)
    optimizer = optim.AdamW(parameters, lr=0.1)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    seen = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(o))
    optimizer.register_step_post_hook(lambda o, *_: seen.append(o))
    one_step(optimizer, parameters)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert seen == [optimizer, optimizer]


def test_nothing_is_kept_alive(mesh):
    parameters = placed(mesh)
    optimizer = optim.AdamW(parameters, lr=0.1)
    one_step(optimizer, parameters)
    local = weakref.ref(parameters[0].grad._local_tensor)
    optimizer.zero_grad()
    assert local() is None
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


def test_copies_and_saved_states_hold_no_twin(mesh):
    parameters = placed(mesh)
    optimizer = optim.AdamW(parameters, lr=0.1)
    one_step(optimizer, parameters)
    assert stepping._TWIN in optimizer.__dict__
    assert stepping._TWIN not in copy.deepcopy(optimizer).__dict__


def test_the_plugin_names_the_optimizers():
    assert optim.AdamW in default_registry().optimizers
    assert optim.LBFGS not in default_registry().optimizers
    with pytest.raises(RuleError, match="is not a class"):
        Registrar(Origin("test")).add_optimizers(torch.nn.Linear)
