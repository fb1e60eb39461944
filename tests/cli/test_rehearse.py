"""``shardwise rehearse``: its tables, its JSON, and what it refuses."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from shardwise.cli.main import main

PROGRAM = """
import torch
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard


def step(mesh):
    plan = {"0.weight": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}}
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False))
    sw.distribute_module(model, mesh, plan, src_data_rank=None)
    return model, sw.zeros((4, 8), device_mesh=mesh, placements=[Shard(0), Replicate()])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024, bias=False), nn.Linear(1024, 256, bias=False)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def blocks(mesh):
    model = nn.Sequential(*[Block() for _ in range(3)])
    sw.distribute_module(model, mesh, {"*.up.weight": Shard(0), "*.down.weight": Shard(1)}, src_data_rank=None)
    return model, sw.zeros((64, 256), device_mesh=mesh, placements=[Replicate()])


def data_parallel(mesh):
    model = nn.Linear(256, 256)
    sw.distribute_module(model, mesh, {}, src_data_rank=None)
    return model, sw.zeros((2**16, 256), device_mesh=mesh, placements=[Shard(0)])


def asks_data(mesh):
    return sw.ones((4,), device_mesh=mesh, placements=[Replicate()] * mesh.ndim).nonzero()
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)

    def call(*args):
        return CliRunner().invoke(main, ["rehearse", *args])

    return call


def test_it_shows_what_a_rank_holds_and_sends(run):
    result = run("train.py:step", "--mesh", "2x4", "--names", "dp,tp")
    assert result.exit_code == 0, result.output
    assert "One of 8 ranks (2x4), at dp 0, tp 0" in result.output
    # 256 parameters of float32 in four parts.
    assert "(of 256 parameters, 1.00 KiB)" in result.output
    rows = [line.split("│")[1:-1] for line in result.output.splitlines() if "all_reduce" in line]
    assert ["backward", "all_reduce", "dp", "2", "2", "256 B"] in [[cell.strip() for cell in row] for row in rows]


def test_a_learned_step_is_one_after_the_first(run, monkeypatch):
    monkeypatch.setenv("SHARDWISE_LEARN", "auto")
    result = run("train.py:data_parallel", "--mesh", "4", "--learned")
    assert result.exit_code == 0, result.output
    # Here the first step is as good as any.
    assert "Learning gains too little, so the program stays as it is: " in " ".join(result.output.split())
    args = ("train.py:blocks", "--mesh", "4", "--names", "tp")
    assert "--learned shows" in run(*args).output
    result = run(*args, "--learned")
    assert "A step after the first: " in result.output
    assert "--learned shows" not in result.output
    contents = [json.loads(run(*args, "--json", *more).output) for more in ((), ("--learned",))]
    first, later = (sum(row["bytes"] for row in content["collectives"]) for content in contents)
    assert later < 0.8 * first
    assert contents[1]["learned"] is True
    assert "learned" not in contents[0]


def test_by_op_names_what_needs_a_collective(run):
    result = run("train.py:step", "--mesh", "2x4", "--names", "dp,tp", "--by-op")
    assert "redistribute" in result.output


def test_cuda_is_rehearsed_without_a_device(run):
    content = json.loads(
        run("train.py:step", "--mesh", "8x128", "--names", "dp,tp", "--json", "--device", "cuda").output
    )
    assert content["ops"]["aten._fused_adamw_.default"] == 1
    assert {row["kind"] for row in content["collectives"]} == {"all_reduce"}


def test_json_has_everything(run):
    content = json.loads(run("train.py:step", "--mesh", "2x4", "--names", "dp,tp", "--json", "--rank", "5").output)
    assert (content["mesh"], content["names"], content["coordinate"]) == ([2, 4], ["dp", "tp"], [1, 1])
    assert content["memory"]["parameters"] == content["parameter_bytes"] / 4 == 256
    assert {"phase", "kind", "mesh_dims", "ranks", "op", "times", "bytes"} == set(content["collectives"][0])
    assert content["ops"]["aten.mm.default"] == 5


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--mesh", "two"], "is not a mesh"),
        (["--mesh", "2x4", "--names", "dp"], "1 name and the mesh 2 dims"),
        (["--mesh", "2x4", "--rank", "8"], "ranks 0 to 7"),
        (["--mesh", "2x4", "--learned", "--plan", "step.plan"], "give one of them"),
    ],
)
def test_options_that_make_no_sense(run, args, message):
    result = run("train.py:step", *args)
    assert result.exit_code == 2
    assert message in result.output


def test_what_depends_on_data_is_refused(run):
    result = run("train.py:asks_data", "--mesh", "2")
    assert result.exit_code == 1
    assert "the shape of its result depends on data" in result.output
