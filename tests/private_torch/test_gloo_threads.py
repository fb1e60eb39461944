"""The shelf ``private_torch.gloo_threads``: each function has a test that fails clearly when torch takes it away."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from shardwise.private_torch import gloo_threads


def states():
    return list(gloo_threads._states(gloo_threads._TASKS))


@pytest.mark.skipif(not gloo_threads._TASKS.exists(), reason="only Linux says how threads are")
def test_the_threads_of_gloo_have_the_name_that_is_looked_for():
    before = len(states())
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    group.allreduce([torch.ones(2)]).wait()  # by a thread that has given itself its name before
    assert len(states()) > before
    assert gloo_threads.await_rest(30.0)


def task(folder, number, name, state):
    folder = folder / str(number)
    folder.mkdir(exist_ok=True)
    (folder / "comm").write_text(f"{name}\n")
    change(folder, f"{number} ({name}) {state} 1 2 3")


def change(folder, text):
    """At once: who reads meanwhile sees the text before or this one."""
    (folder / "new").write_text(text)
    (folder / "new").replace(folder / "stat")


def test_a_thread_that_would_run_is_waited_for(tmp_path):
    task(tmp_path, 1, "python", "R")
    assert gloo_threads.await_rest(0.0, tmp_path)  # none of gloo's
    task(tmp_path, 2, "pt_gloo_runloop", "S")
    task(tmp_path, 3, "pt_gloo_runloop", "R")
    assert not gloo_threads.await_rest(0.05, tmp_path)
    threading.Timer(0.2, change, (tmp_path / "3", "3 (pt_gloo_runloop) S 1 2 3")).start()
    assert gloo_threads.await_rest(30.0, tmp_path)
    assert list(gloo_threads._states(tmp_path)) == ["S", "S"]


def test_where_nothing_says_how_threads_are_nobody_waits(tmp_path):
    assert gloo_threads.await_rest(30.0, tmp_path / "none")
