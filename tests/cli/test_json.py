"""``--json``: one document on stdout, whatever a program prints and however a command ends."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
from click.testing import CliRunner

from shardwise.cli import main
from shardwise.cli.output import print_json

PROGRAM = """
import os
import subprocess

import torch
from torch import nn

import shardwise as sw


def step(mesh):
    print("of the program")
    os.write(1, b"of its C code\\n")
    subprocess.run(["echo", "of its child"], check=True)
    model = sw.distribute_module(nn.Linear(4, 4), mesh, {"*": [sw.Replicate()]})
    return model, (sw.distribute_tensor(torch.randn(4, 4), mesh, [sw.Shard(0)]),)


def plain():
    print("of the program")
    nn.Linear(4, 4)(torch.randn(4, 4))


def raises(mesh):
    raise ValueError("a mistake of mine")


def interrupted(mesh):
    raise KeyboardInterrupt
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(PROGRAM)
    (tmp_path / "ends.py").write_text("raise SystemExit(3)")
    return lambda *arguments: CliRunner().invoke(main, [*arguments, "--json"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("rehearse", "mine.py:step", "--mesh", "2"),
        ("lock", "mine.py:step", "--mesh", "2"),
        ("plan", "mine.py:step", "--mesh", "2"),
        ("coverage", "mine.py:plain"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_what_a_program_prints_goes_to_stderr(run, arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert isinstance(json.loads(result.stdout), dict)
    assert "of the program" in result.stderr


ERRORS = {
    "an op": (("why", "nosuch"), 1, "CallError"),
    "a program": (("rehearse", "mine.py:raises", "--mesh", "2"), 1, "Error"),
    "a file": (("timeline", "mine.py"), 1, "TimelineFileError"),
    "an option": (("rehearse", "mine.py:step", "--mesh", "0x2"), 2, "UsageError"),
    "no option": (("check", "mine.py:step"), 2, "UsageError"),
    "a command": (("trian",), 2, "UsageError"),
    "a module that ends the process": (("explain", "mm", "--mesh", "2", "--import", "ends.py"), 1, "Error"),
    "a function of samples that needs some": (("infer", "mm", "--samples", "mine.py:step"), 1, "Error"),
    "a size that torch cannot count": (("explain", "mm", "--mesh", "2", "--input", f"f32[{10**20}] R"), 1, "CallError"),
    "a command of a command": (("plugins", "serch"), 2, "UsageError"),
    "a plugin": (("plugins", "show", "nosuch"), 1, "Error"),
    "an operand": (("explain", "mm", "--mesh", "2", "--input", "f33[2]"), 1, "CallError"),
    "a sample": (("infer", "mm", "--sample", "garbage("), 1, "CallError"),
}


@pytest.mark.parametrize("what", ERRORS)
def test_an_error_is_a_document_too(run, what):
    arguments, code, kind = ERRORS[what]
    result = run(*arguments)
    assert result.exit_code == code
    error = json.loads(result.stdout)["error"]
    assert error["type"] == kind
    assert error["message"].splitlines()[0] in result.stderr


def test_the_parts_of_an_error_can_be_read(run):
    error = json.loads(run("why", "nosuch").stdout)["error"]
    assert error["asked"] == "find the op 'nosuch'"
    assert error["found"].startswith("torch knows no such op")
    assert "shardwise rules" in error["do"]


@pytest.mark.parametrize("arguments", [("rules", "nosuch"), ("plugins", "search", "zzz")], ids=" ".join)
def test_nothing_found_is_an_empty_list_and_an_exit_code(run, arguments):
    result = run(*arguments)
    assert (result.exit_code, json.loads(result.stdout)) == (1, [])


def test_two_ways_to_print_are_refused(run):
    assert "--markdown and --json" in run("rules", "mm", "--markdown").stderr


def test_ctrl_c_ends_with_130(run):
    result = run("rehearse", "mine.py:interrupted", "--mesh", "2")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "Aborted!\n"


def test_what_is_no_number_is_null(capsys):
    print_json({"cost": math.inf, "rows": [(math.nan, 1.5)], "name": "mm"})
    assert json.loads(capsys.readouterr().out) == {"cost": None, "rows": [[None, 1.5]], "name": "mm"}


def test_processes_and_c_code_of_the_program_print_to_stderr(tmp_path):
    (tmp_path / "mine.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "shardwise.cli", "rehearse", "mine.py:step", "--mesh", "2", "--json"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(result.stdout)["parameters"] == 20
    assert {"of the program", "of its C code", "of its child"} <= set(result.stderr.splitlines())
