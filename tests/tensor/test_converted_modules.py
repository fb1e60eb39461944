"""``module.to(...)``, ``half()``, ``double()``, ``load_state_dict`` and parametrizations while a graph refers to the
parameters.

Torch converts plain parameters with ``parameter.data = converted``; so a graph that is alive does not matter.
"""

import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import shardwise as sw
from shardwise import MeshTensor, Replicate, Shard
from shardwise.errors import LayoutError
from shardwise.testing import mesh as mesh_of

PLACES = {"0.weight": [Shard(0)], "0.bias": [Shard(0)], "2.weight": [Shard(1)]}
X = torch.linspace(-1, 2, 16).reshape(4, 4)


def twice(module):
    return {name: 2 * value.detach().clone() for name, value in module.state_dict().items()}


CONVERSIONS = {
    "double": lambda m: m.double(),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "to dtype": lambda m: m.to(torch.float64),
    "to device": lambda m: m.to("cpu"),
    "share_memory": lambda m: m.share_memory(),
    "of the program's own": lambda m: m._apply(lambda t: 3 * t.detach()),
    "load": lambda m: m.load_state_dict(twice(m)),
    "load assign": lambda m: m.load_state_dict(twice(m), assign=True),
}


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, MeshTensor) else tensor).detach().clone()


def model(placed):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    return sw.distribute_module(net, mesh_of((dist.get_world_size(),)), PLACES) if placed else net


def loss_of(net):
    x = X.to(next(net.parameters()).dtype)
    if isinstance(next(net.parameters()), MeshTensor):
        x = sw.distribute_tensor(x, mesh_of((dist.get_world_size(),)), [Shard(0)])
    return net(x).double().square().mean()


def told(net, before):
    """What a program sees of a module's parameters."""
    return [
        (p is was, p.dtype, getattr(p, "mark", None), whole(p), None if p.grad is None else whole(p.grad))
        for p, was in zip(net.parameters(), before, strict=True)
    ]


def converted(name, when, placed):
    """A program that converts a module: parameters then, after a late backward, and gradients of a later step."""
    net = model(placed)
    before = list(net.parameters())
    for i, parameter in enumerate(before):
        parameter.mark = i
    loss = loss_of(net)
    if when != "before backward":
        loss.backward(retain_graph=when == "between two backwards")
    CONVERSIONS[name](net)
    seen = told(net, before)
    if when != "after backward" and not name.startswith("load"):  # torch refuses one after a write
        loss.backward()
        seen += told(net, before)
    net.zero_grad()
    loss_of(net).backward()
    return seen + told(net, before)


def on_rank(when):
    return {name: converted(name, when, placed=True) for name in CONVERSIONS}


@pytest.mark.parametrize("when", ["before backward", "between two backwards", "after backward"])
def test_a_module_is_converted_as_a_plain_one(ranks, when):
    for actual in ranks.run(on_rank, when):
        for name, seen in actual.items():
            for expected, found in zip(converted(name, when, placed=False), seen, strict=True):
                same(name, expected, found)


def same(name, expected, found):
    assert (name, *expected[:-2]) == (name, *found[:-2])
    close = {"rtol": 2e-2, "atol": 1e-3} if expected[1].itemsize == 2 else {}
    for one, other in zip(expected[-2:], found[-2:], strict=True):
        torch.testing.assert_close(other, one, **close, msg=lambda words: f"{name}: {words}")


def layouts_change():
    """A function of the program's own lays parameters out anew, or returns what a plain parameter cannot become."""
    net = sw.distribute_module(nn.Linear(4, 4), mesh_of((dist.get_world_size(),)), {"weight": [Shard(0)]})
    weight, before = net.weight, net.weight.full_tensor().detach()
    loss = weight.sum()
    net._apply(lambda t: t.redistribute(placements=[Replicate()]))
    assert net.weight is weight
    assert weight.placements == (Replicate(),)
    loss.backward()
    torch.testing.assert_close(weight.full_tensor().detach(), before)
    with pytest.raises(LayoutError, match=r"set \.data of a plain tensor"):
        nn.Linear(4, 4)._apply(lambda t: sw.distribute_tensor(t, mesh_of((dist.get_world_size(),)), [Shard(0)]))
    return weight.grad.full_tensor()


def test_a_function_of_the_program_may_lay_parameters_out(ranks):
    for grad in ranks.run(layouts_change):
        torch.testing.assert_close(grad, torch.ones(4, 4))


class _Upper(nn.Module):
    """A parametrization without an inverse: its original is the parameter itself."""

    def forward(self, x):
        return x.triu() + x.triu(1).T


class _Doubled(nn.Module):
    def forward(self, x):
        return 2 * x

    def right_inverse(self, x):
        return x / 2


def _square(placed):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return sw.distribute_module(net, mesh_of((dist.get_world_size(),)), PLACES) if placed else net


def _assigned(net):
    parametrize.register_parametrization(net[0], "weight", _Doubled())
    net[0].weight = torch.arange(16.0).reshape(4, 4) / 16


def _left(net):
    parametrize.register_parametrization(net[0], "weight", _Upper())
    parametrize.remove_parametrizations(net[0], "weight", leave_parametrized=True)


def _norm_assigned(net):
    parametrizations.weight_norm(net[0])
    net[0].weight = torch.arange(16.0).reshape(4, 4) / 16


PARAMETRIZED = {
    "without an inverse": lambda net: parametrize.register_parametrization(net[0], "weight", _Upper()),
    "with an inverse": lambda net: parametrize.register_parametrization(net[0], "weight", _Doubled()),
    "assigned": _assigned,
    "left parametrized": _left,
    "removed": lambda net: (
        parametrize.register_parametrization(net[0], "weight", _Doubled()),
        parametrize.remove_parametrizations(net[0], "weight", leave_parametrized=False),
    ),
    "two originals": _norm_assigned,
}


def parametrized(name, placed):
    """A training loop that parametrizes a layer between two steps: whole parameters, gradients, and what hooks saw."""
    net, seen = _square(placed), []
    weight = net[0].weight
    watched = weakref.ref(weight)
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(whole(p.grad)))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        loss = loss_of(net)  # the last one is alive while the layer changes
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 0:
            PARAMETRIZED[name](net)
    places = [p.placements for p in net.parameters() if isinstance(p, MeshTensor)]
    return watched() is weight, places, seen + [whole(p) for p in net.parameters()] + [whole(loss)]


def each_parametrized():
    return {name: parametrized(name, placed=True) for name in PARAMETRIZED}


def test_a_layer_is_parametrized_between_two_steps(ranks):
    for actual in ranks.run(each_parametrized):
        for name, (kept, places, seen) in actual.items():
            expected_kept, _, expected = parametrized(name, placed=False)
            assert kept == expected_kept, name
            if name != "two originals":
                assert set(places) == {(Shard(0),), (Shard(1),), (Replicate(),)}, name
            torch.testing.assert_close(seen, expected, msg=lambda words, name=name: f"{name}: {words}")


def outdated_by_parametrizing():
    """Backward through a weight that was replaced after the forward pass: torch refuses it, as after any write."""
    words = []
    for placed in (False, True):
        net = _square(placed)
        x = sw.distribute_tensor(X, net[0].weight.device_mesh, [Shard(0)]) if placed else X
        loss = net(x)
        PARAMETRIZED["with an inverse"](net[2:])
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
            loss.sum().backward()
        words.append(type(raised.value).__name__)
    return words


def test_a_graph_that_needs_the_old_weight_is_refused(ranks):
    assert ranks.run(outdated_by_parametrizing) == [["RuntimeError", "RuntimeError"]] * ranks.world_size
