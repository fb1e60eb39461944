"""Tables on a narrow terminal: columns go, words stay whole."""

import re

import pytest
from click.testing import CliRunner

from shardwise.cli import main
from shardwise.cli.main import COMMANDS
from shardwise.cli.output import pipe_width
from shardwise.steps import planning

BORDERS = ("│", "┃", "┏", "└")
WORDS = re.compile(r"[^\s│┃]+")


@pytest.fixture
def at(monkeypatch):
    """``at(60, "plugins")``: what the command prints on a terminal with so many columns."""

    def run(columns, *arguments):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("NO_COLOR", "1")
        output = re.sub(r"\x1b\[[0-9;]*m", "", CliRunner().invoke(main, arguments).output)
        lines = [line for line in output.splitlines() if line.startswith(BORDERS)]
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
        return {word for word in WORDS.findall(text.partition("not shown: ")[0]) if word[0] not in "┏┡└"}

    wide = words(200)
    # A path may be longer than a line.
    long = [word for word in wide if len(word) > 30]
    assert not [word for word in words(columns) - wide if not any(word in whole for whole in long)]


@pytest.mark.parametrize("command", ["", *COMMANDS, "plugins check", "plugins search", "plan show"])
def test_help_is_no_wider_than_the_terminal_and_keeps_its_words(monkeypatch, command):
    def lines(columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        return CliRunner().invoke(main, [*command.split(), "--help"]).output.splitlines()

    whole = {word for line in lines(200) for word in line.split()}
    for columns in (40, 60, 80):
        narrow = lines(columns)
        assert max(map(len, narrow)) <= columns
        assert {word for line in narrow for word in line.split()} <= whole


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


STEP = """
import torch
from torch import nn
import shardwise as sw

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.out = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.out(torch.relu(self.wide(self.norm(x))))

def step(mesh):
    model = nn.Sequential(Block(), Block(), nn.Linear(16, 16))
    heads = {"*.wide.*": {"tp": sw.Shard(0)}, "*.out.weight": {"tp": sw.Shard(1)}}
    sw.distribute_module(model, mesh, heads, src_data_rank=None)
    return model, sw.zeros((32, 8, 16), device_mesh=mesh, placements={"dp": sw.Shard(0)})
"""
FIGURE = re.compile(r"\d[\d.,]* (?:ms|B|KiB|MiB)|\d+ x, [\d.]+ (?:B|KiB)|\(\d+\.\d% less\)")


@pytest.fixture
def printed(tmp_path, monkeypatch):
    """What a command prints, with the widest line at most that wide; on a terminal, or in a pipe of that width."""
    (tmp_path / "mine.py").write_text(STEP)
    monkeypatch.chdir(tmp_path)

    def run(width, *arguments, terminal=True):
        for name in ("FORCE_COLOR", "NO_COLOR"):
            monkeypatch.setenv(name, "1") if terminal else monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("COLUMNS", str(width))
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        text = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)
        # In a pipe a sentence is one line.
        assert max(len(line) for line in text.splitlines() if terminal or line.startswith(BORDERS)) <= width
        return text

    return run


@pytest.fixture(scope="module")
def planned_once():
    """A plan is made once for all widths, as what is asked is how it is printed; the bar runs each time."""
    plan, made = planning.plan, []

    def once(*arguments, tell, **options):
        if not made:
            made.append(plan(*arguments, tell=tell, **options))
        for phase in (*planning.PLAN_PHASES, "prove"):
            tell(phase, made[0].calls)
        return made[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "plan", once)
        yield


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
@pytest.mark.usefixtures("planned_once")
def test_a_plan_shows_its_figures_whole_at_any_width(printed, terminal):
    asked = ("plan", "mine.py:step", "--mesh", "2x2", "--names", "dp,tp", "--fixed", "parameters", "--prove")
    wide = printed(200, *asked, terminal=terminal)
    # The last lines have the seconds that it took.
    figures = sorted(FIGURE.findall(wide.partition(" calls, ")[0]))
    assert {kind for figure in figures for kind in ("ms", "KiB", " x, ", "less") if kind in figure} == {
        "ms",
        "KiB",
        " x, ",
        "less",
    }
    for width in (60, 80, 120):
        text = printed(width, *asked, terminal=terminal)
        table = re.sub(r"\s+", " ", text.partition(" calls, ")[0])
        assert sorted(FIGURE.findall(table)) == figures
        for name in ("op by op", "plan", "tp"):
            assert re.search(rf"\b{name}\b", table)


def test_a_long_name_is_broken_where_its_parts_are_joined(at):
    names = [word for word in WORDS.findall(at(200, "rules", "scaled_dot_product")) if word.startswith("aten._scaled")]
    assert max(map(len, names)) > 50
    cells = [line.split("│")[1].strip() for line in at(60, "rules", "scaled_dot_product").splitlines() if "│" in line]
    assert "".join(cells) == "".join(names)
    assert not [cell for cell in cells if cell and not cell.endswith(("_", ".", "default", "out"))]


def test_a_table_for_a_pipe_is_200_columns_wide_where_nobody_says_how_wide_it_is(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert pipe_width() == 200
    for text, width in (("72", 72), ("0", 200), ("wide", 200), ("-3", 200), ("", 200)):
        monkeypatch.setenv("COLUMNS", text)
        assert pipe_width() == width


def test_a_timeline_keeps_its_times_and_says_what_is_not_shown(at, tmp_path):
    from shardwise.tools.trace_file import WaitedFor

    rows = [
        WaitedFor(
            exposed=0.0123,
            measured=0.02,
            predicted=0.001,
            times=4,
            nbytes=262144,
            kind="all_reduce",
            mesh_dims=("dp", "tp"),
            modules=("blocks.{0-1}.norm1",),
            phase="backward",
            op="aten.native_layer_norm_backward.default",
            why="gradient of `weight` is brought to its layout: dp, tp P(sum) -> R",
            lines=("mine.py:28",),
            implicit=False,
        )
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.cli.timeline.read_trace", lambda _file: type("Trace", (), {"collectives": ()}))
        patch.setattr("shardwise.cli.timeline.exposures", lambda _collectives: rows)
        narrow = at(100, "timeline", str(tmp_path / "any.json"))
    assert "│ 12.3 ms │" in narrow
    assert "256.00 KiB" in narrow
    assert "not shown: predicted, share" in narrow
