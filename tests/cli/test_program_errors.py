"""Programs that raise, end, or return what is no step: each command says so in the program's own lines."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from shardwise.cli.main import main

PROGRAMS = """
import sys

import torch
from torch import nn

import shardwise as sw


def raises(mesh):
    raise ValueError("a mistake of mine")


def raises_in_torch(mesh):
    return nn.Linear(2, 2), torch.ones(3, 5)


def ends(mesh):
    sys.exit("leaving")


def needs_nothing():
    return None


def does_nothing(mesh):
    return 3


def says_done(mesh):
    return "done"


def returns_a_function(mesh):
    def later():
        raise AssertionError

    return later


def in_a_dict(mesh):
    return {"model": nn.Linear(2, 2), "inputs": torch.ones(2, 2)}


def makes_a_mesh(mesh):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2,))


def makes_a_group(mesh):
    torch.distributed.init_process_group("gloo")


def asserts(mesh):
    assert mesh is None


def by_name(mesh):
    model = sw.distribute_module(nn.Linear(2, 2), mesh, {"weight": {"tp": sw.Shard(0)}})
    return model, torch.ones(2, 2)


def swaps(mesh):
    return torch.ones(2, 2), nn.Linear(2, 2)
"""
COMMANDS = ("rehearse", "lock", "plan")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(PROGRAMS)
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "binary.py").write_bytes(bytes(range(256)))
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "misses.py").write_text("import no_such_module_of_mine\n")

    def call(command, program):
        mesh = [] if command == "coverage" else ["--mesh", "2"]
        result = CliRunner().invoke(main, [command, program, *mesh])
        assert result.exit_code == 1
        # Not a traceback: click shows a ClickException itself, and anything else ends up in `exception`.
        assert isinstance(result.exception, SystemExit)
        assert "/cli/" not in result.output
        return result.output

    return call


@pytest.mark.parametrize("command", COMMANDS)
def test_an_error_is_shown_with_the_lines_of_the_program(run, command):
    output = run(command, "mine.py:raises")
    assert "mine.py:raises raised ValueError: a mistake of mine" in output
    assert ", in raises" in output
    assert output.count("File ") == 1


@pytest.mark.parametrize("command", [*COMMANDS, "coverage"])
@pytest.mark.parametrize(
    ("program", "said"),
    [("broken.py:f", "raised SyntaxError"), ("misses.py:f", "raised ModuleNotFoundError: No module named")],
)
def test_an_error_of_an_import_too(run, command, program, said):
    assert said in run(command, program)


@pytest.mark.parametrize("command", [*COMMANDS, "coverage"])
@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("binary.py:f", "SyntaxError: it has null bytes, so it is not Python (binary.py, line 1)"),
        ("folder.py:f", "folder.py is a folder, not a file"),
    ],
)
def test_what_is_no_file_of_python(run, command, program, said):
    assert said in run(command, program)


def test_calls_of_torch_are_counted(run):
    output = run("rehearse", "mine.py:raises_in_torch")
    assert "raised RuntimeError" in output
    assert "more inside of torch and shardwise" in output
    assert output.count("File ") == 1


def test_a_program_that_ends_the_process(run):
    assert "mine.py:ends ended the process: SystemExit: leaving" in run("rehearse", "mine.py:ends")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_function_with_other_arguments(run, command):
    output = run(command, "mine.py:needs_nothing")
    assert "is called with 1 argument, mesh, and it is needs_nothing()" in output
    assert "Write `def step(mesh):`" in output


def test_coverage_takes_no_mesh(run):
    output = run("coverage", "mine.py:does_nothing")
    assert "is called with no argument, and it is does_nothing(mesh)" in output
    assert "`shardwise rehearse" in output


@pytest.mark.parametrize("command", COMMANDS)
def test_a_program_without_ops_on_the_mesh_is_refused(run, command):
    assert "ran no op on" in run(command, "mine.py:does_nothing")


def test_coverage_of_nothing_is_refused(run):
    assert "mine.py:needs_nothing ran no op" in run("coverage", "mine.py:needs_nothing")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_function_that_nothing_calls_is_refused(run, command):
    assert "it returned the function returns_a_function.<locals>.later" in run(command, "mine.py:returns_a_function")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_step_in_a_dict_is_refused(run, command):
    output = run(command, "mine.py:in_a_dict")
    assert "it returned a dict" in output
    assert "Return (model, inputs)" in output


def test_a_program_that_makes_a_process_group_of_its_own(run):
    output = run("rehearse", "mine.py:makes_a_group")
    assert "makes no process group and no mesh of its own: use `mesh`" in output


def test_an_assertion_without_a_text(run):
    assert "mine.py:asserts raised AssertionError\n" in run("rehearse", "mine.py:asserts")


@pytest.mark.parametrize("command", COMMANDS)
def test_mesh_dims_without_names(run, command):
    assert "--names gives the mesh dims their names, as in --names dp,tp" in run(command, "mine.py:by_name")


def test_a_step_in_another_order_is_refused(run):
    output = run("rehearse", "mine.py:swaps")
    assert "it returned a Tensor, a Linear" in output.replace("FakeTensor", "Tensor")
    assert "Return (model, inputs)" in output


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("mine.py:says_done", "left nothing to compare"),
        ("mine.py:no_such", "mine.py has no function 'no_such'"),
        ("mine.py:needs_nothing", "is called with 1 argument, mesh"),
        ("mine.py:raises", "a mistake of mine"),
        ("mine.py:by_name", ", in by_name"),
    ],
)
def test_check_says_the_same(run, program, said):
    output = run("check", program)
    assert said in output
    assert "core/shardwise" not in output
    assert "testing" not in output


@pytest.mark.parametrize("command", [["lock", "--learned"], ["plan"]], ids=" ".join)
def test_files_are_named_from_where_the_command_was_called(run, tmp_path, command):
    (tmp_path / "below").mkdir()
    (tmp_path / "mine.py").write_text(
        "import os\nimport torch\nimport shardwise as sw\n\ndef leaves(mesh):\n    os.chdir('below')\n"
        "    model = sw.distribute_module(torch.nn.Linear(8, 8), mesh, {'weight': [sw.Shard(0)]}, src_data_rank=None)\n"
        "    return model, sw.zeros((4, 8), device_mesh=mesh, placements=[sw.Replicate()])\n"
    )
    made = CliRunner().invoke(main, [*command, "mine.py:leaves", "--mesh", "2", "--out", "made"])
    assert made.exit_code == 0, made.output
    assert (tmp_path / "made").exists()
    assert [path.name for path in (tmp_path / "below").iterdir()] == []
