"""Softmax and cross entropy over sharded classes: scores are never gathered, numbers are those of one device."""

import pytest
import torch
from torch.nn import functional

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.comm.events import observe
from shardwise.testing import mesh

SAMPLES, CLASSES = 6, 802
IGNORED = 2


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1]))


def targets():
    result = torch.arange(SAMPLES) * 131 % CLASSES
    result[IGNORED] = -100
    return result


WEIGHT = numbers(CLASSES).abs()
VARIANTS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "weight": {"weight": WEIGHT},
    "smoothing": {"label_smoothing": 0.1},
    "smoothing, weight": {"label_smoothing": 0.1, "weight": WEIGHT},
    "probabilities": {"target": numbers(SAMPLES, CLASSES).softmax(1)},
    "probabilities, weight": {"target": numbers(SAMPLES, CLASSES).softmax(1), "weight": WEIGHT},
    "an ignored class": {"ignore_index": 131},
}


def moved_by_cross_entropy(variant, shape, placements):
    """Compare the loss and its gradient with one device; give the bytes of each collective."""
    options = {"target": targets(), **VARIANTS[variant]}
    if "ignore_index" in options:
        options["target"] = options["target"].clamp(min=0)
    scores = numbers(SAMPLES, CLASSES)
    whole = scores.clone().requires_grad_()
    expected = functional.cross_entropy(whole, **options)
    expected.sum().backward()
    where = mesh(shape)
    x = sw.distribute_tensor(scores, where, placements).requires_grad_()
    put = {
        name: sw.distribute_tensor(value, where, [Replicate()] * len(shape)) if name in ("target", "weight") else value
        for name, value in options.items()
    }
    events = []
    with observe(events.append):
        loss = functional.cross_entropy(x, **put)
        loss.sum().backward()
    torch.testing.assert_close(loss.full_tensor(), expected)
    torch.testing.assert_close(x.grad.full_tensor(), whole.grad)
    assert x.grad.placements == tuple(placements)
    return [event.nbytes for event in events]


@pytest.mark.parametrize("variant", VARIANTS)
def test_cross_entropy_over_sharded_classes_moves_a_few_numbers_per_sample(pool, variant):
    for moved in pool.run(moved_by_cross_entropy, variant, (4,), [Shard(1)]):
        assert moved
        assert max(moved) <= SAMPLES * 4, moved


def test_classes_and_batch_sharded_at_once(pool):
    assert max(pool.run(moved_by_cross_entropy, "mean", (2, 2), [Shard(0), Shard(1)])[0]) <= SAMPLES * 4


def softmaxes():
    lines = numbers(5, 3, 6)
    lines[0, 0] = -float("inf")
    lines[1, 1, 2] = float("nan")
    for op in (torch.softmax, torch.log_softmax, functional.softmin):
        for dim in (0, 1, -1):
            whole = lines.clone().requires_grad_()
            x = sw.distribute_tensor(lines, mesh((4,)), [Shard(dim % 3)]).requires_grad_()
            result, expected = op(x, dim=dim), op(whole, dim=dim)
            assert result.placements == (Shard(dim % 3),)
            torch.testing.assert_close(result.full_tensor(), expected, equal_nan=True)
            (result * result).sum().backward()
            (expected * expected).sum().backward()
            torch.testing.assert_close(x.grad.full_tensor(), whole.grad, equal_nan=True)


def test_softmax_over_a_sharded_dim_keeps_it_sharded(pool):
    pool.run(softmaxes)


def refusals():
    """A target that is no class fails on every rank, as it fails on one device."""
    x = sw.distribute_tensor(numbers(4, 6), mesh((4,)), [Shard(1)])
    y = sw.distribute_tensor(torch.tensor([0, 1, 6, 2]), mesh((4,)), [Replicate()])
    with pytest.raises(IndexError):
        functional.cross_entropy(x, y)


def test_a_target_out_of_bounds_is_refused(pool):
    pool.run(refusals)
