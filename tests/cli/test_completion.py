"""Shell completion: the scripts, and the words that shells are offered."""

import shutil
import subprocess
import sys

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from shardwise.cli import main
from shardwise.cli.completion import _offering, _ops, _plugins


def words(*typed):
    """What is offered for the last word typed."""
    *before, last = typed
    return [item.value for item in ShellComplete(main, {}, "shardwise", "_X").get_completions(list(before), last)]


def test_commands():
    assert words("pl") == ["plan", "plugins"]
    assert words("plugins", "") == ["check", "freeze", "list", "search", "show"]


LIGHT = """
import sys
from click.shell_completion import ShellComplete
from shardwise.cli import main
offered = ShellComplete(main, {}, "shardwise", "_X").get_completions([], "pl")
assert [(item.value, bool(item.help)) for item in offered] == [("plan", True), ("plugins", True)]
assert "torch" not in sys.modules
"""


def test_the_name_of_a_command_needs_no_torch():
    subprocess.run([sys.executable, "-c", LIGHT], check=True, timeout=60)


def test_plugins():
    assert words("plugins", "show", "shardwise-mat") == ["shardwise-matmul"]
    assert words("rules", "--plugin", "shardwise-mat") == ["shardwise-matmul"]


def test_a_plugin_or_a_path():
    assert words("plugins", "check", "shardwise-mat")[1] == "shardwise-matmul"
    complete = ShellComplete(main, {}, "shardwise", "_X")
    assert complete.get_completions(["plugins", "check"], "")[0].type == "file"


@pytest.mark.parametrize("command", ["check", "coverage", "lock", "plan", "rehearse", "timeline"])
def test_files_for_a_program(command):
    offered = ShellComplete(main, {}, "shardwise", "_X").get_completions([command], "mi")
    assert [item.type for item in offered] == ["file"]


IN_BASH = """
compopt() { printf 'compopt %s %s\\n' "$@"; }
eval "$({program} completion bash)"
COMP_WORDS=({program} plugins check shardwise-li) COMP_CWORD=3
_shardwise_completion {program}
echo "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_offers_plugins_where_a_file_may_stand_too(tmp_path):
    program = tmp_path / "shardwise"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m shardwise "$@"\n')
    program.chmod(0o755)
    script = IN_BASH.replace("{program}", str(program))
    done = subprocess.run([shutil.which("bash"), "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "compopt -o default\nshardwise-linalg\n", done.stderr


def test_ops_as_people_type_them():
    assert words("why", "aten.bm") == ["aten.bmm", "aten.bmm.default", "aten.bmm.dtype", "aten.bmm.out"]
    assert words("why", "bm") == ["bmm"]


@pytest.mark.parametrize("names", [_plugins, _ops])
def test_what_is_broken_offers_nothing(monkeypatch, names):
    def broken():
        raise OSError("metadata is gone")

    offer = _offering(broken)
    assert offer(None, None, "") == []
    monkeypatch.setenv("SHARDWISE_STRICT", "perhaps")
    assert names()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script(shell, tmp_path):
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"# Completion of shardwise for {shell}. To install it, once:\n#   ")
    assert f"_SHARDWISE_COMPLETE={shell}_complete" in result.output
    if shutil.which(shell):
        script = tmp_path / "script"
        script.write_text(result.output)
        subprocess.run([shell, "-n", str(script)], check=True)


def test_the_shell_of_the_environment(monkeypatch):
    monkeypatch.setenv("SHELL", "/usr/bin/zsh")
    assert "_SHARDWISE_COMPLETE=zsh_complete" in CliRunner().invoke(main, ["completion"]).output
    monkeypatch.setenv("SHELL", "/bin/sh")
    result = CliRunner().invoke(main, ["completion"])
    assert result.exit_code == 2
    assert "name one, as in completion bash" in result.output
