"""Gradients that wait: the numbers of one device, and one sum over the mesh for all backward passes of a step."""

from __future__ import annotations

import copy
import math
from collections import Counter

import pytest
import torch
from test_training import OPTIMIZERS, SAMPLE, TIGHT, TRANSFORMER_CASES, Transformer, ids
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.comm.events import observe
from shardwise.testing import mesh

STEPS, MICRO = 2, 4


def train(model, batches, around, clip=None, optimizer="adamw fused"):
    """Gradients before and parameters after each of the steps."""
    steps = OPTIMIZERS[optimizer](model.parameters())
    seen = []
    for micro_batches in batches:
        steps.zero_grad()
        with around():
            for x, target in micro_batches:
                (functional.cross_entropy(model(x), target) / MICRO).backward()
            if clip == "inside":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)
        if clip == "after":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        seen.append([p.grad.clone() for p in model.parameters()])
        steps.step()
        seen.append([p.detach().clone() for p in model.parameters()])
    return seen


def nothing():
    return torch.enable_grad()


def compare(mesh_of, partition, data, hook, clip):
    """Train beside one device; the collectives of a run that waits, and of one that does not."""
    m = mesh(*mesh_of)
    torch.manual_seed(0)
    reference = Transformer().double()
    batches = [[(ids(12, 7, 6), ids(12, 7, 6) * (i + 1) % 12) for i in range(MICRO)] for _ in range(STEPS)]
    placed = [
        [(sw.distribute_tensor(x, m, data), sw.distribute_tensor(t, m, data[: m.ndim])) for x, t in step]
        for step in batches
    ]
    spread = [copy.deepcopy(reference) for _ in range(2)]
    expected = train(reference, batches, nothing, clip)
    sent = []
    for model, around in zip(spread, (sw.accumulate, nothing), strict=True):
        sw.distribute_module(model, m, partition)
        if hook is not None:
            hook(model)
        kinds = Counter()
        with observe(lambda event, kinds=kinds: kinds.update([event.kind])):
            got = train(model, placed, around, clip)
        sent.append(kinds)
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close([t.full_tensor() for t in ours], theirs, **TIGHT)
        for p in model.parameters():
            assert p.grad.placements == p.placements
    return sent


EVERYDAY = ("data, tensor and sequence 2x2",)
SENT_CASES = [pytest.param(c, marks=() if c in EVERYDAY else SAMPLE) for c in TRANSFORMER_CASES]


@pytest.mark.parametrize("case", SENT_CASES)
def test_several_backwards_give_the_numbers_of_one_device(pool, case):
    late, early = pool.run(compare, *TRANSFORMER_CASES[case], None)[0]
    assert late.total() <= early.total()
    if "data" in case:
        assert late.total() < early.total()


@pytest.mark.parametrize("clip", [pytest.param("after", marks=SAMPLE), "inside"])
def test_clipping_gives_the_norm_of_one_device(pool, clip):
    pool.run(compare, *TRANSFORMER_CASES["data and tensor 2x2"], clip)


# -- what .grad is meanwhile ---------------------------------------------------------------------------------------

WEIGHT = torch.arange(12.0, dtype=torch.float64).reshape(4, 3) / 7


INPUT = torch.arange(24.0, dtype=torch.float64).reshape(6, 4).sin()


def leaf(m, layout=None, dtype=torch.float64):
    return sw.distribute_tensor(WEIGHT.to(dtype), m, layout or [Replicate()], src_data_rank=None).requires_grad_()


def batch(m, i, layout=None):
    return sw.distribute_tensor(INPUT + i, m, layout or [Shard(0)], src_data_rank=None)


def one_device(micro=MICRO):
    w = WEIGHT.clone().requires_grad_()
    for i in range(micro):
        ((INPUT + i) @ w).square().sum().backward()
    return w


def backward(m, w, i, **kwargs):
    (batch(m, i).to(w.dtype) @ w).square().sum().backward(**kwargs)


def kinds_of(run):
    """The kinds of the collectives that a call issues."""
    kinds = []
    with observe(lambda event: kinds.append(event.kind)):
        run()
    return kinds


def read_inside():
    m = mesh((2,))
    w, expected = leaf(m), one_device().grad

    def inside():
        for i in range(MICRO):
            backward(m, w, i)

    with sw.accumulate():
        assert kinds_of(inside) == []
        assert w.grad.placements == (Partial(),)
        torch.testing.assert_close(w.grad.full_tensor(), expected, **TIGHT)
        torch.testing.assert_close(w.grad.norm().item(), expected.norm().item(), **TIGHT)
        torch.testing.assert_close(float(w.grad.max()), float(expected.max()), **TIGHT)
        assert w.grad.placements == (Partial(),)  # reading moves nothing
    assert w.grad.placements == w.placements
    assert kinds_of(lambda: torch.testing.assert_close(w.grad.to_local(), expected, **TIGHT)) == []


def one_collective_per_dtype():
    m = mesh((2,))
    leaves = [leaf(m, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.float64, torch.float32)]

    def step():
        with sw.accumulate():
            for i in range(MICRO):
                for w in leaves:
                    backward(m, w, i)

    assert kinds_of(step) == ["all_reduce"] * 2
    assert all(w.grad.placements == w.placements for w in leaves)


def sharded_parameters_are_scattered_once():
    m = mesh((2,))
    leaves, expected = [leaf(m, [Shard(0)]) for _ in range(3)], one_device().grad

    def step():
        with sw.accumulate():
            for i in range(MICRO):
                for w in leaves:
                    backward(m, w.redistribute(placements=[Replicate()], grad_placements=[Partial()]), i)

    assert kinds_of(step) == ["all_gather"] * MICRO * 3 + ["reduce_scatter"]
    for w in leaves:
        assert w.grad.placements == (Shard(0),)
        torch.testing.assert_close(w.grad.full_tensor(), expected, **TIGHT)


def the_outermost_sums():
    m = mesh((2,))
    w = leaf(m)
    with sw.accumulate():
        for i in range(MICRO):
            with sw.accumulate():
                backward(m, w, i)
            assert w.grad.placements == (Partial(),)
    torch.testing.assert_close(w.grad.to_local(), one_device().grad, **TIGHT)


def after_an_exception():
    m = mesh((2,))
    w, expected = leaf(m), one_device()
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in (w, expected)]

    def failing():
        with sw.accumulate():
            for i in range(MICRO - 1):
                backward(m, w, i)
            raise KeyError("the program's own")

    def fails():
        with pytest.raises(KeyError, match="own"):
            failing()

    assert kinds_of(fails) == []
    assert w.grad.placements == (Partial(),)
    backward(m, w, MICRO - 1)  # what comes is placed again, and added
    torch.testing.assert_close(w.grad.full_tensor(), expected.grad, **TIGHT)
    for optimizer in optimizers:
        optimizer.step()
    assert w.grad.placements == w.placements
    torch.testing.assert_close(w.full_tensor(), expected, **TIGHT)


def a_step_inside():
    m = mesh((2,))
    ours, theirs = [leaf(m), leaf(m)], [one_device(2), one_device(2)]
    optimizers = [torch.optim.AdamW([p], lr=0.1, fused=True) for p in (*ours, *theirs)]
    with sw.accumulate():
        for w in ours:
            for i in range(2):
                backward(m, w, i)
        for optimizer in optimizers[::2]:
            optimizer.step()
        assert [w.grad.placements for w in ours] == [(Replicate(),), (Partial(),)]
        for optimizer in optimizers[1::2]:
            optimizer.step()
    for w, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(w.full_tensor(), expected, **TIGHT)


def gradients_that_are_there():
    """Those of an earlier backward, and zeros that ``zero_grad`` leaves."""
    m = mesh((2,))
    for layout in ([Replicate()], [Shard(0)], [Shard(1)]):
        w, expected = leaf(m, layout), one_device().grad
        backward(m, w, 7)
        w.grad.zero_()
        backward(m, w, 0)
        assert w.grad.placements == tuple(layout)

        def step(w=w):
            with sw.accumulate():
                for i in range(1, MICRO):
                    backward(m, w, i)

        kinds = kinds_of(step)
        assert len([k for k in kinds if k in ("all_reduce", "reduce_scatter")]) <= 1, kinds
        assert w.grad.placements == tuple(layout)
        torch.testing.assert_close(w.grad.full_tensor(), expected, **TIGHT)


def some_wait_and_some_do_not():
    m = mesh((2,))
    for order in (0, 1):
        w, expected = leaf(m), one_device(2).grad
        with sw.accumulate():
            for i in range(2):
                layout = [Shard(0)] if i == order else [Replicate()]
                (batch(m, i, layout) @ w).square().sum().backward()
            unused = leaf(m)
        assert unused.grad is None
        assert w.grad.placements == w.placements
        torch.testing.assert_close(w.grad.to_local(), expected, **TIGHT)


def in_half_precision():
    m = mesh((2,))
    w, expected = leaf(m, dtype=torch.bfloat16), one_device().grad
    with sw.accumulate():
        for i in range(MICRO):
            backward(m, w, i)
    assert w.grad.dtype is torch.bfloat16
    torch.testing.assert_close(w.grad.to_local().double(), expected, rtol=2e-2, atol=0.5)


def graphs_that_stay():
    m = mesh((2,))
    w, expected = leaf(m), one_device(1).grad
    with sw.accumulate():
        loss = (batch(m, 0) @ w).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        assert w.grad.placements == (Partial(),)
    torch.testing.assert_close(w.grad.to_local(), 2 * expected, **TIGHT)
    w.grad = None
    with sw.accumulate():
        loss = (batch(m, 0) @ w).square().sum()
        loss.backward(create_graph=True)
        assert w.grad.placements == (Replicate(),)
        w.grad.sum().backward()
    twice = WEIGHT.clone().requires_grad_()
    loss = (INPUT @ twice).square().sum()
    loss.backward(create_graph=True)
    twice.grad.sum().backward()
    torch.testing.assert_close(w.grad.full_tensor(), twice.grad, **TIGHT)


def gradients_that_are_returned():
    m = mesh((2,))
    w = leaf(m)
    with sw.accumulate():
        (grad,) = torch.autograd.grad((batch(m, 0) @ w).square().sum(), [w])
    assert w.grad is None
    assert grad.placements == w.placements  # nothing is accumulated, so nothing waits
    torch.testing.assert_close(grad.to_local(), one_device(1).grad, **TIGHT)


def an_optimizer_in_backward():
    m = mesh((2,))
    results = []
    for w, run in ((leaf(m), backward), (WEIGHT.clone().requires_grad_(), None)):
        optimizer = torch.optim.SGD([w], lr=0.1)

        def step(p, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        w.register_post_accumulate_grad_hook(step)
        with sw.accumulate():
            for i in range(2):
                if run is not None:
                    run(m, w, i)
                else:
                    x = INPUT + i
                    (x @ w).square().sum().backward()
        results.append(w.detach())
    torch.testing.assert_close(results[0].full_tensor(), results[1], **TIGHT)


def recomputed():
    m = mesh((2,))
    w, expected = leaf(m), one_device().grad

    def step():
        with sw.accumulate():
            for i in range(MICRO):
                x = batch(m, i)
                checkpoint(lambda x, w: (x @ w).square().sum(), x, w, use_reentrant=False).backward()

    assert kinds_of(step) == ["all_reduce"]
    torch.testing.assert_close(w.grad.to_local(), expected, **TIGHT)


def scaled_losses():
    m = mesh((2,))
    for place in ("inside", "after"):
        for big in (1.0, 1e308):
            w, expected = leaf(m), one_device(2)
            optimizer = torch.optim.SGD([w], lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
            with sw.accumulate():
                for i in range(2):
                    scaler.scale((batch(m, i) @ w).square().sum() * big).backward()
                if place == "inside":
                    scaler.unscale_(optimizer)
                    scaler.step(optimizer)
            if place == "after":
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
            scaler.update()
            stepped = WEIGHT - 0.1 * expected.grad if big == 1.0 else WEIGHT
            torch.testing.assert_close(w.detach().full_tensor(), stepped, **TIGHT)
            assert scaler.get_scale() == (16.0 if big == 1.0 else 8.0)


def compiled():
    m = mesh((2,))
    w, expected = leaf(m), one_device().grad
    loss = torch.compile(lambda x, w: (x @ w).square().sum(), backend="aot_eager")
    with sw.accumulate():
        for i in range(MICRO):
            loss(batch(m, i), w).backward()
    assert w.grad.placements == w.placements
    torch.testing.assert_close(w.grad.to_local(), expected, **TIGHT)


@pytest.mark.parametrize(
    "program",
    [
        read_inside,
        one_collective_per_dtype,
        sharded_parameters_are_scattered_once,
        the_outermost_sums,
        after_an_exception,
        a_step_inside,
        gradients_that_are_there,
        some_wait_and_some_do_not,
        in_half_precision,
        graphs_that_stay,
        gradients_that_are_returned,
        an_optimizer_in_backward,
        recomputed,
        scaled_losses,
        compiled,
    ],
)
def test_gradients_that_wait(two_ranks, program):
    two_ranks.run(program)


# -- every layout -------------------------------------------------------------------------------------------------


def gradients_of_every_layout(shape, every):
    """Two gradients in one context, each pair of layouts that follow each other, for leaves of every n-th layout."""
    m = mesh((2, 2))
    one = [Replicate(), Partial(), Shard(0), Shard(1), Partial("avg")]
    layouts = [[a, b] for a in one for b in one]
    counts = [torch.arange(1.0, 1 + math.prod(shape), dtype=torch.float64).reshape(shape) * k for k in (1, 3)]
    waited = 0
    owners = [[a, b] for a in one[:4] for b in one[:4] if not (a.is_partial() or b.is_partial())]
    for own in owners[::every]:
        leaves = []
        with sw.accumulate():
            for i, layout in enumerate(layouts):
                w = sw.distribute_tensor(torch.zeros(shape, dtype=torch.float64), m, own, src_data_rank=None)
                w.requires_grad_()
                for count, grad_layout in zip(counts, (layout, layouts[i - 1]), strict=True):
                    factor = sw.distribute_tensor(count, m, [Replicate()] * 2, src_data_rank=None)
                    used = w.redistribute(placements=[Replicate()] * 2, grad_placements=grad_layout)
                    (used * factor).sum().backward()
                waited += w.grad.placements != w.placements
                torch.testing.assert_close(w.grad.full_tensor(), sum(counts), **TIGHT)
                leaves.append(w)
        for w in leaves:
            assert w.grad.placements == w.placements
            torch.testing.assert_close(w.grad.full_tensor(), sum(counts), **TIGHT)
    return waited / len(owners[::every])


@pytest.mark.parametrize(
    ("shape", "every"), [((3, 1), 2), *(pytest.param(shape, 1, marks=SAMPLE) for shape in ((3, 1), (4, 2), (1, 5)))]
)
def test_gradients_of_every_layout_wait_for_each_other(pool, shape, every):
    (waited,) = set(pool.run(gradients_of_every_layout, shape, every))
    assert waited > 100 / 9


def on_several_meshes():
    m, rows = mesh((2, 2), ("dp", "tp")), mesh((4,))
    leaves, expected = [leaf(m, [Replicate()] * 2), leaf(rows), leaf(m["dp"])], one_device().grad
    with sw.accumulate():
        for i in range(MICRO):
            for w, layout in zip(leaves, ([Shard(0), Replicate()], [Shard(0)], [Shard(0)]), strict=True):
                (batch(w.device_mesh, i, layout) @ w).square().sum().backward()
    for w in leaves:
        assert w.grad.placements == w.placements
        torch.testing.assert_close(w.grad.to_local(), expected, **TIGHT)


def prefetched():
    m = mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    reference = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).double()
    model = copy.deepcopy(reference)
    sw.distribute_module(model, m, {"*": {"dp": Shard(0)}})
    sw.prefetch(model, "dp")
    xs = [torch.randn(4, 8, dtype=torch.float64) for _ in range(MICRO)]
    placed = [sw.distribute_tensor(x, m, [Shard(0), Replicate()]) for x in xs]

    def step():
        with sw.accumulate():
            for x in placed:
                model(x).square().sum().backward()

    kinds = kinds_of(step)
    for x in xs:
        reference(x).square().sum().backward()
    assert [k for k in kinds if k != "all_gather"] == ["reduce_scatter"]
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.grad.placements == p.placements
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, **TIGHT)


@pytest.mark.parametrize("program", [on_several_meshes, prefetched])
def test_gradients_that_wait_on_four_ranks(pool, program):
    pool.run(program)


def learned():
    """The decisions of a step whose gradients wait, made from its first time and used in the later ones."""
    m = mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    reference = Transformer().double()
    model = copy.deepcopy(reference)
    sw.distribute_module(model, m, TRANSFORMER_CASES["data and tensor 2x2"][1])
    data = [(ids(12, 8, 6), ids(12, 8, 6) * (i + 1) % 12) for i in range(2)]
    place = [Shard(0), Replicate()]
    placed = [(sw.distribute_tensor(x, m, place), sw.distribute_tensor(t, m, place)) for x, t in data]
    optimizers = [torch.optim.AdamW(own.parameters(), lr=0.02, foreach=True) for own in (model, reference)]
    sent = []

    def step(own, batches, optimizer):
        optimizer.zero_grad()
        with sw.accumulate():
            for x, target in batches:
                functional.cross_entropy(own(x), target).backward()
        optimizer.step()

    with sw.learn() as learning:
        for _ in range(4):
            sent.append(len(kinds_of(lambda: step(model, placed, optimizers[0]))))
            step(reference, data, optimizers[1])
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                assert p.grad.placements == p.placements
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, **TIGHT)
                torch.testing.assert_close(p.detach().full_tensor(), q.detach(), **TIGHT)
        from shardwise.engine import decided

        assert learning.learned is not None
        return sent, decided.in_force.known, learning.rounds


@pytest.mark.slow
@pytest.mark.sample
def test_a_step_whose_gradients_wait_is_learned(pool):
    sent, known, rounds = pool.run(learned)[0]
    assert known > 0
    assert rounds == 1, "what autograd does to a gradient that waits is no reason to record once more"
    assert sent[-1] < sent[0]
