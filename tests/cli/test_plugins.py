"""``shardwise plugins`` and ``shardwise rules``: tables for people, JSON for programs."""

import json
from importlib.metadata import entry_points

import pytest
import torch
from click.testing import CliRunner

from shardwise.cli import main
from shardwise.discovery import GROUP, use_registry
from shardwise.registry import Origin, Registrar, Registry
from shardwise.rule import rule


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


def test_an_unknown_plugin_in_the_settings_is_a_message(monkeypatch):
    monkeypatch.setenv("SHARDWISE_PLUGINS", "shardwise-nothing")
    monkeypatch.setattr("shardwise.discovery._process.registry", None)
    result = run("plugins")
    assert result.exit_code == 1
    assert "Error: SettingsError: read SHARDWISE_PLUGINS: there is no plugin shardwise-nothing" in result.output


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
