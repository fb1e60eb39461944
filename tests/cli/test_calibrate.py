"""``shardwise calibrate`` as a person runs it: processes of its own, torchrun's, and what it refuses."""

import importlib
import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner
from full_disk import full_disk

from shardwise.cli import main
from shardwise.cli.calibrate import MeasuredMesh
from shardwise.planning.cost import Connection, Link, Links
from shardwise.planning.link_file import Calibration, Site, parse

SMALL = ["calibrate", "--device", "cpu", "--largest", "4096"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(*arguments, launcher=(), **environment):
    command = [sys.executable, *launcher, "-m", "shardwise.cli", *SMALL, *arguments]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=env)


@pytest.mark.slow
@pytest.mark.sample
def test_figures_are_printed_and_written_where_they_are_read(tmp_path):
    path = tmp_path / "links.json"
    done = run("--mesh", "2x1", SHARDWISE_LINKS=str(path))
    assert done.returncode == 0, done.stderr
    assert f"written to {path}" in done.stdout
    assert "2x1 cpu" in done.stdout
    assert all(kind in done.stdout for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "copy"))
    assert "predicted us" in done.stdout
    (entry,) = parse(path.read_text(), str(path))
    assert (entry.site.mesh_shape, entry.site.backend) == ((2, 1), "gloo")


@pytest.mark.slow
@pytest.mark.sample
def test_under_torchrun_and_for_programs(tmp_path):
    path = tmp_path / "mine.json"
    done = run("--mesh", "2", "--out", str(path), "--json", launcher=TORCHRUN)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = json.loads(done.stdout)  # of one rank alone
    assert printed["file"] == str(path)
    assert printed["meshes"] == json.loads(path.read_text())["meshes"]
    assert len(printed["meshes"]) == 1
    assert {row["steps"] for row in printed["transitions"]} >= {"all_gather[0]", "slice[0]"}
    assert all(row["predicted"] > 0 and row["measured"] > 0 for row in printed["transitions"])


def refused(*arguments):
    """What the command says when it refuses, before it starts a process."""
    result = CliRunner().invoke(main, [*SMALL, *arguments])
    assert result.exit_code != 0
    return result.output


def test_a_mesh_of_another_size_than_torchruns_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--mesh 3 wants 3 processes and torchrun started 2" in refused("--mesh", "3", "--out", f"{tmp_path}/links")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mesh", ["1", "1x1", "0", "2x", "two", "-2"])
def test_what_is_no_mesh_is_refused(mesh):
    done = CliRunner().invoke(main, ["calibrate", f"--mesh={mesh}"])
    assert done.exit_code == 2
    assert "is not a mesh" in done.output


class Measured:
    """In place of a pool whose workers have measured."""

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run(self, _function, request, **_):
        links = Links((Connection.same(Link(1e-5, 1e-6, 1e9)),), 1e-6, 1e10)
        calibration = Calibration(Site((2,), "cpu", "x86_64", "gloo", (1,)), links, "2.13.0", "2026-01-02")
        return [MeasuredMesh(request, calibration, [])]


def test_a_file_that_cannot_be_written_is_a_message(tmp_path, monkeypatch):
    """The workers measure, and the command writes: an error of theirs came with the tracebacks of all of them."""
    monkeypatch.setattr(importlib.import_module("shardwise.cli.calibrate"), "WorkerPool", Measured)
    path = tmp_path / "links.json"
    with full_disk():
        output = refused("--mesh", "2", "--out", str(path))
    assert output == (
        f"Error: LinksFileError: write measured link figures to {path}: File too large. "
        "Name a file that can be written.\n"
    )
    assert list(tmp_path.iterdir()) == []
    done = CliRunner().invoke(main, [*SMALL, "--mesh", "2", "--out", str(path)])
    assert done.exit_code == 0
    assert len(parse(path.read_text(), str(path))) == 1


def test_a_file_that_is_no_such_file_is_left_alone(tmp_path):
    path = tmp_path / "notes"
    path.write_text("mine")
    assert "is not a file of link figures" in refused("--mesh", "2", "--out", str(path))
    assert path.read_text() == "mine"
