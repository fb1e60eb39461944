"""A kernel that returns other shapes than torch says without data is found at its first run."""

import pytest
import torch

import shardwise as sw
from shardwise import Shard
from shardwise.errors import RuleError
from shardwise.rule import Flow, rule_from
from shardwise.testing import mesh
from shardwise.testing.isolated import isolated_registry


def refused():
    library = torch.library.Library("acme_shapes", "DEF")
    library.define("halved(Tensor x) -> (Tensor, Tensor)")
    library.impl("halved", lambda x: (x * 2, x[: len(x) // 2].clone()), "CPU")
    library.impl("halved", lambda x: (x * 2, torch.empty_like(x)), "Meta")
    halved = torch.ops.acme_shapes.halved.default

    @rule_from(halved)
    def RULE(x):  # as in a plugin
        return Flow([("a", None)], [("a", None), ("a", None)])

    x = sw.distribute_tensor(torch.rand(8, 3), mesh((2,)), [Shard(0)])
    with isolated_registry(RULE):
        for _ in range(2):  # a plan that failed is tried again
            with pytest.raises(RuleError, match=r"kernel for cpu returned a tensor of shape \(2, 3\)") as raised:
                halved(x)
            assert "of which this rank has (4, 3)" in str(raised.value)
            assert "results=" in str(raised.value)


def test_a_kernel_with_other_shapes_is_refused(two_ranks):
    two_ranks.run(refused)
