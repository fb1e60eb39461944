"""``shardwise lock``: it writes, compares, holds to budgets, and writes nothing in CI."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner

from shardwise.cli.main import main

PROGRAM = """
import torch
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard


def step(mesh):
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)])
    sw.distribute_module(model, mesh, {"*.weight": {"tp": Shard(1)}}, src_data_rank=None)
    inputs = sw.zeros((4, 8), device_mesh=mesh, placements=[Shard(0), Replicate()])
    return model, inputs


def more(mesh):
    model, inputs = step(mesh)
    whole = [Replicate()] * 2
    model[1].register_forward_hook(lambda module, args, output: output.redistribute(placements=whole))
    return model, inputs
"""
MESH = ("--mesh", "2x4", "--names", "dp,tp")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)

    def call(function, *args, mesh=MESH):
        return CliRunner().invoke(main, ["lock", f"train.py:{function}", *mesh, *args])

    return call


@pytest.fixture
def written(run, tmp_path):
    assert run("step").exit_code == 0
    path = tmp_path / "communication.lock"
    # The same file, as if the program had changed.
    path.write_text(path.read_text().replace("train.py:step", "train.py:more"))
    return path


def test_it_writes_and_compares(run, tmp_path):
    result = run("step")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "communication.lock").read_text()
    assert "program  train.py:step\n" in text
    assert str(tmp_path) not in text
    result = run("step", "--check")
    assert (result.exit_code, result.output.split(":")[0]) == (0, "communication.lock holds")


def test_a_difference_is_shown_with_module_line_and_reason(run, written):
    before = written.read_text()
    result = run("more", "--check")
    assert result.exit_code == 1
    lines = result.output.splitlines()
    at = next(i for i, line in enumerate(lines) if "redistribute()" in line)
    assert lines[at].startswith("  forward ")
    assert " at 1: 1 x, " in lines[at]
    assert lines[at + 1].strip() == f"train.py:{PROGRAM.splitlines().index(LINE) + 1}"
    assert written.read_text() == before


LINE = "    model[1].register_forward_hook(lambda module, args, output: output.redistribute(placements=whole))"


def test_without_check_it_is_written_and_the_difference_is_shown(run, written):
    result = run("more")
    assert result.exit_code == 0
    assert "added:" in result.output
    assert run("more", "--check").exit_code == 0


def test_in_ci_nothing_is_written(run, written, monkeypatch):
    before = written.read_text()
    monkeypatch.setenv("CI", "true")
    result = run("more")
    assert result.exit_code == 1
    assert "CI is set, so nothing is written" in result.stderr
    assert written.read_text() == before
    written.unlink()
    result = run("more")
    assert result.exit_code == 1
    assert "LockFileError: read the lockfile communication.lock: No such file" in result.output
    assert "CI is set, so nothing is written" in result.stderr
    assert not written.exists()


def test_annotations_are_at_the_line(run, written):
    result = run("more", "--check", "--format", "github", "--budget", "tp forward 1")
    assert result.exit_code == 1
    number = PROGRAM.splitlines().index(LINE) + 1
    assert f"::error file=train.py,line={number},title=communication added::forward " in result.output
    assert "title=over the budget tp forward 1 B::" in result.output
    assert all(line.startswith("::") for line in result.output.splitlines())


def test_a_budget_that_is_exceeded_writes_nothing(run, tmp_path):
    result = run("step", "--budget", "* * 1GiB", "--budget", "dp backward 1")
    assert result.exit_code == 1
    assert "did not write communication.lock" in result.output
    assert "over the budget dp backward 1 B: 192 B, most of it from\n" in result.output
    assert not (tmp_path / "communication.lock").exists()
    assert run("step", "--budget", "* * 1GiB", "--budget", "dp backward 1GiB").exit_code == 0


def test_json_has_rows_and_changes(run, written):
    content = json.loads(run("more", "--check", "--json").stdout)
    assert (content["ok"], content["written"], content["mesh"], content["names"]) == (
        False,
        False,
        [2, 4],
        ["dp", "tp"],
    )
    assert content["collectives"] == sum(row["times"] for row in content["rows"])
    assert content["bytes"] == sum(row["nbytes"] for row in content["rows"])
    assert {"added"} <= {change["change"] for change in content["changes"]}


@pytest.mark.parametrize(
    ("args", "mesh", "message"),
    [
        (["--check"], ("--mesh", "4x2", "--names", "dp,tp"), "LockFitError: compare a step with communication.lock"),
        (["--budget", "pp forward 1GiB"], MESH, "CallError: hold a step to the budget 'pp forward 1GiB'"),
        (["--budget", "tp sideways 1GiB"], MESH, "'sideways' is not one of forward, backward, optimizer, *"),
        (
            ["--budget", "dim0 forward 1 apple"],
            ("--mesh", "2x4"),
            "CallError: hold a step to the budget 'dim0 forward 1",
        ),
    ],
)
def test_what_is_refused_before_the_step_runs(run, args, mesh, message, tmp_path):
    run("step")
    lockfile = tmp_path / "communication.lock"
    lockfile.write_text(lockfile.read_text().replace(":step\n", ":no_such_function\n"))
    result = run("no_such_function", *args, mesh=mesh)
    assert result.exit_code == 1
    assert message in result.output


def test_a_file_in_no_folder_is_refused_before_the_step_runs(run):
    result = run("no_such_function", "--out", "nowhere/a.lock")
    assert result.exit_code == 2
    assert "--out nowhere/a.lock: there is no folder" in result.output


def test_a_file_of_nonsense_is_not_compared_with(run, tmp_path):
    (tmp_path / "communication.lock").write_text("nonsense")
    result = run("step", "--check")
    assert result.exit_code == 1
    assert "LockFileError: read the lockfile communication.lock: line 1: it is not a lockfile" in result.output


def test_a_learned_step_has_a_lockfile_of_its_own(run, tmp_path):
    result = run("step", "--learned")
    assert result.exit_code == 0, result.output
    assert "mesh     dp 2, tp 4\ndevice   cpu\nplan     learned\n" in (tmp_path / "communication.lock").read_text()
    assert "A step after the first: " in result.stderr
    assert run("step", "--learned", "--check").exit_code == 0
    assert "does not hold" in run("step", "--check").output


MOVES = """

def elsewhere(mesh):
    import os

    os.chdir(os.pardir)
    return step(mesh)
"""


def test_the_file_is_where_the_command_was_started(run, tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(PROGRAM + MOVES)
    assert run("elsewhere").exit_code == 0
    monkeypatch.chdir(tmp_path)
    assert run("elsewhere", "--check").exit_code == 0


def test_a_lockfile_that_an_editor_of_windows_saved_is_written_again(run, written):
    written.write_bytes(written.read_text().replace("\n", "\r\n").encode("utf-8-sig"))
    assert run("more", "--check").exit_code == 1
    assert run("more").exit_code == 0
    assert written.read_bytes().startswith(b"# What one rank")


def test_no_other_file_is_overwritten(run, tmp_path):
    before = (tmp_path / "train.py").read_text()
    result = run("step", "--out", "train.py")
    assert result.exit_code == 2
    assert "--out train.py: that file is not a lockfile, and it would be overwritten" in result.output
    assert (tmp_path / "train.py").read_text() == before
    os.mkfifo(tmp_path / "pipe")
    result = run("step", "--out", "pipe")
    assert result.exit_code == 2
    assert "--out pipe: ValueError: it is not a file" in result.output
    assert run("step", "--out", "").exit_code == 2
    # What is left of a merge is a lockfile, and so is an empty file.
    path = tmp_path / "communication.lock"
    path.write_text("")
    assert run("step").exit_code == 0
    written = path.read_text()
    path.write_text(written.replace("[memory]", "<<<<<<< HEAD\n[memory]"))
    assert run("step", "--check").exit_code == 1
    assert run("step").exit_code == 0
    assert path.read_text() == written


def test_the_lockfile_of_an_earlier_release_is_replaced(run, tmp_path):
    assert run("step").exit_code == 0
    path = tmp_path / "communication.lock"
    written = path.read_text()
    path.write_text(written.replace("version  2", "version  1").replace("device   cpu\n", ""))
    assert "is of version 1, and this release reads version 2" in run("step", "--check").output
    assert run("step").exit_code == 0
    assert path.read_text() == written


def test_a_lockfile_says_whose_kernels_it_is_of(run, tmp_path):
    assert run("step", "--device", "cuda").exit_code == 0
    assert "\ndevice   cuda\n" in (tmp_path / "communication.lock").read_text()
    assert run("step", "--device", "cuda", "--check").exit_code == 0
    result = run("step", "--check")
    assert result.exit_code == 1
    assert "it is of the device cuda, and this is cpu" in " ".join(result.output.split())


def test_the_lockfile_of_a_later_release_is_not_replaced(run, tmp_path):
    assert run("step").exit_code == 0
    path = tmp_path / "communication.lock"
    path.write_text(path.read_text().replace("version  2", "version  3"))
    before = path.read_text()
    result = run("step")
    assert result.exit_code == 1
    assert "LockVersionError" in result.output
    assert path.read_text() == before
