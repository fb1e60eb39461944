"""``x[...]`` takes and refuses the indices that torch takes and refuses, by errors of the same types."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.nn import functional

import shardwise as sw
from shardwise import Replicate, Shard, errors
from shardwise.testing import mesh

X = torch.arange(24.0).view(6, 4)
ROWS = torch.tensor([2, 0, 5])
LAYOUTS = ([Replicate()], [Shard(0)], [Shard(1)])

TAKEN = {
    "a list of floats": lambda x, _: x[[1.0, 2.7]],
    "lists of floats and integers": lambda x, _: x[[1.5, 2], [0, 1]],
    "nested lists": lambda x, _: x[[[1, 2], [0, 3.7]]],
    "a list of floats beside a slice": lambda x, _: x[:, [3.0, -1.0]],
    "flags as bytes": lambda x, _: x[(x > 5).byte()],
    "rows by bytes": lambda x, _: x[(x[:, 0] > 5).byte()],
    "columns by bytes": lambda x, _: x[:, (x[0] > 1).byte()],
    "written by a list of floats": lambda x, _: x.__setitem__([1.0], 7.0) or x,
    "written by bytes": lambda x, _: x.__setitem__((x[:, 0] > 5).byte(), x[0] + 1) or x,
}
REFUSED = {
    "floats": lambda x, rows: x[rows.double()],
    "floats behind a slice": lambda x, _: x[:, x[0]],
    "one float": lambda x, _: x[x[0, 0]],
    "floats to write to": lambda x, rows: x.__setitem__(rows.double(), 0.0),
    "a number written by bytes": lambda x, _: x.__setitem__((x > 5).byte(), 0.0),
    "short integers": lambda x, rows: x[rows.short()],
    "floats, unsafely": lambda x, rows: torch.ops.aten._unsafe_index(x, [rows.double()]),
    "short integers, unsafely": lambda x, rows: torch.ops.aten._unsafe_index(x, [rows.short()]),
    "flags, unsafely": lambda x, _: torch.ops.aten._unsafe_index(x, [x[:, 0] > 5]),
    "a matrix of rows to select": lambda x, rows: x.index_select(0, rows[None]),
    "a table of one dim": lambda x, rows: functional.embedding(rows, x[0]),
    "a window that stands still": lambda x, _: functional.conv1d(x[..., None], x[..., None], stride=0),
    "a number of many": lambda x, _: float(x),
    "an integer of many": lambda x, _: int(x),
    "a complex number of many": lambda x, _: complex(x),
    "a truth of many": lambda x, _: bool(x),
    "an item of many": lambda x, _: x.item(),
    "an index of many": lambda _, rows: operator.index(rows),
    "a range of many": lambda _, rows: range(rows),
}


def on_mesh(case, layout):
    return case(
        *(sw.distribute_tensor(t.clone(), mesh((2,)), layout if t.ndim > 1 else [Replicate()]) for t in (X, ROWS))
    )


def takes(name, layout):
    torch.testing.assert_close(on_mesh(TAKEN[name], layout).full_tensor(), TAKEN[name](X.clone(), ROWS))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", TAKEN)
def test_an_index_that_torch_takes(two_ranks, name, layout):
    two_ranks.run(takes, name, layout)


def refuses(name, layout):
    with pytest.raises((RuntimeError, IndexError, TypeError, ValueError)) as expected:
        REFUSED[name](X.clone(), ROWS)
    with pytest.raises(expected.type):
        on_mesh(REFUSED[name], layout)


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
@pytest.mark.parametrize("name", REFUSED)
def test_an_index_that_torch_refuses(two_ranks, name, layout):
    two_ranks.run(refuses, name, layout)


def test_errors_of_one_element_are_those_of_torch_as_well():
    assert errors.ItemValueError.__mro__[1:3] == (errors.ItemError, errors.ShardingError)
    assert issubclass(errors.ItemValueError, ValueError)
    assert issubclass(errors.ItemTypeError, errors.ItemError)
    assert issubclass(errors.ItemTypeError, TypeError)
