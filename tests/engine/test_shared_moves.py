"""What was moved for one op is there for the next: on every rank or on none, until either is written."""

from __future__ import annotations

import copy
import gc
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import MeshTensor, Partial, Shard
from shardwise.comm.events import observe
from shardwise.engine import kept_operands, shared_moves
from shardwise.engine.shared_moves import REUSED, keeping_moves
from shardwise.errors import RankDisagreementError
from shardwise.kernel import kept_moves  # the module: workers get other globals by value
from shardwise.testing import mesh
from shardwise.tools.rehearse import rehearse


def seen(run, *args):
    """How often each kind of collective was issued in a run, and how often one was not because its result was there."""
    counts = Counter()
    with observe(lambda event: counts.update([(event.kind, event.phase)]), phases=("issued", REUSED)):
        result = run(*args)
    return result, counts


def values(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def placed(whole, *placements, shape=(4,)):
    return sw.distribute_tensor(whole, mesh(shape), list(placements))


def rows(shape=(8, 32)):
    """An activation whose rows are sharded, and the same on one device. It is not a leaf."""
    whole = values(*shape)
    return placed(whole, Shard(0)) * 1, whole


def weight(seed=1):
    whole = values(32, 32, seed=seed)
    return placed(whole, Shard(1)), whole


# -- counts ----------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A transformer layer whose norms and sums are sharded along the sequence, and its products along their heads."""

    def __init__(self, dim=256, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(*s, bias=False) for s in 2 * [(dim, 512)] + [(512, dim)])

    def forward(self, x):
        b, t, d = x.shape
        h = self.norm1(x)
        q, k, v = (w(h).view(b, t, self.heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        o = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
        x = x + by_sequence(self.wo(o))
        h = self.norm2(x)
        return x + by_sequence(self.down(nn.functional.gelu(self.gate(h)) * self.up(h)))


COLUMNS = ("wq", "wk", "wv", "gate", "up")
HEADS = {f"{name}.weight": [Shard(0 if name in COLUMNS else 1)] for name in (*COLUMNS, "wo", "down")}


def by_sequence(x):
    return x.redistribute(placements=[Shard(1)]) if isinstance(x, MeshTensor) else x


def sequence_parallel(limit):
    torch.manual_seed(0)
    layer, x, direction = Layer().double(), values(2, 8, 256), values(2, 8, 256, seed=1)
    whole = copy.deepcopy(layer)
    expected = whole(x)
    expected.backward(direction)
    sw.distribute_module(layer, mesh((4,)), HEADS)
    sharded, direction = placed(x, Shard(1)), placed(direction, Shard(1))
    with keeping_moves(limit):
        y, forward = seen(layer, sharded)
        _, backward = seen(y.backward, direction)
    torch.testing.assert_close(y.full_tensor(), expected)
    for mine, other in zip(layer.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad)
    return forward, backward


def test_a_layer_sends_what_is_sent_by_hand(pool):
    forward, backward = zip(*pool.run(sequence_parallel, 1 << 20), strict=True)
    by_hand = {("all_gather", "issued"): 2, ("reduce_scatter", "issued"): 2}
    assert forward == (by_hand | {("all_gather", REUSED): 3},) * 4
    # The mirror of forward, and the gradients of the weights and biases of both norms.
    by_hand = {("reduce_scatter", "issued"): 2, ("all_gather", "issued"): 2, ("all_reduce", "issued"): 4}
    assert [{k: n for k, n in counts.items() if k[1] == "issued"} for counts in backward] == [by_hand] * 4
    forward, backward = pool.run(sequence_parallel, 0)[0]
    assert forward == {("all_gather", "issued"): 5, ("reduce_scatter", "issued"): 2}
    assert backward.total() == 18


def products(needs_grad):
    x, whole = rows()
    weights = [weight(seed) for seed in (1, 2, 3)]
    x.requires_grad_(needs_grad)
    h, plain = x * 2, whole * 2
    with torch.set_grad_enabled(needs_grad):
        results, counts = seen(lambda: [h.view(4, 2, 32) @ w for w, _ in weights])
    for mine, (_, w) in zip(results, weights, strict=True):
        torch.testing.assert_close(mine.full_tensor(), plain.view(4, 2, 32) @ w)
    return counts


@pytest.mark.parametrize("needs_grad", [True, False])
def test_views_of_one_tensor_are_gathered_once(pool, needs_grad):
    assert pool.run(products, needs_grad) == [{("all_gather", "issued"): 1, ("all_gather", REUSED): 2}] * 4


def reduced():
    parts = [values(8, 6, seed=seed) for seed in range(4)]
    x = MeshTensor.from_local(parts[torch.distributed.get_rank()], mesh((4,)), [Partial()]) * 2
    whole = 2 * sum(parts)
    (a, b, c), counts = seen(lambda: (x.exp(), x.tanh(), x.abs()))
    for mine, function in ((a, torch.exp), (b, torch.tanh), (c, torch.abs)):
        torch.testing.assert_close(mine.full_tensor(), function(whole))
    return {kind: n for (kind, phase), n in counts.items() if phase == "issued"}


def test_a_partial_tensor_is_reduced_once(pool):
    (issued,) = {tuple(counts.items()) for counts in pool.run(reduced)}
    assert sum(n for _, n in issued) == 1


def handed_on():
    """A tensor that was reduced for one op is handed reduced to one that would reduce it otherwise, or use it whole."""
    parts = [values(8, 32, seed=seed) for seed in range(4)]
    x = MeshTensor.from_local(parts[torch.distributed.get_rank()], mesh((4,)), [Partial()]) * 2
    whole = 2 * sum(parts)
    placed_w, w = weight()
    other = values(8, 32, seed=9)
    by_rows = placed(other, Shard(0))

    def run():
        return x.exp(), torch.maximum(x, by_rows), x.tanh() @ placed_w, torch.where(x > 0, x, by_rows)

    results, counts = seen(run)
    expected = whole.exp(), torch.maximum(whole, other), whole.tanh() @ w, torch.where(whole > 0, whole, other)
    for mine, one in zip(results, expected, strict=True):
        torch.testing.assert_close(mine.full_tensor(), one)
    x.add_(1)
    torch.testing.assert_close(torch.maximum(x, by_rows).full_tensor(), torch.maximum(whole + 1, other))
    return counts


def test_what_was_reduced_is_handed_on_reduced(pool):
    first, *rest = pool.run(handed_on)
    assert rest == [first] * 3
    assert sum(first[kind, "issued"] for kind in ("all_reduce", "reduce_scatter")) == 1


def recomputed():
    whole, (w, plain) = values(8, 32), weight()
    x = placed(whole, Shard(0)).requires_grad_()

    def layer(x, w):
        h = x * 2
        return torch.tanh(h @ w) + torch.sin(h @ w)

    def run():
        checkpoint(layer, x, w, use_reentrant=False).sum().backward()

    _, counts = seen(run)
    one = whole.requires_grad_()
    layer(one, plain).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), one.grad)
    return counts


def test_a_recomputed_layer_moves_its_own_tensors(pool):
    first, *rest = pool.run(recomputed)
    assert first["all_gather", REUSED] >= 2
    assert rest == [first] * 3


# -- writes ----------------------------------------------------------------------------------------------------------


def replaced(x):
    x.data = x * 3


def by_an_optimizer(x):
    x.requires_grad_().grad = x.detach() * 1
    torch.optim.SGD([x], lr=0.5).step()
    x.requires_grad_(False)


def local(x):
    return x.to_local() if isinstance(x, MeshTensor) else x


def through_a_part(x):
    y = MeshTensor.from_local(x.to_local(), x.device_mesh, x.placements) if isinstance(x, MeshTensor) else x
    y.mul_(3)


WRITES = {
    "in place": lambda x: x.mul_(3),
    "through a view": lambda x: x.view(4, 64).mul_(3),
    "through a slice": lambda x: x[:, 2:4].zero_(),
    "through detach": lambda x: x.detach().mul_(3),
    "through .data": lambda x: x.data.mul_(3),
    "through a view of .data": lambda x: x.data.view(-1).mul_(3),
    "through a shallow copy": lambda x: (copy.copy(x) if isinstance(x, MeshTensor) else x).mul_(3),
    "through the part": lambda x: local(x).mul_(3),
    "through the part of a view": lambda x: local(x.view(256)).mul_(3),
    "through a tensor of the part": through_a_part,
    "as out=": lambda x: torch.mul(x, x, out=x),
    "in a list": lambda x: torch._foreach_mul_([x], 3),
    "new memory": replaced,
    "an optimizer": by_an_optimizer,
    "nothing": lambda x: x,
}


def written(name):
    x, whole = rows()
    (w, plain), (other, plain_other) = weight(), weight(2)
    torch.testing.assert_close((x @ w).full_tensor(), whole @ plain)
    WRITES[name](x)
    WRITES[name](whole)
    y, counts = seen(lambda: x @ other)
    torch.testing.assert_close(y.full_tensor(), whole @ plain_other)
    torch.testing.assert_close((x.view(4, 2, 32) @ w).full_tensor(), whole.view(4, 2, 32) @ plain)
    return counts["all_gather", "issued"]


@pytest.mark.parametrize("name", WRITES)
def test_what_was_written_is_moved_again(pool, name):
    assert pool.run(written, name) == [0 if name == "nothing" else 1] * 4


def results_are_written():
    whole = values(8, 6)
    y = placed(whole, Shard(0)) * 1
    unsafe_view = torch.ops.aten._unsafe_view.default
    # Its result has the memory of its operand, and torch's schema does not say so.
    first, counts = seen(lambda: unsafe_view(y, [3, 16]))
    first.zero_()
    again, counts_again = seen(lambda: unsafe_view(y, [3, 16]))
    torch.testing.assert_close(again.full_tensor(), whole.view(3, 16))
    return counts["all_gather", "issued"], counts_again["all_gather", REUSED]


def test_a_result_does_not_share_memory_with_what_is_kept(pool):
    assert pool.run(results_are_written) == [(1, 1)] * 4


def moves_in_different_places():
    """Two windows of one tensor have one shape, and are not one tensor."""
    whole = values(8, 64)
    x = placed(whole, Shard(0)) * 1
    (w, plain) = weight()
    for part, expected in zip(x.split(32, 1), whole.split(32, 1), strict=True):
        torch.testing.assert_close((part @ w).full_tensor(), expected @ plain)
    square = placed(values(32, 32), Shard(0)) * 1
    for mine, expected in ((square, values(32, 32)), (square.t(), values(32, 32).t())):
        torch.testing.assert_close((mine @ w).full_tensor(), expected @ plain)


def test_other_views_are_other_tensors(pool):
    pool.run(moves_in_different_places)


# -- what is not kept ------------------------------------------------------------------------------------------------


def not_kept(make):
    w, _ = weight()
    x = MAKERS[make]()
    with torch.inference_mode(make == "inference"):
        _, counts = seen(lambda: [x @ w for _ in range(2)])
    return counts["all_gather", "issued"]


def made_in_inference():
    with torch.inference_mode():
        return placed(values(8, 32), Shard(0)) * 1


MAKERS = {
    "parameter": lambda: nn.Parameter(placed(values(8, 32), Shard(0))),
    "frozen": lambda: nn.Parameter(placed(values(8, 32), Shard(0)), requires_grad=False),
    "leaf": lambda: placed(values(8, 32), Shard(0)).requires_grad_(),
    "memory of the program": lambda: MeshTensor.from_local(values(2, 32), mesh((4,)), [Shard(0)]),
    "inference": made_in_inference,
}


@pytest.mark.parametrize("make", MAKERS)
def test_parameters_and_memory_of_the_program_are_moved_each_time(pool, make):
    assert pool.run(not_kept, make) == [2] * 4


# -- ranks -----------------------------------------------------------------------------------------------------------


class Cycle:
    pass


def collected_at_other_times():
    """Tensors die at once on some ranks, and never on others."""
    rank = torch.distributed.get_rank()
    w, plain = weight()
    part = 8 * 32 * 8
    log = []
    if rank % 2:
        gc.disable()
    try:
        with keeping_moves(3 * part):
            first, _ = rows()
            for turn in range(12):
                x, whole = rows()
                for tensor in (x, first, x):
                    y, counts = seen(lambda tensor=tensor: tensor @ w)
                    torch.testing.assert_close(y.full_tensor(), whole @ plain)
                    log.append(counts["all_gather", REUSED])
                if rank % 2:
                    cycle = Cycle()
                    cycle.own, cycle.tensor = cycle, x
                    del cycle
                del x, tensor
                if rank == 2 and turn % 3 == 0:
                    gc.collect()
                log.append(kept_moves.kept_moves.held)
                assert kept_moves.kept_moves.held <= 3 * part
    finally:
        gc.enable()
    return log


def test_ranks_that_collect_at_other_times_send_the_same(pool):
    first, *rest = pool.run(collected_at_other_times)
    assert rest == [first] * 3
    assert 0 in first
    assert 1 in first


def bounded():
    w, _ = weight()
    part = 8 * 32 * 8
    with keeping_moves(2 * part):
        tensors = [rows()[0] for _ in range(5)]
        for x in tensors:
            x @ w
        kept = [move.local for x in tensors for move in (x._kept_moves or {}).values()]
        assert [k is not None for k in kept] == [False, False, False, True, True]
        assert sum(k.nbytes for k in kept if k is not None) == kept_moves.kept_moves.held == 2 * part
        large = rows((32, 32))[0]
        large @ w
        assert not hasattr(large, "_kept_moves")
        del tensors, x
        assert (
            kept_moves.kept_moves.held == 2 * part
        )  # what ranks collect at other times counts until it is dropped in its turn
    assert kept_moves.kept_moves.held == 0


def test_what_is_kept_is_bounded(pool):
    pool.run(bounded)


def one_rank_writes():
    x, _ = rows()
    w, _ = weight()
    cached = shared_moves.checks_ranks
    shared_moves.checks_ranks = kept_operands.checks_ranks = lambda: True
    try:
        x @ w
        if torch.distributed.get_rank() == 1:
            x.to_local().zero_()
        with pytest.raises(RankDisagreementError, match="for an op"):
            x @ w
    finally:
        shared_moves.checks_ranks = kept_operands.checks_ranks = cached


def test_checked_ranks_say_so_when_one_of_them_writes_its_part(pool):
    pool.run(one_rank_writes)


def step_of_the_demo():
    layer = sw.distribute_module(Layer(), mesh((4,)), HEADS)
    x = placed(values(2, 8, 256).float(), Shard(1))
    _, counts = seen(lambda: layer(x).sum().backward())
    return {kind: n for (kind, phase), n in counts.items() if phase == "issued"}


def rehearsed(device_mesh):
    layer = sw.distribute_module(Layer(), device_mesh, HEADS, src_data_rank=None)
    x = sw.distribute_tensor(torch.ones(2, 8, 256), device_mesh, [Shard(1)], src_data_rank=None)
    return layer(x).sum()


def test_a_rehearsal_reuses_what_real_ranks_reuse(pool):
    real = pool.run(step_of_the_demo)[0]
    counts = Counter()
    for use, times, _ in rehearse(rehearsed, (4,)).collectives:
        counts[use.kind] += times
    assert counts == real
