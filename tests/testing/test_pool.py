"""The worker pool: results by rank, errors with every rank's traceback, and no process left behind."""

import ctypes
import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from shardwise.errors import PlacementError, WorkerError
from shardwise.testing import WorkerPool, mesh
from shardwise.testing.pool import _main_thread_first

SECRET = 41


class Box:
    def __init__(self, value):
        self.value = value


def rank_times(factor):
    return dist.get_rank() * factor


def test_results_come_by_rank(pool):
    assert pool.run(rank_times, 10) == [0, 10, 20, 30]


def test_functions_of_test_modules_travel_by_value(pool):
    def inner(box):
        return Box(box.value + SECRET)

    assert [box.value for box in pool.run(inner, Box(1))] == [42] * 4


def test_functions_that_name_ops_travel_too(pool):
    def relu(value):
        return torch.ops.aten.relu(value), Box(torch.ops.aten).value is torch.ops.aten

    aten = torch.ops.aten
    assert all(same for _, same in pool.run(relu, -torch.ones(2)))
    assert pool.run(lambda: aten.neg(torch.ones(2)).tolist()) == [[-1.0, -1.0]] * 4


def test_collectives_and_tensors(pool):
    def total(start):
        value = start + dist.get_rank()
        dist.all_reduce(value)
        return value

    for result in pool.run(total, torch.ones(3)):
        torch.testing.assert_close(result, torch.full((3,), 10.0))


def test_state_stays_between_runs_and_meshes_are_cached(pool):
    def mesh_identity():
        assert mesh((2, 2)).size() == 4
        return id(mesh((2, 2)))

    pids = pool.run(os.getpid)
    assert pool.run(mesh_identity) == pool.run(mesh_identity)
    assert pool.run(os.getpid) == pids


def test_workers_run_torch_on_one_thread(pool):
    assert pool.run(torch.get_num_threads) == [1] * 4


def test_workers_do_not_look_for_garbage_in_what_they_start_with(two_ranks):
    assert min(two_ranks.run(gc.get_freeze_count)) > len(sys.modules)


def test_an_error_on_every_rank_keeps_the_workers(pool):
    def refuse():
        raise PlacementError(asked="place it", found="no room", do="Make room.", dim=dist.get_rank())

    pids = pool.run(os.getpid)
    with pytest.raises(WorkerError, match="rank 0 raised PlacementError: place it: no room") as caught:
        pool.run(refuse)
    assert [failure.kind for failure in caught.value.errors] == ["PlacementError"] * 4
    assert [failure.error.dim for failure in caught.value.errors] == [0, 1, 2, 3]
    assert "in refuse" in str(caught.value)
    assert pool.run(os.getpid) == pids


class PickyError(Exception):
    def __init__(self, *, needed):
        super().__init__(needed)


def test_an_error_that_cannot_be_rebuilt_arrives_as_text(pool):
    def refuse():
        raise PickyError(needed="words")

    with pytest.raises(WorkerError, match="PickyError: words") as caught:
        pool.run(refuse)
    assert caught.value.errors[0].error is None


def test_a_result_that_cannot_be_pickled_is_an_error(pool):
    def generator():
        return (i for i in range(3))

    with pytest.raises(WorkerError, match="TypeError: cannot pickle 'generator' object"):
        pool.run(generator)


def test_workers_that_cannot_start():
    with WorkerPool(1, "carrier-pigeon", "forkserver") as pool:
        with pytest.raises(WorkerError, match="start 1 workers: rank 0 raised"):
            pool.run(dist.get_rank)
        assert pool.pids == []


def test_workers_that_hang_while_they_start(monkeypatch):
    monkeypatch.setattr("shardwise.testing.pool.START_TIMEOUT", 0.01)
    with WorkerPool(1) as pool, pytest.raises(WorkerError, match=r"rank 0 hung: no answer within 0\.01 s"):
        pool.run(dist.get_rank)


@pytest.fixture(scope="module")
def fragile():
    """Two workers for the tests that break them, from a server that has torch: they start often."""
    with WorkerPool(2, start_method="forkserver") as pool:
        yield pool


@pytest.fixture
def pair(fragile):
    """The same, up and running, so that a test times the failure and not the start."""
    assert fragile.run(dist.get_rank) == [0, 1]
    return fragile


def test_one_rank_raises_while_the_other_waits_in_a_collective(pair, monkeypatch):
    monkeypatch.setattr("shardwise.testing.pool.GRACE", 1.0)

    def half():
        if dist.get_rank() == 1:
            raise ValueError("boom")
        dist.all_reduce(torch.ones(1))

    with pytest.raises(WorkerError, match="rank 1 raised ValueError: boom") as caught:
        pair.run(half)
    assert [failure.kind for failure in caught.value.errors] == ["hung", "ValueError"]
    assert "all_reduce" in caught.value.errors[0].traceback
    assert pair.run(dist.get_rank) == [0, 1]


def test_a_killed_worker(pair):
    def die():
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    before = pair.run(os.getpid)
    with pytest.raises(WorkerError, match="rank 0 died: its process was killed by SIGKILL"):
        pair.run(die)
    assert not any(psutil.pid_exists(pid) for pid in before)
    assert pair.run(dist.get_rank) == [0, 1]


@pytest.fixture(scope="module")
def alone():
    """One worker, where the other ranks do not matter."""
    with WorkerPool(1, start_method="forkserver") as pool:
        yield pool


def test_a_crash_of_native_code_shows_where_python_was(alone):
    def read_nowhere():
        ctypes.string_at(8)

    with pytest.raises(WorkerError, match="rank 0 died: its process was killed by SIGSEGV") as caught:
        alone.run(read_nowhere)
    assert " in read_nowhere\n" in caught.value.errors[0].traceback
    assert " in read_nowhere\n" in str(caught.value)
    assert alone.run(dist.get_rank) == [0]


@pytest.mark.slow
@pytest.mark.sample
def test_a_crash_of_native_code_shows_the_native_stack():
    program = "from shardwise.private_torch.crashes import show_native_stacks as s; import os; s(); os.abort()"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGABRT
    assert "abort" in ended.stderr.partition("frame #1")[2]


@pytest.mark.slow
@pytest.mark.sample
def test_a_process_that_ignores_ctrl_c_does_so_where_it_shows_native_stacks():
    program = (
        "import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); s(); os.kill(os.getpid(), signal.SIGINT)"
    )
    program = f"from shardwise.private_torch.crashes import show_native_stacks as s; {program}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.slow
@pytest.mark.sample
def test_a_worker_that_exits(alone):
    with pytest.raises(WorkerError, match="rank 0 died: its process ended with exit code 3"):
        alone.run(os._exit, 3)
    assert alone.run(dist.get_rank) == [0]


def test_a_worker_killed_between_runs(alone):
    os.kill(alone.run(os.getpid)[0], signal.SIGKILL)
    with pytest.raises(WorkerError, match="rank 0 died: its process was killed by SIGKILL"):
        alone.run(dist.get_rank)
    assert alone.run(dist.get_rank) == [0]


def test_a_hang_ends_at_the_timeout_and_shows_where(pair):
    def sleep_well():
        if dist.get_rank() == 1:
            time.sleep(600)

    with pytest.raises(WorkerError, match=r"rank 1 hung: no answer within 1\.0 s") as caught:
        pair.run(sleep_well, timeout=1.0)
    assert "in sleep_well" in caught.value.errors[1].traceback
    assert caught.value.errors[0] is None


def test_a_rank_that_hangs_shows_its_main_thread_first(pair):
    def sleep_well():
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        time.sleep(600)

    with pytest.raises(WorkerError, match=r"no answer within 5\.0 s") as caught:
        pair.run(sleep_well, timeout=5.0)
    for failure in caught.value.errors:
        assert re.match(r"Current thread \(most recent call first\):\n.* in sleep_well\n", failure.traceback)
        assert "\nThread (most recent call first):\n" in failure.traceback, "the other threads"


def test_stacks_of_ranks_that_hang_in_one_place_are_equal():
    """Each rank has threads of its own numbers, which it writes in their order."""
    main, other = "most recent call first):\n  in main\n", "most recent call first):\n  in other\n"
    first = _main_thread_first(f"Thread 0x7fb2 ({other}\nCurrent thread 0x7fb3 ({main}")
    second = _main_thread_first(f"Current thread 0x7ac1 ({main}\nThread 0x7ac2 ({other}")
    assert first == second == f"Current thread ({main}\nThread ({other}".rstrip()


def test_a_rank_that_cannot_write_its_stack_is_said_to_hang(pair):
    def stops():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.raises(WorkerError, match=r"--- rank 1\nno answer within 1\.0 s") as caught:
        pair.run(stops, timeout=1.0)
    assert caught.value.errors[1].traceback == ""


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_workers_die_with_a_killed_parent(tmp_path, start_method):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent("""
            import os, sys, time
            from shardwise.testing import WorkerPool

            if __name__ == "__main__":
                pool = WorkerPool(1, start_method=sys.argv[1])
                print(*pool.run(os.getpid), flush=True)
                time.sleep(600)
        """)
    )
    with subprocess.Popen([sys.executable, str(script), start_method], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 1
        parent.kill()
    wait_until_gone(pids)


def wait_until_gone(pids, seconds=5.0):
    end = time.monotonic() + seconds
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < end, f"still there: {pids}"
        time.sleep(0.05)


STARTING = """
import re
import signal
from multiprocessing import resource_tracker
from shardwise.testing.pool import _without_interrupts

with _without_interrupts():
    resource_tracker.ensure_running()  # as the start of a process does
    print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


def test_the_first_worker_starts_without_interrupts_too():
    """The first start of a process starts Python's tracker of resources, which lets signals through again."""
    done = subprocess.run([sys.executable, "-c", STARTING], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


LONG_FOLDER = """
import sys, tempfile
from multiprocessing import util
from shardwise.testing import WorkerPool, fork_server

if __name__ == "__main__":
    before = tempfile.gettempdir()
    if sys.argv[1] == "used":
        util.get_temp_dir()  # multiprocessing has its folder, and keeps it
    with WorkerPool(1, start_method="forkserver") as pool:
        try:
            print(*pool.run(fork_server.__name__.upper))
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
    assert tempfile.gettempdir() == before
"""


@pytest.mark.parametrize(
    ("state", "printed"),
    [
        ("fresh", "SHARDWISE.TESTING.FORK_SERVER\n"),
        ("used", "WorkerError: start a fork server: the temporary folder .* has a path that is too long for a socket"),
    ],
)
def test_a_temporary_folder_with_a_long_path(tmp_path, state, printed):
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    script = tmp_path / "program.py"
    script.write_text(LONG_FOLDER)
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(
        [sys.executable, str(script), state], capture_output=True, text=True, check=False, env=environment
    )
    assert re.match(printed, done.stdout), done.stderr
    assert not list(folder.glob("shardwise-*"))
