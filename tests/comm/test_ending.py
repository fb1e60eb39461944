"""The end of a process in which a thread looks for failed ranks."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, threading, time
from types import SimpleNamespace

NAME = "shardwise rank failures"
# Registered first, and so called last.
atexit.register(lambda: print([t.name for t in threading.enumerate() if t.name == NAME]))

from shardwise.comm import rank_failures, waiting_ranks

asked = threading.Event()


def long_question(world, now):
    asked.set()
    time.sleep(0.5)


waiting_ranks._look = long_question
waiting_ranks.current_world = lambda: SimpleNamespace(failure=None, compiles=False, final={0: None})
rank_failures._install()  # as the first process group of several ranks does
assert asked.wait(30)
print([t.name for t in threading.enumerate() if t.name == NAME])
"""


def test_the_thread_ends_before_python_does():
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['shardwise rank failures']", "[]"]
