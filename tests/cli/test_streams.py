"""Where output cannot be written as it is: an encoding of few letters, a full disk, streams that are closed."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from shardwise.cli import main
from shardwise.cli.main import COMMANDS

EXPLAIN = ("explain", "aten.mm", "--mesh", "2x2", "--input", "f32[8,16] S(0),R", "--input", "f32[16,32] R,R")
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")


def run(*arguments, redirected=None, **environment):
    command = [sys.executable, "-m", "shardwise", *arguments]
    if redirected is not None:
        command = ["sh", "-c", f'"$@" {redirected}', "sh", *command]
    environment = {**os.environ, "COLUMNS": "80", **environment}
    return subprocess.run(command, capture_output=True, check=False, env=environment)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_letters_that_a_terminal_has_not_are_spelled(encoding):
    done = run(*EXPLAIN, PYTHONIOENCODING=encoding, FORCE_COLOR="1", NO_COLOR="1")
    assert done.returncode == 0, done.stderr
    assert ("moves us" if encoding == "ascii" else "moves µs") in done.stdout.decode(encoding)


def test_bytes_of_a_name_that_are_no_letters_are_spelled(tmp_path):
    name = os.fsencode(tmp_path / "step") + b"\xff.py"
    Path(os.fsdecode(name)).write_text("def step():\n    pass\n")
    done = subprocess.run(
        [sys.executable, "-c", PRINTS, os.fsdecode(name)],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.strip().endswith(rb"step\udcff.py")


PRINTS = """
import sys
from shardwise.cli.streams import writing_any_letter
with writing_any_letter():
    print(sys.argv[1])
"""


@needs_full
@pytest.mark.parametrize("arguments", [("--help",), ("completion", "bash"), ("rules", "svd", "--json")], ids=" ".join)
def test_a_full_disk_is_one_line(arguments):
    done = run(*arguments, redirected=">/dev/full")
    assert done.returncode == 1
    assert done.stderr.decode() == "Error: cannot write the output: No space left on device\n"


@pytest.mark.slow
@pytest.mark.sample
@needs_full
@pytest.mark.parametrize("module", ["shardwise", "shardwise.demo"])
def test_a_full_disk_is_one_line_of_the_demo_too(module):
    sizes = ["--steps", "1", "--layers", "1", "--width", "32", "--heads", "4", "--context", "16", "--mesh", "2"]
    arguments = [*(["demo"] if module == "shardwise" else []), *sizes, "--no-learn"]
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (1, "Error: cannot write the output: No space left on device\n")


def test_another_error_of_the_system_is_not_taken_for_a_full_disk():
    done = subprocess.run(
        [sys.executable, "-c", PRINTS.replace("print(sys.argv[1])", "open('/no/such/file')")],
        capture_output=True,
        check=False,
    )
    assert b"FileNotFoundError" in done.stderr


@pytest.mark.parametrize(
    ("closed", "is_printed"), [(">&-", False), (">&- 2>&-", False), ("2>&-", True), ("<&- >&- 2>&-", False)]
)
def test_closed_streams_lead_nowhere(closed, is_printed):
    done = run("rules", "svd", "--json", redirected=closed)
    assert (done.returncode, done.stderr) == (0, b"")
    assert bool(done.stdout and json.loads(done.stdout)) == is_printed


def test_the_processes_of_a_command_without_streams_have_them():
    opens = "import os; from shardwise.cli.streams import open_streams; open_streams(); "
    program = f"{opens}os._exit(sum(map(os.get_inheritable, range(3))))"
    command = f"{shlex.join([sys.executable, '-c', program])} <&- >&- 2>&-"
    assert subprocess.run(command, shell=True, check=False).returncode == 3  # noqa: S602  # a shell closes them


def helps():
    for name in sorted(COMMANDS):
        command = main.get_command(None, name)
        yield (name,)
        if isinstance(command, click.Group):
            yield from ((name, inner) for inner in command.list_commands(None))


def test_lines_of_help_fit_60_columns():
    for names in helps():
        result = CliRunner().invoke(main, [*names, "--help"], terminal_width=60)
        assert result.exit_code == 0
        assert [line for line in result.output.splitlines() if len(line) > 60] == [], names


def test_no_sentence_of_a_list_of_commands_is_cut():
    for names in helps():
        result = CliRunner().invoke(main, [*names, "--help"], terminal_width=60)
        listed = result.output.partition("Commands:")[2]
        assert "..." not in listed, names
