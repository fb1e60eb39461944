"""What a tool asks about one call."""

import pytest
import torch

from shardwise.errors import NoStrategyError, PlacementError
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import REPLICATE, partial, shard
from shardwise.kernel.schema import OpSchema
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.strategies import result_metas, rows, strategy
from shardwise.rule.authoring import rule

aten = torch.ops.aten
MESH = AbstractMesh((2, 2))
MM = rule(aten.mm.default, "m k, k n -> m n", reduce={"k": "sum"})


def spec(shape, *placements):
    return TensorSpec(MESH, placements, TensorMeta.contiguous(shape, torch.float32))


SCHEMA = OpSchema.of(aten.mm.default, spec((8, 6), shard(0), REPLICATE), spec((6, 4), REPLICATE, REPLICATE))


def test_result_metas_are_those_of_the_op():
    (meta,) = result_metas(SCHEMA)
    assert meta == TensorMeta.contiguous((8, 4), torch.float32)


def test_results_that_depend_on_data_have_no_metas():
    with pytest.raises(NoStrategyError, match=r"depends on data"):
        result_metas(OpSchema.of(aten.nonzero.default, spec((8, 6), REPLICATE, REPLICATE)))


def test_rows_do_not_depend_on_where_operands_lie():
    listed = rows(MM, SCHEMA)
    assert [row.name for row in listed] == ["shard m", "shard k", "shard n", "R"]
    whole = OpSchema.of(aten.mm.default, spec((8, 6), REPLICATE, REPLICATE), spec((6, 4), REPLICATE, REPLICATE))
    assert rows(MM, whole) == listed


def test_a_strategy_has_the_cost_of_moving_each_operand():
    metas = result_metas(SCHEMA)
    free = strategy(SCHEMA, [s.placements for s in SCHEMA.specs], [(shard(0), REPLICATE)], metas)
    assert free.cost == 0.0
    assert str(free) == "[S(0), R], [R, R] -> [S(0), R]"
    moved = strategy(SCHEMA, [(shard(1),) * 2, (shard(0),) * 2], [(partial("sum"),) * 2], metas)
    assert moved.redistribute_cost[0] > 0
    assert moved.output_specs[0].reductions == {0: "sum", 1: "sum"}


def test_a_strategy_takes_no_placement_that_a_tensor_cannot_have():
    with pytest.raises(PlacementError, match=r"there is no dim 2"):
        strategy(SCHEMA, [(shard(2), REPLICATE), (REPLICATE,) * 2], [(REPLICATE,) * 2], result_metas(SCHEMA))
