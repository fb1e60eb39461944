"""What cannot be placed is an error with the numbers, on every rank, and the module is as it was."""

import models
import pytest
import torch
import torchao.quantization as ao
from torch import nn
from torchao.quantization import Int8Tensor, PerGroup, quantize_
from torchao.utils import TorchAOBaseTensor

import shardwise_torchao
from shardwise import Partial, Shard
from shardwise.errors import PlacementError
from shardwise.testing import mesh


class Packed(TorchAOBaseTensor):
    """As torchao's packed layouts: two values of a row in a byte."""

    tensor_data_names = ("qdata",)
    tensor_attribute_names = ()

    def __new__(cls, qdata):
        return torch.Tensor._make_wrapper_subclass(cls, (qdata.shape[0], 2 * qdata.shape[1]), dtype=torch.bfloat16)

    def __init__(self, qdata):
        self.qdata = qdata


def message(place):
    try:
        place()
    except PlacementError as error:
        return str(error)
    return "no error"


def grouped():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 8), nn.Linear(8, 8))
    only = lambda module, _: isinstance(module, nn.Linear) and module.in_features == 96
    quantize_(model, ao.Int8WeightOnlyConfig(granularity=PerGroup(32)), only)
    return model


def cut_inside_a_block():
    model = grouped()
    kept = model[0].weight, model[1].weight
    told = message(lambda: shardwise_torchao.distribute_module(model, mesh((4,)), {"0.weight": [Shard(1)]}))
    return told, model[0].weight is kept[0] and model[1].weight is kept[1]


CUT = (
    "place '0.weight' by the pattern '0.weight': place a weight of shape (8, 96) (Int8Tensor) as [S(1)] on a mesh of "
    "shape (4,): dim 1 has 3 blocks of 32 values with one scale each, and the ranks would start at 0, 24, 48, 72, "
    "inside of blocks. Quantise in blocks that the ranks can divide among them, shard another dim, or replicate it."
)


def test_a_block_of_one_scale_is_not_cut(pool):
    assert pool.run(cut_inside_a_block) == [(CUT, True)] * 4


def blocks_over_more_ranks():
    model = nn.Linear(64, 8)
    quantize_(model, ao.Int8WeightOnlyConfig(granularity=PerGroup(32)))
    told = message(lambda: shardwise_torchao.distribute_module(model, mesh((4,)), {"weight": [Shard(1)]}))
    return "2 blocks of 32" in told


def test_fewer_blocks_than_ranks_are_refused(pool):
    assert pool.run(blocks_over_more_ranks) == [True] * 4


def packed_and_plain():
    packed = nn.Linear(8, 4)
    packed.weight = nn.Parameter(Packed(torch.zeros(4, 4, dtype=torch.uint8)), requires_grad=False)
    plain = torch.zeros(4, 4)
    return (
        message(lambda: shardwise_torchao.distribute_module(packed, mesh((4,)), {"weight": [Shard(0)]})),
        message(lambda: shardwise_torchao.distribute_quantised(plain, mesh((4,)))),
    )


def test_packed_weights_and_plain_tensors_are_refused(pool):
    of_packed, of_plain = pool.run(packed_and_plain)[0]
    assert (
        "'weight' by the pattern 'weight': place a weight of shape (4, 8) (Packed) with its scales: its values"
        in of_packed
    )
    assert "Int8Tensor, Float8Tensor, IntxUnpackedToInt8Tensor" in of_packed
    assert "torchao has not quantised it" in of_plain


def partial_weight():
    model = grouped()
    return message(lambda: shardwise_torchao.distribute_quantised(model[0].weight, mesh((4,)), [Partial("sum")]))


def test_a_quantised_weight_is_not_partial(pool):
    told = "place a weight of shape (8, 96) (Int8Tensor) as [P(sum)]: a scale is for whole values"
    assert all(answer.startswith(told) for answer in pool.run(partial_weight))


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ({"0.weigth": [Shard(0)]}, "no parameter or buffer has such a name; there are 0.weight, 0.bias"),
        ({"0.*": [Shard(0)], "0.weight": [Shard(1)]}, "earlier patterns take all that it fits: '0.*' takes '0.weight'"),
        ({"0.weight": [Shard(2)]}, "'0.weight' by the pattern '0.weight'"),
    ],
)
def test_patterns_without_effect(pool, plan, told):
    def place():
        return message(lambda: shardwise_torchao.distribute_module(grouped(), mesh((4,)), plan))

    assert all(told in answer for answer in pool.run(place))


def test_the_kinds_that_are_placed_are_those_of_this_torchao():
    model = models.quantised("int8 weights by row", models.block())
    assert type(model.gate.weight) is Int8Tensor
