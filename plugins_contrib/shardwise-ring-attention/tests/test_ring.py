"""Attention on real ranks beside one device: every layout, forward and backward; order of steps; memory and work."""

import pytest
import torch
from measure import contiguous_work, observed_work, peak_of_attention
from torch.nn import functional

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.comm import events
from shardwise.kernel import dispatcher
from shardwise.testing import mesh
from shardwise_ring_attention import rules

R, BATCH, HEADS, SEQUENCE = Replicate(), Shard(0), Shard(1), Shard(2)

# mesh, layout of queries, layout of keys and values, (batch, query heads, key heads, queries, keys)
LAYOUTS = {
    "ring": ((4,), [SEQUENCE], [SEQUENCE], (2, 2, 2, 16, 16)),
    "uneven": ((4,), [SEQUENCE], [SEQUENCE], (2, 3, 3, 13, 13)),
    "an empty shard": ((4,), [SEQUENCE], [SEQUENCE], (1, 2, 2, 5, 5)),
    "two empty shards": ((4,), [SEQUENCE], [SEQUENCE], (1, 2, 2, 2, 2)),
    "heads and ring": ((2, 2), [HEADS, SEQUENCE], [HEADS, SEQUENCE], (2, 4, 4, 10, 10)),
    "ring and batch": ((2, 2), [SEQUENCE, BATCH], [SEQUENCE, BATCH], (3, 2, 2, 7, 7)),
    "over two mesh dims": ((2, 2), [SEQUENCE, SEQUENCE], [SEQUENCE, SEQUENCE], (1, 2, 2, 11, 11)),
    "beside copies": ((2, 2), [R, SEQUENCE], [R, SEQUENCE], (1, 2, 2, 8, 8)),
    "grouped heads": ((2, 2), [HEADS, SEQUENCE], [HEADS, SEQUENCE], (2, 8, 2, 9, 9)),
    "one key head": ((4,), [SEQUENCE], [SEQUENCE], (2, 3, 1, 12, 12)),
    "more keys": ((4,), [SEQUENCE], [SEQUENCE], (2, 2, 2, 6, 15)),
    "fewer keys": ((4,), [SEQUENCE], [SEQUENCE], (2, 2, 2, 15, 6)),
    "whole keys": ((4,), [SEQUENCE], [R], (2, 2, 2, 10, 10)),
    "whole queries": ((4,), [R], [SEQUENCE], (2, 2, 2, 1, 10)),
    "ring, and whole queries": ((2, 2), [SEQUENCE, R], [SEQUENCE, SEQUENCE], (1, 2, 2, 9, 9)),
}


def attention(layout, causal, dtype, tolerance):
    mesh_shape, of_query, of_keys, (batch, heads, few, queries, keys) = layout
    generator = torch.Generator().manual_seed(5)
    shapes = (batch, heads, queries, 8), (batch, few, keys, 8), (batch, few, keys, 8), (batch, heads, queries, 8)
    *whole, grad = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    layouts = of_query, of_keys, of_keys
    ours = [
        sw.distribute_tensor(x, mesh(mesh_shape), where).requires_grad_()
        for x, where in zip(whole, layouts, strict=True)
    ]
    whole = [x.requires_grad_() for x in whole]
    moved, plans = [], []
    with events.observe(moved.append), dispatcher.observe(plans.append):
        out = functional.scaled_dot_product_attention(*ours, is_causal=causal, enable_gqa=heads != few)
    expected = functional.scaled_dot_product_attention(*whole, is_causal=causal, enable_gqa=heads != few)
    assert {event.kind for event in moved} <= {"shift", "all_to_all", "all_reduce"}
    assert not any(plan.strategies[0].cost for plan in plans)
    out.backward(sw.distribute_tensor(grad, mesh(mesh_shape), out.placements))
    expected.backward(grad)
    assert out.placements == tuple(of_query)
    for found, wanted in ((out, expected), *((x.grad, y.grad) for x, y in zip(ours, whole, strict=True))):
        torch.testing.assert_close(found.full_tensor(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_it_is_attention_of_one_device(pool, layout, causal):
    pool.run(attention, layout, causal, torch.float64, 1e-9)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 2e-2)], ids=str
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_shorter_dtypes_stay_close(pool, causal, dtype, tolerance):
    pool.run(attention, LAYOUTS["uneven"], causal, dtype, tolerance)


def keys_without_weight(causal):
    generator = torch.Generator().manual_seed(5)
    query, key, value = torch.randn(3, 1, 2, 16, 4, generator=generator, dtype=torch.float64).unbind()
    query[..., 0] = query[..., 0].abs()
    key[..., 4:8, 0] = float("-inf")  # all keys of rank 1
    key[:, 1, :4, 0] = float("-inf")
    key[:, 1, 8:, 0] = float("-inf")  # all keys of a head
    key[:, :, 9] = 0
    value[:, :, 9] = 0  # a score of 0 that has a weight
    query[:, 0, 2] = float("nan")
    ours = [sw.distribute_tensor(x, mesh((4,)), [SEQUENCE]) for x in (query, key, value)]
    op, scalars = rules.RULES[0].ops[0], (0.0, causal)
    for found, wanted in zip(op(*ours, *scalars), op(query, key, value, *scalars), strict=True):
        torch.testing.assert_close(found.full_tensor(), wanted, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_keys_whose_scores_are_minus_infinity_have_no_weight(pool, causal):
    pool.run(keys_without_weight, causal)


def compiled():
    generator = torch.Generator().manual_seed(3)
    whole = [torch.randn(1, 2, 13, 8, generator=generator, dtype=torch.float64) for _ in range(3)]
    ours = [sw.distribute_tensor(x, mesh((4,)), [SEQUENCE]).requires_grad_() for x in whole]
    whole = [x.requires_grad_() for x in whole]
    attend = lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    out = torch.compile(attend, backend="aot_eager", fullgraph=True)(*ours)
    expected = attend(*whole)
    torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-9, atol=1e-9)
    out.backward(sw.distribute_tensor(torch.ones_like(expected), mesh((4,)), [SEQUENCE]))
    expected.sum().backward()
    for found, wanted in zip(ours, whole, strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), wanted.grad, rtol=1e-9, atol=1e-9)


def test_it_compiles(pool):
    pool.run(compiled, timeout=120.0)


# -- the order of steps ------------------------------------------------------------------------------------------


def under_way_at_each_kernel(name, causal):
    """How many shifts were issued and not yet waited for, at each kernel of one rank's forward or backward pass."""
    done = []
    original = getattr(rules, name)

    def watched(local, kernel, *operands):
        def noted(*args):
            done.append("kernel")
            return kernel(*args)

        return original(local, noted, *operands)

    query = sw.ones(1, 2, 16, 4, device_mesh=mesh((4,)), placements=[SEQUENCE]).requires_grad_()
    out = functional.scaled_dot_product_attention(query, query, query, is_causal=causal)
    setattr(rules, name, watched)
    try:
        told = lambda event: done.append(event.phase) if event.kind == "shift" else None
        with events.observe(told, phases=("issued", "waited")):
            if name == "ring_backward":
                out.sum().backward()
            else:
                functional.scaled_dot_product_attention(query, query, query, is_causal=causal)
    finally:
        setattr(rules, name, original)
    steps = [i for i, event in enumerate(done) if event == "kernel"]
    return [done[:i].count("issued") - done[:i].count("waited") for i in steps], done.count("issued")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_next_keys_and_values_are_on_their_way_while_some_are_worked_on(pool, causal):
    for under_way, shifts in pool.run(under_way_at_each_kernel, "ring_forward", causal):
        assert shifts == 2 * 3
        assert len(under_way) == 4 + 2 * causal  # with a mask, three pieces in the first step
        assert under_way == [2] * (len(under_way) - 1) + [0]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_gradients_of_keys_and_values_follow_one_step_behind(pool, causal):
    for under_way, shifts in pool.run(under_way_at_each_kernel, "ring_backward", causal):
        assert shifts == 2 * 3 + 2 * 4
        first = 1 + 2 * causal
        assert under_way == [2] * first + [4, 4, 2]


# -- work and memory ---------------------------------------------------------------------------------------------


def test_a_causal_mask_gives_all_ranks_equal_work(pool):
    length = 64
    work = pool.run(lambda: observed_work((1, 1, length, 8), (4,), [SEQUENCE], causal=True))
    assert sum(work) == length * (length + 1) // 2
    assert len(set(work)) == 1
    alone = contiguous_work(length, 4)
    assert max(alone) * 4 / sum(alone) > 1.6


def peaks(causal):
    sizes = (1, 1, 4096, 64)
    ring = [
        peak_of_attention(sizes, (2, 2), [R, SEQUENCE], causal=causal),
        peak_of_attention(sizes, (4,), [SEQUENCE], causal=causal),
    ]
    return [*ring, peak_of_attention(sizes, (4,), [SEQUENCE], causal=causal, without=True)]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_memory_per_rank_falls_as_the_ring_grows(pool, causal):
    for of_two, of_four, gathered in pool.run(peaks, causal):
        assert of_four < 0.75 * of_two
        assert of_four < (0.75 if causal else 0.95) * gathered
