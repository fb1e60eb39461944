"""Quantised models on four ranks beside torchao on one device: placed, and quantised when they are placed already."""

import copy
import re
from pathlib import Path

import models
import pytest
import torch
import torchao.quantization as ao
from models import COLUMNS_AND_ROWS, CONFIGS, EXACT, FLOAT8, R
from torch import nn
from torchao.quantization import PerGroup, quantize_

import shardwise as sw
import shardwise_torchao
from shardwise import Replicate, Shard
from shardwise.testing import mesh

LAYOUTS = {
    "columns and rows": ((4,), COLUMNS_AND_ROWS, R),
    "rows of weights, then whole": ((4,), {"gate.*": [Shard(0)], "up.*": [Shard(0)]}, R),
    "replicated, batch sharded": ((4,), {}, [Shard(0)]),
    "columns and rows by batch": (
        (2, 2),
        {"gate.*": {"tp": Shard(0)}, "up.*": {"tp": Shard(0)}, "down.*": {"tp": Shard(1)}},
        [Shard(0), Replicate()],
    ),
}
README = Path(__file__).parents[1] / "README.md"
NAMES = {(4,): ("tp",), (2, 2): ("dp", "tp")}


def difference(ours, theirs):
    """Relative to the largest element; 0 says the same bits."""
    ours = ours.full_tensor() if isinstance(ours, sw.MeshTensor) else ours
    return float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())


def run_placed(model, on, plan, of_input, dtype):
    shardwise_torchao.distribute_module(model, mesh(on, NAMES[on]), plan)
    with torch.no_grad():
        return model(sw.distribute_tensor(models.batch(dtype=dtype), mesh(on, NAMES[on]), of_input))


def placed_models(dtype):
    found = {}
    for name in CONFIGS:
        model = models.quantised(name, models.block(dtype=dtype))
        expected = model(models.batch(dtype=dtype))
        for layout, (on, plan, of_input) in LAYOUTS.items():
            result = run_placed(copy.deepcopy(model), on, plan, of_input, dtype)
            found[name, layout] = difference(result, expected)
    return found


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.bfloat16, 1.6e-2)])
def test_a_quantised_model_is_placed_and_gives_what_one_device_gives(pool, dtype, most):
    for found in pool.run(placed_models, dtype):
        assert len(found) == len(CONFIGS) * len(LAYOUTS)
        assert [(where, by) for where, by in found.items() if by > most] == []
        if dtype == torch.float32:
            assert [(where, by) for where, by in found.items() if where[0] in EXACT and by] == []


def quantised_when_placed():
    found = {}
    for name in CONFIGS:
        one, several = models.block(), models.block()
        models.quantised(name, one)
        sw.distribute_module(several, mesh((4,)), COLUMNS_AND_ROWS)
        models.quantised(name, several)
        pairs = dict(one.named_parameters())
        # The same integers and scales as one device has, though a shard of a row finds the largest of all shards.
        inner = [
            torch.equal(getattr(ours, part).full_tensor(), getattr(pairs[key], part))
            for key, ours in several.named_parameters()
            if isinstance(ours, ao.Int8Tensor | ao.Float8Tensor | ao.IntxUnpackedToInt8Tensor)
            for part in ours.__tensor_flatten__()[0]
        ]
        with torch.no_grad():
            result = several(sw.distribute_tensor(models.batch(), mesh((4,)), R))
            shardwise_torchao.distribute_module(several, mesh((4,)), COLUMNS_AND_ROWS)
            again = several(sw.distribute_tensor(models.batch(), mesh((4,)), R))
        by = max(difference(y, one(models.batch())) for y in (result, again))
        found[name] = len(inner) >= 6, all(inner), by
        assert several.gate.weight.qdata.placements == (Shard(0),)
        assert name != "int8 weights by row" or several.down.weight.scale.placements == (Replicate(),)
    return found


def test_torchao_quantises_a_placed_model_by_itself(pool):
    for found in pool.run(quantised_when_placed):
        assert list(found) == list(CONFIGS)
        assert {many and same for many, same, _ in found.values()} == {True}
        assert max(by for *_, by in found.values()) < 1e-6


def float8_products():
    found = {}
    for name, granularity in FLOAT8.items():
        model = models.float8_both(models.block(dtype=torch.bfloat16), granularity())
        expected = model(models.batch(dtype=torch.bfloat16))
        for layout, (on, plan, of_input) in LAYOUTS.items():
            result = run_placed(copy.deepcopy(model), on, plan, of_input, torch.bfloat16)
            found[name, layout] = difference(result, expected)
    return found


def test_float8_activations_take_their_scale_from_the_whole_mesh(pool):
    for found in pool.run(float8_products):
        assert len(found) == len(FLOAT8) * len(LAYOUTS)
        assert [(where, by) for where, by in found.items() if by > 1.6e-2] == []


# -- where the parts lie -----------------------------------------------------------------------------------------


def lie(name):
    model = models.quantised(name, models.block(bias=True))
    shardwise_torchao.distribute_module(model, mesh((4,)), COLUMNS_AND_ROWS | {"gate.bias": [Shard(0)]})
    weights = {key: p for key, p in model.named_parameters() if key.startswith(("gate", "down"))}
    local = sum(t.to_local().nbytes for t in shardwise_torchao.parts(model).values())
    return {
        key: {n: str(getattr(p, n).placements[0]) for n in p.__tensor_flatten__()[0]}
        if hasattr(p, "qdata")
        else str(p.placements[0])
        for key, p in weights.items()
    }, local


def test_scales_lie_with_their_values(pool):
    by_row, _ = pool.run(lie, "int8 weights by row")[0]
    whole, first, second = "R", "S(0)", "S(1)"
    assert by_row == {
        "gate.weight": {"qdata": first, "scale": first, "zero_point": first},
        "gate.bias": first,
        # A row has one scale, whichever part of it a rank has.
        "down.weight": {"qdata": second, "scale": whole, "zero_point": whole},
        "down.bias": whole,
    }
    by_group, local = pool.run(lie, "int8 weights by group")[0]
    assert by_group["down.weight"] == {"qdata": second, "scale": second, "zero_point": second}
    # Values of a byte, a scale of four and a zero point of one for each 32; biases of 64 and 32, and the norm.
    assert local == 3 * (64 * 128 // 4) * (32 + 5) // 32 + 4 * (32 + 128 + 64 + 64)


def tied():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False))
    quantize_(model, CONFIGS["int8 weights by row"]())
    model[2].weight = model[0].weight
    shardwise_torchao.distribute_module(model, mesh((4,)), {"*.weight": [Shard(0)]})
    return model[0].weight is model[2].weight, model[0].weight.qdata.placements


def test_a_weight_that_two_layers_share_is_placed_once(pool):
    assert pool.run(tied) == [(True, (Shard(0),))] * 4


def looked_up():
    only = lambda module, _: isinstance(module, nn.Embedding)
    config = ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))
    torch.manual_seed(0)
    table = nn.Embedding(100, 64)
    quantize_(table, config, only)
    indices = torch.tensor([1, 99, 0, 50, 7, 7])
    expected = table(indices)
    found = []
    for layout in ([Shard(0)], [Replicate()]):
        on_mesh = shardwise_torchao.distribute_module(copy.deepcopy(table), mesh((4,)), {"weight": layout})
        found.append(difference(on_mesh(sw.distribute_tensor(indices, mesh((4,)), [Shard(0)])), expected))
    return found


def test_a_quantised_embedding(pool):
    assert pool.run(looked_up) == [[0.0, 0.0]] * 4


# -- states and compiled code ------------------------------------------------------------------------------------


def gathered():
    model = models.quantised("int4 weights by group", models.block())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shardwise_torchao.distribute_module(model, mesh((4,)), COLUMNS_AND_ROWS)
    back = models.quantised("int4 weights by group", models.block(bias=False))
    for parameter in back.norm.parameters():
        parameter.data.zero_()
    back.load_state_dict({name: shardwise_torchao.whole(tensor) for name, tensor in model.state_dict().items()})
    parts = [
        torch.equal(getattr(back.state_dict()[name], part), getattr(tensor, part))
        for name, tensor in state.items()
        if hasattr(tensor, "qdata")
        for part in tensor.__tensor_flatten__()[0]
    ]
    return parts, torch.equal(
        back(models.batch()), models.quantised("int4 weights by group", models.block())(models.batch())
    )


def test_a_placed_model_is_made_whole(pool):
    assert pool.run(gathered) == [([True] * 9, True)] * 4


def through_a_checkpoint(folder):
    model = models.quantised("int8 weights by group", models.block())
    expected = model(models.batch())
    shardwise_torchao.distribute_module(model, mesh((4,)), COLUMNS_AND_ROWS)
    sw.checkpoint.save({"model": shardwise_torchao.parts(model)}, folder, step=1)
    torch.manual_seed(7)
    other = models.quantised("int8 weights by group", models.Block())
    grid = mesh((2, 2), NAMES[2, 2])
    shardwise_torchao.distribute_module(other, grid, LAYOUTS["columns and rows by batch"][1])
    before = difference(other(sw.distribute_tensor(models.batch(), grid, [Replicate()] * 2)), expected)
    sw.checkpoint.load({"model": shardwise_torchao.parts(other)}, folder)
    return before > 0.01, difference(other(sw.distribute_tensor(models.batch(), grid, [Replicate()] * 2)), expected)


def test_a_checkpoint_of_one_mesh_is_loaded_on_another(pool, tmp_path):
    for differed, by in pool.run(through_a_checkpoint, str(tmp_path)):
        assert differed
        assert by < 1e-6


def compiled():
    found = []
    for name in ("int8 both", "int4 weights by group"):
        model = models.quantised(name, models.block())
        shardwise_torchao.distribute_module(model, mesh((4,)), COLUMNS_AND_ROWS)
        x = sw.distribute_tensor(models.batch(), mesh((4,)), R)
        with torch.no_grad():
            expected = model(x).full_tensor()
            found.append(difference(torch.compile(model, backend="aot_eager", fullgraph=True)(x), expected))
    return found


def test_a_placed_model_compiles(pool):
    assert max(by for found in pool.run(compiled) for by in found) < 1e-6


def readme():
    program = {"__name__": "mlp"}
    (block,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    exec(block, program)  # noqa: S102  our own page
    return program["difference"](mesh((4,), ("tp",)))


def test_the_readme_runs_and_gives_the_bits_of_one_device(pool):
    assert pool.run(readme) == [0.0] * 4
