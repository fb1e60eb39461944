"""``shardwise timeline``: the table of what a program waits for."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner

from shardwise.cli.main import main
from shardwise.tools.sites import Line, Site
from shardwise.tools.trace_file import Flight, Slice, trace_of


def flight(number, module, exposed, *, predicted=0.001, finished=0.5, implicit=True):
    line = Line("train.py", 7)
    why = "operand `mat2` is moved tp S(1) -> R"
    site = Site("forward", module, "aten.mm.default", "all_gather", ("tp",), 4, 1 << 20, why, implicit, line, number)
    return Flight(
        site, 0.1 * number, predicted, None if finished is None else 0.1 * number + finished, [(1.0, 1.0 + exposed)]
    )


@pytest.fixture
def run(tmp_path):
    def call(flights, *args):
        path = tmp_path / "step.json"
        path.write_text(json.dumps(trace_of(flights, [Slice("(root)", "module", 0, 2)], 0, is_rehearsal=False)))
        return CliRunner().invoke(main, ["timeline", str(path), *args])

    return call


LAYERS = [flight(i, f"blocks.{i}.wq", 0.25) for i in range(3)]
HEAD = flight(9, "head", 0.0, predicted=None, finished=None, implicit=False)


def test_layers_are_one_row_and_the_longest_wait_is_first(run):
    result = run([HEAD, *LAYERS])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "4 collectives; the program waited 750.0 ms for them."
    words = lines[3].split()
    assert words[:9] == ["750.0", "ms", "100%", "1,500.0", "ms", "3.000", "ms", "3", "3.00"]
    assert "all_gather tp  blocks.{0-2}.wq  implicit: aten.mm.default, operand `mat2` is moved" in lines[3]
    assert lines[3].endswith("train.py:7")
    assert lines[4].split()[:6] == ["0.000", "ms", "0%", "-", "-", "1"]


def test_most_says_how_much_is_left_out(run):
    result = run([HEAD, *LAYERS], "--most", "1")
    assert result.output.endswith("\n1 more sites with 0.000 ms: --most 2 lists them.\n")
    assert "head" not in result.output


def test_json_has_seconds(run):
    first, second = json.loads(run([HEAD, *LAYERS], "--json").output)
    assert (first["modules"], first["exposed"], first["times"]) == (["blocks.{0-2}.wq"], 0.75, 3)
    assert (second["measured"], second["predicted"]) == (None, None)


def test_a_step_without_collectives_is_no_table(run):
    assert run([]).output == "0 collectives; the program waited 0.000 ms for them.\n"


def test_what_is_no_timeline_is_refused(tmp_path):
    (tmp_path / "other.json").write_text("[]")
    for name, found in (("other.json", "it is not a timeline of shardwise"), ("none.json", "No such file")):
        result = CliRunner().invoke(main, ["timeline", str(tmp_path / name)])
        assert result.exit_code == 1
        assert f"TimelineFileError: read the timeline {tmp_path / name}: {found}" in result.output


def test_the_picture_has_a_lane_for_each_track_and_is_xml(run, tmp_path):
    assert run([HEAD, *LAYERS], "--svg", str(tmp_path / "a.svg")).exit_code == 0
    root = ET.fromstring((tmp_path / "a.svg").read_text())  # noqa: S314  # our own text
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"program", "tp", "tp (2)", "the program waits"} <= set(texts)
    titles = [node.text for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sum(title.startswith("all_gather tp 1.00 MiB | blocks.1.wq | implicit") for title in titles) == 1
    result = run([HEAD], "--svg", str(tmp_path / "no" / "a.svg"))
    assert result.exit_code == 2
    assert "there is no folder" in result.output
