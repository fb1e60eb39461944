"""Collectives that compiled graphs issue are recorded, compared, watched and shown as those of eager mode."""

from __future__ import annotations

import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.comm import graph_group, standstill
from shardwise.comm.collective_log import CollectiveLog
from shardwise.comm.events import Event, observe
from shardwise.comm.groups import group_of
from shardwise.errors import PlacementError, RankFailedError, RankWaitError, UnseenGraphWarning, WorkerError
from shardwise.private_torch.tracing import seeing_graphs
from shardwise.settings import Settings
from shardwise.testing import WorkerPool

SAMPLE = [pytest.mark.slow, pytest.mark.sample]
ALONE = 1  # the rank that does what the other does not


@pytest.fixture(scope="module")
def two() -> Iterator[WorkerPool]:
    """Workers of this module alone: their process groups end with each error."""
    with WorkerPool(2, start_method="forkserver") as workers:
        yield workers


def is_alone() -> bool:
    return dist.get_rank() == ALONE


def operands() -> tuple[sw.MeshTensor, sw.MeshTensor]:
    """An input sharded by rows, and a parameter sharded by columns: their product needs one of them whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = sw.distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
    w = sw.distribute_tensor(torch.ones(4, 8), mesh, [Shard(1)]).requires_grad_()
    return x, w


def log() -> CollectiveLog:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    group: Any = group_of(mesh, (0,))
    of_group: CollectiveLog = group.log
    return of_group


def look_at_lines_anew() -> None:
    """Have the log look at the line of each call again.

    A call that follows the same call as before is taken to be at the same line, and another test may have made both.
    """
    log()._entries.clear()
    log()._at = type(log()._at)(0, 0, None)


def product(x: Any, w: Any) -> Any:
    return (x @ w).relu().sum()


def summed(x: Any, w: Any) -> Any:
    return product(x, w).full_tensor()


def moved(x: Any, w: Any) -> Any:
    """Other collectives than those of :func:`summed`."""
    return (x.redistribute(placements=[Shard(1)]).sum() + w.sum()).full_tensor()


def broken(x: Any, w: Any) -> Any:
    y = x @ w
    torch._dynamo.graph_break()
    return (y @ w.t()).sum().full_tensor()


# -- recorded ----------------------------------------------------------------------------------------------------------


def recorded_beside_graphs(program: Callable[..., Any], fullgraph: bool) -> tuple[list[str], Counter[str]]:
    """What the second call and its backward pass record, and the collectives in the graphs of the first."""
    torch._dynamo.reset()
    look_at_lines_anew()
    in_graphs: Counter[str] = Counter()

    def see(graph: Any) -> None:
        names = [str(node.target).split(".")[1] for node in graph.graph.nodes if "_c10d_functional" in str(node.target)]
        in_graphs.update(name for name in names if name != "wait_tensor")

    x, w = operands()
    compiled = torch.compile(program, backend=seeing_graphs(see), fullgraph=fullgraph)
    compiled(x, w).backward()
    before = log().count
    compiled(x, w).backward()
    return [str(call) for call in log().calls() if call.number > before], in_graphs


KIND = {
    "all_gather": "all_gather_into_tensor",
    "all_reduce": "all_reduce",
    "exchange": "all_to_all_single",
    "reduce_scatter": "reduce_scatter_tensor",
}


@pytest.mark.parametrize(
    ("program", "fullgraph"),
    [(summed, True), pytest.param(broken, False, marks=SAMPLE), pytest.param(moved, True, marks=SAMPLE)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_each_run_records_what_is_in_the_graphs(ranks: WorkerPool, program: Any, fullgraph: bool) -> None:
    for texts, in_graphs in ranks.run(recorded_beside_graphs, program, fullgraph, timeout=120):
        assert Counter(KIND[text.split()[0]] for text in texts) == in_graphs
        assert texts, "the program sends something"
        forward = [text for text in texts if "a compiled graph at" in text]
        assert forward
        assert all("test_graph_calls.py" in text for text in forward)
        assert all(text in forward or "Tensor.backward at" in text for text in texts)


_TABLE = {torch.ops._c10d_functional.all_to_all_single.default, torch.ops._c10d_functional.wait_tensor.default}


def finds_ops() -> bool:
    """Whether ops that are wrapped now are found in a table that was made before, as torch's are."""
    before = {op._op for op in _TABLE}
    log()
    assert before.isdisjoint([op._op for op in _TABLE]), "they were wrapped before, and this shows nothing"
    return all(op in _TABLE for op in _TABLE)


def test_torch_finds_wrapped_ops_in_its_tables() -> None:
    """A collective that is not found in the table of those may run again in the backward pass of some ranks."""
    with WorkerPool(2, start_method="forkserver") as fresh:
        assert fresh.run(finds_ops) == [True, True]


def records_of(options: dict[str, Any]) -> tuple[float, int, list[str]]:
    torch._dynamo.reset()
    look_at_lines_anew()
    x, w = operands()
    compiled = torch.compile(product, **options)
    compiled(x, w).backward()
    before = log().count
    loss = compiled(x, w)
    loss.backward()
    count = log().count - before
    return float(loss.full_tensor()), count, [str(call) for call in log().calls() if call.number > before][:count]


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("options", [{}, {"mode": "reduce-overhead"}], ids=str)
def test_graphs_of_inductor_are_recorded(ranks: WorkerPool, options: dict[str, Any]) -> None:
    for loss, count, texts in ranks.run(records_of, {"fullgraph": True, **options}, timeout=300):
        assert loss == 8 * 8 * 4.0
        assert count
        # Torch writes the code of such a graph into a file of its own, which is no line of the program.
        assert all("tests/comm/test_graph_calls.py:" in text for text in texts), texts


def counts_while_compiling() -> tuple[int, int, int]:
    """Calls that are recorded while a graph is made without being run, and in a run that a mode sees."""

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **kwargs or {})

    def one(x: Any) -> Any:
        return x.redistribute(placements=[Replicate()]).to_local()

    torch._dynamo.reset()
    x = operands()[0]
    graphs: list[Any] = []
    counts = [log().count]
    compiled = torch.compile(one, backend=seeing_graphs(graphs.append), fullgraph=True)
    compiled(x)
    counts.append(log().count)
    with Seeing():
        graphs[0](x.to_local())
    counts.append(log().count)
    graphs[0](x.to_local())
    counts.append(log().count)
    return tuple(b - a for a, b in pairwise(counts))  # type: ignore[return-value]


def test_a_call_counts_once_and_not_while_it_is_traced(ranks: WorkerPool) -> None:
    assert ranks.run(counts_while_compiling, timeout=120) == [(1, 1, 1)] * ranks.world_size


def observed() -> tuple[int, int]:
    torch._dynamo.reset()
    x, w = operands()
    compiled = torch.compile(summed, backend="aot_eager")
    compiled(x, w)
    outside: list[Any] = []
    inside: list[Any] = []
    with observe(outside.append), observe(inside.append, in_graphs=True):
        compiled(x, w)
    return len(outside), len(inside)


def test_observers_see_graphs_if_they_ask(ranks: WorkerPool) -> None:
    for outside, inside in ranks.run(observed, timeout=120):
        assert outside == 0
        assert inside > 1


def warnings_with_the_cpp_wrapper(backend: str) -> tuple[list[str], float, int]:
    """Warnings of two compilations with it, a loss, and what the second call records."""

    def loss(x: Any) -> Any:
        return (x * 2).sum().redistribute(placements=[Replicate()]).to_local()

    x = operands()[0]
    graph_group._warn_once.cache_clear()
    compiled = torch.compile(loss, backend=backend, fullgraph=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for is_on in (False, True, True):
            torch._dynamo.reset()
            with inductor_config.patch(cpp_wrapper=is_on):
                compiled(x)
    before = log().count
    value = float(compiled(x))
    assert {one.filename for one in caught if one.category is UnseenGraphWarning} <= {__file__}
    return [str(one.message) for one in caught if one.category is UnseenGraphWarning], value, log().count - before


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=SAMPLE)])
def test_a_graph_that_is_not_seen_is_said_to_be(ranks: WorkerPool, backend: str) -> None:
    for texts, loss, count in ranks.run(warnings_with_the_cpp_wrapper, backend, timeout=300):
        assert len(texts) == 1, "once, and not where the wrapper is off"
        assert "cpp_wrapper" in texts[0]
        assert loss == 64.0
        assert count == (1 if backend == "aot_eager" else 0), "if Inductor's are seen now, the warning has to go"


# -- ranks that part ---------------------------------------------------------------------------------------------------


def failures(workers: WorkerPool, program: Callable[[], object]) -> tuple[list[Any], float]:
    """What each rank of a program raises, and the seconds until both had."""
    workers.run(torch.manual_seed, 0)  # the workers are up
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        workers.run(program, timeout=120)
    return caught.value.errors, time.monotonic() - start


def compiled_and_warm(program: Any = summed) -> tuple[Any, Any, Any]:
    """A compiled program that has run once on both ranks, and its operands."""
    torch._dynamo.reset()
    x, w = operands()
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    compiled(x, w)
    return compiled, x, w


def one_skips_a_call() -> None:
    """The shapes on the wire fit, so nothing but the record tells."""
    compiled, x, w = compiled_and_warm()
    for step in range(200):
        if not (is_alone() and step == 3):
            compiled(x, w)
        x.sum().full_tensor()
        time.sleep(0.02)


def ranks_compile_other_programs() -> None:
    """What they send has the same form, so the backend does not tell them apart."""
    torch._dynamo.reset()
    x = operands()[0]
    compiled = torch.compile(multiplied if is_alone() else added, backend="aot_eager", fullgraph=True)
    for _ in range(200):
        compiled(x)
        time.sleep(0.02)


def added(x: Any) -> Any:
    return x.sum(0).full_tensor() * 2


def multiplied(x: Any) -> Any:
    return x.prod(0).full_tensor() * 2


@pytest.mark.parametrize(
    "program", [one_skips_a_call, pytest.param(ranks_compile_other_programs, marks=SAMPLE)], ids=lambda p: p.__name__
)
def test_ranks_whose_graphs_part_end_and_name_the_graph(two: WorkerPool, program: Callable[[], None]) -> None:
    errors, seconds = failures(two, program)
    assert seconds < 90
    for failure in errors:
        assert failure.kind == "RankDisagreementError", failure
        assert any(
            "a compiled graph at" in line and "test_graph_calls.py:" in line for line in failure.error.differences
        )


def one_does_not_call() -> None:
    compiled, x, w = compiled_and_warm()
    standstill._limit.cache_clear()
    standstill.read_settings = lambda: Settings(wait_limit=3.0)  # type: ignore[attr-defined]
    if is_alone():
        time.sleep(8)
    compiled(x, w)


@pytest.mark.slow
@pytest.mark.sample
def test_a_graph_that_waits_says_who_does_not_come(two: WorkerPool) -> None:
    errors, _ = failures(two, partial(with_own_limit, one_does_not_call))
    for failure in errors:
        assert failure.kind == "RankWaitError", failure
        assert isinstance(failure.error, RankWaitError)
        waits, missing = failure.error.differences
        assert waits.startswith("rank 0: waits in ")
        assert "a compiled graph at" in waits
        assert missing.startswith(f"rank {ALONE}: did not come and is at ")


def with_own_limit(program: Callable[[], None]) -> None:
    before = standstill.read_settings  # type: ignore[attr-defined]
    try:
        program()
    finally:
        standstill.read_settings = before  # type: ignore[attr-defined]
        standstill._limit.cache_clear()


def compares_while_one_goes_elsewhere() -> None:
    compiled, x, w = compiled_and_warm()
    with sw.check_ranks():
        if is_alone():
            x.sum().full_tensor()
        compiled(x, w)


def test_a_comparison_names_the_graph_before_anything_is_sent(two: WorkerPool) -> None:
    errors, _ = failures(two, compares_while_one_goes_elsewhere)
    for failure in errors:
        assert failure.kind == "RankDisagreementError", failure
        here, there = failure.error.differences
        assert here.startswith("rank 0: ")
        assert "a compiled graph at" in here
        assert "MeshTensor.full_tensor at" in there


def right_program() -> list[float]:
    compiled, x, w = compiled_and_warm()
    with sw.check_ranks():
        totals = [float(compiled(x, w)) for _ in range(2)]
        product(x, w).backward()
    assert w.grad is not None
    return [*totals, float(w.grad.full_tensor().sum())]


def test_a_right_program_passes_with_every_collective_compared(ranks: WorkerPool) -> None:
    assert ranks.run(right_program, timeout=120) == [[256.0, 256.0, 256.0]] * ranks.world_size


def one_fails() -> None:
    compiled, x, w = compiled_and_warm()
    if is_alone():
        raise ValueError("this rank alone")
    compiled(x, w)


def test_a_graph_that_waits_for_a_failed_rank_says_so(two: WorkerPool) -> None:
    errors, _ = failures(two, one_fails)
    assert errors[ALONE].kind == "ValueError"
    assert isinstance(errors[0].error, RankFailedError)
    assert "this rank alone" in errors[0].message


def goes_on_after_its_error() -> float:
    """One rank catches an error and then runs a graph, for which the other has waited longer than a note may stand."""
    compiled, x, w = compiled_and_warm()
    if is_alone():
        with pytest.raises(PlacementError):
            x.redistribute(placements=[Shard(7)])
        time.sleep(1)
    total = float(compiled(x, w))
    for _ in range(15):
        total = float(compiled(x, w))
        time.sleep(0.2)
    return total


@pytest.mark.slow
@pytest.mark.sample
def test_a_graph_withdraws_the_note_of_an_error_that_was_caught(two: WorkerPool) -> None:
    assert two.run(goes_on_after_its_error, timeout=120) == [256.0] * 2


# -- shown -------------------------------------------------------------------------------------------------------------


def phases_of_graphs() -> list[list[str]]:
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    x = sw.MeshTensor.from_local(torch.ones(4, 8), mesh, [Partial()])
    compiled = torch.compile(lambda x: x.relu() + 1, backend="aot_eager", fullgraph=True)
    compiled(x)
    seen: dict[int, list[str]] = {}

    def note(event: Event) -> None:
        seen.setdefault(event.number, []).append(event.phase)

    with observe(note, phases=("issued", "waiting", "waited", "finished"), in_graphs=True):
        compiled(x)
    return list(seen.values())


def test_a_graph_waits_for_a_collective_no_longer_than_it_takes(two: WorkerPool) -> None:
    """It is known to be finished when the wait is over: a process may be put aside between two notes of the time."""
    for phases in two.run(phases_of_graphs, timeout=120):
        assert phases
        assert all(order == ["issued", "waiting", "waited", "finished"] for order in phases)


def timeline_of(folder: str) -> list[dict[str, Any]]:
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    layer = torch.nn.Linear(8, 8, bias=False)
    sw.distribute_module(layer, mesh, {"weight": [Shard(0)]})
    x = sw.MeshTensor.from_local(torch.ones(4, 8), mesh, [Partial()])
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    compiled(x).sum().backward()
    with sw.timeline(Path(folder) / "step.json", ranks="all") as recorded:
        compiled(x).sum().backward()
    assert recorded.flights
    path = Path(folder) / f"step.rank{dist.get_rank()}.json"
    return [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "collective"]


def test_a_timeline_has_the_collectives_of_graphs(two: WorkerPool, tmp_path: Path) -> None:
    for events in two.run(timeline_of, str(tmp_path), timeout=120):
        names = [event["name"] for event in events if event["args"]["op"] == "(graph)"]
        assert all(name.endswith("| a compiled graph sends it") for name in names), "not explicit: nobody knows that"
        of_graphs = [event["args"] for event in events if event["args"]["op"] == "(graph)"]
        assert of_graphs
        for args in of_graphs:
            assert args["mesh_dims"] == ["tp"], "no other mesh of these workers has names"
            assert args["why"] == "a compiled graph sends it"
            assert args["measured_s"] >= args["exposed_s"] >= 0
            assert args["predicted_s"] > 0
            assert args["line"]
