"""What only the meta device refuses is computed, and what a kernel refuses is refused by the kernel's error."""

from __future__ import annotations

import pytest
import torch

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.engine import kernel_results
from shardwise.testing import mesh

COMPLEX = torch.tensor([1 + 2j, complex("nan"), 3 - 1j, 0, 2, complex("inf"), 1j, -1]).view(4, 2)
ROWS = torch.arange(8.0).view(4, 2)
FLAGS = ROWS > 2

TAKEN = {
    "complex numbers in place": lambda put: put(COMPLEX).clone().nan_to_num_(),
    "flags for a sum": lambda put: torch.nansum(put(FLAGS), 0, out=put(FLAGS).new_empty(0)),
}
REFUSED = {
    "flags divided": lambda put: torch.floor_divide(put(FLAGS), put(FLAGS)),
    "complex norm": lambda put: torch.nn.functional.layer_norm(put(COMPLEX), [2]),
    "integers shrunk": lambda put: torch.nn.functional.softshrink(put(ROWS.long())),
    "matrix of one dim": lambda put: torch.matrix_exp(put(ROWS)[0]),
    "number in a list": lambda put: torch.cat([put(FLAGS).sum(), put(FLAGS).sum()]),
    "least of none": lambda put: torch.amin(put(ROWS)[:0], 0),
}


def computes(name, layout):
    expected = TAKEN[name](lambda t: t.clone())
    result = TAKEN[name](lambda t: sw.distribute_tensor(t, mesh((4,)), layout))
    torch.testing.assert_close(result.full_tensor(), expected, equal_nan=True, check_stride=True)


@pytest.mark.parametrize("layout", [[Replicate()], [Shard(0)], [Shard(1)]])
@pytest.mark.parametrize("name", TAKEN)
def test_what_only_the_meta_device_refuses_is_computed(pool, name, layout):
    pool.run(computes, name, layout)


def refuses(name, layout):
    with pytest.raises((RuntimeError, IndexError, TypeError)) as expected:
        REFUSED[name](lambda t: t)
    with pytest.raises(expected.type) as error:
        REFUSED[name](lambda t: sw.distribute_tensor(t, mesh((4,)), layout))
    assert str(error.value).partition("\n")[0] == str(expected.value).partition("\n")[0]


@pytest.mark.parametrize("layout", [[Replicate()], [Shard(0)], [Shard(1)]])
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_kernel_refuses_is_its_own_error(pool, name, layout):
    pool.run(refuses, name, layout)


def asks(op, shapes, *rest):
    """Whether the kernel of an op was asked about a call that the meta device refuses."""
    asked, real = [], kernel_results.run_on_ones
    kernel_results.run_on_ones = lambda *args: asked.append(1) or real(*args)
    try:
        with pytest.raises(RuntimeError):
            op(*(sw.distribute_tensor(torch.ones(shape), mesh((4,)), [Replicate()]) for shape in shapes), *rest)
    finally:
        kernel_results.run_on_ones = real
    return bool(asked)


def test_a_private_kernel_is_not_asked(pool):
    """It may trust what torch gives it."""
    private, public = torch.ops.aten._cdist_forward.default, torch.ops.aten.renorm.default
    assert not any(pool.run(asks, private, [(4, 2), (4, 3)], 2.0, None))
    assert all(pool.run(asks, public, [(3,)], 2.0, 0, 1.0))
