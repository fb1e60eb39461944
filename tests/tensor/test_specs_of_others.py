"""``MeshTensor(local, spec)`` with a spec of another class, and nested tensors of MeshTensors."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta as DTensorMeta
from torch.nn import functional

import shardwise as sw
from shardwise import MeshTensor, Replicate, Shard
from shardwise.errors import ArgumentError, LayoutError
from shardwise.testing import mesh

X = torch.arange(24.0).view(6, 4)


def as_dtensor_is_made():
    on = mesh((2,))
    spec = DTensorSpec(on, (Shard(0),), DTensorMeta(X.shape, X.stride(), X.dtype))
    expected = sw.distribute_tensor(X, on, [Shard(0)])
    tensor = MeshTensor(expected.to_local(), spec, requires_grad=True)
    assert tensor.spec is expected.spec
    assert tensor.requires_grad
    torch.testing.assert_close((tensor * 2).full_tensor(), X * 2)


def test_a_spec_of_dtensor(two_ranks):
    two_ranks.run(as_dtensor_is_made)


def without_a_spec():
    for spec in (None, [Shard(0)], mesh((2,))):
        with pytest.raises(ArgumentError, match="from_local"):
            MeshTensor(X, spec)


def test_what_is_not_a_spec(two_ranks):
    two_ranks.run(without_a_spec)


def nested():
    def on(x, *layout):
        return sw.distribute_tensor(x, mesh((2,)), layout or [Replicate()])

    x, offsets = on(X), torch.tensor([0, 2, 6])
    parts = torch.nested.nested_tensor([X[:2], X[:3]], layout=torch.jagged)
    for make in (
        lambda: torch.nested.nested_tensor_from_jagged(x, offsets),
        lambda: torch.nested.as_nested_tensor([x[:2], x[:3]], layout=torch.jagged),
        lambda: torch.nested.as_nested_tensor([x[:2], x[:3]]),
        lambda: functional.linear(parts, on(torch.ones(4, 4), Shard(0))),
    ):
        with pytest.raises(LayoutError, match="pad_sequence"):
            make()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused_with_what_to_do(two_ranks):
    two_ranks.run(nested)
