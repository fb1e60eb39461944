"""An error on one rank ends all ranks soon, and each says which rank and which error."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.comm import rank_failures
from shardwise.comm.failure_notes import ENDED, GONE, Note, World
from shardwise.comm.shared_store import SharedStore
from shardwise.errors import RankFailedError, WorkerError
from shardwise.testing import WorkerPool

BAD = 1  # the rank on which an error is raised


@pytest.fixture(scope="module")
def pair() -> Iterator[WorkerPool]:
    """Workers of this module alone: their process groups end with each error."""
    with WorkerPool(2, start_method="forkserver") as workers:
        yield workers


def sharded(local: torch.Tensor) -> sw.MeshTensor:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return sw.MeshTensor.from_local(local, mesh, [Shard(0)])


def target_out_of_range() -> None:
    logits, target = torch.randn(4, 5), torch.tensor([0, 1, 2, 3])
    if torch.distributed.get_rank() == BAD:
        target[0] = 11
    loss = torch.nn.functional.cross_entropy(sharded(logits), sharded(target))
    loss.full_tensor()


def index_out_of_range() -> None:
    index = torch.tensor([0, 99 if torch.distributed.get_rank() == BAD else 1])
    ids = sharded(index)
    table = sw.distribute_tensor(torch.randn(10, 3), ids.device_mesh, [Replicate()])
    torch.nn.functional.embedding(ids, table).sum().full_tensor()


def division_by_zero() -> None:
    divisor = sharded(torch.tensor([1, 0 if torch.distributed.get_rank() == BAD else 1]))
    (divisor.new_full((divisor.shape[0],), 6) // divisor).sum().full_tensor()


def cross_entropy_of_a_number() -> None:
    value = sharded(torch.tensor([0.5, 1.5 if torch.distributed.get_rank() == BAD else 0.5]))
    torch.nn.functional.binary_cross_entropy(value, torch.zeros_like(value)).full_tensor()


def ids_out_of_range(ids: sw.MeshTensor) -> sw.MeshTensor:
    return ids + (90 if torch.distributed.get_rank() == BAD else 0)


def gathered_out_of_range() -> None:
    table = sharded(torch.randn(4, 5))
    table.gather(1, ids_out_of_range(sharded(torch.zeros(4, 2, dtype=torch.int64)))).sum().full_tensor()


def scattered_out_of_range() -> None:
    table = sharded(torch.randn(4, 5))
    table.scatter(1, ids_out_of_range(sharded(torch.zeros(4, 2, dtype=torch.int64))), 1.0).sum().full_tensor()


def selected_out_of_range() -> None:
    ids = ids_out_of_range(sharded(torch.zeros(4, dtype=torch.int64)))
    table = sw.distribute_tensor(torch.randn(10, 3), ids.device_mesh, [Replicate()])
    table.index_select(0, ids).sum().full_tensor()


def put_out_of_range() -> None:
    table = sharded(torch.randn(4, 5))
    ids = ids_out_of_range(sharded(torch.zeros(4, dtype=torch.int64)))
    rows = sharded(torch.arange(4) + 4 * torch.distributed.get_rank())
    table[rows, ids] = 1.0
    table.sum().full_tensor()


def error_between_ops() -> None:
    x = sharded(torch.ones(2))
    if torch.distributed.get_rank() == BAD:
        raise ValueError("no more batches")
    x.sum().full_tensor()


def timeline_without_a_folder() -> None:
    folder = "/no/such/folder" if torch.distributed.get_rank() == BAD else tempfile.gettempdir()
    with sw.timeline(f"{folder}/step.json", ranks=()):
        sharded(torch.ones(2)).sum().full_tensor()


ERRORS = {
    target_out_of_range: "IndexError: Target 11 is out of bounds",
    index_out_of_range: "index out of range",
    division_by_zero: "RuntimeError: ZeroDivisionError",
    cross_entropy_of_a_number: "RuntimeError: all elements of input should be between 0 and 1",
    gathered_out_of_range: "RuntimeError: index 90 is out of bounds",
    scattered_out_of_range: "RuntimeError: index 90 is out of bounds",
    selected_out_of_range: "index out of range",
    put_out_of_range: "index 90 is out of bounds",
    timeline_without_a_folder: "TimelineFileError: write a timeline to /no/such/folder",
    error_between_ops: "ValueError: no more batches",
}


# What .ci/run adds.
SAMPLE = [pytest.mark.slow, pytest.mark.sample]
EVERY_DAY = {"target_out_of_range", "error_between_ops"}
PROGRAMS = [pytest.param(f, marks=[] if f.__name__ in EVERY_DAY else SAMPLE, id=f.__name__) for f in ERRORS]


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_error_on_one_rank_ends_all_ranks(pair: WorkerPool, program: Any) -> None:
    pair.run(torch.manual_seed, 0)  # the workers are up
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        pair.run(program, timeout=60)
    seconds = time.monotonic() - start
    print(f"{program.__name__}: {seconds:.1f} s until both ranks had ended")
    assert seconds < 20
    own, other = caught.value.errors[BAD], caught.value.errors[0]
    assert ERRORS[program].partition(": ")[2] in own.message
    assert other.kind == "RankFailedError", other
    assert isinstance(other.error, RankFailedError)
    assert other.error.rank == BAD
    assert ERRORS[program] in other.error.error


def test_an_error_that_every_rank_raises_is_not_explained_by_that_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    note = Note(1, "", "RuntimeError", "the loss is NaN", "k", 1, is_final=True)
    monkeypatch.setattr(rank_failures, "failure_behind", lambda *_: note.error(""))
    monkeypatch.setattr(rank_failures.dist, "is_initialized", lambda: True)
    same, other, told = RuntimeError("the loss is NaN"), RuntimeError("Connection closed"), RuntimeError("singular")
    vars(told)["_shardwise_told"] = "aten.linalg_inv_ex.default"  # all ranks may have raised it: an op of ours has
    for error in (same, other, told):
        rank_failures.explain(error)
    assert [len(getattr(error, "__notes__", ())) for error in (same, other, told)] == [0, 1, 0]


# What an earlier import registers runs after what shardwise does at the end of a process.
LEAVES = """
import atexit, gc, sys
import torch.distributed as dist
atexit.register(lambda: print("frozen" if gc.get_freeze_count() else "unfrozen"))
from shardwise.comm.rank_failures import watch

class Noted:
    def __init__(self):
        self.itself = self

    def __del__(self):
        print("collected")

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
watch(dist.group.WORLD)
dist.barrier()
gc.disable()
Noted()
if rank == 0:
    raise ValueError("no more batches")
"""


@pytest.mark.slow
@pytest.mark.sample
def test_a_rank_that_has_failed_leaves_the_rest_of_its_objects_to_the_system(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEAVES]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    printed = [process.communicate(timeout=120)[0].split() for process in processes]
    assert printed == [["collected", "frozen"], ["unfrozen", "collected"]]
    assert [process.returncode for process in processes] == [1, 0]


# -- programs that catch errors --------------------------------------------------------------------------------------


def outcome(program: Any) -> tuple[str, float]:
    """What a program raises, as a program that stays alive sees it, and after how many seconds."""
    start = time.monotonic()
    try:
        program()
    except Exception as error:  # noqa: BLE001  # any type is compared by the caller
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "nothing", time.monotonic() - start


def caught_by_the_program() -> list[Any]:
    answer = outcome(index_out_of_range)
    time.sleep(8)  # a rank that neither ends nor goes on
    return [answer, outcome(lambda: sharded(torch.ones(2)).sum().full_tensor())]


@pytest.mark.slow
@pytest.mark.sample
def test_a_rank_that_catches_its_error_and_stays_ends_the_others_too(pair: WorkerPool) -> None:
    answers = pair.run(caught_by_the_program, timeout=60)
    pair.close()
    (waiting, seconds), after = answers[0]
    print(f"{seconds:.1f} s until the waiting rank had ended")
    assert seconds < 20
    assert waiting.startswith("RankFailedError: ")
    assert "rank 1 has failed in aten.embedding.default: IndexError: index out of range in self" in waiting
    assert after[0].startswith("RankFailedError: "), "the group stays closed"
    (own, _), after = answers[BAD]
    assert own.startswith("IndexError: ")
    assert after[0].startswith("RankFailedError: ")


def all_ranks_raise() -> list[Any]:
    """Both ranks raise the same errors, in a lowering and outside of one. One rank is slow before and after."""
    rank = torch.distributed.get_rank()
    logits, target = sharded(torch.randn(4, 5)), sharded(torch.tensor([0, 1, 2, 11]))
    answers = []
    for slow in (0, 1):
        if rank == slow:
            time.sleep(2.5)
        answers.append(outcome(lambda: torch.nn.functional.cross_entropy(logits, target))[0])
        answers.append(outcome(lambda: target // 0)[0])
        if rank == slow:
            time.sleep(2.5)
        answers.append(target.sum().item())
    return answers


@pytest.mark.slow
@pytest.mark.sample
def test_an_error_of_all_ranks_fails_nobody(pair: WorkerPool) -> None:
    for answers in pair.run(all_ranks_raise, timeout=60):
        assert answers == ["IndexError: Target 11 is out of bounds.", "RuntimeError: ZeroDivisionError", 28] * 2


def one_rank_goes_on(program: Any) -> tuple[str, str]:
    """One rank catches what it raises and computes on."""
    known = sharded(torch.ones(3))
    first = outcome(program)[0]
    return first, outcome(lambda: known.sum().full_tensor())[0]


def divide() -> None:
    torch.tensor([1]) // 1
    sharded(torch.tensor([6, 6])) // sharded(torch.tensor([1, 0 if torch.distributed.get_rank() == BAD else 1]))


def loss() -> None:
    target = torch.tensor([0, 11 if torch.distributed.get_rank() == BAD else 1])
    torch.nn.functional.cross_entropy(sharded(torch.randn(2, 5)), sharded(target))


def test_an_error_beside_communication_can_be_caught_on_one_rank(pair: WorkerPool) -> None:
    assert pair.run(one_rank_goes_on, divide) == [
        ("nothing", "nothing"),
        ("RuntimeError: ZeroDivisionError", "nothing"),
    ]


@pytest.mark.slow
@pytest.mark.sample
def test_no_rank_goes_on_after_an_error_in_a_lowering_of_its_own(pair: WorkerPool) -> None:
    answers = pair.run(one_rank_goes_on, loss)
    pair.close()
    assert answers[BAD][0].startswith("IndexError: Target 11")
    for text in (answers[0][0], answers[0][1], answers[BAD][1]):
        assert text.startswith("RankFailedError: "), answers
        assert "rank 1 has failed in aten.nll_loss_forward.default: IndexError: Target 11 is out of bounds" in text


def last_batch_is_smaller() -> None:
    for rows in (4, 3 if torch.distributed.get_rank() == BAD else 4):
        sharded(torch.ones(rows, 2)).sum(0).full_tensor()


def test_a_layout_that_one_rank_knows_and_another_does_not_ends_both(pair: WorkerPool) -> None:
    with pytest.raises(WorkerError) as caught:
        pair.run(last_batch_is_smaller, timeout=60)
    assert [failure.kind for failure in caught.value.errors] == ["RankFailedError", "RankDisagreementError"]
    assert "rank 1 has failed in from_local" in caught.value.errors[0].message
    assert "f32[6,2]" in caught.value.errors[BAD].message


def slices_of_a_mesh_wait_apart() -> None:
    """In each row of a mesh one rank is slow, and the rows have made other numbers of layouts."""
    rank = torch.distributed.get_rank()
    row = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))["column"]
    for length in (3, 4, 5) if rank < 2 else (3,):
        sw.MeshTensor.from_local(torch.ones(length), row, [Shard(0)])
    if rank % 2:
        time.sleep(5)
    x = sw.MeshTensor.from_local(torch.ones(7), row, [Shard(0)])
    assert x.sum().full_tensor() == 14


@pytest.mark.slow
@pytest.mark.sample
def test_a_slow_rank_of_one_slice_fails_no_rank_of_another(pool: WorkerPool) -> None:
    pool.run(slices_of_a_mesh_wait_apart)


# -- processes that end ------------------------------------------------------------------------------------------------

PROGRAM = """
import sys, torch
from datetime import timedelta
import torch.distributed as dist
rank, port, failing = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=10))
import shardwise as sw
from torch.distributed.device_mesh import init_device_mesh
x = sw.MeshTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [sw.Shard(0)])
if rank == failing:
    raise ValueError("no more batches")
print(x.sum().full_tensor())
"""


def run_pair(program: str, failing: int, *words: str) -> list[tuple[str, str]]:
    """What two processes print, each running a program that ends by an error, and what they write of it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(port), str(failing), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in (0, 1)
    ]
    results = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    return results


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_that_nobody_catches_ends_the_other_process(failing: int) -> None:
    """Rank 0 has the store: it must not end before the other has read why."""
    errors = [error for _, error in run_pair(PROGRAM, failing)]
    assert "ValueError: no more batches" in errors[failing]
    assert (
        f"RankFailedError: wait for the other ranks in a collective: rank {failing} has failed: ValueError"
        in (errors[1 - failing])
    )


def one_rank_ends_after_an_error_of_all() -> None:
    """Every rank raises and catches the same error, and then one of them comes to its end before the others."""
    x = sharded(torch.tensor([6, 6]))
    with contextlib.suppress(RuntimeError):
        x // 0
    if torch.distributed.get_rank() != BAD:
        x.sum().full_tensor()


@pytest.mark.slow
@pytest.mark.sample
def test_a_rank_that_ends_after_it_caught_what_every_rank_raised_ends_the_others(pair: WorkerPool) -> None:
    with pytest.raises(WorkerError) as caught:
        pair.run(one_rank_ends_after_an_error_of_all, timeout=60)
    failure, none = caught.value.errors
    assert failure.kind == "RankFailedError"
    assert (
        "rank 1 has failed: its program has ended: it had caught RuntimeError in aten.floor_divide" in failure.message
    )
    assert none is None


def one_rank_meets_the_others_in_finally() -> None:
    x = sharded(torch.ones(2))
    try:
        if torch.distributed.get_rank() == BAD:
            raise ValueError("no more batches")
        x.sum().full_tensor()
    finally:
        torch.distributed.barrier()


@pytest.mark.slow
@pytest.mark.sample
def test_a_rank_that_waits_while_it_handles_an_error_says_which(pair: WorkerPool) -> None:
    with pytest.raises(WorkerError) as caught:
        pair.run(one_rank_meets_the_others_in_finally, timeout=60)
    for failure in caught.value.errors:
        assert "rank 1: waits in torch.distributed." in failure.message + failure.traceback
        assert "after ValueError: no more batches" in failure.message + failure.traceback


ENDS_A_THREAD = """
import os, sys, threading, time
import torch, torch.distributed as dist
rank, port, failing = (int(word) for word in sys.argv[1:4])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
import shardwise as sw
from torch.distributed.device_mesh import init_device_mesh
x = sw.MeshTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [sw.Shard(0)])
ended = []

def work():
    if rank == failing:
        raise ValueError("no more batches")
    try:
        x.sum().full_tensor()
    finally:
        ended.append(time.time())

thread = threading.Thread(target=work)
thread.start()
thread.join()
sys.exit(1)
"""


@pytest.mark.slow
@pytest.mark.sample
def test_an_error_that_ended_a_thread_is_named() -> None:
    errors = [error for _, error in run_pair(ENDS_A_THREAD, BAD)]
    assert "ValueError: no more batches" in errors[BAD]
    said = "its program has ended: one of its threads had ended by ValueError, no more batches"
    assert f"rank {BAD} has failed: {said}" in errors[0]


FAILS_FIRST = """
import sys
import torch, torch.distributed as dist
rank, port, failing = (int(word) for word in sys.argv[1:4])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
import shardwise as sw
from torch.distributed.device_mesh import init_device_mesh
model = torch.nn.Linear(2, 2)
sw.distribute_module(model, init_device_mesh("cpu", (2,)), "no.plan" if rank == failing else {})
"""


@pytest.mark.slow
def test_an_error_before_the_first_collective_of_a_rank_is_told() -> None:
    errors = [error for _, error in run_pair(FAILS_FIRST, BAD)]
    said = f"rank {BAD} has failed in distribute_module: PlanFileError: read the plan: no.plan cannot be read"
    assert said in errors[0], errors[0]


def test_the_first_rank_does_not_wait_for_one_that_ended_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank lets the others read why it ends; one that has come to its end does not come to read."""
    waited_for: list[int] = []
    world = World(SharedStore(None, 4), 0, 4, "", lambda: None)
    monkeypatch.setattr(World, "let_others_read", lambda _, number: waited_for.append(number))
    monkeypatch.setattr(rank_failures, "current_world", lambda: world)
    monkeypatch.setattr(rank_failures, "PROCESS", type(rank_failures.PROCESS)())
    monkeypatch.setattr(rank_failures, "leave_native_ends", lambda: None)
    monkeypatch.setattr(rank_failures.gc, "freeze", lambda: None)
    for kind in (ENDED, GONE, "ValueError"):
        world.own = Note(2, "", kind, "", "", 1, is_final=True)
        rank_failures._leave_world()
    assert waited_for == [3, 3, 4]


# -- programs that do not wait when another rank fails ----------------------------------------------------------------


def fails() -> None:
    raise ValueError("of the first run")


def looks_and_meets() -> float:
    time.sleep(1.5 + torch.distributed.get_rank())  # a thread looks for ranks that have ended, and one that waits looks
    return float(sharded(torch.ones(2)).sum().full_tensor())


def test_an_error_that_ended_one_run_of_a_pool_is_over_in_the_next(pair: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="of the first run"):
        pair.run(fails, timeout=60)
    assert pair.run(looks_and_meets, timeout=60) == [4.0, 4.0]


BUSY = """
import sys, time
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import shardwise as sw

rank, port, failing, does = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
x = sw.MeshTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [sw.Shard(0)])
x.sum().full_tensor()

def slow_compiler(graph, _):
    for tries in range(2):
        try:
            for second in range(100):
                time.sleep(1.0)
        except RuntimeError:  # compilers take errors for passes that do not apply
            if tries:
                raise
    return graph

if rank == failing:
    time.sleep(1.0)
    raise ValueError("no more batches")
if does == "compile":
    x = torch.compile(torch.sin, backend=slow_compiler)(x)
else:
    time.sleep(6.0)  # longer than the first rank waits for others to read its error
print("came through")
x.sum().full_tensor()
"""


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("does", ["compile", "compute"])
def test_a_rank_that_waits_for_nobody_learns_of_an_error(does: str, failing: int) -> None:
    """What it computes it may finish; what it compiles would never run. The store may have ended with the other."""
    results = run_pair(BUSY, failing, does)
    output, error = results[1 - failing]
    assert output == ("" if does == "compile" else "came through\n")
    last = error.rstrip().splitlines()[-1]
    assert "RankFailedError: " in last
    assert f"rank {failing} has failed: ValueError: no more batches" in last
    assert "frame #" not in error, "torch shows the native stack of a store that is gone"


ENDS_SOONER = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import shardwise as sw

rank, port, how = int(sys.argv[1]), sys.argv[2], sys.argv[4]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
x = sw.MeshTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [sw.Shard(0)])
x.sum().full_tensor()
dist.barrier()
if rank == 1:
    time.sleep(4.0)
    print("came through")
if how == "destroys":
    dist.destroy_process_group()
sys.stdout.flush()
os._exit(1) if how == "leaves" else sys.exit(1)
"""


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("how", ["ends", "destroys", "leaves"])
def test_a_rank_that_works_on_when_the_first_has_ended_is_not_disturbed(how: str) -> None:
    """The store ends with the first rank. Torch shows a native stack for each call of it, here several times a second;
    a call that is under way at that moment may still show one.
    """
    (_, _), (output, error) = run_pair(ENDS_SOONER, 0, how)
    assert output == "came through\n"
    assert error.count("frame #0") <= 1, error


DESTROYS_FINALLY = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import shardwise as sw

rank, port, failing = (int(word) for word in sys.argv[1:4])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
try:
    x = sw.MeshTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [sw.Shard(0)])
    x.sum().full_tensor()
    if rank == failing:
        raise ValueError("no more batches")
    x.sum().full_tensor()
finally:
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_is_told_by_a_program_that_destroys_its_groups_in_finally(failing: int) -> None:
    _, error = run_pair(DESTROYS_FINALLY, failing)[1 - failing]
    assert f"rank {failing} has failed: ValueError: no more batches" in error.rstrip().splitlines()[-1]


DESTROYS_TOO_SOON = """
import sys, time
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import shardwise as sw

rank, port, early, then = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
x = sw.MeshTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [sw.Shard(0)])
x.sum().full_tensor()
if rank == early:
    dist.destroy_process_group()
    if then == "works on":
        time.sleep(6.0)
    print("came through")
    sys.stdout.flush()
    sys.exit(1)
x.sum().full_tensor()
"""


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("then", ["ends", "works on"])
def test_a_rank_that_destroys_its_groups_before_others_is_said_to_have_done_so(then: str) -> None:
    """It raises nothing, so nothing else says why the other one waits in vain."""
    (_, error), (output, own_error) = run_pair(DESTROYS_TOO_SOON, 1, then)
    said = "rank 1 has failed: it has destroyed its process groups. Correct which calls rank 1 makes before that."
    assert said in error.rstrip().splitlines()[-1], error
    assert output == "came through\n"
    assert not own_error, own_error


def forks_and_sums() -> list[str]:
    """What a child says of collectives, two over a group of its parent, and two over a mesh that it meets first."""
    x = sharded(torch.ones(2))
    x.sum().full_tensor()
    other = init_device_mesh("cpu", (2,))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        for mesh in (x.device_mesh, x.device_mesh, other, other):
            try:
                y = sw.MeshTensor.from_local((x * 2).to_local(), mesh, [sw.Shard(0)])
                y.sum().full_tensor()
            except RuntimeError as error:
                os.write(writing, f"{type(error).__name__}\n".encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as said:
        lines = said.read().splitlines()
    os.waitpid(child, 0)
    x.sum().full_tensor()
    return lines


def test_a_forked_process_that_issues_a_collective_is_refused(pair: WorkerPool) -> None:
    assert pair.run(forks_and_sums, timeout=60) == [["ForkedProcessError"] * 4] * 2
