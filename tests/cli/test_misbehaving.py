"""Plugins that misbehave at import: the commands say so in their row, stay JSON, and list the rest."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardwise.cli import main, plugin_probe, plugin_states
from shardwise.discovery.entry_points import discover
from shardwise.discovery.loading import load
from shardwise.errors import PluginLoadError
from shardwise.kernel.registry import Registry

COUNT = plugin_probe.threading.active_count
LOOPS = "while True:\n    pass\n"


@pytest.fixture(autouse=True)
def _short(request, monkeypatch):
    # Those that do not end cost as much; all others would have to be slower than that on a busy machine.
    ends = not any(name in request.node.name for name in ("acme-loops", "acme-waits"))
    monkeypatch.setattr(plugin_probe, "LIMIT", 30.0 if ends else 5.0)
    # Threads of pytest's workers would have each fault seen twice.
    monkeypatch.setattr(plugin_probe.threading, "active_count", lambda: 1)
    monkeypatch.setattr(plugin_states, "_seen", {})


def run(*arguments):
    return CliRunner().invoke(main, arguments)


def rows_of(result):
    return {row["plugin"]: row for row in json.loads(result.stdout)}


SAMPLE = [pytest.mark.slow, pytest.mark.sample]
ENDS = {
    "acme-aborts": ("import os\nos.abort()", "crashes the process with signal 6 (SIGABRT) at import"),
    "acme-segfaults": ("import ctypes\nctypes.string_at(0)", "crashes the process with signal 11 (SIGSEGV) at import"),
    "acme-ends": ("import os\nos._exit(3)", "ends the process with exit code 3 at import"),
    "acme-gives-up": ("raise KeyboardInterrupt", "raises KeyboardInterrupt at import"),
    "acme-stops": ("import os\nos._exit(0)", "ends the process with exit code 0 at import"),
    "acme-loops": (LOOPS, "does not end within 5 s at import"),
    "acme-waits": ("import threading\nthreading.Event().wait()", "does not end within 5 s at import"),
}


@pytest.mark.parametrize("name", [*list(ENDS)[:-2], *(pytest.param(n, marks=SAMPLE) for n in list(ENDS)[-2:])])
def test_a_plugin_that_ends_every_program_is_a_row(install, source, name):
    text, reason = ENDS[name]
    install("acme-first", source())
    install(name, text)
    install("acme-zuletzt", source("_values_copy", "R -> R"))
    result = run("plugins", "--json")
    rows = rows_of(result)
    assert (rows[name]["status"], rows[name]["reason"]) == ("failed", reason)
    # The rest goes on; but no program could look up a rule.
    assert [row["plugin"] for row in rows.values() if row["status"] != "loaded"] == [name]
    assert rows["acme-first"]["ops"] == rows["acme-zuletzt"]["ops"] == 1
    assert result.exit_code == 1
    assert f"disable the plugin with SHARDWISE_DISABLE_PLUGINS={name}" in result.stderr


def test_two_of_them_are_two_rows_and_the_doctor_names_both(install):
    install("acme-aborts", ENDS["acme-aborts"][0])
    install("acme-ends", ENDS["acme-ends"][0])
    result = run("doctor", "--json")
    findings = {finding["check"]: finding for finding in json.loads(result.stdout) if finding["result"] == "failed"}
    assert "SIGABRT" in findings["plugin acme-aborts"]["found"]
    assert "exit code 3" in findings["plugin acme-ends"]["found"]
    assert "so does every program" in findings["look-up"]["found"]
    assert result.exit_code == 1


def test_what_a_crash_wrote_is_shown(install):
    install("acme-aborts", "import os, sys\nprint('no GPU', file=sys.stderr, flush=True)\nos.abort()")
    (facts,) = json.loads(run("plugins", "show", "acme-aborts", "--json").stdout)
    assert "no GPU" in facts["traceback"]


def test_the_traceback_of_a_keyboard_interrupt_is_shown(install):
    install("acme-gives-up", ENDS["acme-gives-up"][0])
    (facts,) = json.loads(run("plugins", "show", "acme-gives-up", "--json").stdout)
    assert facts["traceback"].rstrip().endswith("raise KeyboardInterrupt\nKeyboardInterrupt")


def test_a_disabled_one_is_not_imported(install, monkeypatch):
    install("acme-aborts", ENDS["acme-aborts"][0])
    monkeypatch.setenv("SHARDWISE_DISABLE_PLUGINS", "acme-aborts")
    result = run("plugins", "--json")
    assert (result.exit_code, rows_of(result)["acme-aborts"]["status"]) == (0, "blocked")


@pytest.mark.parametrize(
    ("more", "note"),
    [
        ("print('hello from acme')\nprint('again')", "prints at import: 'hello from acme...'"),
        ("import os\nos.write(1, b'past Python')", "prints at import: 'past Python'"),
        ("import subprocess\nsubprocess.run(['true'])", "starts a process at import"),
    ],
)
def test_a_plugin_that_does_more_than_define_rules_is_loaded_with_a_note(install, source, capfd, more, note):
    import textwrap

    install("acme-loud", textwrap.dedent(source()) + more + "\n")
    result = run("plugins", "--json")
    row = rows_of(result)["acme-loud"]
    assert (result.exit_code, row["status"], row["ops"]) == (0, "loaded", 1)
    assert note in row["reason"]
    # Past Python's own stdout, too: what else reads it gets the command's output alone.
    assert "past Python" not in capfd.readouterr().out


def test_the_doctor_warns_of_a_plugin_that_prints(install, source):
    import textwrap

    install("acme-loud", textwrap.dedent(source()) + "print('hello')\n")
    findings = {finding["check"]: finding for finding in json.loads(run("doctor", "--json").stdout)}
    loud = findings["plugin acme-loud"]
    assert (loud["result"], loud["found"]) == ("warning", "acme-loud 1.0 loaded, 1 op; it prints at import: 'hello'")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
        ("class Odd(BaseException): pass\nraise Odd('so')", "Odd: so"),
        ("raise GeneratorExit", "GeneratorExit: "),
    ],
)
def test_whatever_a_plugin_raises_is_its_row_and_a_warning_of_programs(install, text, cause):
    install("acme-raises", text)
    result = run("plugins", "--json")
    assert (result.exit_code, rows_of(result)["acme-raises"]["reason"]) == (0, cause)
    plugins = [plugin for plugin in discover() if plugin.origin.plugin == "acme-raises"]
    with pytest.warns(RuntimeWarning, match="shardwise left out the plugin acme-raises 1.0") as told:
        (status,) = load(plugins, Registry(), strict=False)
    # What is to be mended is the plugin.
    assert (Path(told[0].filename).name, told[0].lineno) == ("acme_raises_plugin.py", text.count("\n") + 1)
    assert status.status == "failed"
    with pytest.raises(PluginLoadError):
        load(plugins, Registry(), strict=True)


def test_a_child_that_a_plugin_forks_does_not_speak_for_it(install, source):
    import textwrap

    install("acme-forks", "import os\nos.fork()\n" + textwrap.dedent(source()))
    plugins = [plugin for plugin in discover() if plugin.origin.plugin.startswith("acme")]
    assert [seen.notes for seen in plugin_probe.probe_plugins(plugins)] == [("starts a process at import",)]


@pytest.mark.slow
@pytest.mark.sample
def test_a_process_of_its_own_sees_the_same(install, source, monkeypatch):
    # Where there is no fork, and where a fork of several threads has something to say against a plugin.
    install("acme-aborts", ENDS["acme-aborts"][0])
    install("acme-good", source())
    monkeypatch.delattr(os, "fork")
    plugins = [plugin for plugin in discover() if plugin.origin.plugin.startswith("acme")]
    aborts, good = plugin_probe.probe_plugins(plugins, 60.0)
    assert (aborts.end, good) == (ENDS["acme-aborts"][1], plugin_probe.Seen())


def test_a_thread_that_a_plugin_starts_is_a_note(install, source, monkeypatch):
    import textwrap

    thread = "from threading import Event, Thread\nThread(target=Event().wait, daemon=True).start()\n"
    install("acme-loud", textwrap.dedent(source()) + thread)
    monkeypatch.setattr(plugin_probe.threading, "active_count", COUNT)
    plugins = [plugin for plugin in discover() if plugin.origin.plugin.startswith("acme")]
    assert [seen.notes for seen in plugin_probe.probe_plugins(plugins)] == [("starts a thread at import",)]


def test_simulated_ranks_are_no_threads_of_a_plugin():
    program = (
        "import sys\n"
        "from shardwise.testing.simulated import run_ranks\n"
        "run_ranks((2,), lambda at, comm: at)\n"
        "sys.argv = ['shardwise', 'why', '--help']\n"
        "from shardwise.cli import main\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=90)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(("arguments", "code"), [(["plugins", "--help"], 0), (["why", "--no-such"], 2)])
def test_a_thread_of_a_plugin_does_not_keep_the_command(arguments, code):
    program = (
        "import sys, threading\n"
        "threading.Thread(target=threading.Event().wait, name='acme').start()\n"
        f"sys.argv = ['shardwise', *{arguments}]\n"
        "from shardwise.cli import main\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=90)
    assert ended.returncode == code, ended.stderr
    assert "A plugin's thread still runs (acme); this command ends without it." in ended.stderr
    assert "Usage: " in ended.stdout + ended.stderr
