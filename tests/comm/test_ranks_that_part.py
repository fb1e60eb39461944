"""Ranks that make other collectives, or wait for each other: every rank ends soon, and the error says who does what."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import asdict
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.comm import rank_failures, standstill
from shardwise.comm.call_posts import first_difference
from shardwise.comm.collective_log import KEPT, CollectiveLog, call_code, subject_code
from shardwise.comm.failure_notes import Note, Wait, World
from shardwise.comm.groups import group_of
from shardwise.comm.standstill import Waiting, circle
from shardwise.comm.waiting_ranks import _awaited
from shardwise.errors import RankDisagreementError, RankWaitError, WorkerError
from shardwise.settings import Settings
from shardwise.testing import WorkerPool

SAMPLE = [pytest.mark.slow, pytest.mark.sample]
ALONE = 2  # the rank that does what the others do not


@pytest.fixture(scope="module")
def four() -> Iterator[WorkerPool]:
    """Workers of this module alone: their process groups end with each error."""
    with WorkerPool(4, start_method="forkserver") as workers:
        yield workers


def is_alone() -> bool:
    return dist.get_rank() == ALONE


def sharded() -> sw.MeshTensor:
    return sw.distribute_tensor(torch.ones(8, 8), init_device_mesh("cpu", (4,)), [Shard(0)])


def failures(workers: WorkerPool, program: Callable[[], object]) -> tuple[list[Any], float]:
    """What each rank of a program raises, and the seconds until all of them had."""
    workers.run(torch.manual_seed, 0)  # the workers are up
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        workers.run(program, timeout=60)
    seconds = time.monotonic() - start
    print(f"{seconds:.1f} s until all ranks had ended")
    return list(caught.value.errors), seconds


def checked(program: Callable[[], object]) -> object:
    with sw.check_ranks():
        return program()


# -- programs that are wrong -----------------------------------------------------------------------------------------


def item_on_one_rank() -> None:
    x = sharded()
    for i in range(3):
        total = x.sum()
        if is_alone() and i == 1:
            total.item()
        x.sum(0).full_tensor()


def item_of_the_same_size() -> float:
    """Without the check the numbers are wrong and nothing is said: other ranks take the next sum for this one."""
    x = sharded()
    total = x.sum()
    if is_alone():
        total.item()
    twice = (total * 2).item()
    if not is_alone():
        total.item()
    return twice


def moved_on_one_rank() -> None:
    """On a mesh of two dims; the ranks of another row have to end as well."""
    mesh = init_device_mesh("cpu", (2, 2))
    x = sw.distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)])
    if is_alone():
        x.redistribute(placements=[Shard(0), Replicate()])
    x.redistribute(placements=[Shard(0), Replicate()])
    x.redistribute(placements=[Replicate(), Shard(1)])


def another_op_on_one_rank() -> None:
    """A collective of a lowering."""
    x = sharded()
    if is_alone():
        torch.linalg.vector_norm(x)
    x.sum().full_tensor()


def item_at_the_end() -> None:
    total = sharded().sum()
    total.item()
    if is_alone():
        total.item()


def item_beside_a_barrier() -> None:
    total = sharded().sum()
    if is_alone():
        total.item()
    dist.barrier()
    total.item()


def one_rank_does_not_come() -> None:
    total = sharded().sum()
    total.item()
    if is_alone():
        time.sleep(6)
    total.item()


# -- what is compared before a collective ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "alone", "others"),
    [
        (item_on_one_rank, "MeshTensor.item at", "MeshTensor.full_tensor at"),
        (item_of_the_same_size, "MeshTensor.item at", "MeshTensor.item at"),
        pytest.param(moved_on_one_rank, "all_gather over mesh dim 1", "MeshTensor.redistribute at", marks=SAMPLE),
        pytest.param(
            another_op_on_one_rank, "aten.linalg_vector_norm.default at", "MeshTensor.full_tensor at", marks=SAMPLE
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_comparison_names_both_lines_on_all_ranks(four: WorkerPool, program: Any, alone: str, others: str) -> None:
    errors, seconds = failures(four, partial(checked, program))
    assert seconds < 20
    assert {failure.kind for failure in errors} == {"RankDisagreementError"}
    for failure in errors:
        here = next(line for line in failure.error.differences if f"rank {ALONE}: " in line)
        rest = next(line for line in failure.error.differences if line is not here)
        assert alone in here
        assert others in rest
        assert "test_ranks_that_part.py:" in here
        assert here.rpartition(".py:")[2] != rest.rpartition(".py:")[2]


@pytest.mark.slow
@pytest.mark.sample
def test_a_rank_that_is_alone_at_the_end_says_so(four: WorkerPool) -> None:
    for program, kind in (
        (partial(checked, item_at_the_end), "RankDisagreementError"),
        (item_at_the_end, "RankFailedError"),
    ):
        errors, seconds = failures(four, program)
        assert seconds < 20
        assert [failure and failure.kind for failure in errors] == [None, None, kind, None]
        assert "has ended" in errors[ALONE].message


def right_program() -> list[float]:
    """All kinds of collectives, with one rank later than the others."""
    x = sharded()
    totals = []
    for _ in range(5):
        if is_alone():
            time.sleep(0.05)
        totals += [x.sum().item(), x.redistribute(placements=[Shard(1)]).full_tensor().sum().item()]
    return totals


def test_a_right_program_passes_with_every_collective_compared(pool: WorkerPool) -> None:
    assert pool.run(partial(checked, right_program)) == [[64.0] * 10] * 4


# -- what is recorded always -------------------------------------------------------------------------------------------


def test_the_error_names_the_order_of_sets_where_it_is_random(monkeypatch: pytest.MonkeyPatch) -> None:
    note = Note(0, "run", "RankDisagreementError", "apart", "key", 1, is_final=True, ranks_say=("rank 0: a",))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert "unless all start with the same PYTHONHASHSEED. " in str(note.error(""))
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert "PYTHONHASHSEED" not in str(note.error(""))


def test_ranks_that_part_end_without_being_asked(four: WorkerPool) -> None:
    errors, seconds = failures(four, item_on_one_rank)
    assert seconds < 20
    for failure in errors:
        assert failure.kind == "RankDisagreementError", failure
        alone, rest = failure.error.differences
        if f"rank {ALONE}" not in alone:
            alone, rest = rest, alone
        assert "of 4 bytes, MeshTensor.item at" in alone
        assert rest.startswith("ranks 0, 1, 3: all_reduce sum over mesh dim 0 of 32 bytes, MeshTensor.full_tensor at")


def branches(order: Sequence[str], how: str) -> None:
    """Gradients of one shape, which reach their parameters in the order of some names."""
    mesh = init_device_mesh("cpu", (4,))
    placements: Any = {"*.weight": [Shard(0)]} if how == "sharded" else {}
    source = None if how == "without a source" else 0
    model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in sorted(order)})
    sw.distribute_module(model, mesh, placements, src_data_rank=source)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = sw.distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
    for _ in range(4):
        with sw.accumulate() if how == "together" else nullcontext():
            outputs = [model[name](x).sum() for name in order]
            if how == "one by one":
                for output in outputs:
                    output.backward()
            else:
                sum(outputs).backward()
        optimizer.step()
        time.sleep(0.5)
    x.sum().item()


def set_order(how: str) -> None:
    names = ["a", "b", "c", "d"]
    branches(names[::-1] if is_alone() else names, how)


@pytest.mark.parametrize(
    "how", ["one by one", *(pytest.param(how, marks=SAMPLE) for how in ("in a sum", "sharded", "without a source"))]
)
def test_gradients_of_one_shape_in_another_order_end_all_ranks(four: WorkerPool, how: str) -> None:
    """As in a loop over a set of names: nothing else about these collectives differs, and the numbers are wrong."""
    errors, seconds = failures(four, partial(set_order, how))
    assert seconds < 20
    for failure in errors:
        assert failure.kind == "RankDisagreementError", failure
        text = str(failure.error)
        assert re.search(r"for the gradient of '[ad]\.weight'; ", text)
        assert "PYTHONHASHSEED" in text


def step_on_one_rank() -> None:
    """It sends nothing, and its part of the parameter is another one from then on."""
    weight = nn.Parameter(sharded())
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.sum().backward()
    for i in range(60):
        (weight * 2).sum().item()
        if i == 1 or (i == 2 and is_alone()):
            optimizer.step()
        time.sleep(0.1 if i > 2 else 0.0)


@pytest.mark.parametrize("compares", [False, pytest.param(True, marks=SAMPLE)])
def test_an_optimizer_step_of_one_rank_ends_all_ranks(four: WorkerPool, compares: bool) -> None:
    errors, _ = failures(four, partial(checked, step_on_one_rank) if compares else step_on_one_rank)
    for failure in errors:
        assert failure.kind == "RankDisagreementError", failure
        text = str(failure.error)
        if compares:
            assert f"rank {ALONE}: all_reduce" in text
            assert ", after 2 optimizer steps" in text
            assert ", after 1 optimizer step" in text.replace("2 optimizer steps", "")
        else:
            alone, rest = sorted(failure.error.differences, key=lambda line: "optimizer" not in line)
            assert alone.startswith(f"rank {ALONE}: ")
            assert alone.endswith(", after an optimizer step")
            assert "optimizer" not in rest


def gathered(names: Sequence[str]) -> None:
    mesh = init_device_mesh("cpu", (4,))
    tensors = {name: sw.distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)]) for name in sorted(names)}
    for name in names:
        tensors[name].full_tensor()
    time.sleep(3)
    tensors["a"].sum().item()


def gathered_in_another_order() -> None:
    gathered(["b", "a"] if is_alone() else ["a", "b"])


@pytest.mark.slow
@pytest.mark.sample
def test_tensors_of_one_shape_that_are_gathered_in_another_order_end_all_ranks(four: WorkerPool) -> None:
    errors, _ = failures(four, gathered_in_another_order)
    assert "for distributed tensor 2" in str(errors[0].error)


def in_one_order() -> None:
    for how in ("one by one", "in a sum", "sharded", "without a source", "together"):
        branches(["c", "a", "d", "b"], how)
    gathered(["b", "a"])


@pytest.mark.slow
@pytest.mark.sample
def test_the_same_in_one_order_passes(four: WorkerPool) -> None:
    four.run(in_one_order, timeout=120)


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("compares", [False, True])
def test_ranks_that_wait_for_each_other_end(four: WorkerPool, compares: bool) -> None:
    errors, seconds = failures(four, partial(checked, item_beside_a_barrier) if compares else item_beside_a_barrier)
    assert seconds < 20
    says = "ranks 0, 1, 3: waits in torch.distributed.barrier at"
    assert errors[ALONE].kind == "RankDisagreementError"
    for failure in errors:
        # Torch raises what it likes in its own calls; the reason is added to that.
        text = failure.traceback
        assert says in text
        assert f"rank {ALONE}: waits in all_reduce sum over mesh dim 0 of 4 bytes, MeshTensor.item at" in text


def compared_by_one_rank() -> float:
    x = sharded()
    if is_alone():
        with sw.check_ranks():
            return x.sum().item()
    return x.sum().item()


@pytest.mark.slow
@pytest.mark.sample
def test_a_rank_that_compares_alone_ends_with_the_others(four: WorkerPool) -> None:
    errors, seconds = failures(four, compared_by_one_rank)
    assert seconds < 20
    for failure in errors:
        assert failure.kind == "RankDisagreementError", failure
        assert "ranks wait for each other" in failure.message


def with_limit(seconds: float, program: Callable[[], object]) -> object:
    standstill._limit.cache_clear()
    before, standstill.read_settings = standstill.read_settings, lambda: Settings(wait_limit=seconds)  # type: ignore[attr-defined]
    try:
        return program()
    finally:
        standstill.read_settings = before  # type: ignore[attr-defined]
        standstill._limit.cache_clear()


@pytest.mark.slow
@pytest.mark.sample
def test_a_wait_ends_at_its_limit_and_says_who_did_not_come(four: WorkerPool) -> None:
    errors, seconds = failures(four, partial(with_limit, 3.0, one_rank_does_not_come))
    assert seconds < 20
    for rank, failure in enumerate(errors):
        assert failure.kind == "RankWaitError", failure
        if rank != ALONE:
            assert isinstance(failure.error, RankWaitError)
            waits, missing = failure.error.differences
            assert waits.startswith("ranks 0, 1, 3: waits in all_reduce sum")
            assert missing.startswith(f"rank {ALONE}: did not come and is at ")
            assert "MeshTensor.item at" in missing


@pytest.mark.slow
@pytest.mark.sample
def test_a_slow_rank_is_waited_for(four: WorkerPool) -> None:
    assert four.run(slow_once) == [8.0 * 8] * 4


def slow_once() -> float:
    total = sharded().sum()
    if is_alone():
        time.sleep(2.6)
    return float(total.item())


@pytest.mark.slow
@pytest.mark.sample
def test_a_rank_that_gets_no_time_is_waited_for(four: WorkerPool) -> None:
    """It has written that it waits for rank 0, which has come meanwhile and waits for it elsewhere."""
    assert four.run(stopped_in_a_call_of_torch, timeout=60) == [8.0 * 8] * 4


def stopped_in_a_call_of_torch() -> float:
    total = sharded().sum()
    processes: list[int] = [0] * 4
    dist.all_gather_object(processes, os.getpid())
    group = dist.new_group([0, ALONE])
    if dist.get_rank() == 0:
        time.sleep(1.8)  # the other one writes what it waits for
        os.kill(processes[ALONE], signal.SIGSTOP)
        threading.Timer(6.0, os.kill, (processes[ALONE], signal.SIGCONT)).start()
    if dist.get_rank() in (0, ALONE):
        dist.broadcast(torch.ones(1), 0, group)
    return float(total.item())


# -- logs --------------------------------------------------------------------------------------------------------------

SUM, GATHER = call_code("all_reduce sum", (0,)), call_code("all_gather", (0, 1))


def log_of(*calls: tuple[int, int]) -> CollectiveLog:
    log = CollectiveLog("group", (0, 1))
    for code, nbytes in calls:
        log.record(code, nbytes)
    return log


def test_a_digest_is_of_kinds_bytes_and_their_order() -> None:
    one = log_of((SUM, 4), (GATHER, 8))
    assert one.digest == log_of((SUM, 4), (GATHER, 8)).digest
    for other in ([(GATHER, 8), (SUM, 4)], [(SUM, 4)], [(SUM, 8), (GATHER, 8)], [(SUM, 4), (GATHER, 8), (SUM, 4)]):
        assert log_of(*other).digest != one.digest


def test_a_digest_is_of_the_tensors_that_calls_are_for() -> None:
    def log_for(*subjects: str, uneven: bool = False) -> CollectiveLog:
        log = log_of()
        for _ in range(2):  # the second time each call follows the one before as it did
            for subject in subjects:
                if subject:
                    log.tell_subject(subject_code(subject, subject.upper()))
                (log.record_uneven if uneven else log.record)(SUM, 4)
        return log

    for uneven in (False, True):
        one = log_for("a", "b", "", uneven=uneven)
        assert one.digest == log_for("a", "b", "", uneven=uneven).digest
        for other in (("b", "a", ""), ("a", "", "b"), ("a", "b", "b"), ("", "", ""), ("a", "b")):
            assert log_for(*other, uneven=uneven).digest != one.digest
        said = [call.text.rpartition(", for ")[2] for call in one.calls()]
        assert said[:2] == said[3:5] == ["A", "B"]
        assert ", for " not in one.calls()[2].text


def test_subjects_of_one_call_add_up_in_their_order() -> None:
    def log_for(*subjects: str) -> CollectiveLog:
        log = log_of()
        for subject in subjects:
            log.tell_subject(subject_code(subject, subject))
        log.record(SUM, 4)
        return log

    assert log_for("a", "b").digest == log_for("a", "b").digest
    assert len({log_for(*said).digest for said in (("a", "b"), ("b", "a"), ("a",), ("b",), ())}) == 5
    assert log_for("a", "b").calls()[0].text.endswith(", for several tensors")


def test_a_digest_is_of_the_optimizer_steps_between_calls() -> None:
    def log_with(*between: str) -> CollectiveLog:
        log = log_of()
        log.tell_step()  # ranks may have this log since another moment, so it does not count
        for word in ("", *between):
            if word == "step":
                log.tell_step()
            elif word:
                log.tell_subject(subject_code(word, word))
            else:
                log.record(SUM, 4)
        return log

    ways = [("step", ""), ("step", "step", ""), ("", "step"), ("step", "a", ""), ("a", "")]
    logs = [log_with(*between, "") for between in ways]
    assert len({log.digest for log in logs}) == len(ways)
    assert [log.digest for log in logs] == [log_with(*between, "").digest for between in ways]
    assert logs[0].digest_after(1) == log_of((SUM, 4)).digest
    said = [log.calls()[1].text.partition(".py:")[2].partition(", ")[2] for log in logs]
    assert said == ["after an optimizer step", "after optimizer steps", "", "after an optimizer step, for a", "for a"]
    assert [log.steps for log in logs] == [1, 2, 1, 1, 0]


def test_bytes_that_depend_on_the_rank_do_not_count() -> None:
    one, other = log_of(), log_of()
    one.record_uneven(SUM, 4)
    other.record_uneven(SUM, 100)
    assert one.digest == other.digest
    assert "of 100 bytes" in str(other.call(1))


@given(st.lists(st.tuples(st.booleans(), st.sampled_from((SUM, GATHER)), st.integers(0, 3)), max_size=300))
def test_a_digest_is_the_same_whenever_it_is_asked_for(calls: list[tuple[bool, int, int]]) -> None:
    """Digests are rolled for many calls at a time."""
    log, along, expected = log_of(), [], 0
    for is_uneven, code, nbytes in calls:
        (log.record_uneven if is_uneven else log.record)(code, nbytes)
        along.append(log.digest)
        expected = hash((expected, ~code)) if is_uneven else hash((expected, code, nbytes))
        assert along[-1] == expected
    assert [log.digest_after(n + 1) for n in range(len(calls))] == along
    words = [(f"{'all_reduce sum' if code == SUM else 'all_gather'} over", n) for _, code, n in calls]
    assert [
        call.text.startswith(kind) and f"of {n} bytes" in call.text
        for call, (kind, n) in zip(log.calls(), words, strict=True)
    ] == [True] * len(calls)


def test_a_log_keeps_the_last_calls_with_their_lines() -> None:
    log = log_of(*[(SUM, n) for n in range(KEPT + 10)])
    assert log.call(10) is None
    assert log.digest_after(10) is None
    calls = log.calls()
    assert len(calls) == KEPT
    assert calls[-1].text.startswith(f"all_reduce sum over mesh dim 0 of {KEPT + 9} bytes")
    assert "test_ranks_that_part.py:" in calls[-1].text
    assert log.call(KEPT + 11) is None


def test_two_ranks_that_are_apart_have_digests_in_common() -> None:
    """As far as calls are kept."""
    calls = [(SUM, n % 7) for n in range(3 * KEPT)]
    for ahead in (0, 1, 13, 200, 500):
        one, other = log_of(*calls), log_of(*calls[: len(calls) - ahead])
        assert any(one.digest_after(n) == digest for n, digest in other.digests().items()), ahead


def test_the_first_difference_is_the_first_and_not_a_later_one() -> None:
    common = [(SUM, n) for n in range(20)]
    right, wrong = log_of(*common, (SUM, 1), (SUM, 2)), log_of(*common, (GATHER, 1), (SUM, 2))
    short = log_of(*common)
    number, calls = first_difference({0: right.calls(), 1: wrong.calls(), 2: short.calls()})
    assert number == 21
    assert sorted(calls) == [0, 1]
    assert calls[1].text.startswith("all_gather over mesh dims 0, 1")
    assert first_difference({0: right.calls(), 1: short.calls()}) == (None, {})


def test_a_difference_that_is_no_longer_kept_has_no_number() -> None:
    tail = [(SUM, 4)] * (KEPT + 5)
    assert first_difference({0: log_of((SUM, 1), *tail).calls(), 1: log_of((SUM, 2), *tail).calls()})[0] == 0


# -- circles -----------------------------------------------------------------------------------------------------------


def waits(kind: str, group: str, number: int, ranks: tuple[int, ...], **counts: int) -> Waiting:
    return Waiting(1, [Wait(kind, group, number, ranks, "")], counts)


def test_ranks_in_one_collective_are_no_circle() -> None:
    everyone = {rank: waits("collective", "g", 3, (0, 1, 2), g=3) for rank in (0, 1)}
    assert not circle(everyone, 0), "both have come; rank 2 has not, and does not wait"


def test_ranks_in_two_collectives_that_cross_are_a_circle() -> None:
    crossed = {
        0: waits("collective", "row", 4, (0, 1), row=4, column=2),
        1: waits("collective", "column", 3, (1, 0), row=3, column=3),
        2: waits("collective", "other", 1, (2, 0), other=1),
    }
    assert circle(crossed, 0) == circle(crossed, 1) == {0, 1}
    assert not circle(crossed, 2), "it waits for a rank of the circle, and that one not for it"


def test_a_rank_that_has_issued_what_another_waits_for_is_not_missed() -> None:
    chain = {
        0: waits("collective", "row", 4, (0, 1), row=4, column=2),
        1: waits("collective", "column", 3, (1, 0), row=4, column=3),
    }
    assert not circle(chain, 0)


def test_comparisons_and_calls_of_torch_are_met_by_their_own_kind() -> None:
    ranks = (0, 1)
    assert not circle({r: waits("comparison", "g", 5, ranks, g=4) for r in ranks}, 0)
    assert not circle({r: waits("torch", "(0, 1)", 0, ranks) for r in ranks}, 0)
    mixed = {0: waits("comparison", "g", 5, ranks, g=4), 1: waits("torch", "(0, 1)", 0, ranks, g=4)}
    assert circle(mixed, 0) == {0, 1}


def test_a_rank_that_has_issued_a_collective_does_not_come_to_its_comparison() -> None:
    ranks = (0, 1)
    waiting = {0: waits("collective", "g", 5, ranks, g=5), 1: waits("comparison", "g", 5, ranks, g=4)}
    assert circle(waiting, 0) == {0, 1}, "rank 1 compares, and rank 0 does not"
    waiting[0].compared["g"] = 5
    assert not circle(waiting, 0), "rank 0 has compared: rank 1 reads it"


class Work:
    """A collective on a device, which is finished or not."""

    def __init__(self) -> None:
        self.is_over = False

    def is_completed(self) -> bool:
        return self.is_over


def test_a_collective_on_a_device_is_a_wait_while_it_is_not_complete() -> None:
    """As NCCL has it: no thread of the host waits, and the log knows the last work."""
    log = CollectiveLog("group", (0, 1), holds_work=True)
    log.record(SUM, 4)
    log.work = Work()
    world: Any = SimpleNamespace(logs={"group": log}, waits={}, size=2, compares={})
    for now in (0.0, 5.0):
        _awaited(world, now)
    _, since, wait = world.waits[log.name]
    assert since == 0.0
    assert (wait.kind, wait.number, wait.ranks) == ("collective", 1, (0, 1))
    log.work.is_over = True
    _awaited(world, 6.0)
    assert log.name not in world.waits


def test_a_thread_that_asks_the_store_again_and_again_waits_meanwhile() -> None:
    """On a busy machine a look at it finds it in the middle of a question more often than between two."""
    is_asked, may_answer, asks_below = threading.Event(), threading.Event(), [3]

    def check(_: object) -> bool:
        if asks_below[0]:
            asks_below[0] -= 1
            return check(_)
        is_asked.set()
        return may_answer.wait(20)

    store: Any = SimpleNamespace(check=check, set=lambda *_: None)
    world = World(store, 0, 2, "", lambda: None)
    thread = threading.Thread(target=partial(world.wait_for, "verdict", (0, 1)))
    thread.start()
    assert thread.ident is not None
    world.compares[thread.ident] = Wait("comparison", "group", 1, (0, 1), "all_reduce")
    try:
        assert is_asked.wait(20)
        looks = [_awaited(world, now) for now in (0.0, 5.0)]
    finally:
        may_answer.set()
        thread.join()
    assert looks[1] == {0, 1}
    _, since, wait = world.waits[thread.ident]
    assert (since, wait) == (0.0, world.compares[thread.ident])
    _awaited(world, 6.0)
    assert thread.ident not in world.waits


def test_an_error_that_travels_through_the_store_is_the_same() -> None:
    note = Note(1, "run", "RankDisagreementError", "they differ", "k", 1, is_final=True, ranks_say=("rank 0: a",))
    again = Note(**json.loads(json.dumps(asdict(note))))
    assert again == note
    error = again.error("closed")
    assert isinstance(error, RankDisagreementError)
    assert error.differences == ("rank 0: a",)


def test_an_optimizer_step_raises_what_the_thread_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimpleNamespace(failure=None, steps=0, logs={}, ranks_on=lambda _: frozenset())
    monkeypatch.setattr(rank_failures.PROCESS, "world", world)
    monkeypatch.setattr(rank_failures, "current_world", lambda: world)
    woken = []
    for _ in range(9):
        rank_failures.PROCESS.wakes.clear()
        rank_failures.at_step(None)
        woken.append(rank_failures.PROCESS.wakes.is_set())
    rank_failures.PROCESS.wakes.clear()
    assert [step for step, is_woken in enumerate(woken, 1) if is_woken] == [1, 2, 4, 8]
    world.failure = Note(
        1, "run", "RankDisagreementError", "they differ", "k", 1, is_final=True, ranks_say=("rank 0: a",)
    )
    with pytest.raises(RankDisagreementError, match="they differ: rank 0: a"):
        rank_failures.at_step(None)


def compiled() -> float:
    """What a graph sends is neither recorded nor compared; what runs around it is."""
    x = sharded()
    log = _log()
    total = torch.compile(lambda t: (t * 2).sum(), backend="eager")
    with sw.check_ranks():
        before = log.count
        out = total(x)
        inside = log.count - before
        value = out.full_tensor()
    return float(value) + 1000 * inside


def _log() -> CollectiveLog:
    group: Any = group_of(init_device_mesh("cpu", (4,)), (0,))
    log: CollectiveLog = group.log
    return log


@pytest.mark.slow
@pytest.mark.sample
def test_a_compiled_program_passes(pool: WorkerPool) -> None:
    assert pool.run(compiled, timeout=120) == [128.0] * 4
