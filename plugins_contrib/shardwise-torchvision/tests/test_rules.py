"""The rules: what the oracle says of them, of some without their conditions, and which rows they have."""

from importlib import import_module

import pytest
import torch

from shardwise import Replicate
from shardwise.planning.results import output_metas
from shardwise.planning.strategies import make_call
from shardwise.rule import AbstractMesh, OpSchema, TensorMeta, TensorSpec, rule
from shardwise.testing import RuleRefuted, check_rule
from shardwise_torchvision import deformable, plugin, position_sensitive, regions, samples

vision = torch.ops.torchvision
RULES = [
    getattr(import_module(f"shardwise_torchvision.{module}"), name)
    for module, rules in plugin.RULES.items()
    for name in dict.fromkeys(rules.values())
]


@pytest.mark.parametrize("of", RULES, ids=lambda r: str(r).partition(":")[0])
def test_the_oracle_accepts(of):
    report = check_rule(of, samples.SAMPLES, stand_ins=samples.STAND_INS, cases=250)
    assert not report.unexercised
    assert not report.unsampled


def refuted(careless, row):
    with pytest.raises(RuleRefuted, match=row):
        check_rule(careless, samples.SAMPLES, stand_ins=samples.STAND_INS, meshes=[(4,)])


def test_regions_of_other_ranks_pictures_do_not_count():
    def all_count(local, pictures, rois, *settings):
        numbered, _ = regions.own(local, local.spec("input"), rois)
        return local.call.op(regions.on_shard(pictures), numbered, *settings)

    refuted(
        rule(vision.roi_align.default, "n _ _ _, _ _ -> _ _ _ _", reduce={"n": "sum"}, lowering={"n": all_count}),
        "shard n",
    )


def test_channels_of_one_grid_stay_together():
    careless = rule(vision.ps_roi_pool.default, "_ c _ _, k _ -> k c _ _, k c _ _")
    refuted(careless, "shard c")


def test_a_maximum_is_not_linear():
    careless = rule(vision.roi_pool.default, "_ _ _ _, _ _ -> _ _ _ _, _ _ _ _", partial=["sum, R -> sum, R"])
    refuted(careless, "sum, R -> sum, R")


# -- rows --------------------------------------------------------------------------------------------------------


def rows(of, op, *args):
    """The rows of a call without those that have a partial operand alone; what must divide is behind them."""

    def spec(value):
        tensor = isinstance(value, torch.Tensor)
        return TensorSpec(AbstractMesh((2,)), [Replicate()], TensorMeta.of(value)) if tensor else value

    schema = OpSchema.of(op, *map(spec, args), static=of.static)
    found = of.rows(make_call(of, schema, output_metas(op, schema.values, of.meta)))
    plain = [r for r in found if not r.name.startswith(("sum", "avg")) and ", sum, R -> " not in r.name]
    return [f"{r}{f' of {r.divides[0][2]}' if r.divides else ''}" for r in plain]


def empty(*shape):
    return torch.empty(shape, device="meta")


def test_rows_of_roi_align():
    assert rows(regions.ROI_ALIGN, vision.roi_align.default, empty(2, 6, 5, 5), empty(7, 5), 1.0, 2, 2, -1, True) == [
        "shard n: [S(0), R] -> [P(sum)]",
        "shard c: [S(1), R] -> [S(1)]",
        "shard k: [R, S(0)] -> [S(0)]",
        "R: [R, R] -> [R]",
    ]


def test_rows_of_position_sensitive_pooling():
    found = rows(position_sensitive.POOL, vision.ps_roi_pool.default, empty(2, 24, 5, 5), empty(7, 5), 1.0, 2, 2)
    assert found == [
        "shard c: [S(1), R] -> [S(1), S(1)] of 6",
        "shard k: [R, S(0)] -> [S(0), S(0)]",
        "n, R -> sum, R: [S(0), R] -> [P(sum), R]",
        "R: [R, R] -> [R, R]",
    ]


def convolution(groups, offset_groups, *, masked=True):
    offset, mask = empty(2, offset_groups * 18, 4, 4), empty(2, offset_groups * 9, 4, 4) if masked else empty(2, 1)
    x, weight, bias = empty(2, 12, 4, 4), empty(8, 12 // groups, 3, 3), empty(8)
    settings = (1, 1, 1, 1, 1, 1, groups, offset_groups, masked)
    of = rows(deformable.CONVOLUTION, vision.deform_conv2d.default, x, weight, offset, mask, bias, *settings)
    return [row for row in of if not row.startswith(("R,", "R:", "shard n"))]


@pytest.mark.parametrize(
    ("groups", "offset_groups", "masked", "expected"),
    [
        (1, 1, True, "i, i, R, R, sum -> sum: [S(1), S(1), R, R, P(sum)] -> [P(sum)]"),
        (1, 4, True, "i, i, i, i, sum -> sum: [S(1), S(1), S(1), S(1), P(sum)] -> [P(sum)] of 4"),
        (1, 4, False, "i, i, i, R, sum -> sum: [S(1), S(1), S(1), R, P(sum)] -> [P(sum)] of 4"),
        (4, 1, True, "shard g: [S(1), S(0), R, R, S(0)] -> [S(1)] of 4"),
        (4, 2, True, "shard g: [S(1), S(0), S(1), S(1), S(0)] -> [S(1)] of 2"),
    ],
)
def test_a_shard_of_channels_takes_whole_groups_of_both_kinds(groups, offset_groups, masked, expected):
    output = ["shard o: [R, S(0), R, R, S(0)] -> [S(1)]"] if groups == 1 else []
    assert sorted(convolution(groups, offset_groups, masked=masked)) == sorted([*output, expected])


def test_groups_that_cut_each_other_are_whole():
    assert convolution(2, 3) == []
