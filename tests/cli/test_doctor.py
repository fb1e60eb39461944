"""``shardwise doctor``: each check sees what is broken, and none hides the others."""

import json
import sys

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from shardwise.cli import environment, installation, main


def doctor(*arguments):
    return CliRunner().invoke(main, ["doctor", *arguments])


def found(check):
    """The findings of that name, by the one check that makes them."""
    name = "plugins" if check.startswith("plugin ") else check
    rows = {**environment.CHECKS, **installation.CHECKS}[name]()
    return [(row.result, row.found, row.do) for row in rows if row.check == check]


def failures():
    return [row["check"] for row in json.loads(doctor("--json").stdout) if row["result"] == "failed"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """One process group is enough: a test of its own starts it."""
    monkeypatch.delitem(environment.CHECKS, "process group")


def test_a_sound_environment_passes():
    result = doctor()
    assert result.exit_code == 0, result.output
    for words in ("CPython 3", "CPU cores", "tested with 2.11 to 2.13", "gloo yes", "imported from", "ops have rules"):
        assert words in result.output
    assert "0 failed" in result.output


def test_every_check_is_in_the_json():
    rows = json.loads(doctor("--json").stdout)
    assert {row["check"] for row in rows} >= {
        *("python", "machine", "torch", "backends", "devices", "shardwise", "settings", "link figures"),
        *("plugin shardwise-matmul", "look-up", "rules", "dependencies"),
    }
    assert all(set(row) == {"check", "result", "found", "do"} for row in rows)


def test_warnings_fail_when_strict(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert doctor().exit_code == 0
    assert doctor("--strict").exit_code == 1


def test_a_pyproject_that_cannot_be_read_is_a_warning(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").symlink_to("/proc/self/mem")
    monkeypatch.chdir(tmp_path)
    with pytest.warns(RuntimeWarning, match="shardwise has no settings of it"):
        result, said, do = found("settings")[0]
    assert (result, said.split(":")[0]) == ("warning", f"{tmp_path / 'pyproject.toml'} cannot be read")
    assert do.startswith("Make it readable")


# -- what it stands on ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "result"),
    [("2.10.1", "failed"), ("2.11.0", "ok"), ("2.13.1+cpu", "ok"), ("2.15.0", "ok"), ("2.16.0", "warning")],
)
def test_the_version_of_torch(monkeypatch, version, result):
    monkeypatch.setattr(torch, "__version__", version)
    assert [one for one, _, _ in found("torch")] == [result]


def test_cuda_without_a_device_is_no_failure(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    ((result, what, _),) = found("devices")
    assert (result, what) == ("warning", "torch is built for CUDA and finds no device")


def test_a_process_group_is_started_and_ended():
    (row,) = environment._gloo()
    assert (row.result, row.found) == ("ok", "gloo starts with one rank and reduces")
    assert not dist.is_initialized()


def test_a_process_group_that_does_not_start(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    (row,) = environment._gloo()
    assert row.result == "failed"
    assert "nothing0" in row.found


def test_a_process_group_that_hangs(monkeypatch):
    monkeypatch.setattr(environment, "_PATIENCE", 0.05)
    monkeypatch.setattr(environment, "_one_rank", lambda: __import__("time").sleep(1) or "")
    (row,) = environment._gloo()
    assert (row.result, "does not start" in row.found) == ("failed", True)


# -- shardwise itself ----------------------------------------------------------------------------------------------


def test_second_copies(tmp_path, monkeypatch):
    for place in (tmp_path / "core" / "shardwise", tmp_path / "shardwise"):
        place.mkdir(parents=True)
        (place / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    rows = found("shardwise")
    assert any("core.shardwise would be a second copy" in what for _, what, _ in rows)
    assert any(f"a second copy is in {tmp_path}" in what for _, what, _ in rows)
    assert {result for result, _, _ in rows} == {"ok", "warning"}


def test_settings_with_their_sources(fresh, monkeypatch, tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.shardwise]\nprefer = {"aten.mm" = "shardwise-matmul"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDWISE_DISABLE_PLUGINS", "shardwise-conv")
    rows = [what for _, what, _ in found("settings")]
    assert "disabled = shardwise-conv, from SHARDWISE_DISABLE_PLUGINS" in rows
    path = tmp_path / "pyproject.toml"
    assert f"prefer = aten.mm = shardwise-matmul, from 'prefer' in [tool.shardwise] of {path}" in rows
    assert found("plugin shardwise-conv") == [
        ("ok", f"shardwise-conv (shardwise {_version()}) blocked: in SHARDWISE_DISABLE_PLUGINS", "")
    ]


@pytest.mark.parametrize("value", ["forbid", "forbid over tp; warn kinds all_gather above 1MiB"])
def test_a_policy_is_shown_as_it_is_written(fresh, monkeypatch, value):
    monkeypatch.setenv("SHARDWISE_COMMUNICATION", value)
    assert ("ok", f"communication = {value}, from SHARDWISE_COMMUNICATION", "") in found("settings")


def test_a_policy_that_is_none_fails(fresh, monkeypatch):
    monkeypatch.setenv("SHARDWISE_COMMUNICATION", "perhaps")
    assert any(
        result == "failed" and "'perhaps' is not what a policy does" in what for result, what, _ in found("settings")
    )


def test_a_preference_for_no_op_is_a_warning(fresh, monkeypatch):
    monkeypatch.setenv("SHARDWISE_PREFER", "aten.mn=shardwise-matmul,aten.mm=shardwise-matmul")
    rows = list(installation.CHECKS["preferences"]())
    assert [(row.result, row.found.partition(",")[0]) for row in rows] == [
        ("warning", "prefer = aten.mn = shardwise-matmul")
    ]


def test_a_lock_that_cannot_be_read_is_said_once(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDWISE_LOCK", str(tmp_path / "no.lock"))
    failed = [(row.check, row.do) for row in installation.CHECKS["plugins"]() if row.result == "failed"]
    assert failed == [("look-up", "Restore it, or write it again with `shardwise plugins freeze`.")]


def test_a_plugin_that_registers_nothing_is_a_warning(install):
    install(
        "acme-empty", "from shardwise.hookspecs import hookimpl\n\n@hookimpl\ndef shardwise_register(registry): pass\n"
    )
    [(result, what, do)] = found("plugin acme-empty")
    assert (result, what) == ("warning", "acme-empty 1.0 loaded, 0 ops; it registers nothing")
    assert "registry.add" in do


def test_a_hook_that_returns_its_rules_fails(install):
    text = "from shardwise.hookspecs import hookimpl\n\n@hookimpl\ndef shardwise_register(registry): return []\n"
    install("acme-returns", text)
    [(result, what, _)] = found("plugin acme-returns")
    assert result == "failed"
    assert "returned a list, which registers nothing: pass rules to registry.add(...)" in what


def _version():
    from importlib.metadata import version

    return version("shardwise")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("SHARDWISE_STRICT", "perhaps", "neither on nor off"),
        ("SHARDWISE_PLUGINS", "nothing", "there is no plugin nothing"),
        ("SHARDWISE_PREFER", "aten.mm", "is not a pair"),
    ],
)
def test_broken_settings_fail_and_the_rest_is_checked(fresh, monkeypatch, name, value, words):
    monkeypatch.setenv(name, value)
    done = doctor("--json")
    assert done.exit_code == 1
    rows = json.loads(done.stdout)
    assert [row["check"] for row in rows if row["result"] == "failed"] == ["settings", "look-up"]
    assert any(row["check"] == "settings" and words in row["found"] for row in rows)
    assert "no op has rules in conflict" in {row["found"] for row in rows}


@pytest.mark.parametrize(
    ("text", "result", "words"),
    [
        (None, "failed", "does not exist"),
        ("mine", "failed", "is not a file of link figures"),
        ('{"version": 99, "meshes": []}', "failed", "version 99"),
        ('{"version": 2, "meshes": []}', "ok", "no mesh"),
    ],
    ids=["missing", "malformed", "newer", "empty"],
)
def test_link_figures(tmp_path, monkeypatch, text, result, words):
    path = tmp_path / "links.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("SHARDWISE_LINKS", str(path))
    ((is_, what, do),) = found("link figures")
    assert (is_, words in what) == (result, True), what
    assert bool(do) == (result == "failed")


def test_link_figures_tell_their_meshes(tmp_path, monkeypatch):
    from shardwise.planning.cost import Connection, Link, Links
    from shardwise.planning.link_file import Calibration, Site, store

    link = Link(1e-6, 1e-6, 1e9)
    links = Links((Connection(link, link, link, link),), 1e-6, 1e9)
    store(Calibration(Site((4,), "cpu", "a cpu", "gloo", (1,)), links, "2.13", "2026-01-01"), tmp_path / "links.json")
    monkeypatch.setenv("SHARDWISE_LINKS", str(tmp_path / "links.json"))
    ((result, what, _),) = found("link figures")
    assert (result, "4 cpu (a cpu) with gloo on one host" in what) == ("ok", True)


def test_broken_plugins_fail(install, source):
    install("acme-broken", "raise OSError('no libacme.so')")
    install("acme-new", source(), metadata="Requires-Dist: shardwise>=99\n")
    assert doctor().exit_code == 1
    ((result, what, do),) = found("plugin acme-broken")
    assert (result, what) == ("failed", "acme-broken 1.0 failed: OSError: no libacme.so")
    assert "plugins show acme-broken" in do
    assert found("plugin acme-new")[0][0] == "failed"


def test_strict_mode_that_raises_is_a_finding(install, monkeypatch):
    install("acme-broken", "raise OSError('no libacme.so')")
    monkeypatch.setenv("SHARDWISE_STRICT", "1")
    assert failures() == ["plugin acme-broken", "look-up"]


def test_conflicts_and_hidden_copies(install, source):
    install("acme-kernels", source(), folder="second", version="0.9")
    install("acme-kernels", source())
    install("bolt-kernels", source())
    ((result, what, do),) = found("rules")
    assert (result, what.startswith("aten._copy_from_and_resize.default: acme-kernels 1.0 at ")) == ("failed", True)
    assert 'SHARDWISE_PREFER="aten._copy_from_and_resize.default=bolt-kernels"' in do
    assert [one for one, _, _ in found("plugin acme-kernels")] == ["ok", "warning"]


def test_dependencies_of_plugins(install, source):
    install("acme-kernels", source(), metadata="Requires-Dist: click>=99\nRequires-Dist: no-such-thing\n")
    rows = [what for result, what, _ in found("dependencies") if result == "failed"]
    assert any("requires click>=99, and " in what for what in rows)
    assert any("requires no-such-thing, which is not installed" in what for what in rows)


def test_a_check_that_raises_is_a_finding(monkeypatch):
    def broken():
        raise OSError("metadata is gone")

    monkeypatch.setitem(installation.CHECKS, "dependencies", broken)
    rows = json.loads(doctor("--json").stdout)
    assert [(row["check"], row["found"]) for row in rows if row["result"] == "failed"] == [
        ("dependencies", "the check raises OSError: metadata is gone")
    ]
