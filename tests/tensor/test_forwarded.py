"""Parameters that a program holds from before ``distribute_module``: they are the module's own afterwards."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import MeshTensor, Replicate, Shard
from shardwise.errors import PlainTensorError
from shardwise.testing import mesh

TIGHT = {"rtol": 1e-9, "atol": 1e-11}


def on_two():
    return mesh((2,), ("tp",))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(6, dtype=torch.float64)
        self.last = nn.Linear(6, 2, dtype=torch.float64)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


PATTERNS = {"first.*": Shard(0), "norm.weight": Shard(0), "last.weight": Shard(1)}


def pair():
    """A model on one device and the same on the mesh, with what a program holds of each from before."""
    torch.manual_seed(0)
    one = Model()
    model = copy.deepcopy(one)
    held = [(list(m.parameters()), list(m.buffers())) for m in (one, model)]
    sw.distribute_module(model, on_two(), PATTERNS)
    return one, model, *held


def inputs():
    return torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def same(on_mesh, expected):
    torch.testing.assert_close(on_mesh.full_tensor(), expected, **TIGHT)


def whole_loop():
    """A loop that reads and writes the parameters from before only: clipping, decay, averages, the optimizer."""

    def train(model, parameters, buffers, x):
        averages = [p.detach().clone() for p in parameters]
        optimizer = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.05}], lr=0.1)
        norms = []
        for _ in range(3):
            optimizer.zero_grad()
            (model(x).square().sum() + 0.1 * sum(p.square().sum() for p in parameters)).backward()
            norms.append(nn.utils.clip_grad_norm_(parameters, 0.5))
            optimizer.step()
            with torch.no_grad():
                for average, parameter in zip(averages, parameters, strict=True):
                    average.lerp_(parameter, 0.1)
                parameters[0] -= 0.01 * parameters[0].sign()
                buffers[0].mul_(0.5)
                nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parameters) * 1.01, parameters)
        return [*norms, *averages, *model.parameters(), *model.buffers()]

    one, model, of_one, of_model = pair()
    expected = train(one, *of_one, inputs())
    for value, right in zip(train(model, *of_model, sw.distribute_tensor(inputs(), on_two())), expected, strict=True):
        same(value, right)


def test_a_loop_over_parameters_from_before_trains_the_model(two_ranks):
    two_ranks.run(whole_loop)


def as_the_new_one():
    _, model, _, (parameters, (mean, *_)) = pair()
    old, new = parameters[0], model.first.weight
    assert isinstance(old, MeshTensor)
    assert isinstance(old, nn.Parameter)
    assert not isinstance(mean, nn.Parameter)
    assert repr(old) == repr(new) == f"{old}"
    assert (old.shape, len(old), old.placements, old.spec) == (new.shape, 6, new.placements, new.spec)
    assert parameters.index(old) == 0
    assert old in {old: 1}
    for copied in (copy.copy(old), copy.deepcopy(old), pickle.loads(pickle.dumps(old))):
        assert type(copied) is MeshTensor
        same(copied, new.full_tensor())
    torch.save(old, io.BytesIO())

    old.note = "here"
    assert new.note == "here"
    del old.note
    assert not hasattr(new, "note")
    old.requires_grad = False
    assert not new.requires_grad
    old.requires_grad_()
    old.data = old.data * 2
    same(old[1:3], new.full_tensor()[1:3])
    same(1 + old, 1 + new.full_tensor())
    mean += 3
    same(mean, torch.full((6,), 3.0, dtype=torch.float64))
    assert model.norm.running_mean.full_tensor()[0] == 3

    calls = []
    handle = old.register_hook(lambda _: calls.append(1))
    total = new.square().sum()
    (of_old,) = torch.autograd.grad(total, old, retain_graph=True)
    same(of_old, 2 * new.full_tensor())
    total.backward(inputs=[old])
    assert old.grad is new.grad is not None
    old.grad = None
    assert new.grad is None
    assert len(calls) == 2
    handle.remove()

    layer = nn.Linear(4, 6)
    layer.weight = old  # tied later on: one parameter
    layer.register_buffer("mean", mean)
    assert layer.weight is new
    assert layer.mean is model.norm.running_mean


def test_a_parameter_from_before_is_as_the_new_one(two_ranks):
    two_ranks.run(as_the_new_one)


def unscaled_before_the_first_step():
    def first_step(model, x):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if model is not one:
            sw.distribute_module(model, on_two(), {"weight": Shard(0)})
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(model(x).square().sum()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
        scaler.step(optimizer)
        return list(model.parameters())

    torch.manual_seed(0)
    one = nn.Linear(4, 6)
    model = copy.deepcopy(one)
    x = inputs().float()
    expected = first_step(one, x)
    for value, right in zip(first_step(model, sw.distribute_tensor(x, on_two())), expected, strict=True):
        torch.testing.assert_close(value.full_tensor(), right)


def test_gradients_are_unscaled_and_clipped_before_the_first_step_of_an_optimizer_made_before(two_ranks):
    two_ranks.run(unscaled_before_the_first_step)


def compiled():
    one, model, (of_one, _), (of_model, _) = pair()
    for module, parameters, x in ((one, of_one, inputs()), (model, of_model, sw.distribute_tensor(inputs(), on_two()))):

        def loss(x, module=module, parameters=parameters):
            return module(x).square().sum() + sum(p.square().sum() for p in parameters)

        torch.compile(loss, backend="aot_eager", fullgraph=True)(x).backward()
    for parameter, expected in zip(model.parameters(), one.parameters(), strict=True):
        same(parameter.grad, expected.grad)


def test_compiled_code_takes_the_new_parameters(two_ranks):
    two_ranks.run(compiled)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


def past_what_is_passed_on():
    """What reaches the old object itself is an error, and no gradient is lost."""
    torch.manual_seed(0)
    model = Model()
    weight, view = model.first.weight, model.first.weight.view(-1)
    early = model(inputs()).sum()
    sw.distribute_module(model, on_two(), PATTERNS)
    x = sw.distribute_tensor(inputs(), on_two())
    refused = r"a parameter of shape \(\d, \d\).*distribute_module has replaced"
    for late in (early.backward, _Product.apply(x, weight).sum().backward):
        with pytest.raises(PlainTensorError, match=r"bring a gradient to a parameter of shape .*has replaced it after"):
            late()
    with pytest.raises(PlainTensorError, match=refused):
        x.flatten()[:24] * view
    with pytest.raises(PlainTensorError, match=refused):
        torch.func.grad(lambda w: (x @ w.t()).sum())(weight)


def test_what_cannot_be_passed_on_is_refused(two_ranks):
    two_ranks.run(past_what_is_passed_on)


def of_a_class_with_slots():
    """Python cannot change such a class: the old parameter stays, and is refused where a program trains it."""

    class Slotted(nn.Parameter):  # here, as a class that is sent to the ranks loses its slots
        __slots__ = ("more",)

    model = nn.Linear(4, 6, dtype=torch.float64)
    model.weight = Slotted(model.weight.detach())
    old = model.weight
    sw.distribute_module(model, on_two(), {"weight": Shard(0)})
    x = sw.distribute_tensor(inputs(), on_two())
    for use in (lambda: x @ old.t(), lambda: torch.cat([x, old]), lambda: x @ (old * 2).t()):
        with pytest.raises(
            PlainTensorError, match=r"of shape \(6, 4\) that distribute_module has replaced.*would not learn"
        ):
            use()
    with torch.no_grad():  # to compare with is no learning
        assert torch.equal(old, model.weight.full_tensor())


def test_a_parameter_of_a_class_with_slots_is_refused(two_ranks):
    two_ranks.run(of_a_class_with_slots)


def made_on_the_mesh():
    with sw.on(on_two()):
        layer = nn.Linear(4, 6, dtype=torch.float64)
    old = list(layer.parameters())
    sw.distribute_module(layer, on_two(), {"weight": Shard(0), "bias": Replicate()})
    assert all(a is b for a, b in zip(old, layer.parameters(), strict=True))
    assert old[0].placements == (Shard(0),)
    layer(sw.distribute_tensor(inputs(), on_two())).sum().backward()
    assert old[0].grad.placements == (Shard(0),)
    same(old[0].grad, inputs().sum(0).expand(6, 4))


def test_a_parameter_made_on_the_mesh_stays_the_object_that_it_is(two_ranks):
    two_ranks.run(made_on_the_mesh)
