"""The registry of this process. What becomes of installed plugins is tested in tests/installed, with real wheels."""

import sys
import types
from importlib.metadata import EntryPoint

import pytest
import torch
from attrs import evolve

from shardwise.discovery.entry_points import GROUP, InstalledPlugin, discover
from shardwise.discovery.loading import load
from shardwise.discovery.process import default_registry, statuses, use_registry
from shardwise.errors import NoRuleError, PluginLoadError, SettingsError
from shardwise.hookspecs import hookimpl
from shardwise.kernel.precedence import Origin
from shardwise.kernel.registry import Registry
from shardwise.rule import rule
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
    assert {e.op for e in default_registry().ops() if e.op not in registry} == own
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


@pytest.fixture
def acme(monkeypatch):
    """``acme(replaces)``: a plugin whose rule for mm replaces somebody's."""

    def made(replaces):
        module = types.ModuleType("acme_replacing")
        mm = rule(MM, "R, R -> R", replaces=replaces)
        module.shardwise_register = hookimpl(lambda registry: registry.add(mm), specname="shardwise_register")
        monkeypatch.setitem(sys.modules, "acme_replacing", module)
        entry = EntryPoint(name="acme", value="acme_replacing", group=GROUP)
        return InstalledPlugin(Origin("acme", "acme", "1"), entry, "ready")

    return made


def test_what_a_hook_that_watches_raises_names_the_plugin_the_hook_and_the_op(monkeypatch):
    def watch(plan):
        raise KeyError("no such metric")

    module = types.ModuleType("acme_watching")
    module.shardwise_register = hookimpl(lambda: None, specname="shardwise_register")
    module.shardwise_dispatched = hookimpl(watch, specname="shardwise_dispatched")
    monkeypatch.setitem(sys.modules, "acme_watching", module)
    watching = InstalledPlugin(
        Origin("acme", "acme", "1"), EntryPoint(name="acme", value="acme_watching", group=GROUP), "ready"
    )
    registry = Registry()
    load([watching], registry)
    (told,) = registry.observers
    plan = types.SimpleNamespace(schema=types.SimpleNamespace(op=MM))  # what the message is made of
    with pytest.raises(PluginLoadError) as caught:
        told(plan)
    assert caught.value.found == "its hook shardwise_dispatched raised KeyError: 'no such metric'"
    assert "the plugin acme 1 of a call of aten.mm.default" in caught.value.asked
    assert "SHARDWISE_DISABLE_PLUGINS=acme" in caught.value.do
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("name", ["shardwise", "shardwise-matmul", "Shardwise_Conv", "shardwise-fft", "shardwise-core"])
def test_a_rule_replaces_those_of_a_plugin_or_distribution_also_of_one_that_is_known_and_not_installed(acme, name):
    assert load([acme(name)], Registry())[0].status == "loaded"


def test_a_plugin_whose_rules_replace_those_of_a_name_that_nobody_has_is_left_out(acme):
    registry = Registry()
    with pytest.warns(
        RuntimeWarning, match=r"replaces 'shardwise-matmull', and no plugin .* nearest is shardwise-matmul"
    ):
        (status,) = load([acme("shardwise-matmull")], registry)
    assert status.status == "failed"
    assert MM not in registry
    with pytest.raises(PluginLoadError, match="shardwise-matmull"):
        load([acme("shardwise-matmull")], Registry(), strict=True)


def test_a_family_that_is_not_installed_may_be_disabled_and_is_said_to_be_missing_elsewhere(monkeypatch):
    from shardwise.discovery import entry_points

    copies = {key: copy for key, copy in entry_points._copies().items() if "shardwise-linalg" not in key}
    monkeypatch.setattr(entry_points, "_copies", lambda: copies)
    assert discover(Settings(disabled=frozenset({"shardwise-linalg"})))
    with pytest.raises(SettingsError, match=r"Install it: pip install shardwise-linalg=="):
        discover(Settings(prefer=(("aten.mm", "shardwise-linalg"),)))
    with pytest.raises(SettingsError, match=r"The nearest is shardwise-matmul\."):
        discover(Settings(disabled=frozenset({"shardwise-matmull"})))


def test_what_has_the_name_of_a_family_is_of_this_release(tmp_path, monkeypatch):
    """Else somebody else's distribution of that name would stand for the family, whatever it requires."""
    about = tmp_path / "shardwise_norm-9.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: shardwise-norm\nVersion: 9.9\n")
    (about / "entry_points.txt").write_text("[shardwise.plugins.v1]\nshardwise-norm = shardwise_norm_of_others\n")
    (about / "RECORD").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = [plugin for plugin in discover(Settings()) if plugin.origin.plugin == "shardwise-norm"]
    assert found.status == "refused"
    assert "a family and its core are of one release" in found.reason
