"""Operators that take functions, on MeshTensors: a plugin's function runs in their place, or an error says so."""

import pytest
import torch

import shardwise as sw
from shardwise import Shard
from shardwise.discovery.process import default_registry
from shardwise.errors import NoRuleError
from shardwise.testing import mesh


def without_a_function():
    flex = torch.ops.higher_order.flex_attention
    m = mesh((2,))
    x = sw.distribute_tensor(torch.ones(2, 1, 4, 4), m, [Shard(0)])
    x + x  # the registry is asked at the first op
    function = default_registry().higher_order.pop(flex)
    mask = (4, 4, *[None] * 12, 4, 4, lambda *_: True)
    try:
        with pytest.raises(NoRuleError, match="add_higher_order"):
            flex(x, x, x, lambda score, *_: score, mask, 1.0, {})
    finally:
        default_registry().higher_order[flex] = function


def test_an_operator_that_no_plugin_takes(two_ranks):
    two_ranks.run(without_a_function)
