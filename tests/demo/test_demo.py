"""The demo as a person runs it: real processes, the verdict, and what happens when one of them dies."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from importlib.metadata import entry_points

import psutil
import pytest
from click.testing import CliRunner

from shardwise.demo import command
from shardwise.discovery.entry_points import GROUP
from shardwise.testing import WorkerPool

SMALL = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "16", "--device", "cpu"]
ENDLESS = ["--mesh", "2x1", "--steps", "1000000"]


def heed_interrupts():
    """A shell starts its background jobs with Ctrl-C ignored, and what they start inherits that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start(*arguments):
    demo = [sys.executable, "-u", "-m", "shardwise.demo", *SMALL, *arguments]
    # A session of its own, so that Ctrl-C can be sent to the whole group as a terminal does.
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(demo, start_new_session=True, preexec_fn=heed_interrupts, **pipes)  # noqa: PLW1509


@pytest.fixture
def endless():
    """A demo that trains for ever, and its two workers; whatever is left of them is killed afterwards."""
    with start(*ENDLESS) as demo:
        family = [psutil.Process(demo.pid)]
        try:
            assert "step 1/" in demo.stdout.readline()
            family += [child for child in family[0].children() if "spawn_main" in " ".join(child.cmdline())]
            assert len(family) == 3
            yield demo, family[1:]
        finally:
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def assert_all_gone(processes, seconds=5):
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    assert alive == []


def check_report(path, out):
    assert "the mesh and one device agree over 3 steps" in out
    report = json.loads(path.read_text())
    assert report["agrees"] is True
    assert len(report["mesh"]["losses"]) == 3
    assert report["mesh"]["losses"] == pytest.approx(report["one_device"]["losses"], abs=1e-4)
    plugins = {entry.name for entry in entry_points(group=GROUP)}
    assert {use["plugin"] for use in report["operators"]} <= plugins
    operators = {use["operator"] for use in report["operators"]}
    assert {"aten.mm.default", "aten.embedding.default"} <= operators
    assert sum(use["bytes"] for use in report["collectives"]) > 0
    assert f"learned from the first step: {report['learned']}" in out


def test_the_demo_agrees_and_reports(tmp_path, monkeypatch):
    """In this process, with workers that start fast."""
    monkeypatch.setattr(command, "WorkerPool", partial(WorkerPool, start_method="forkserver"))
    path = tmp_path / "report.json"
    result = CliRunner().invoke(command.demo, [*SMALL, "--steps", "3", "--mesh", "2x1", "--json", str(path)])
    assert result.exit_code == 0, result.output
    check_report(path, result.output)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "layers"), [("2x1", 1), pytest.param("2x2", 2, marks=pytest.mark.sample)])
def test_the_demo_as_a_person_runs_it(tmp_path, mesh, layers):
    path = tmp_path / "report.json"
    with start("--steps", "3", "--layers", str(layers), "--mesh", mesh, "--json", str(path)) as demo:
        out, err = demo.communicate(timeout=280)
    assert demo.returncode == 0, out + err
    check_report(path, out)


@pytest.mark.slow
@pytest.mark.sample
def test_under_torchrun(tmp_path):
    report_path = tmp_path / "report.json"
    arguments = [*SMALL, "--steps", "2", "--mesh", "2", "--json", str(report_path)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "shardwise.demo", *arguments], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the mesh and one device agree over 2 steps") == 1
    assert json.loads(report_path.read_text())["settings"]["mesh_names"] == ["tp"]


@pytest.mark.slow
@pytest.mark.sample
def test_a_killed_worker_ends_the_demo_within_seconds(endless):
    demo, workers = endless
    workers[1].kill()
    _, err = demo.communicate(timeout=60)
    assert demo.returncode == 3
    assert "its process was killed by SIGKILL" in err
    assert_all_gone(workers)


@pytest.mark.slow
@pytest.mark.sample
def test_ctrl_c_leaves_nothing_behind(endless):
    demo, workers = endless
    os.killpg(demo.pid, signal.SIGINT)
    demo.communicate(timeout=20)
    assert demo.returncode != 0
    assert_all_gone(workers)


@pytest.mark.slow
def test_a_killed_parent_leaves_nothing_behind(endless):
    demo, workers = endless
    demo.kill()
    assert_all_gone(workers)
