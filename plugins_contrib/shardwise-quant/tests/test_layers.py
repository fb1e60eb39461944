"""Quantised layers: how near they are to the exact ones, and an MLP of them on real ranks."""

import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.testing import mesh
from shardwise_quant import DynamicInt8Linear, Int4Linear, Int8Linear, QuantisationError, quantise, tensor_parallel
from shardwise_quant.blocked import block_rows, pack

LAYERS = [Int8Linear, DynamicInt8Linear, Int4Linear]
SIZE, HIDDEN = 256, 512


def made(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear(inputs=128, outputs=192, dtype=torch.float32, *, bias=True):
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype)


def mlp(make, dtype=torch.float32):
    layers = [linear(SIZE, HIDDEN, dtype), nn.ReLU(), linear(HIDDEN, SIZE, dtype)]
    return quantise(nn.Sequential(*layers), make)


def relative(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


# -- one device --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("make", "error"), [(Int8Linear, 0.01), (DynamicInt8Linear, 0.015), (Int4Linear, 0.12)])
def test_a_quantised_layer_is_near_the_exact_one(make, error, dtype):
    exact, x = linear(dtype=dtype), made(3, 5, 128, dtype=dtype)
    layer = make(exact)
    assert layer(x).dtype == dtype
    assert layer(x).shape == (3, 5, 192)
    assert 1e-4 < relative(layer(x), exact.double()(x.double())) < error


@pytest.mark.parametrize("make", LAYERS)
def test_rows_of_zeros_and_no_bias(make):
    exact = linear(bias=False)
    with torch.no_grad():
        exact.weight[:7] = 0
    y = make(exact)(torch.cat([made(2, 128), torch.zeros(1, 128)]))
    assert torch.isfinite(y).all()
    assert not y[:, :7].any()
    assert not y[2].any()


@pytest.mark.parametrize("make", LAYERS)
def test_states_are_saved_and_loaded(make):
    one, other = make(linear()), make(linear(dtype=torch.float32))
    other.load_state_dict({name: torch.zeros_like(t) for name, t in one.state_dict().items()})
    other.load_state_dict(one.state_dict())
    assert torch.equal(other(made(2, 128)), one(made(2, 128)))


def test_a_shared_layer_is_made_once():
    shared = linear(64, 64)
    found = quantise(nn.Sequential(shared, nn.Sequential(shared)), Int8Linear)
    assert found[0] is found[1][0]


def test_a_blocked_weight_has_its_columns_as_a_dim():
    whole = torch.randint(0, 16, (2 * block_rows(), 64), dtype=torch.int32)
    halves = pack(whole).split(32, dim=1)
    for half, columns in zip(halves, whole.split(32, dim=1), strict=True):
        assert torch.equal(half, pack(columns))


@pytest.mark.parametrize(
    ("sizes", "group", "words"),
    [((96, 64), 64, "groups of 64"), ((64, 64), 16, "groups of 16"), ((64, 72), 64, "72 outputs")],
)
def test_what_cannot_be_packed_is_refused(sizes, group, words):
    with pytest.raises(QuantisationError, match=words):
        Int4Linear(nn.Linear(*sizes), group)


def test_a_layer_that_is_not_quantised_is_not_sharded():
    model = nn.Sequential(nn.ReLU(), Int8Linear(linear()))
    for by in ({"0": "outputs"}, {"1": "rows"}):
        with pytest.raises(QuantisationError, match="Name a quantised layer"):
            tensor_parallel(model, by)


# -- on real ranks -----------------------------------------------------------------------------------------------

MESHES = [((4,), ("tp",)), ((2, 2), ("dp", "tp"))]


def run_mlp(make, shape, names, dtype):
    """The answers of the mesh and of one device, and the bytes of weights on this rank and in all."""
    whole, grid = mlp(make, dtype), mesh(shape, names)
    plan = tensor_parallel(whole, {"0": "outputs", "2": "inputs"})
    sharded = sw.distribute_module(copy.deepcopy(whole), grid, plan)
    x = made(5, 3, SIZE, dtype=dtype, seed=1)
    with torch.inference_mode():
        hidden = sharded[0](sw.distribute_tensor(x, grid, [Shard(0)] * (len(shape) - 1) + [Replicate()]))
        assert hidden.placements[-1] == Shard(2)
        y = sharded(sw.distribute_tensor(x, grid, [Shard(0)] * (len(shape) - 1) + [Replicate()])).full_tensor()
        expected = whole(x)
    kept = sum(t.to_local().nbytes for t in sharded.buffers())
    return y, expected, kept, sum(t.nbytes for t in whole.buffers())


@pytest.mark.parametrize(("shape", "names"), MESHES, ids=["4", "2x2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", LAYERS)
def test_an_mlp_gives_what_one_device_gives(pool, make, dtype, shape, names):
    for y, expected, kept, in_all in pool.run(run_mlp, make, shape, names, dtype):
        assert kept < 1.03 * in_all / shape[-1]  # scales and the second bias are not sharded
        if make is DynamicInt8Linear and dtype == torch.float32:
            assert torch.equal(y, expected)
        tight = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(y, expected, rtol=tight, atol=tight * expected.abs().max().item())


def run_uneven(make, placements):
    """A layer cut where its kernel must not be cut, or unevenly: it is padded or moved, and never wrong."""
    layer = make(linear(96 if make is not Int4Linear else 128, 192, torch.bfloat16))
    plan = {"weight": placements}
    sharded = sw.distribute_module(copy.deepcopy(layer), mesh(), plan)
    x = made(3, layer.in_features, dtype=torch.bfloat16)
    with torch.inference_mode():
        return sharded(sw.distribute_tensor(x, mesh(), [Shard(1)])).full_tensor(), layer(x)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("make", LAYERS)
def test_a_bad_cut_is_never_wrong(pool, make, dim):
    for y, expected in pool.run(run_uneven, make, [Shard(dim)]):
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())


def run_packing():
    """torch's own packing and product on a mesh, without this package's layers."""
    grid = mesh()
    weight = torch.randint(0, 16, (256, 64), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    scales, x = made(2, 256, 2).abs(), made(6, 64, seed=1)
    packed = torch._convert_weight_to_int4pack_for_cpu(sw.distribute_tensor(weight, grid, [Shard(0)]), 1)
    assert packed.placements == (Shard(0),)
    y = torch._weight_int4pack_mm_for_cpu(
        sw.distribute_tensor(x, grid), packed, 32, sw.distribute_tensor(scales, grid, [Shard(1)])
    )
    assert y.placements == (Shard(1),)
    whole = torch._weight_int4pack_mm_for_cpu(x, torch._convert_weight_to_int4pack_for_cpu(weight, 1), 32, scales)
    torch.testing.assert_close(y.full_tensor(), whole, rtol=1e-6, atol=1e-6)


def test_torch_packs_on_a_mesh(pool):
    pool.run(run_packing)


def run_float8():
    """Sizes that only CPU takes, a bias that must be added once, and float8 tensors that are moved."""
    grid = mesh((2, 2))
    a, b = made(5, 20).to(torch.float8_e4m3fn), made(6, 20, seed=1).to(torch.float8_e4m3fn)
    one, bias = torch.tensor(0.5), made(6, seed=2)
    expected = torch._scaled_mm(a, b.t(), one, one, bias, out_dtype=torch.float32)
    for left, right in (([Shard(1)] * 2, [Shard(1)] * 2), ([Shard(0), Shard(1)], [Replicate(), Shard(1)])):
        y = torch._scaled_mm(
            sw.distribute_tensor(a, grid, left),
            sw.distribute_tensor(b, grid, right).t(),
            *(sw.distribute_tensor(t, grid) for t in (one, one, bias)),
            out_dtype=torch.float32,
        )
        torch.testing.assert_close(y.full_tensor(), expected, rtol=1e-5, atol=1e-5)


def test_float8_on_a_mesh(pool):
    pool.run(run_float8)


def test_the_readme_says_what_runs():
    page = Path(__file__).parents[1].joinpath("README.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    space = {}
    exec(block, space)  # noqa: S102  our own page
    assert list(space["plan"]) == ["0.weight", "0.scales", "0.bias", "2.weight"]


def test_the_example_runs():
    script = Path(__file__).parents[1] / "examples" / "mlp.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    done = subprocess.run(
        [*command, "--rdzv-endpoint", "localhost:0", str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert list(lines) == ["bfloat16", "Int8Linear", "DynamicInt8Linear", "Int4Linear"]
    for name in list(lines)[1:]:
        numbers = [float(word) for word in lines[name].replace(",", " ").replace(";", " ").split() if _number(word)]
        in_all, per_rank, apart, lost = numbers
        assert per_rank < 0.52 * in_all
        assert apart < 0.02
        assert lost < 0.15


def _number(word):
    return word.replace(".", "", 1).isdigit()
