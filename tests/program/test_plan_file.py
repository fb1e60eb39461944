"""The text of plan files: what is written is read, and what is no whole plan is refused by file and line."""

from __future__ import annotations

import json

import pytest
from attrs import evolve
from full_disk import full_disk

from shardwise.errors import PlanFileError, PlanVersionError
from shardwise.kernel.placements import REPLICATE, Shard
from shardwise.program.decisions import Decisions
from shardwise.program.plan_file import Line, PlanFile, parse, patterns_of
from shardwise.program.step_plan import StepPlan, read_plan

FILE = PlanFile(
    program="train.py:step",
    mesh_names=("pod", "tp"),
    mesh_shape=(8, 16),
    figures="defaults (0123)",
    predicted={"step_ms": 412.7, "kept": "20.16 GiB"},
    parameters={"head.weight": {"tp": "S(0)"}, "blocks.*.wq.weight": {"pod": "S(1)", "tp": "_S(0, 4)"}, "*.bias": {}},
    inputs={"ids": {"pod": "S(0)"}, "rest.0": {}},
    rests=(Line("blocks.*.wo", "aten.mm.default", "forward", {"tp": "R"}, 'cheaper than "P(sum)"', 32),),
    moves=(Line("head", "aten.mm.default", "backward", {"tp": "S(0)"}, "", 1, "mat2"),),
    communication={"forward": ("all_reduce tp 16 ranks x67 8 B (8 B)",), "backward": ()},
)
TEXT = FILE.text()


def test_what_is_written_is_read():
    read = parse(TEXT, "gpt.plan")
    assert read.text() == TEXT
    assert evolve(read, source="").rests == FILE.rests
    assert read.digest == FILE.digest


def test_reasons_and_figures_are_no_part_of_the_digest():
    other = TEXT.replace("cheaper", "dearer").replace("412.7", "1.5") + "# a comment\n"
    assert parse(other, "").digest == FILE.digest
    assert parse(TEXT.replace("times = 32", "times = 31"), "").digest != FILE.digest


def test_a_line_stands_for_all_layers_that_lie_alike():
    layouts = {f"blocks.{i}.w": {"tp": "S(0)"} for i in range(12)}
    assert patterns_of(layouts) == {"blocks.*.w": {"tp": "S(0)"}}
    differs = {**layouts, "blocks.3.w": {}}
    assert patterns_of(differs) == dict(sorted(differs.items()))


def test_a_pattern_that_would_match_more_is_not_used():
    layouts = {"blocks.0.w": {"tp": "S(0)"}, "blocks.head.w": {}}
    assert patterns_of(layouts) == layouts


def test_every_line_holds_for_a_name():
    """`norm*` stands for `norm` as well, so a line of its own would fit nothing where the plan is used."""
    layouts = {"a.0.norm1.w": {}, "a.0.norm2.w": {}, "a.1.norm.w": {}, "a.1.up.w": {"tp": "S(0)"}}
    assert patterns_of(layouts) == {"a.*.norm*.w": {}, "a.*.up.w": {"tp": "S(0)"}}
    layouts["a.1.norm.w"] = {"tp": "S(0)"}
    assert patterns_of(layouts) == {"a.0.norm1.w": {}, "a.0.norm2.w": {}, "a.*.norm.w": layouts["a.1.norm.w"]} | {
        "a.*.up.w": {"tp": "S(0)"}
    }


def test_the_first_pattern_that_matches_places():
    assert FILE.placements_of("head.weight") == ("head.weight", (REPLICATE, Shard(0)))
    assert FILE.placements_of("head.bias") == ("*.bias", (REPLICATE, REPLICATE))
    assert FILE.placements_of("tail.weight") is None


def line_of(text):
    return next(i for i, line in enumerate(TEXT.splitlines(), 1) if line.startswith(text))


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("times = 32", "times = ", "times = 32", "it is not TOML"),
        ("version = 1\n", "", "version", "it has no version"),
        ("figures = ", "# ", None, "it has no 'figures'"),
        ("pod = 8", 'pod = "8"', "mesh", "mesh dim 'pod' has the size '8'"),
        ('"head.weight"        = { tp =', '"head.weight" = { sp =', '"head.weight"', "'sp' is not a mesh dim"),
        ('_S(0, 4)"', 'T(0)"', '"blocks.*.wq', "'T(0)' is not a placement"),
        ("times = 32", "times = 0", "[[rests]]", "'times' is 0"),
        ('operand = "mat2"\n', "", "[[moves]]", "[[moves]] has no 'operand'"),
        ('op = "aten', 'of = "aten', "[[rests]]", "[[rests]] has no 'op'"),
        ("[inputs]", "[input]", None, "it has no [inputs]"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(old, new, line, message):
    assert old in TEXT
    with pytest.raises(PlanFileError) as error:
        parse(TEXT.replace(old, new, 1), "gpt.plan")
    assert message in str(error.value)
    assert "read the plan gpt.plan" in str(error.value)
    if line is not None:
        assert error.value.line == line_of(line)


@pytest.mark.parametrize("length", range(0, len(TEXT) - 2, 13))
def test_a_file_cut_short_is_refused(length):
    with pytest.raises(PlanFileError):
        parse(TEXT[:length], "gpt.plan")


def test_a_later_version_is_refused():
    with pytest.raises(PlanVersionError, match="line 1: it is of version 2, and this release reads version 1"):
        parse(TEXT.replace("version = 1", "version = 2"), "gpt.plan")


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "gpt.plan"
    StepPlan(FILE, Decisions((8, 16), {})).save(path)
    return path


def test_a_pair_of_files_is_read(saved):
    assert read_plan(saved).file.text() == TEXT


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("gpt.plan", None, "cannot be read"),
        ("gpt.plan.decisions.json", None, "gpt.plan.decisions.json cannot be read"),
        ("gpt.plan.decisions.json", '{"plan": "0', "is not a whole file of decisions"),
        ("gpt.plan", TEXT.replace("times = 32", "times = 31"), "was changed"),
        ("gpt.plan.decisions.json", json.dumps({"plan": FILE.digest}), "the data is not what"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(saved, name, text, message):
    if text is None:
        saved.with_name(name).unlink()
    else:
        saved.with_name(name).write_text(text)
    with pytest.raises(PlanFileError, match=message):
        read_plan(saved)


def test_where_one_file_of_a_plan_cannot_be_written_neither_is(saved):
    before = {path.name: path.read_bytes() for path in saved.parent.iterdir()}
    other = evolve(FILE, program="another")
    beside = saved.with_name("gpt.plan.decisions.json")
    with full_disk(len(beside.read_bytes()) + 8), pytest.raises(PlanFileError, match=r"gpt\.plan cannot be written"):
        StepPlan(other, Decisions((8, 16), {})).save(saved)
    assert {path.name: path.read_bytes() for path in saved.parent.iterdir()} == before
    (saved.parent / "folder").mkdir()
    with pytest.raises(PlanFileError, match="it is not a file"):
        StepPlan(FILE, Decisions((8, 16), {})).save(saved.parent / "folder")
    assert sorted(path.name for path in saved.parent.iterdir()) == ["folder", *sorted(before)]


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(PlanFileError, match="cannot be written"):
        StepPlan(FILE, Decisions((8, 16), {})).save(tmp_path / "nowhere" / "gpt.plan")
