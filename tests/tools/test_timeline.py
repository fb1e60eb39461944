"""Timelines: four gloo ranks record a step, and files that are none are refused."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from full_disk import full_disk
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.comm.events import observe
from shardwise.demo.large import placed_step
from shardwise.errors import CallError, TimelineFileError
from shardwise.testing import mesh
from shardwise.tools.rehearse import rehearse
from shardwise.tools.timeline import Timeline
from shardwise.tools.trace_file import exposures, read_trace

SMALL = partial(placed_step, layers=2, width=16, heads=4, context=8, batch=8, places_activations=False)
GRID = (2, 2), ("dp", "tp")


def step_on_ranks(folder, ranks):
    """Record a step; the collectives that this rank issued meanwhile, and what the timeline has."""
    model, inputs, optimizer = SMALL(mesh(*GRID))
    seen = []
    with observe(seen.append), sw.timeline(Path(folder) / "step.json", ranks=ranks) as recorded:
        model(*inputs).backward()
        optimizer.step()
    return [(e.kind, e.nbytes) for e in seen], [(f.site.kind, f.site.nbytes) for f in recorded.flights]


@pytest.fixture(scope="module")
def folder(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("timeline")
    results = pool.run(step_on_ranks, str(folder), "all")
    assert all(issued == recorded and issued for issued, recorded in results)
    return folder


@pytest.fixture(scope="module")
def trace(folder):
    return json.loads((folder / "step.rank1.json").read_text())


def events_of(trace, category):
    return [event for event in trace["traceEvents"] if event.get("cat") == category]


def tracks(trace):
    return {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}


def test_what_is_printed_of_a_timeline_is_a_line():
    assert repr(Timeline(3)) == "<Timeline of rank 3: 0 collectives and 0 slices of the program recorded>"


def test_each_rank_writes_its_file(folder):
    assert sorted(path.name for path in folder.iterdir()) == [f"step.rank{rank}.json" for rank in range(4)]


def test_only_rank_0_records_unless_others_are_named(pool, tmp_path):
    results = pool.run(step_on_ranks, str(tmp_path), (0,))
    assert [bool(recorded) for _, recorded in results] == [True, False, False, False]
    assert [path.name for path in tmp_path.iterdir()] == ["step.json"]


def test_each_mesh_dim_is_a_track(trace):
    names = tracks(trace)
    assert {name.split(" (")[0] for name in names.values()} == {"program", "dp", "tp"}
    for event in events_of(trace, "collective"):
        assert names[event["tid"]].split(" (")[0] in event["args"]["mesh_dims"]
    assert [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"] == ["rank 1"]


def test_what_stands_on_one_track_is_nested_or_apart(trace):
    for track in tracks(trace):
        spans = [(e["ts"], e["ts"] + e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X" and e["tid"] == track]
        open_ends = []
        for begin, end in spans:
            while open_ends and open_ends[-1] <= begin + 1e-3:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-2
            open_ends.append(end)


def test_a_slice_says_what_is_sent_where_from_and_why(trace):
    names = {event["name"] for event in events_of(trace, "collective")}
    wanted = "all_gather tp 512 B | model.blocks.1.attention.wq | implicit: aten.mm.default, operand `mat2` is moved"
    assert any(name.startswith(wanted) for name in names), "\n".join(sorted(names))
    assert any("explicit: gradient of `weight` is brought to its layout" in name for name in names)


def test_predicted_stands_beside_measured_and_exposed(trace):
    waits = {}
    for event in events_of(trace, "wait"):
        waits[event["args"]["number"]] = waits.get(event["args"]["number"], 0) + event["dur"]
    for event in events_of(trace, "collective"):
        args = event["args"]
        assert args["predicted_s"] > 0
        assert args["measured_s"] > 0
        assert args["exposed_s"] * 1e6 == pytest.approx(waits[args["number"]], abs=1)
        assert args["line"].endswith(tuple(f".py:{n}" for n in range(1, 200)))


def test_modules_their_backward_and_the_optimizer_are_on_the_programs_track(trace):
    names = {
        category: {e["name"] for e in events_of(trace, category)} for category in ("module", "backward", "optimizer")
    }
    assert {"(root)", "model.blocks.0.attention.wq"} <= names["module"]
    assert {"backward of model.head", "backward of model.blocks.0.feed.down"} <= names["backward"]
    assert names["optimizer"] == {"optimizer"}


def test_the_command_lists_the_longest_waits_first(folder):
    rows = exposures(read_trace(folder / "step.rank0.json").collectives)
    assert [row.exposed for row in rows] == sorted((row.exposed for row in rows), reverse=True)
    layers = [row for row in rows if row.modules == ["model.blocks.{0-1}.attention.wq"] and row.phase == "forward"]
    assert [(row.times, row.nbytes, row.op) for row in layers] == [(2, 1024, "aten.mm.default")]


# -- other runs ------------------------------------------------------------------------------------------------------


def slow_rank(path):
    """Rank 1 comes late to a collective, which the others wait for."""
    on = mesh((4,), ("dp",))
    x = sw.ones((8, 8), device_mesh=on, placements=[Shard(0)])
    whole = [Replicate()]
    x.redistribute(placements=whole)  # groups are made
    with sw.timeline(path, ranks=(0,)) as recorded:
        if on.get_rank() == 1:
            time.sleep(0.6)
        x.redistribute(placements=whole)
        later = x.redistribute(placements=whole, async_op=True)
        time.sleep(0.6)
        later.to_local()
    return [(flight.exposed, flight.measured) for flight in recorded.flights]


def test_what_hides_behind_work_is_not_exposed(pool, tmp_path):
    (late, hidden), *others = pool.run(slow_rank, str(tmp_path / "step.json"))
    assert others == [[]] * 3
    assert late[0] > 0.2
    assert late[1] > 0.2
    assert hidden[0] < 0.4


def profiled(path):
    on = mesh((4,), ("dp",))
    x = sw.ones((8, 8), device_mesh=on, placements=[Shard(0)])
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with sw.timeline(path) as recorded:
            x.redistribute(placements=[Replicate()])
        x.redistribute(placements=[Replicate()])
    names = [e.key for e in profiler.key_averages() if " | " in e.key]
    counts = [e.count for e in profiler.key_averages() if " | " in e.key]
    return names, counts, len(recorded.flights)


def test_the_profiler_shows_the_same_names_while_it_records(pool, tmp_path):
    first, *others = pool.run(profiled, str(tmp_path / "step.json"))
    assert first == (["all_gather dp 64 B | (no module) | explicit: redistribute(): dp S(0) -> R"], [1], 1)
    assert others == [([], [], 0)] * 3
    (one,) = read_trace(tmp_path / "step.json").collectives
    assert one["line"].endswith(f"test_timeline.py:{profiled.__code__.co_firstlineno + 5}")


def test_gradients_that_are_sent_together_have_a_slice(pool, tmp_path):
    assert pool.run(accumulated, str(tmp_path / "step.json"))[0] == [
        "gradients that waited are brought to their layouts"
    ]


def accumulated(path):
    on = mesh((4,), ("dp",))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    sw.distribute_module(model, on, {}, src_data_rank=None)
    x = sw.ones((8, 8), device_mesh=on, placements=[Shard(0)])
    with sw.timeline(path) as recorded:
        with sw.accumulate():
            model(x).sum().backward()
        [p.grad.to_local() for p in model.parameters()]
    late = [f for f in recorded.flights if f.site.why.startswith("gradients")]
    assert all(len(f.waits) == 1 for f in late)
    return [f.site.why for f in late]


def prefetched(path):
    on = mesh((2, 2), ("dp", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    sw.distribute_module(model, on, {"*.weight": {"dp": Shard(0)}}, src_data_rank=None)
    sw.prefetch(model, "dp")
    x = sw.ones((8, 8), device_mesh=on, placements=[Shard(0), Replicate()])
    with sw.timeline(path) as recorded:
        model(x).sum().backward()
    return [(f.site.module, f.site.mesh_dims) for f in recorded.flights if f.site.op == "prefetch"]


def test_what_is_gathered_ahead_is_at_its_unit_and_mesh_dim(pool, tmp_path):
    sent = pool.run(prefetched, str(tmp_path / "step.json"))[0]
    assert sent[:2] == [("0", ("dp",)), ("1", ("dp",))]
    assert {dims for _, dims in sent} == {("dp",)}


def test_a_rehearsal_has_predictions_and_nothing_measured(tmp_path):
    def program(on):
        model, inputs, optimizer = SMALL(on)
        with sw.timeline(tmp_path / "step.json"):
            model(*inputs).backward()
            optimizer.step()

    rehearse(program, (8, 16, 8), ("pod", "tp", "dp"))
    collectives = read_trace(tmp_path / "step.json").collectives
    assert collectives
    assert all(one["measured_s"] is None and one["predicted_s"] > 0 for one in collectives)


def test_code_that_is_compiled_meanwhile_is_not_told_of(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    compiled = torch.compile(lambda x: model(x) * 2, backend="aot_eager", fullgraph=True)
    with sw.timeline(tmp_path / "step.json") as recorded:
        compiled(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2))
    # The graph that runs is a module; those that were traced into it are not told of.
    assert [one.name for one in recorded.slices] == ["(root)", "0", "1", "(root)"]


def test_nothing_is_observed_outside(tmp_path):
    from shardwise.comm import events

    with sw.timeline(tmp_path / "step.json"):
        assert events.observers
    assert not events.observers


def test_a_block_that_raises_leaves_its_timeline(tmp_path):
    model = torch.nn.Linear(2, 2)
    model.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), sw.timeline(tmp_path / "step.json"):
        model(torch.ones(1, 2))
    assert read_trace(tmp_path / "step.json").collectives == []


def test_a_timeline_that_cannot_be_written_does_not_hide_what_the_block_raised(tmp_path):
    with pytest.raises(ZeroDivisionError) as caught, full_disk(), sw.timeline(tmp_path / "step.json"):
        1 / 0  # noqa: B018
    (note,) = caught.value.__notes__
    assert "step.json" in note
    assert "it cannot be written: File too large" in note
    with pytest.raises(TimelineFileError, match="it cannot be written"), full_disk(), sw.timeline(tmp_path / "it.json"):
        pass
    assert list(tmp_path.iterdir()) == []


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(TimelineFileError, match="there is no folder"), sw.timeline(tmp_path / "no" / "step.json"):
        raise AssertionError


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(TimelineFileError, match="it is a folder"), sw.timeline(tmp_path):
        raise AssertionError


@pytest.mark.parametrize("ranks", ["some", ["one"], 0, [1]])
def test_ranks_that_make_no_sense_are_refused(tmp_path, ranks):
    with pytest.raises(CallError, match="write a timeline of the ranks"), sw.timeline(tmp_path / "a.json", ranks=ranks):
        raise AssertionError


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, "No such file"),
        (b"\xff", "it is not JSON"),
        (b"{", "it is not JSON, or cut short"),
        (b"[" * 100_000, "it is not JSON, or cut short"),
        (b"[]", "it is not a timeline of shardwise"),
        (b'{"traceEvents": []}', "it is not a timeline of shardwise"),
        (b'{"otherData": {"shardwise_timeline": 2}}', "version 2, and this release reads version 1"),
        (b'{"otherData": {"shardwise_timeline": 1}}', "no list of events"),
        (b'{"otherData": {"shardwise_timeline": 1}, "traceEvents": [1]}', "event 0 is not an object"),
        (b'{"otherData": {"shardwise_timeline": 1}, "traceEvents": [{"cat": "collective"}]}', "says nothing"),
        (b'{"otherData": {"shardwise_timeline": 1}, "traceEvents": [{"cat": "collective", "args": {}}]}', "'number'"),
    ],
)
def test_a_file_that_is_no_timeline_is_refused(tmp_path, content, found):
    path = tmp_path / "step.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TimelineFileError, match=r"read the timeline .*step\.json: ") as raised:
        read_trace(path)
    assert found in raised.value.found


@pytest.mark.parametrize("name", ["measured_s", "predicted_s", "kind"])
def test_a_collective_that_lacks_something_is_refused(folder, tmp_path, name):
    path = tmp_path / "step.json"
    path.write_text((folder / "step.rank0.json").read_text().replace(f'"{name}"', '"x"'))
    with pytest.raises(TimelineFileError, match=rf"event \d+ has no '{name}'"):
        read_trace(path)


@given(st.data())
def test_random_changes_are_read_whole_or_refused(folder, tmp_path_factory, data):
    content = bytearray((folder / "step.rank0.json").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    path = tmp_path_factory.mktemp("random") / "step.json"
    path.write_bytes(content)
    try:
        assert exposures(read_trace(path).collectives)
    except TimelineFileError as error:
        assert error.path == str(path)  # noqa: PT017  # whether it raises is not known before
