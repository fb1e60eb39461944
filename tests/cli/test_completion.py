"""Shell completion: the scripts, and the words that shells are offered."""

import os
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
    assert [(item.type, item.value) for item in offered] == [("file", "mi")]


def program_in(folder):
    """What a shell calls when somebody types shardwise."""
    program = folder / "shardwise"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m shardwise "$@"\n')
    program.chmod(0o755)
    return program


def in_shell(shell, script, folder):
    """What a script prints in a shell without the settings of who runs the tests."""
    program_in(folder)
    (folder / "mine.py").touch()
    here = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder), "ZDOTDIR": str(folder)}
    here.pop("XDG_CONFIG_HOME", None)
    done = subprocess.run(
        [shutil.which(shell), *(["-f"] if shell == "zsh" else []), "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        env=here,
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here")
def test_fish_offers_commands_plugins_and_files(tmp_path):
    install = CliRunner().invoke(main, ["completion", "fish"]).output.splitlines()[1].removeprefix("#   ")
    asked = ["shardwise comp", "shardwise plugins show shardwise-mat", "shardwise coverage mi"]
    shown = in_shell("fish", "\n".join([install, *(f"complete -C '{words}'" for words in asked)]), tmp_path)
    assert [line.partition("\t")[0] for line in shown.splitlines()] == ["completion", "shardwise-matmul", "mine.py"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here")
def test_zsh_needs_no_settings_of_its_own(tmp_path):
    script = 'eval "$(shardwise completion zsh)"; print $_comps[shardwise]'
    assert in_shell("zsh", script, tmp_path) == "_shardwise_completion\n"
    loaded = f"autoload -Uz compinit && compinit -D -i; compinit() {{ print twice }}; {script}"
    assert in_shell("zsh", loaded, tmp_path) == "_shardwise_completion\n"


IN_BASH = """
compopt() { printf 'compopt %s %s\\n' "$@"; }
eval "$({program} completion bash)"
COMP_WORDS=({program} plugins check shardwise-li) COMP_CWORD=3
_shardwise_completion {program}
echo "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_offers_plugins_where_a_file_may_stand_too(tmp_path):
    script = IN_BASH.replace("{program}", str(program_in(tmp_path)))
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
