"""Modules of rules: registered by the names of their ops, imported when one of these is first seen."""

import sys
import types

import pytest
import torch

from shardwise.comm import rule_agreement
from shardwise.comm.rule_agreement import summary
from shardwise.errors import NoRuleError, PluginLoadError, RuleConflictError, RuleError
from shardwise.kernel.precedence import Origin
from shardwise.kernel.registrar import Registrar, stem_of
from shardwise.kernel.registry import Registry
from shardwise.rule import rule

aten = torch.ops.aten


@pytest.fixture
def module(tmp_path, monkeypatch):
    """``module(text)`` writes a module of rules and gives its name; nothing is imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = []

    def write(text, name=None):
        name = name or f"rules_of_{tmp_path.name}_{len(names)}"
        names.append(name)
        head = "import torch\nfrom shardwise.rule import rule\naten = torch.ops.aten\n"
        (tmp_path / f"{name}.py").write_text(head + text)
        return name

    yield write
    for name in names:
        sys.modules.pop(name, None)


def registry_of(*plugins, prefer=()):
    registry = Registry(prefer)
    for plugin, fill in plugins:
        registrar = Registrar(Origin(plugin, plugin, "1"))
        fill(registrar)
        registry.accept(registrar)
    return registry


def of(name, stems="aten::neg"):
    return lambda registrar: registrar.add_modules({name: stems})


NEG = 'RULES = (rule([aten.neg.default, aten.neg_.default, aten.neg.out], "... -> ..."),)'


@pytest.mark.parametrize("op", [aten.neg.default, aten.neg_.default, aten.neg.out])
def test_a_module_is_imported_when_an_op_of_its_own_is_first_seen(module, op):
    name = module(NEG)
    registry = registry_of(("acme", of(name)))
    with pytest.raises(NoRuleError):
        registry.lookup(aten.mm.default)
    assert name not in sys.modules
    assert registry.lookup(op).rule is sys.modules[name].RULES[0]
    assert registry.lookup(op).origin == Origin("acme", "acme", "1")
    assert registry.find(op) == [registry.lookup(op)]


def test_the_stem_of_a_name():
    named = ["aten::add.Tensor", "aten::add_.Tensor", "aten::add", "aten::__iand__.Tensor", "aten::_foreach_add_.List"]
    assert [stem_of(n) for n in named] == ["aten::add"] * 3 + ["aten::__iand__", "aten::_foreach_add"]


def test_an_overload_that_the_module_has_no_rule_for_has_none(module):
    registry = registry_of(("acme", of(module('RULES = (rule(aten.neg.default, "... -> ..."),)'))))
    assert aten.neg.default in registry
    assert aten.neg.out not in registry


def test_several_modules_may_have_overloads_of_one_name(module):
    one = module('RULES = (rule(aten.neg.default, "... -> ..."),)')
    other = module('RULES = (rule(aten.neg_.default, "... -> ..."),)')
    registry = registry_of(("acme", lambda r: r.add_modules({one: "aten::neg", other: "aten::neg"})))
    assert aten.neg.default in registry
    assert aten.neg_.default in registry


def test_two_rules_of_one_plugin_for_an_op_are_an_error_where_the_op_is_seen(module):
    one, other = module(NEG), module(NEG)
    registry = registry_of(("acme", lambda r: r.add_modules({one: "aten::neg", other: "aten::neg"})))
    with pytest.raises(PluginLoadError, match=rf"two rules for it: .*{one}.* and .*{other}"):
        registry.lookup(aten.neg.default)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("rules = ()", "RuleError: .*it has no RULES"),
        ("RULES = 3", "RuleError: .*its RULES is an int"),
        ("RULES = (3,)", "RuleError: .*3 is an int"),
        ("raise SystemExit(2)", "SystemExit: 2"),
        (
            'RULES = (rule(aten.abs.default, "... -> ..."),)',
            "has a rule for it, at .*Register the module for aten::abs",
        ),
    ],
)
def test_a_module_that_cannot_be_had_is_an_error_each_time(module, text, found):
    registry = registry_of(("acme", of(module(text))))
    for _ in range(2):
        with pytest.raises(PluginLoadError, match=found) as caught:
            registry.lookup(aten.neg.default)
        assert caught.value.plugin == "acme"
        assert "SHARDWISE_DISABLE_PLUGINS=acme" in str(caught.value)
        assert caught.value.__cause__ is not None


def test_plugins_conflict_as_anywhere_whatever_was_seen_before(module):
    one, other = module(NEG), module(NEG)
    eager = rule(aten.neg.default, "... -> ...")
    both = (("acme", of(one)), ("bolt", lambda r: r.add(eager)))
    assert [r.op for r in registry_of(*both).conflicts()] == [aten.neg.default]
    with pytest.raises(RuleConflictError, match="bolt"):
        registry_of(*both).lookup(aten.neg.default)
    with pytest.raises(RuleConflictError, match="bolt"):
        registry_of(("acme", of(one)), ("bolt", of(other))).lookup(aten.neg.default)
    assert len(registry_of(("acme", of(one)), ("bolt", of(other))).conflicts()) == 3
    preferred = registry_of(*both, prefer=[("aten.neg.default", "acme")])
    assert preferred.lookup(aten.neg.default).origin.plugin == "acme"
    replacing = registry_of(("acme", of(one)), ("bolt", lambda r: r.add(eager, replaces="acme")))
    assert replacing.lookup(aten.neg.default).origin.plugin == "bolt"


def test_a_plugin_that_comes_later_is_heard_also_of_ops_that_were_seen(module):
    registry = registry_of(("acme", of(module(NEG))))
    registry.lookup(aten.neg.default)
    registrar = Registrar(Origin("bolt", "bolt", "1"))
    registrar.add_modules({module(NEG): "aten::neg"})
    registry.accept(registrar)
    with pytest.raises(RuleConflictError):
        registry.lookup(aten.neg.default)


def test_a_list_of_rules_has_those_of_all_modules(module):
    registry = registry_of(("acme", of(module(NEG))), ("bolt", of(module("1 / 0"), "aten::abs")))
    assert len(list(registry.ops())) == 3
    assert registry.see_all() == {"aten.abs.default": "ZeroDivisionError: division by zero"}
    with pytest.raises(PluginLoadError, match="ZeroDivisionError"):
        registry.read_modules()


def test_what_is_seen_is_no_difference_between_ranks_and_other_rules_are_named(module, tmp_path):
    name = module(NEG)
    seen, unseen = (registry_of(("acme", of(name))) for _ in range(2))
    seen.lookup(aten.neg.default)
    assert summary(seen) == summary(unseen)
    assert summary(seen, whole=True) == summary(unseen, whole=True)
    before, whole = summary(unseen), summary(unseen, whole=True)
    assert whole["rule"]["aten.neg.default"] == "acme 1: ... -> ..."
    (tmp_path / f"{name}.py").write_text((tmp_path / f"{name}.py").read_text() + "\n# another word\n")
    rule_agreement._digests.cache_clear()  # another process reads the file as it is then
    assert summary(unseen) != before
    assert summary(unseen, whole=True) == whole


@pytest.mark.parametrize("names", ["aten::neg.default", "aten::neg_", "neg", "aten.neg", ""])
def test_names_that_are_none_are_refused_where_they_are_registered(names):
    with pytest.raises(RuleError, match=r"is not the name of an op|no op is named"):
        Registrar(Origin("acme")).add_modules({"acme.rules": names})


def test_threads_that_see_an_op_at_the_same_time_get_one_rule(module):
    name = module("import time\ntime.sleep(0.05)\n" + NEG)
    registry = registry_of(("acme", of(name)))
    import threading

    found = []
    threads = [threading.Thread(target=lambda: found.append(registry.lookup(aten.neg.default))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({id(entry) for entry in found}) == 1
    assert isinstance(sys.modules[name], types.ModuleType)
