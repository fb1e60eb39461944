"""Random programs of 5 to 15 ops on random placements, forward and backward, against one device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.testing import mesh

TIGHT = {"rtol": 1e-9, "atol": 1e-11}
SHAPES = [(4, 6), (6, 4), (5, 6), (7,), (1, 6), (2, 3, 4), (8, 8)]


# Each op takes the values so far and an integer that it may spend on choices, and returns a value or None when nothing
# fits. Values stay small, so that float64 leaves errors far below the tolerance.
def unary(values, n):
    ops = [torch.tanh, torch.neg, torch.relu, torch.sigmoid, torch.sin, torch.abs, lambda x: x * 0.5, lambda x: 2 - x]
    return ops[n % len(ops)](pick(values, n))


def binary(values, n):
    a = pick(values, n)
    fitting = [b for b in values if broadcasts(a.shape, b.shape)]
    b = pick(fitting, n // 7)
    ops = [torch.add, torch.sub, torch.mul, torch.maximum, lambda x, y: x / (2 + y.abs())]
    return torch.tanh(ops[n % len(ops)](a, b)) if n % 2 else ops[n % len(ops)](a, b)


def product(values, n):
    a = pick([v for v in values if v.ndim == 2], n)
    fitting = [b for b in values if b.ndim == 2 and a is not None and b.shape[0] == a.shape[1]]
    b = pick(fitting, n // 5)
    return None if a is None or b is None else torch.tanh(a @ b)


def reduction(values, n):
    a = pick([v for v in values if v.ndim], n)
    if a is None:
        return None
    ops = [torch.sum, torch.mean, torch.amax, torch.amin, torch.logsumexp]
    return torch.tanh(ops[n % len(ops)](a, dim=n % a.ndim, keepdim=bool(n // 3 % 2)))


def regroup(values, n):
    a = pick([v for v in values if v.ndim > 1], n)
    if a is None:
        return None
    return [a.flatten(0, 1), a.transpose(0, -1), a.unsqueeze(n % a.ndim), a.reshape(-1)][n % 4]


def cut(values, n):
    a = pick([v for v in values if v.ndim and v.shape[0] > 1], n)
    if a is None:
        return None
    return [a[1:], a[-1], a.narrow(0, 0, 2), a.split(2)[0], a.flip(0)][n % 5]


def join(values, n):
    a = pick(values, n)
    alike = [b for b in values if b.shape == a.shape]
    b = pick(alike, n // 3)
    return torch.stack([a, b], n % (a.ndim + 1)) if n % 2 or a.ndim == 0 else torch.cat([a, b], n % a.ndim)


def along(values, n):
    a = pick([v for v in values if v.ndim], n)
    if a is None:
        return None
    return [torch.softmax(a, n % a.ndim), torch.cumsum(torch.tanh(a), n % a.ndim)][n // 2 % 2]


def pick(values, n):
    return values[n % len(values)] if values else None


def broadcasts(a, b):
    try:
        return torch.broadcast_shapes(a, b).numel() <= 256
    except RuntimeError:
        return False


OPS = [unary, binary, product, reduction, regroup, cut, join, along]


def run_program(leaves, steps, spread=None):
    """All values of a program; ``spread`` puts a value on other placements now and then."""
    values = list(leaves)
    for i, (which, n) in enumerate(steps):
        value = OPS[which](values, n)
        if value is not None:
            values.append(spread(value, i) if spread else value)
    loss = sum(v.square().mean() for v in values[-3:])
    loss.backward()
    return [v.detach() for v in values[len(leaves) :]], [leaf.grad for leaf in leaves]


def layouts(numbers, ndim, mesh_ndim):
    choices = [Replicate(), Partial(), *(Shard(d) for d in range(ndim))]
    return [choices[n % len(choices)] for n in numbers[:mesh_ndim]]


def compare(mesh_shape, shapes, steps, numbers):
    m = mesh(mesh_shape)
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    expected = run_program([t.clone().requires_grad_() for t in full], steps)

    def spread(value, i):
        if numbers[i % len(numbers)] % 3:
            return value
        return value.redistribute(placements=layouts(numbers[i:] + numbers, value.ndim, m.ndim))

    leaves = [
        sw.distribute_tensor(t, m, layouts(numbers[i:] + numbers, t.ndim, m.ndim)).requires_grad_()
        for i, t in enumerate(full)
    ]
    results = run_program(leaves, steps, spread)
    for mine, whole in zip([*results[0], *results[1]], [*expected[0], *expected[1]], strict=True):
        if whole is None:
            assert mine is None
        else:
            torch.testing.assert_close(mine.full_tensor(), whole, **TIGHT)


programs = st.lists(st.tuples(st.integers(0, len(OPS) - 1), st.integers(0, 10**6)), min_size=5, max_size=15)
meshes = st.sampled_from([(4,), (2, 2), (1, 4)])


def checked(pool, data):
    shapes = data.draw(st.lists(st.sampled_from(SHAPES), min_size=2, max_size=4))
    numbers = data.draw(st.lists(st.integers(0, 1000), min_size=8, max_size=8))
    pool.run(compare, data.draw(meshes), shapes, data.draw(programs), numbers)


@pytest.mark.slow
@pytest.mark.sample
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_programs_compute_what_one_device_does(pool, data):
    checked(pool, data)


@pytest.mark.slow
@pytest.mark.sample
@settings(max_examples=150, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_fixed_sample_of_random_programs(pool, data):
    checked(pool, data)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_many_random_programs_compute_what_one_device_does(pool, data):
    checked(pool, data)
