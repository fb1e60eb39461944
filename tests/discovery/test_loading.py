"""The registry of this process. What becomes of installed plugins is tested in tests/installed, with real wheels."""

import pytest
import torch
from attrs import evolve

from shardwise.discovery.entry_points import discover
from shardwise.discovery.loading import load
from shardwise.discovery.process import default_registry, statuses, use_registry
from shardwise.errors import NoRuleError, PluginLoadError
from shardwise.kernel.registry import Registry
from shardwise.settings import Settings

MM = torch.ops.aten.mm.default


def test_there_is_one_registry_per_process():
    assert default_registry() is default_registry()
    assert {s.status for s in statuses()} == {"loaded"}


def test_another_registry_for_a_while():
    before = default_registry()
    with use_registry(Registry()) as empty:
        assert default_registry() is empty
        with pytest.raises(NoRuleError):
            default_registry().lookup(MM)
    assert default_registry() is before
    assert MM in before


def test_a_disabled_first_party_plugin_takes_exactly_its_ops():
    registry = Registry()
    load(discover(Settings(disabled=frozenset({"shardwise-matmul"}))), registry)
    own = {entry.op for entry in default_registry().ops(plugin="shardwise-matmul")}
    assert {e.op for e in default_registry().ops()} - {e.op for e in registry.ops()} == own
    with pytest.raises(NoRuleError, match=r"aten\.mm\.default"):
        registry.lookup(MM)


def test_what_is_not_blocked_but_cannot_be_used_raises_when_strict():
    plugins = discover(Settings(plugins=frozenset({"shardwise-matmul"})))
    assert {f.origin.plugin for f in plugins if f.status == "ready"} == {"shardwise-matmul"}
    assert {s.status for s in load(plugins, Registry(), strict=True)} == {"loaded", "blocked"}
    refused = evolve(plugins[0], status="refused", reason="it needs shardwise>=99")
    assert load([refused], Registry(), strict=False)[0].status == "refused"
    with pytest.raises(PluginLoadError, match="it needs shardwise>=99"):
        load([refused], Registry(), strict=True)


def test_names_that_nobody_has_are_refused():
    with pytest.raises(PluginLoadError, match="there is no plugin acme"):
        discover(Settings(disabled=frozenset({"acme"})))
