"""Ctrl-C in the middle of a command: 130, one word on stderr, no process left behind, no file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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
# A shell without job control has programs in the background ignore Ctrl-C: these tests may run there.
COMMAND = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("shardwise.cli", run_name="__main__", alter_sys=True)
"""
SLOW = [pytest.mark.slow, pytest.mark.sample]


def interrupt(folder: Path, arguments: tuple[str, ...], ready: int) -> tuple[int, str, str]:
    """Start a command, and press Ctrl-C when the program runs in so many processes: the whole group gets it."""
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    children: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 120
        while len(list(folder.glob("ready-*"))) < ready:
            assert command.poll() is None, command.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        children = psutil.Process(command.pid).children(recursive=True)
        os.killpg(command.pid, signal.SIGINT)
        out, err = command.communicate(timeout=60)
    finally:
        if command.poll() is None:
            os.killpg(command.pid, signal.SIGKILL)
            command.communicate()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    return command.returncode, out, err


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
def test_ctrl_c_ends_a_command_and_its_processes(tmp_path, arguments, ready):
    (tmp_path / "mine.py").write_text(PROGRAM)
    assert interrupt(tmp_path, arguments, ready) == (130, "", "Aborted!\n")
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith(("ready-", "__"))}
    assert left == {"mine.py"}
