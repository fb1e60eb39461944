"""The group of commands: complete, and without torch where nothing is computed."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from shardwise.cli import main
from shardwise.cli.main import COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there(name):
    command = main.get_command(click.Context(main), name)
    assert isinstance(command, click.Command)
    assert command.name == name
    assert COMMANDS[name][1].endswith(".")


def test_the_help_lists_all():
    console = CliRunner()
    text = console.invoke(main, ["--help"]).output
    assert all(f"  {name} " in text for name in COMMANDS)
    assert main.get_command(click.Context(main), "trian") is None
    assert console.invoke(main, ["trian"]).exit_code == 2
    assert "No such command 'doctr'. Did you mean 'doctor'?" in console.invoke(main, ["doctr"]).stderr
    assert "There are calibrate, check, " in console.invoke(main, ["xyz"]).stderr


def test_it_runs_as_a_module():
    command = [sys.executable, "-m", "shardwise"]
    done = subprocess.run([*command, "trian"], capture_output=True, text=True, check=False)
    assert (done.returncode, "Usage: shardwise" in done.stderr) == (2, True)


LIGHT = """
import sys
sys.argv = ["shardwise", *{arguments!r}]
from shardwise.cli import main
try:
    main()
except SystemExit:
    pass
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["new", "--help"], ["completion", "bash"]], ids=str)
def test_what_computes_nothing_imports_no_torch(arguments):
    subprocess.run(
        [sys.executable, "-c", LIGHT.format(arguments=arguments)], check=True, capture_output=True, timeout=60
    )


NAMES = """
import sys, shardwise as sw
assert "torch" not in sys.modules
assert set(sw.__all__) <= set(dir(sw))
for name in sw.__all__:
    getattr(sw, name)
try:
    sw.nothing
except AttributeError as error:
    assert "nothing" in str(error)
"""


@pytest.mark.slow
@pytest.mark.sample
def test_names_of_the_package_are_imported_at_their_first_use():
    subprocess.run([sys.executable, "-c", NAMES], check=True, capture_output=True, timeout=120)
