"""Training that torchao changes, on four ranks beside one device: fake quantisation, and products in float8."""

import copy
import dataclasses

import models
import pytest
import torch
import torchao.quantization as ao
from models import COLUMNS_AND_ROWS, R
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.quantization import PerGroup, quantize_
from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

import shardwise as sw
from shardwise import Shard
from shardwise.testing import mesh

INT4 = {"weight_dtype": torch.int4}
BASES = {
    "int4 weights": lambda: ao.IntxWeightOnlyConfig(granularity=PerGroup(32), **INT4),
    "int4 weights, int8 activations": lambda: ao.Int8DynamicActivationIntxWeightConfig(
        weight_granularity=PerGroup(32), **INT4
    ),
}


def fake(base):
    return lambda model: quantize_(model, QATConfig(BASES[base](), step="prepare"))


def fake_of_each(model):
    activations = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    weights = IntxFakeQuantizeConfig(torch.int4, group_size=32)
    quantize_(model, QATConfig(activation_config=activations, weight_config=weights, step="prepare"))


def float8(recipe):
    def prepare(model):
        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        convert_to_float8_training(model, config=config)

    return prepare


PREPARED = {
    **{f"fake {base}": fake(base) for base in BASES},
    "fake, each by itself": fake_of_each,
    "fake float8": lambda model: quantize_(
        model, QATConfig(ao.Float8DynamicActivationFloat8WeightConfig(), step="prepare")
    ),
    "float8, a scale for a tensor": float8("tensorwise"),
    "float8, a scale for a row": float8("rowwise"),
    "float8, a scale for a row, exact gradients of weights": float8("rowwise_with_gw_hp"),
}
LAYOUTS = {
    "replicated": ({}, R),
    "batch": ({}, [Shard(0)]),
    "columns and rows": (COLUMNS_AND_ROWS, R),
    "rows everywhere": ({"*.weight": [Shard(0)]}, [Shard(0)]),
}


def step(model, x):
    y = model(x)
    (y * y).mean().backward()
    grads = [p.grad for p in model.parameters()]
    return [y.detach(), *grads]


def relative(ours, theirs):
    ours = ours.full_tensor() if isinstance(ours, sw.MeshTensor) else ours
    return float((ours - theirs).abs().max() / theirs.abs().max())


def steps():
    found = {}
    for name, prepare in PREPARED.items():
        model = models.block()
        prepare(model)
        for layout, (plan, of_input) in LAYOUTS.items():
            one, several = copy.deepcopy(model), copy.deepcopy(model)
            expected = step(one, models.batch(8))
            sw.distribute_module(several, mesh((4,)), plan)
            got = step(several, sw.distribute_tensor(models.batch(8), mesh((4,)), of_input))
            found[name, layout] = max(map(relative, got, expected))
    return found


# A sum in another order may move an activation over the edge between two values of 8 bits. Then one result differs by
# that element's share in its sum. Weights do not move: their values are those of one device.
ROUNDED = 2e-3
SUMMED = 1e-5
WEIGHTS_ONLY = ("fake int4 weights",)


def test_a_step_is_that_of_one_device(pool):
    for found in pool.run(steps):
        assert len(found) == len(PREPARED) * len(LAYOUTS)
        most = {name: SUMMED if name in WEIGHTS_ONLY else ROUNDED for name in PREPARED}
        assert [(where, by) for where, by in found.items() if by > most[where[0]]] == []


def scaled_products(recipe):
    """In bfloat16 and by torch's own float8 product, not emulated."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).bfloat16()
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    one, several = copy.deepcopy(model), copy.deepcopy(model)
    x = models.batch(16, dtype=torch.bfloat16)
    expected = step(one, x)
    sw.distribute_module(several, mesh((4,)), {"0.*": [Shard(0)], "2.weight": [Shard(1)]})
    got = step(several, sw.distribute_tensor(x, mesh((4,)), R))
    return max(relative(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_products_in_float8(pool, recipe):
    assert max(pool.run(scaled_products, recipe)) < 1.6e-2


def prepared_trained_converted(base):
    one, several = models.block(), models.block()
    for model in (one, several):
        quantize_(model, QATConfig(BASES[base](), step="prepare"))
    sw.distribute_module(several, mesh((4,)), COLUMNS_AND_ROWS)
    x = models.batch(8)
    placed = sw.distribute_tensor(x, mesh((4,)), R)
    for model, batch in ((one, x), (several, placed)):
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for _ in range(3):
            optimizer.zero_grad()
            step(model, batch)
            optimizer.step()
        quantize_(model, QATConfig(BASES[base](), step="convert"))
    with torch.no_grad():
        return type(several.down.weight).__name__, relative(several(placed), one(x))


@pytest.mark.parametrize("base", BASES)
def test_a_model_is_prepared_trained_and_converted_on_the_mesh(pool, base):
    for kind, by in pool.run(prepared_trained_converted, base):
        assert kind == "IntxUnpackedToInt8Tensor"
        assert by < (ROUNDED if "activations" in base else SUMMED)
