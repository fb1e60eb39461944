"""The rules, and the plugin as it is installed."""

import json
import subprocess
import sys

import pytest
import torch
import torchao.quantization  # noqa: F401  defines the operators

import shardwise as sw
from shardwise import Shard
from shardwise.kernel.known_rules import known_plugins
from shardwise.rule import rule
from shardwise.testing import RuleRefuted, check_rule, mesh
from shardwise_torchao import float8, samples

ao = torch.ops.torchao
NAME = "shardwise-torchao"
LOADED = """
import sys, torch
from shardwise.discovery.process import default_registry
default_registry().lookup(torch.ops.aten.mm.default)
print(*sorted(name for name in sys.modules if name.split(".")[0] in ("torchao", "shardwise_torchao")))
"""


@pytest.mark.parametrize("of", [float8.QUANTIZE, float8.DEQUANTIZE], ids=["quantize", "dequantize"])
def test_the_oracle_accepts(of):
    report = check_rule(of, samples.SAMPLES, cases=250)
    assert not report.unexercised
    assert not report.unsampled


def test_scales_go_with_their_blocks():
    careless = rule(ao.quantize_affine_float8_non_decomposed.default, "m k, _ _ -> m k")
    calls = [(args, named) for args, named in samples.quantize() if args[1].shape == (8, 12)]
    with pytest.raises(RuleRefuted, match="shard"):
        check_rule(careless, calls, meshes=[(4,)])


def quantised_and_back():

    whole, scales = torch.randn(8, 24, generator=torch.Generator().manual_seed(0)), torch.rand(8, 12) + 0.5
    scales = sw.distribute_tensor(scales, mesh((4,)), [Shard(1)])
    values = ao.quantize_affine_float8_non_decomposed(sw.distribute_tensor(whole, mesh((4,)), [Shard(1)]), scales)
    back = ao.dequantize_affine_float8_non_decomposed(values, scales)
    expected = ao.quantize_affine_float8_non_decomposed(whole, scales.full_tensor())
    return (
        values.placements,
        torch.equal(values.full_tensor().float(), expected.float()),
        torch.equal(back.full_tensor(), ao.dequantize_affine_float8_non_decomposed(expected, scales.full_tensor())),
    )


def test_on_a_mesh(pool):
    assert pool.run(quantised_and_back) == [((Shard(1),), True, True)] * 4


def run(*command):
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True).stdout


def test_a_plugin_that_is_loaded_imports_neither_torchao_nor_rules():
    assert run("-c", LOADED).split() == ["shardwise_torchao", "shardwise_torchao.plugin"]


def test_the_check_says_what_the_directory_says():
    rows = json.loads(run("-m", "shardwise.cli", "plugins", "check", "--json", NAME))
    (listed,) = [plugin for plugin in known_plugins() if plugin.name == NAME]
    (oracle,) = [row for row in rows if row["check"] == "oracle"]
    assert {row["result"] for row in rows} == {"ok"}
    assert oracle["found"] == listed.oracle
