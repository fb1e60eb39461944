"""``shardwise plugins`` and ``shardwise rules``: tables for people, JSON for programs."""

import json
from importlib.metadata import entry_points

import pytest
import torch
from click.testing import CliRunner

from shardwise.cli import main
from shardwise.discovery.entry_points import GROUP
from shardwise.discovery.process import use_registry
from shardwise.kernel.precedence import Origin
from shardwise.kernel.registry import Registrar, Registry
from shardwise.rule.authoring import rule


def run(*arguments):
    return CliRunner().invoke(main, arguments)


@pytest.fixture
def _toy_registry():
    """A registry with one rule in it, in place of the process's own."""
    registrar = Registrar(Origin("shardwise-toy", "toys", "1.2"))
    registrar.add(rule(torch.ops.aten.mm.default, "m k, k n -> m n", reduce={"k": "sum"}))
    registry = Registry()
    registry.accept(registrar)
    with use_registry(registry):
        yield


def test_plugins_lists_every_entry_point():
    rows = json.loads(run("plugins", "--json").output)
    assert {row["plugin"] for row in rows} == {entry.name for entry in entry_points(group=GROUP)}
    assert all(row["status"] == "loaded" and row["ops"] > 0 for row in rows)


def test_plugins_as_a_table():
    output = run("plugins").output
    assert "shardwise-matmul" in output
    assert "loaded" in output


@pytest.mark.usefixtures("fresh")
def test_an_unknown_plugin_in_the_settings_is_a_message(monkeypatch):
    monkeypatch.setenv("SHARDWISE_PLUGINS", "shardwise-nothing")
    result = run("plugins")
    assert result.exit_code == 1
    assert "Error: SettingsError: read SHARDWISE_PLUGINS: there is no plugin shardwise-nothing" in result.output


def test_the_group_alone_lists():
    assert run("plugins").output == run("plugins", "list").output
    assert run("plugins", "--json").output == run("plugins", "list", "--json").output


def test_a_pipe_gets_one_plain_line_per_plugin():
    lines = run("plugins").output.splitlines()
    assert lines[0].split() == ["plugin", "distribution", "version", "status", "ops", "reason"]
    (matmul,) = [line for line in lines if line.startswith("shardwise-matmul ")]
    assert matmul.split()[1:4:2] == ["shardwise", "loaded"]
    assert not any("\x1b" in line or line != line.rstrip() for line in lines)


FAILS = "raise OSError('no libacme.so')"


def test_what_becomes_of_plugins_is_listed(install, source, monkeypatch):
    install("acme-broken", FAILS)
    install("acme-old", source(), group="shardwise.plugins.v0")
    install("acme-new", source(), metadata="Requires-Dist: shardwise>=99\n")
    install("acme-off", source())
    install("acme-good", source())
    monkeypatch.setenv("SHARDWISE_DISABLE_PLUGINS", "acme-off")
    result = run("plugins", "--json")
    assert result.exit_code == 0, result.output
    rows = {row["plugin"]: row for row in json.loads(result.output) if row["plugin"].startswith("acme")}
    assert {name: row["status"] for name, row in rows.items()} == {
        "acme-broken": "failed",
        "acme-old": "needs upgrade",
        "acme-new": "refused",
        "acme-off": "blocked",
        "acme-good": "loaded",
    }
    assert rows["acme-broken"]["reason"] == "OSError: no libacme.so"
    assert rows["acme-good"]["ops"] == 1


# -- show --------------------------------------------------------------------------------------------------------------


def shown(name, exit_code=0):
    result = run("plugins", "show", name, "--json")
    assert result.exit_code == exit_code, result.output
    (facts,) = json.loads(result.output)
    return facts


def test_show_tells_all_of_a_plugin(install, source):
    metadata = "Summary: Kernels\nProject-URL: Home, https://acme.example\nRequires-Dist: shardwise>=0.1.0.dev0\n"
    site = install("acme-kernels", source("mm", "R, R -> R", ', replaces="shardwise"'), metadata=metadata)
    facts = shown("acme-kernels")
    assert (facts["status"], facts["version"], facts["location"]) == ("loaded", "1.0", str(site))
    assert facts["entry_point"] == "[shardwise.plugins.v1] acme-kernels = acme_kernels_plugin"
    assert (facts["summary"], facts["home_page"]) == ("Kernels", "https://acme.example")
    assert facts["requires"] == ["shardwise>=0.1.0.dev0"]
    assert facts["replaces"] == {"shardwise": ["aten.mm.default"]}
    (rule_,) = facts["rules"]
    assert (rule_["op"], rule_["rule"], rule_["holds"]) == ("aten.mm.default", "R, R -> R", "yes")
    assert "acme_kernels_plugin.py:" in rule_["source"]
    loser = next(r for r in shown("shardwise-matmul")["rules"] if r["op"] == "aten.mm.default")
    assert loser["holds"] == "no: replaced by acme-kernels 1.0"
    output = run("plugins", "show", "acme-kernels").output
    assert "https://acme.example" in output
    assert "shardwise: aten.mm.default" in output


@pytest.mark.parametrize(
    ("lines", "status", "reason"),
    [
        ("[{group}]\nacme = acme mod", "refused", "its entry point acme = acme mod names no module: write it as for"),
        ("[{group}]\nacme = acme-odd_plugin", "refused", "its entry point acme = acme-odd_plugin names no module"),
        ("[{group}]\nacme =", "refused", "its entry point acme =  names no module"),
        ("[{group}]\nacme = acme_odd_plugin:a:b", "refused", "acme_odd_plugin:a:b names no module"),
        ("[{group}]\n = acme_odd_plugin", "refused", "its entry point for acme_odd_plugin has no name"),
        (
            "[shardwise.plugin.v1]\nacme = acme_odd_plugin",
            "refused",
            "it registers under shardwise.plugin.v1: plugins ",
        ),
        ("[shardwise_plugins]\nacme = acme_odd_plugin", "refused", "plugins register under shardwise.plugins.v1"),
        ("[shardwise.plugins.v2]\nacme = acme_odd_plugin", "needs upgrade", "upgrade this shardwise"),
        ("[{group}]\nshardwise-matmul = acme_odd_plugin", "refused", "the name shardwise-matmul, which ships with"),
        ("[{group}]\nShardwise = acme_odd_plugin", "refused", "which ships with shardwise: choose another"),
        ("[{group}]\nacme = acme_odd_plugin:nothing", "failed", "has no attribute 'nothing'"),
        ("[{group}]\nacme = acme_odd_plugin [gpu]", "loaded", ""),
    ],
)
def test_an_entry_point_with_a_slip_is_a_row_that_says_so(install, source, fresh, lines, status, reason):
    site = install("acme-odd", source())
    (site / "acme_odd-1.0.dist-info" / "entry_points.txt").write_text(lines.format(group="shardwise.plugins.v1") + "\n")
    fresh()
    result = run("plugins", "--json")
    (row,) = [row for row in json.loads(result.stdout) if row["distribution"] == "acme-odd"]
    assert row["status"] == status
    assert reason in row["reason"]
    assert [row["plugin"] for row in json.loads(result.stdout) if row["status"] == "loaded"][-1] == "shardwise-views"


def test_a_distribution_with_two_plugins_of_one_module(install, source, fresh):
    site = install("acme-two", source())
    entries = "[shardwise.plugins.v1]\nacme-a = acme_two_plugin\nacme-b = acme_two_plugin\n"
    (site / "acme_two-1.0.dist-info" / "entry_points.txt").write_text(entries)
    fresh()
    rows = {row["plugin"]: row for row in json.loads(run("plugins", "--json").stdout)}
    assert (rows["acme-a"]["status"], rows["acme-b"]["status"]) == ("loaded", "failed")
    assert (
        rows["acme-b"]["reason"] == "LookupError: acme_two_plugin is the plugin acme-a already: a module is one plugin"
    )


def test_show_has_the_traceback_of_a_failure(install):
    install("acme-broken", FAILS)
    output = run("plugins", "show", "acme-broken").output
    assert "OSError: no libacme.so" in output
    assert "Traceback (most recent call last):" in output
    assert "acme_broken_plugin.py" in output


@pytest.mark.parametrize(
    ("options", "settings", "status", "reason"),
    [
        ({"group": "shardwise.plugins.v9"}, {}, "needs upgrade", "upgrade this shardwise"),
        ({"metadata": "Requires-Dist: shardwise<0.0.1\n"}, {}, "refused", "it needs shardwise<0.0.1"),
        ({}, {"SHARDWISE_DISABLE_PLUGINS": "acme-kernels"}, "blocked", "in SHARDWISE_DISABLE_PLUGINS"),
    ],
    ids=["needs upgrade", "refused", "blocked"],
)
def test_show_works_for_what_is_not_loaded(install, source, monkeypatch, options, settings, status, reason):
    install("acme-kernels", source(), **options)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    facts = shown("acme-kernels")
    assert facts["status"] == status
    assert reason in facts["reason"]
    assert facts["rules"] == []


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"SHARDWISE_STRICT": "1"}, "PluginLoadError: load the plugin acme-broken 1.0: OSError: no libacme.so"),
        ({"SHARDWISE_STRICT": "perhaps"}, "SettingsError: read SHARDWISE_STRICT: 'perhaps' is neither on nor off"),
        (
            {"SHARDWISE_PLUGINS": "acme-broken,nothing"},
            "SettingsError: read SHARDWISE_PLUGINS: there is no plugin noth",
        ),
    ],
    ids=["strict", "malformed", "unknown name"],
)
def test_list_and_show_work_where_look_ups_raise(install, monkeypatch, settings, refusal):
    install("acme-broken", FAILS)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    facts = shown("acme-broken")
    assert (facts["status"], facts["reason"]) == ("failed", "OSError: no libacme.so")
    assert "no libacme.so" in facts["traceback"]
    assert facts["refusal"].startswith(refusal)
    listed = run("plugins")
    assert listed.exit_code == 1
    assert "acme-broken" in listed.stdout
    assert f"Error: {refusal}" in listed.stderr


def test_a_broken_first_party_plugin_is_listed_and_the_others_too(fresh, monkeypatch):
    import shardwise_conv.plugin  # noqa: F401

    monkeypatch.setitem(__import__("sys").modules, "shardwise_conv.plugin", None)
    facts = shown("shardwise-conv")
    assert facts["status"] == "failed"
    assert "ModuleNotFoundError" in facts["traceback"]
    assert shown("shardwise-matmul")["status"] == "loaded"
    assert run("plugins").exit_code == 1


def test_show_names_conflicts(install, source):
    install("acme-kernels", source())
    install("bolt-kernels", source())
    facts = shown("acme-kernels")
    assert facts["conflicts"] == ["aten._copy_from_and_resize.default with bolt-kernels 1.0"]
    assert facts["rules"][0]["holds"] == "no: conflict"


def test_show_names_the_copies_that_it_hides(install, source):
    second = install("acme-kernels", source(), folder="second", version="0.9")
    install("acme-kernels", source())
    (hidden,) = shown("acme-kernels")["hides"]
    assert hidden == f"acme-kernels 0.9 in {second}"


def test_a_distribution_stands_for_its_plugins(install, source):
    install("acme", source(), entry="acme-kernels")
    assert shown("acme")["plugin"] == "acme-kernels"


def test_an_unknown_name_is_answered_with_close_ones():
    result = run("plugins", "show", "shardwise-matmull")
    assert result.exit_code == 1
    assert "there is no plugin 'shardwise-matmull'. Close to it: shardwise-matmul" in result.output


# -- rules -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_toy_registry")
def test_rules_as_json():
    (row,) = json.loads(run("rules", "mm", "--json").output)
    assert (row["op"], row["plugin"], row["distribution"], row["version"]) == (
        "aten.mm.default",
        "shardwise-toy",
        "toys",
        "1.2",
    )
    assert row["rule"].startswith("m k, k n -> m n")
    assert "test_plugins.py" in row["source"]


@pytest.mark.usefixtures("_toy_registry")
def test_rules_as_a_table():
    output = run("rules").output
    assert "m k, k n -> m n" in output
    assert "shardwise-toy" in output


@pytest.mark.usefixtures("_toy_registry")
def test_rules_that_match_nothing():
    result = run("rules", "conv*")
    assert result.exit_code == 1
    assert "no op with a rule matches 'conv*'" in result.output


def test_rules_by_the_name_that_a_schema_has():
    named = json.loads(run("rules", "aten::mm", "--json").stdout)
    assert named == json.loads(run("rules", "aten.mm", "--json").stdout) != []


def test_rules_tell_their_form():
    rows = {row["op"]: row for row in json.loads(run("rules", "--json").output)}
    assert rows["aten._neg_view.default"]["form"] == "rule"
    assert rows["aten._neg_view.default"]["partial"] == ["linear in self, decreasing in self"]
    assert rows["aten.mm.default"]["form"] == "rule, lowering"
    assert rows["aten.addmm.default"]["form"] == "rule, lowering"
    assert rows["aten._foreach_add.List"]["form"] == "rule_from, zip_lists"
    assert rows["aten.slice.Tensor"]["form"].startswith("rule_from")


def test_rules_of_one_plugin():
    rows = json.loads(run("rules", "--plugin", "shardwise-embedding", "--json").output)
    assert {row["plugin"] for row in rows} == {"shardwise-embedding"}
    table = run("rules", "--plugin", "shardwise-embedding", "--markdown").output
    assert all("shardwise-embedding" in line for line in table.splitlines()[2:])


def test_rules_of_a_plugin_that_is_none_or_not_loaded(install):
    install("acme-broken", FAILS)
    with pytest.warns(RuntimeWarning, match="left out the plugin acme-broken"):
        result = run("rules", "--plugin", "acme-broken")
    assert "the plugin acme-broken is not loaded: failed, OSError" in result.output
    result = run("rules", "--plugin", "acme-brokn")
    assert result.exit_code == 1
    assert "Close to it: acme-broken" in result.output
