"""Context parallelism of an unchanged model: a transformer whose sequence is sharded learns as one device."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.comm import events
from shardwise.kernel import dispatcher
from shardwise.testing import mesh

VOCABULARY, WIDTH, HEADS, STEPS = 17, 16, 4, 4
R = Replicate()
# Sizes of ids, and where heads and positions are of (rows, columns, heads, features): batch or sequence first.
BATCH_FIRST, SEQUENCE_FIRST = ((1, 30), (0, 2, 1, 3)), ((32, 3), (1, 2, 0, 3))


class Block(nn.Module):
    def __init__(self, order):
        super().__init__()
        self.order = order
        self.back = [order.index(d) for d in range(4)]
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.join = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.first(x)
        split = [part(y).unflatten(-1, (HEADS, -1)).permute(self.order) for part in (self.query, self.key, self.value)]
        met = functional.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.join(met.permute(self.back).flatten(-2))
        return x + self.narrow(functional.gelu(self.wide(self.second(x))))


class Transformer(nn.Module):
    def __init__(self, length, order):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(length, WIDTH)
        self.blocks = nn.Sequential(Block(order), Block(order))
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, positions):
        return self.out(self.blocks(self.words(ids) + self.places(positions)))


def model_and_data(sizes, order):
    torch.manual_seed(0)
    along = max(range(2), key=lambda d: sizes[d])
    model = Transformer(sizes[along], order).double()
    ids, targets = torch.randint(VOCABULARY, (2, *sizes))
    positions = torch.arange(sizes[along]).unsqueeze(1 - along).expand(sizes).contiguous()
    return model, [ids, positions, targets]


def losses(model, data, steps=STEPS):
    ids, positions, targets = data
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(ids, positions).transpose(1, 2), targets)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return found


def attention_rows(plans):
    return {plan.names for plan in plans if "scaled_dot_product" in str(plan.schema.op)}


def learns_as_one_device(form, mesh_shape, layout, weights, rows):
    model, data = model_and_data(*form)
    expected = losses(model, data)
    ours, _ = model_and_data(*form)
    m = mesh(mesh_shape)
    ours = sw.distribute_module(ours, m, weights)
    parts = [sw.distribute_tensor(x, m, layout) for x in data]
    plans, moved = [], []
    with dispatcher.observe(plans.append), events.observe(moved.append):
        found = losses(ours, parts)
    assert attention_rows(plans) == {rows}
    assert "shift" in {event.kind for event in moved}
    torch.testing.assert_close(torch.stack([loss.full_tensor() for loss in found]), torch.stack(expected))
    assert found[-1].full_tensor() < found[0].full_tensor()
    for (name, mine), whole in zip(ours.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), whole, rtol=1e-7, atol=1e-9, msg=name)


TENSOR_PARALLEL = {
    "*.query.*": [Shard(0), R],
    "*.key.*": [Shard(0), R],
    "*.value.*": [Shard(0), R],
    "*.join.weight": [Shard(1), R],
}


@pytest.mark.parametrize(
    ("form", "mesh_shape", "layout", "weights", "rows"),
    [
        (BATCH_FIRST, (4,), [Shard(1)], {}, ("ring of q s",)),
        (SEQUENCE_FIRST, (4,), [Shard(0)], {}, ("ring of q s",)),
        (BATCH_FIRST, (2, 2), [Shard(1), Shard(1)], {}, ("ring of q s", "ring of q s")),
        (BATCH_FIRST, (2, 2), [R, Shard(1)], TENSOR_PARALLEL, ("shard h", "ring of q s")),
    ],
    ids=["context", "sequence first", "context over two mesh dims", "tensor x context"],
)
def test_a_transformer_learns_as_one_device(pool, form, mesh_shape, layout, weights, rows):
    pool.run(learns_as_one_device, form, mesh_shape, layout, weights, rows, timeout=120.0)
