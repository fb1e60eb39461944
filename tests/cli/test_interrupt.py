"""Ctrl-C or SIGTERM in the middle of a command: 130 or 143, one word on stderr, no process left behind, no file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

PROGRAM = """
import os
import time
from pathlib import Path


def waits(mesh):
    Path(f"ready-{os.getpid()}").touch()
    time.sleep(300)
"""
FORKS = """
import os
import time


def forks():
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"!")
        time.sleep(300)
    os.read(reading, 1)  # Python forgets a signal that comes in the middle of a fork
    os.kill(child, 15)
    raise ValueError(f"killed by {os.waitpid(child, 0)[1]}")
"""
STAYS = """
import os


def stays():
    for _ in range(2):
        try:
            os.kill(os.getpid(), 15)
        except KeyboardInterrupt:
            pass
"""
# A shell without job control has programs in the background ignore Ctrl-C: these tests may run there.
COMMAND = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("shardwise.cli", run_name="__main__", alter_sys=True)
"""
SLOW = [pytest.mark.slow, pytest.mark.sample]


PLUGIN = """
import os
import time
from pathlib import Path

from shardwise.hookspecs import hookimpl

Path(f"ready-{os.getpid()}").touch()
time.sleep(300)
"""
# What a fork server imports besides torch and shardwise, and what no command imports.
SLOW_PYTEST = """
import os
import time
from pathlib import Path

Path(f"ready-{os.getpid()}").touch()
time.sleep(300)
"""


@pytest.fixture
def scratch():
    """A folder for temporary files with a short name, as that of a socket has to be."""
    with tempfile.TemporaryDirectory(prefix="sw-") as folder:
        yield Path(folder)


@pytest.fixture
def end(tmp_path, scratch):
    """``end(number, arguments, ready)``: start a command, and signal its group when the program runs in ``ready``
    processes. The exit code, what it printed, and what is left.
    """

    def run(number, arguments, ready=1):
        command = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments],
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": str(scratch), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "__cache")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        children: list[psutil.Process] = []
        try:
            deadline = time.monotonic() + 120
            while len(list(tmp_path.glob("ready-*"))) < ready:
                assert command.poll() is None, command.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            children = psutil.Process(command.pid).children(recursive=True)
            os.killpg(command.pid, number)
            out, err = command.communicate(timeout=60)
        finally:
            if command.poll() is None:
                os.killpg(command.pid, signal.SIGKILL)
                command.communicate()
            _, alive = psutil.wait_procs(children, timeout=10)
            for child in alive:
                child.kill()
        assert not alive
        assert list(scratch.iterdir()) == []
        left = {path.name for path in tmp_path.iterdir() if not path.name.startswith(("ready-", "__"))}
        return command.returncode, out, err, left

    return run


ABORTED = (130, "", "Aborted!\n")
TERMINATED = (143, "", "Terminated!\n")


@pytest.mark.parametrize(
    ("arguments", "ready"),
    [
        (("lock", "mine.py:waits", "--mesh", "2"), 1),
        pytest.param(("rehearse", "mine.py:waits", "--mesh", "2", "--json"), 1, marks=SLOW),
        pytest.param(("plan", "mine.py:waits", "--mesh", "2", "--out", "mine.plan"), 1, marks=SLOW),
        pytest.param(("check", "mine.py:waits", "--mesh", "2"), 1, marks=SLOW),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_ctrl_c_ends_a_command_and_its_processes(tmp_path, end, arguments, ready):
    (tmp_path / "mine.py").write_text(PROGRAM)
    assert end(signal.SIGINT, arguments, ready) == (*ABORTED, {"mine.py"})


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "mine.py:waits", "--mesh", "2"),
        pytest.param(("lock", "mine.py:waits", "--mesh", "2"), marks=SLOW),
        pytest.param(("plugins", "check", "slow.py"), marks=SLOW),
    ],
    ids=lambda value: "-".join(value[:2]),
)
def test_sigterm_does_the_same(tmp_path, end, arguments):
    (tmp_path / "mine.py").write_text(PROGRAM)
    (tmp_path / "slow.py").write_text(PLUGIN)
    status, out, err, left = end(signal.SIGTERM, arguments)
    if arguments[0] == "plugins":
        assert out.startswith("slow without a version")
        out = ""
    assert (status, out, err, left) == (*TERMINATED, {"mine.py", "slow.py"})


@pytest.mark.parametrize(("number", "ended"), [(signal.SIGINT, ABORTED), (signal.SIGTERM, TERMINATED)])
def test_a_signal_does_not_wait_for_the_imports_of_the_workers(tmp_path, end, monkeypatch, number, ended):
    (tmp_path / "mine.py").write_text(PROGRAM)
    (tmp_path / "pytest.py").write_text(SLOW_PYTEST)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert end(number, ("check", "mine.py:waits", "--mesh", "2")) == (*ended, {"mine.py", "pytest.py"})


@pytest.mark.slow
@pytest.mark.sample
def test_a_process_that_a_program_forks_ends_by_sigterm_as_any_other(tmp_path):
    (tmp_path / "mine.py").write_text(FORKS)
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "coverage", "mine.py:forks"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "killed by 15" in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.sample
def test_a_second_sigterm_ends_a_command_whose_program_does_not_stop(tmp_path):
    (tmp_path / "mine.py").write_text(STAYS)
    command = [sys.executable, "-c", COMMAND, "coverage", "mine.py:stays"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == -signal.SIGTERM
