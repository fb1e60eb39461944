"""Parameters sharded over the data dim, gathered ahead: the numbers of one device, and the order of what happens."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import MeshTensor, Replicate, Shard
from shardwise.comm.events import observe
from shardwise.errors import InPlaceError, PlacementError
from shardwise.testing import mesh

TIGHT = {"rtol": 1e-9, "atol": 1e-11}
STEPS = 3
PHASES = ("issued", "waited")


class Block(nn.Module):
    def __init__(self, width, heads, recompute=False):
        super().__init__()
        self.heads, self.recompute = heads, recompute
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def attend(self, x):
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))

    def feed(self, x):
        return self.down(functional.gelu(self.up(x)))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        y = self.norm2(x)
        return x + (checkpoint(self.feed, y, use_reentrant=False) if self.recompute else self.feed(y))


class Transformer(nn.Module):
    """Ids ``(batch, time)`` in, scores ``(batch, vocabulary, time)`` out; the embedding is tied to the head."""

    def __init__(self, layers=3, width=8, heads=2, vocabulary=12, context=6, recompute=None):
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(context, width))
        self.layers = nn.ModuleList(Block(width, heads, recompute == "inside") for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids) + self.positions
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute == "outside" else layer(x)
        return self.head(self.norm(x)).transpose(1, 2)


def ids(high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(2))


def train(model, x, target, accumulate=1):
    """Losses of the steps, and the parameters and gradients after the last."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=True)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(accumulate):
            loss = functional.cross_entropy(model(x), target)
            loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return (
        losses,
        {n: p.detach() for n, p in model.named_parameters()},
        {n: p.grad for n, p in model.named_parameters()},
    )


def whole(tensors):
    return {n: t.full_tensor() for n, t in tensors.items() if t is not None}


OVER_DATA = {"*": {"dp": Shard(0)}}
BOTH = {
    "layers.*.w[qkv].weight": {"dp": Shard(1), "tp": Shard(0)},
    "layers.*.wo.weight": {"dp": Shard(0), "tp": Shard(1)},
    "layers.*.up.*": {"dp": Shard(0), "tp": Shard(0)},
    "layers.*.down.weight": {"dp": Shard(0), "tp": Shard(1)},
    **OVER_DATA,
}
CASES = {
    "one": ((), ("dp",), OVER_DATA),
    "2x2": ((2, 2), ("dp", "tp"), OVER_DATA),
    "both": ((2, 2), ("dp", "tp"), BOTH),
}


def spread(model, case):
    shape, names, partition = CASES[case]
    m = mesh(shape or (dist.get_world_size(),), names)
    data = [Shard(0), Replicate()][: m.ndim]
    return sw.distribute_module(copy.deepcopy(model), m, partition), lambda t: sw.distribute_tensor(t, m, data)


def made(**options):
    torch.manual_seed(0)
    return Transformer(**options).double()


def compare(case, batch, accumulate=1, prepare=lambda model: model, **options):
    """One device, the mesh without prefetch, and with it."""
    x, target = ids(12, batch, 6), ids(12, batch, 6)
    reference = prepare(made(**options))
    plain, place = spread(reference, case)
    ahead, _ = spread(reference, case)
    names = list(ahead.state_dict())
    assert sw.prefetch(ahead, "dp") is ahead
    expected = train(reference, x, target, accumulate)
    without = train(plain, place(x), place(target), accumulate)
    found = train(ahead, place(x), place(target), accumulate)
    for mine in (without, found):
        torch.testing.assert_close([loss.full_tensor() for loss in mine[0]], expected[0], **TIGHT)
        torch.testing.assert_close(whole(mine[2]), {n: g for n, g in expected[2].items() if g is not None}, **TIGHT)
        torch.testing.assert_close(whole(mine[1]), expected[1], **TIGHT)
    assert list(ahead.state_dict()) == names
    for (name, p), q in zip(ahead.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(p, nn.Parameter), name
        assert p.placements == q.placements, name
        assert p.grad is None or p.grad.placements == p.placements, name


# What .ci/run adds.
SAMPLE = [pytest.mark.slow, pytest.mark.sample]


BATCHES = [pytest.param(8, marks=SAMPLE), 7]


@pytest.mark.parametrize("batch", BATCHES)
def test_numbers_over_one_mesh_dim_are_those_of_one_device(ranks, batch):
    ranks.run(compare, "one", batch)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("case", ["2x2", pytest.param("both", marks=SAMPLE)])
def test_numbers_are_those_of_one_device(pool, case, batch):
    pool.run(compare, case, batch)


EVEN_TOO = [7, pytest.param(4, marks=SAMPLE)]


@pytest.mark.parametrize("batch", EVEN_TOO)
@pytest.mark.parametrize("recompute", ["inside", pytest.param("outside", marks=SAMPLE)])
def test_with_activations_recomputed(ranks, recompute, batch):
    def compared():
        compare("one", batch, recompute=recompute)

    ranks.run(compared)


@pytest.mark.parametrize("batch", EVEN_TOO)
def test_with_gradients_accumulated(ranks, batch):
    ranks.run(compare, "one", batch, 2)


def frozen(model):
    model.embed.weight.requires_grad_(False)
    for p in model.layers[1].parameters():
        p.requires_grad_(False)
    return model


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("batch", [7, 4])
def test_with_parameters_frozen(pool, batch):
    pool.run(compare, "2x2", batch, 1, frozen)


# -- order -------------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Layers that say when they compute."""

    def __init__(self, layers, width, log):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.log = log

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            self.log.append(f"forward {i}")
            x = torch.relu(layer(x))
            if x.requires_grad:
                x.register_hook(lambda _, i=i: self.log.append(f"backward {i}"))
        return x


def logged():
    m, log = mesh((4,), ("dp",)), []
    model = sw.distribute_module(Layers(4, 8, log).double(), m, {"*": [Shard(0)]})
    model = sw.prefetch(model, "dp")
    x = sw.distribute_tensor(torch.randn(64, 8, dtype=torch.float64), m, [Shard(0)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with observe(lambda event: log.append(f"{event.phase} {event.kind}"), phases=PHASES):
        loss = model(x).sum()
        log.append("backward")
        loss.backward()
        log.append("step")
        optimizer.step()
    return log


STARTED, THERE = "issued all_gather", "waited all_gather"
REDUCED = "issued reduce_scatter"
FORWARD = [
    *[STARTED, "forward 0", STARTED, THERE],
    *["forward 1", STARTED, THERE],
    *["forward 2", STARTED, THERE],
    *["forward 3", THERE],
]


def test_the_next_layer_is_gathered_while_this_one_computes(pool):
    logs = pool.run(logged)
    assert [logs[0]] * 4 == logs, "every rank does the same in the same order"
    log = [entry for entry in logs[0] if "all_reduce" not in entry]
    turn, step = log.index("backward"), log.index("step")
    assert log[:turn] == FORWARD
    backward = log[turn + 1 : step]
    # Layer 3 is still there, so 2 is gathered while it computes, and so on down; layer 0's input needs no gradient.
    assert [e for e in backward if e in (STARTED, REDUCED) or e.startswith("backward")] == [
        "backward 3",
        STARTED,
        REDUCED,
        "backward 2",
        STARTED,
        REDUCED,
        "backward 1",
        STARTED,
        REDUCED,
        "backward 0",
        REDUCED,
    ]
    assert "waited reduce_scatter" not in backward
    assert log[step:] == ["step", *["waited reduce_scatter"] * 4]


# -- memory and misuse -------------------------------------------------------------------------------------------


def copies_are_freed():
    m = mesh((4,), ("dp",))
    model = sw.distribute_module(Layers(6, 8, []).double(), m, {"*": [Shard(0)]})
    model = sw.prefetch(model, "dp", units=list(model.layers))
    owners = [hook.__self__ for hook in model._forward_pre_hooks.values()]
    (schedule,) = {owner.schedule for owner in owners if hasattr(owner, "schedule")}

    def gathered():
        return [i for i, u in enumerate(schedule.units) if any(c._result is not None for c in u.copies.values())]

    seen = []
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: seen.append(gathered()))
    x = sw.distribute_tensor(torch.randn(8, 8, dtype=torch.float64), m, [Shard(0)])
    y = model(x)
    assert seen == [[1], [2], [3], [4], [5], [5]]
    assert gathered() == [5]
    y.sum().backward()
    assert gathered() in ([], [0])
    with torch.no_grad():
        model(x)
    assert gathered() == []
    return True


def test_copies_are_freed_after_use(pool):
    assert pool.run(copies_are_freed) == [True] * 4


def in_forward():
    m = mesh((4,), ("dp",))

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4))
            self.fail = self.write = False

        def forward(self, x):
            if self.write:
                with torch.no_grad():
                    self.inner[0].weight.mul_(0)
            y = self.inner(x)
            if self.fail:
                raise ValueError("as asked")
            return y

    model = sw.distribute_module(Odd(), m, {"*": [Shard(0)]})
    before = dict(model.named_parameters())
    sw.prefetch(model, "dp", units=[])
    x = sw.distribute_tensor(torch.ones(8, 4), m, [Shard(0)])
    model.fail = True
    with pytest.raises(ValueError, match="as asked"):
        model(x)
    assert all(p is before[n] for n, p in model.named_parameters())
    model.fail, model.write = False, True
    with pytest.raises(InPlaceError):
        model(x)
    model.write = False
    y = model(x)
    with torch.no_grad():
        model.inner[0].weight.add_(1)
    z = model(x)
    assert not torch.equal(y.full_tensor(), z.full_tensor()), "what was written is gathered anew"
    loss = (z @ model.inner[0].weight).sum()
    loss.backward()
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x).full_tensor(), z.full_tensor())
    with torch.no_grad():
        twin.inner[0].weight.zero_()
    assert torch.equal(model(x).full_tensor(), z.full_tensor())


def test_errors_writes_and_copies(pool):
    pool.run(in_forward)


def written_before_backward():
    m = mesh((4,), ("dp",))
    model = sw.prefetch(sw.distribute_module(Layers(2, 4, []), m, {"*": [Shard(0)]}), "dp")
    x = sw.distribute_tensor(torch.ones(8, 4), m, [Shard(0)]).requires_grad_()
    loss = model(x).sum()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_writing_a_parameter_before_backward_raises_as_in_torch(pool):
    pool.run(written_before_backward)


def data_replaced():
    """``p.data = y``, as averages of weights do, between the passes, in one, and to another layout."""
    m = mesh((4,), ("dp",))
    torch.manual_seed(0)
    reference = Layers(3, 4, [])
    model = sw.prefetch(sw.distribute_module(copy.deepcopy(reference), m, {"*": [Shard(0)]}), "dp")
    x = torch.ones(8, 4)
    place = partial(sw.distribute_tensor, device_mesh=m, placements=[Shard(0)])
    for change in (
        lambda p: p * 2,
        lambda p: (p + 1).redistribute(placements=[Replicate()]) if isinstance(p, MeshTensor) else p + 1,
        lambda p: (p * 0.5).redistribute(placements=[Shard(p.ndim - 1)]) if isinstance(p, MeshTensor) else p * 0.5,
    ):
        for module in (reference, model):
            for p in module.parameters():
                p.data, p.grad = change(p.data), None
            module(x if module is reference else place(x)).square().sum().backward()
        for p, q in zip(reference.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.full_tensor(), p)
            torch.testing.assert_close(q.grad.full_tensor(), p.grad)
            assert q.grad.placements == q.placements
    loss = model(place(x)).sum()
    for p in model.parameters():
        p.data = p.data * 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_data_of_a_parameter_is_gathered_after_it_was_replaced(pool):
    pool.run(data_replaced)


def nothing_to_gather():
    model = sw.distribute_module(nn.Linear(4, 4), mesh((2, 2), ("dp", "tp")), {"*": {"tp": Shard(0)}})
    with pytest.raises(PlacementError, match="distribute_module"):
        sw.prefetch(model, "dp")
    with pytest.raises(PlacementError, match="'data'"):
        sw.prefetch(model, "data")
    with pytest.raises(PlacementError):
        sw.prefetch(nn.Linear(4, 4), 0)


def test_a_module_without_such_parameters_is_refused(pool):
    pool.run(nothing_to_gather)
