"""What may be judged as a plugin: an installed name, a module with the hook, rules; and what is refused, and how."""

from types import ModuleType

import pytest
import torch

from shardwise.errors import PluginLoadError, RuleError
from shardwise.hookspecs import hookimpl
from shardwise.rule.authoring import rule
from shardwise.testing import RuleRefuted, check_plugin
from shardwise.testing.subject import subject_of

aten = torch.ops.aten
RELU = rule(aten.relu.default, "... -> ...")
MM = rule(aten.mm.default, "m k, k n -> m n", reduce={"k": "sum"})
WRONG = rule(aten.relu.default, "... -> ...", partial=["sum -> sum"])


def plugin(*rules):
    @hookimpl
    def shardwise_register(registry):
        registry.add(*rules)

    module = ModuleType("acme_plugin")
    module.shardwise_register = shardwise_register
    return module


def test_an_installed_plugin_is_found_by_its_name():
    subject = subject_of("shardwise-matmul")
    assert subject.module == "shardwise_matmul.plugin"
    assert subject.loose_rules == ()
    assert any(aten.mm.default in r.ops for r in subject.rules)


@pytest.mark.parametrize("given", [RELU, [RELU], (RELU, MM), plugin(RELU, MM)], ids=["rule", "list", "tuple", "module"])
def test_what_is_not_installed_is_judged_as_it_is(given):
    subject = subject_of(given)
    assert RELU in subject.rules
    assert subject.loose_rules == subject.rules


def test_check_plugin_judges_all_rules():
    samples = {aten.mm.default: [((torch.randn(5, 7), torch.randn(7, 3)), {})]}
    report = check_plugin(plugin(RELU, MM), samples, cases=20)
    assert (report.rules, report.ops, report.cases) == (2, 2, 40)
    assert str(report).startswith("2 rules, 2 ops")
    with pytest.raises(RuleRefuted, match="sum -> sum"):
        check_plugin([MM, WRONG], samples, cases=20)


def test_an_unknown_name_is_no_plugin_without_rules():
    with pytest.raises(PluginLoadError, match=r"it is not installed.*shardwise-matmul"):
        check_plugin("shardwise-matmull")


def test_a_blocked_plugin_is_said_to_be_so(monkeypatch):
    monkeypatch.setenv("SHARDWISE_DISABLE_PLUGINS", "shardwise-matmul")
    with pytest.raises(PluginLoadError, match="it is blocked: in SHARDWISE_DISABLE_PLUGINS"):
        subject_of("shardwise-matmul")


def misspelt():
    module = plugin()

    @hookimpl
    def shardwise_registr(registry):
        """Not the hook's name."""

    module.shardwise_registr = shardwise_registr
    return module


@pytest.mark.parametrize(
    ("given", "found"),
    [(ModuleType("empty"), "has no shardwise_register hook"), (misspelt(), "shardwise_registr"), (3, "has no")],
    ids=["no hook", "misspelt", "number"],
)
def test_an_object_without_the_hook_is_refused(given, found):
    with pytest.raises(PluginLoadError, match=found):
        subject_of(given)


def test_rules_that_clash_or_are_none_are_refused():
    with pytest.raises(RuleError, match="two rules"):
        subject_of([RELU, WRONG])
    with pytest.raises(RuleError, match="is an int"):
        subject_of([3])


def later(**rules):
    @hookimpl
    def shardwise_register(registry):
        for name, where in rules.items():
            registry.add_later(name.replace("__", "::"), where)

    module = ModuleType("acme_later")
    module.shardwise_register = shardwise_register
    return module


def test_rules_by_the_names_of_ops_are_judged_where_the_ops_exist():
    subject = subject_of(later(aten__relu=lambda _: RELU, nobody__op="acme_none:RULE"))
    assert subject.rules == (RELU,)


def test_a_rule_that_cannot_be_had_fails_the_tests_of_its_plugin():
    with pytest.raises(PluginLoadError, match=r"the rule of aten\.relu\.default cannot be had: .*acme_no_such_module"):
        subject_of(later(aten__relu="acme_no_such_module:RULE"))
