"""``shardwise plan``, ``plan diff`` and ``rehearse --plan``: their tables, their JSON, and what they refuse."""

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
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False), nn.LayerNorm(8))
    sw.distribute_module(model, mesh, {"0.weight": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}}, src_data_rank=None)
    return model, sw.zeros((4, 8), device_mesh=mesh, placements=[Shard(0), Replicate()])
"""
ON = ("--mesh", "2x4", "--names", "dp,tp", "--fixed", "parameters")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    (folder / "train_plan.py").write_text(PROGRAM)
    return folder


@pytest.fixture
def run(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return lambda *args: CliRunner().invoke(main, list(args))


@pytest.fixture
def made(run, folder):
    """Two plans of one program: by the defaults, and by the figures of accelerators."""
    if not (folder / "b.plan").exists():
        for name, more in (("a.plan", ()), ("b.plan", ("--wires", "infiniband,nvlink"))):
            result = run("plan", "train_plan.py:step", *ON, *more, "--out", name)
            assert result.exit_code == 0, result.output
    return run


def test_it_shows_the_plan_beside_the_choice_op_by_op(run):
    result = run("plan", "train_plan.py:step", *ON)
    assert result.exit_code == 0, result.output
    assert "train_plan.py:step on 2x4 (dp, tp)" in result.output
    for text in ("op by op", "kept by forward for backward", "What moves, and why", "Verified: a rehearsal"):
        assert text in result.output


def test_json_has_everything(run):
    content = json.loads(run("plan", "train_plan.py:step", *ON, "--json").output)
    assert (content["mesh"], content["names"], content["verified"]) == ([2, 4], ["dp", "tp"], True)
    assert content["plan"]["cost"] <= content["op_by_op"]["cost"]
    assert {"at", "op", "phase", "to", "times", "why"} <= set(content["rests"][0])


@pytest.mark.slow
@pytest.mark.sample
def test_a_bound_is_shown_beside_the_plan(run, folder):
    result = run("plan", "train_plan.py:step", *ON, "--prove", "--out", "proved.plan")
    assert result.exit_code == 0, result.output
    assert "no plan is below" in result.output
    assert "bound_ms = " in (folder / "proved.plan").read_text()
    content = json.loads(run("plan", "train_plan.py:step", *ON, "--prove", "--json").output)
    assert 0 < content["bound"] <= content["plan"]["cost"]
    assert 0 <= content["gap"] < 1
    assert json.loads(run("plan", "train_plan.py:step", *ON, "--json").output)["bound"] is None


def test_all_meshes_of_some_ranks_are_tried(run, folder):
    options = ("--mesh", "8", "--factor", "--names", "dp,tp", "--fixed", "parameters")
    result = run("plan", "train_plan.py:step", *options, "--out", "factored.plan")
    assert result.exit_code == 0, result.output
    assert "PlacementCountError" in result.output  # the program wants two mesh dims
    content = json.loads(run("plan", "train_plan.py:step", *options, "--json").output)
    shapes = {tuple(one["mesh"]): one for one in content["shapes"]}
    assert set(shapes) == {(8,), (2, 4), (4, 2)}
    assert "error" in shapes[8,]
    best = min((one for one in shapes.values() if "cost" in one), key=lambda one: one["cost"])
    assert (content["mesh"], content["plan"]["cost"]) == (best["mesh"], best["cost"])
    mesh = ", ".join(f"{name} = {n}" for name, n in zip(("dp", "tp"), best["mesh"], strict=True))
    assert f"mesh = {{ {mesh} }}" in (folder / "factored.plan").read_text()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--mesh", "2x4"), "give --mesh the number of ranks alone"),
        (("--mesh", "8", "--wires", "nvlink"), "there are 1 wire"),
        (("--mesh", "1"), "it has 1 ranks"),
    ],
)
def test_what_cannot_be_factored(run, options, text):
    result = run("plan", "train_plan.py:step", "--factor", *options)
    assert result.exit_code != 0
    assert text in result.output


def test_a_program_that_takes_no_mesh_has_its_error(run):
    result = run("plan", "train_plan.py:step", "--mesh", "7", "--factor")
    assert result.exit_code != 0
    assert "PlacementCountError" in result.output


def test_two_plans_side_by_side(made):
    result = made("plan", "diff", "a.plan", "b.plan")
    assert result.exit_code == 0, result.output
    assert "infiniband, nvlink" in result.output
    same = made("plan", "diff", "a.plan", "a.plan")
    assert "No line differs." in same.output
    assert json.loads(made("plan", "diff", "a.plan", "a.plan", "--json").output)["lines"] == []


def test_a_rehearsal_by_a_plan_takes_its_mesh(made):
    result = made("rehearse", "train_plan.py:step", "--plan", "a.plan")
    assert result.exit_code == 0, result.output
    assert "One of 8 ranks (2x4)" in result.output
    assert "These are the collectives of the plan." in result.output
    assert json.loads(made("rehearse", "train_plan.py:step", "--plan", "a.plan", "--json").output)["as_planned"]


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("plan", "train_plan.py:step", "--mesh", "two"), 2, "is not a mesh"),
        (("plan", "train_plan.py:step"), 2, "Missing option '--mesh'"),
        (("plan", "train_plan.py:step", "--mesh", "2x4", "--names", "dp"), 2, "--names has 1 name"),
        (("plan", "train_plan.py:step", *ON, "--wires", "nvlink"), 2, "--wires has 1 name"),
        (("plan", "train_plan.py:step", *ON, "--wires", "nvlink,tin"), 1, "'tin' has no figures"),
        (("plan", "train_plan.py:step", *ON, "--fixed", "inputs"), 2, "is not 'parameters'"),
        (("plan", "train_plan.py:step", *ON, "--out", "no/where.plan"), 2, "there is no folder"),
        (("plan", "none.py:step", *ON), 1, "there is no file none.py"),
        (("plan", "diff", "a.plan", "none.plan"), 1, "none.plan cannot be read"),
        (("plan", "diff", "a.plan", "train_plan.py"), 1, "PlanFileError: read the plan train_plan.py: line 2"),
        (("rehearse", "train_plan.py:step"), 2, "it needs --mesh, or a --plan that has one"),
        (("rehearse", "train_plan.py:step", "--plan", "a.plan", "--mesh", "4"), 1, "PlanMeshError"),
    ],
)
def test_what_makes_no_sense_is_refused(made, args, code, message):
    result = made(*args)
    assert result.exit_code == code, result.output
    assert message in result.output
