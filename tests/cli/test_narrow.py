"""Tables on a narrow terminal: columns go, words stay whole."""

import re

import pytest
from click.testing import CliRunner

from shardwise.cli import main

WORDS = re.compile(r"[^\s│┃]+")


@pytest.fixture
def at(monkeypatch):
    """``at(60, "plugins")``: what the command prints on a terminal with so many columns."""

    def run(columns, *arguments):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("NO_COLOR", "1")
        output = re.sub(r"\x1b\[[0-9;]*m", "", CliRunner().invoke(main, arguments).output)
        lines = [line for line in output.splitlines() if line.startswith(("│", "┃", "┏", "└"))]
        assert lines
        assert max(map(len, lines)) <= columns
        return output

    return run


@pytest.mark.parametrize("arguments", [("plugins",), ("rules", "svd"), ("plugins", "search", "linalg")], ids=" ".join)
def test_words_are_whole_at_60_columns_and_what_is_not_shown_is_named(at, arguments):
    wide, narrow = at(200, *arguments), at(60, *arguments)
    assert "not shown" not in wide
    shown = {word for word in WORDS.findall(narrow.partition("not shown")[0]) if word[0] not in "┏┡└"}
    assert shown <= set(WORDS.findall(wide))
    assert "not shown: " in narrow


PROGRAM = """
import torch
from torch import nn
import shardwise as sw

def step(mesh):
    model = sw.distribute_module(nn.Linear(4, 4), mesh, {"*": [sw.Replicate()]})
    return model, (sw.distribute_tensor(torch.randn(4, 4), mesh, [sw.Shard(0)]),)

def plain():
    nn.Linear(4, 4)(torch.randn(4, 4))
"""


@pytest.mark.parametrize("columns", [40, 60])
@pytest.mark.parametrize(
    "arguments",
    [
        ("rehearse", "mine.py:step", "--mesh", "2"),
        ("coverage", "mine.py:plain", "--all"),
        ("explain", "aten.mm", "--mesh", "2x2", "--input", "f32[8,16] S(0),R", "--input", "f32[16,32] R,R"),
        ("explain", "aten.addmm", "--mesh", "4", *(word for _ in range(3) for word in ("--input", "f32[8,8] P(sum)"))),
    ],
    ids=lambda a: "-".join(a[:2]),
)
def test_where_a_table_has_no_room_its_rows_are_lists_of_whole_words(tmp_path, monkeypatch, columns, arguments):
    (tmp_path / "mine.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")

    def words(width):
        monkeypatch.setenv("COLUMNS", str(width))
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0
        text = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)
        assert max(map(len, text.splitlines())) <= width
        return {word for word in WORDS.findall(text) if word[0] not in "┏┡└"}

    wide = words(200)
    # A path may be longer than a line.
    long = [word for word in wide if len(word) > 30]
    assert not [word for word in words(columns) - wide if not any(word in whole for whole in long)]


def test_plugins_keep_their_names_and_states(at):
    output = at(60, "plugins")
    assert "│ shardwise-embedding │" in output
    assert "distribution" not in output.partition("not shown")[0]
    assert "loaded" in output


def test_findings_of_the_doctor_are_sentences_at_60_columns(at):
    output = at(60, "doctor")
    assert re.search(r"│ ok +│ process group: ", output)
    words = set(WORDS.findall(output))
    assert {"shardwise-embedding", "shardwise-pointwise:"} <= words
    assert "check" not in output.splitlines()[1]
