"""The demo that is interrupted: killed for real, started again, on the same mesh and on another."""

import importlib
import json
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from attrs import evolve
from click.testing import CliRunner
from full_disk import full_disk

from shardwise import checkpoint
from shardwise.cli import main
from shardwise.demo.checkpoints import after_a_failure, check_run
from shardwise.demo.data import batches
from shardwise.demo.settings import RunSettings
from shardwise.errors import CheckpointError, CheckpointFileError

SMALL = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "16", "--device", "cpu", "--steps", "40"]
SETTINGS = RunSettings(steps=6, layers=1, width=16, heads=2, context=16, batch=4)


def test_batches_go_on_where_they_were():
    data = batches(SETTINGS)
    seen = [next(data) for _ in range(4)]
    again = batches(SETTINGS)
    for _ in range(2):
        next(again)
    later = batches(SETTINGS)
    later.load_state_dict(again.state_dict())
    rest = list(later)
    assert len(rest) == 4
    assert all(a.equal(b) for a, b in zip(rest[0], seen[2], strict=True))


def test_a_run_goes_on_with_its_own_settings_only(tmp_path):
    check_run(tmp_path, SETTINGS)
    check_run(tmp_path, evolve(SETTINGS, mesh=(4,), steps=9))
    with pytest.raises(CheckpointError, match="it was started with --seed 0, --width 16"):
        check_run(tmp_path, evolve(SETTINGS, seed=1, width=32))
    assert "starts from the beginning" in after_a_failure(tmp_path)
    checkpoint.save({"n": 1}, tmp_path, step=8)
    assert "goes on from step 8" in after_a_failure(tmp_path)
    with pytest.raises(CheckpointError, match=r"--steps 6: the checkpoint in .* is of step 8"):
        check_run(tmp_path, SETTINGS)


def test_the_command_refuses_another_run(tmp_path):
    check_run(tmp_path, SETTINGS)
    result = CliRunner().invoke(main, ["demo", "--checkpoint-dir", str(tmp_path)])
    assert result.exit_code == 2
    assert "it was started with" in result.output


def test_a_folder_for_the_run_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "flat").write_text("")
    with full_disk(), pytest.raises(CheckpointFileError, match=r"run\.json cannot be written: File too large"):
        check_run(tmp_path / "full", SETTINGS)
    with pytest.raises(CheckpointFileError, match=r"flat.* cannot be written: Not a directory"):
        check_run(tmp_path / "flat" / "inner", SETTINGS)
    assert list((tmp_path / "full").iterdir()) == []


def test_a_report_that_cannot_be_written_is_a_message_and_the_old_one_stays(tmp_path, monkeypatch):
    """The run is over by then, and its report is printed."""
    module = importlib.import_module("shardwise.demo.command")
    result = SimpleNamespace(comparison=SimpleNamespace(agrees=True))
    monkeypatch.setattr(module, "_run_locally", lambda *_: result)
    monkeypatch.setattr(module, "print_report", lambda *_: None)
    monkeypatch.setattr(module, "as_json", lambda _: {"long": "a" * 100})
    path = tmp_path / "report.json"
    path.write_text("before")
    with full_disk():
        done = CliRunner().invoke(main, ["demo", "--device", "cpu", "--json", str(path)])
    assert done.exit_code == 1
    assert f"Error: cannot write {path}: File too large" in done.output
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def command(tmp_path, *arguments):
    return [sys.executable, "-m", "shardwise.demo", *SMALL, "--json", str(tmp_path / "report.json"), *arguments]


def finish(tmp_path, *arguments):
    done = subprocess.run(command(tmp_path, *arguments), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((tmp_path / "report.json").read_text())["mesh"]["losses"]


def kill_a_worker(tmp_path, after, *arguments):
    """Start the demo and kill a worker as soon as a step is saved; what the demo says then."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command(tmp_path, *arguments), **pipes) as demo:
        end = time.monotonic() + 200
        while demo.poll() is None and not list((tmp_path / "saved").glob(f"step-*{after}")) and time.monotonic() < end:
            time.sleep(0.01)
        workers = [w for w in psutil.Process(demo.pid).children() if "spawn_main" in " ".join(w.cmdline())]
        workers[1].kill()
        _, err = demo.communicate(timeout=60)
    assert demo.returncode == 3, err
    assert "its process was killed by SIGKILL" in err
    return err


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.timeout(900)  # three runs of the demo: each has a limit of its own, that of the test is their sum
def test_a_killed_run_ends_as_an_uninterrupted_one(tmp_path):
    saved = ["--checkpoint-dir", str(tmp_path / "saved"), "--checkpoint-every", "2"]
    assert "goes on from step" in kill_a_worker(tmp_path, 4, "--mesh", "2", *saved)
    assert finish(tmp_path, "--mesh", "2", *saved) == finish(tmp_path, "--mesh", "2")


@pytest.mark.slow
@pytest.mark.timeout(1200)  # four runs
def test_a_killed_run_goes_on_on_other_meshes(tmp_path):
    saved = ["--checkpoint-dir", str(tmp_path / "saved"), "--checkpoint-every", "2"]
    kill_a_worker(tmp_path, 2, "--mesh", "2x2", *saved)
    kill_a_worker(tmp_path, 8, "--mesh", "2", *saved)
    assert finish(tmp_path, "--mesh", "2x1", *saved) == pytest.approx(finish(tmp_path, "--mesh", "1"), abs=1e-4)
