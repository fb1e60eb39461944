"""The registry: who supplies a rule, and what happens when nobody or two do."""

from __future__ import annotations

import re

import pytest
import torch

from shardwise.errors import NoRuleError, RuleConflictError, RuleError
from shardwise.kernel.first_party import core_version
from shardwise.kernel.precedence import Origin
from shardwise.kernel.registry import Failure, Registrar, Registry
from shardwise.rule.authoring import rule

aten = torch.ops.aten


def make(*ops, name="shardwise-one"):
    registrar = Registrar(Origin(name, name, "1.2"))
    registrar.add(*(rule(op, "... -> ...") for op in ops))
    return registrar


def test_a_rule_is_found_with_its_origin():
    registry = Registry()
    registry.accept(make(aten.neg.default))
    entry = registry.lookup(aten.neg.default)
    assert entry.origin == Origin("shardwise-one", "shardwise-one", "1.2")
    assert entry.rule.source.startswith(__file__)


def test_an_op_without_a_rule_names_the_op_the_plugins_and_what_to_do():
    registry = Registry()
    registry.accept(make(aten.neg.default))
    registry.reject(Failure(Origin("shardwise-broken", "broken", "3"), "ImportError: no module named zlib2"))
    with pytest.raises(NoRuleError) as caught:
        registry.lookup(aten.abs.default)
    assert caught.value.op == "aten.abs.default"
    assert caught.value.plugins == ("shardwise-one",)
    for part in (
        "aten.abs.default",
        "no rule for it in the plugin shardwise-one. ",
        "shardwise-broken",
        "no module named zlib2",
        "Install shardwise-",
    ):
        assert part in str(caught.value)


def test_an_op_that_nobody_is_known_to_have_says_to_look_for_a_plugin():
    with pytest.raises(NoRuleError, match="Install or enable a plugin") as caught:
        Registry().lookup(aten._copy_from_and_resize.default)
    assert caught.value.known == ()


def test_the_family_that_has_an_op_is_named_with_what_pip_installs():
    with pytest.raises(NoRuleError, match=rf"pip install shardwise-matmul=={re.escape(core_version())}") as caught:
        Registry().lookup(aten.mm.default)
    assert caught.value.known == ("shardwise-matmul",)


def test_a_family_that_is_not_loaded_is_named_with_the_reason():
    registry = Registry()
    registry.leave_out(Failure(Origin("shardwise-matmul", "shardwise"), "blocked: in SHARDWISE_DISABLE_PLUGINS"))
    with pytest.raises(NoRuleError, match=r"Enable shardwise-matmul, .*\(blocked: in SHARDWISE_DISABLE_PLUGINS\)"):
        registry.lookup(aten.mm.default)


def test_a_family_that_is_loaded_is_not_named():
    registry = Registry()
    registry.accept(make(aten.neg.default, name="shardwise-matmul"))
    with pytest.raises(NoRuleError) as caught:
        registry.lookup(aten.mm.default)
    assert caught.value.known == ()


def test_two_plugins_with_one_op_conflict_only_when_it_is_looked_up():
    registry = Registry()
    registry.accept(make(aten.neg.default, aten.abs.default))
    registry.accept(make(aten.neg.default, name="shardwise-two"))
    assert registry.lookup(aten.abs.default).origin.plugin == "shardwise-one"
    with pytest.raises(RuleConflictError) as caught:
        registry.lookup(aten.neg.default)
    for part in ("aten.neg.default", "shardwise-one 1.2", "shardwise-two 1.2", __file__, "SHARDWISE_DISABLE_PLUGINS="):
        assert part in str(caught.value)


def test_an_override_wins_until_it_is_undone():
    registry = Registry()
    registry.accept(make(aten.neg.default))
    changes = []
    registry.on_change(lambda: changes.append(1))
    mine = rule(aten.neg.default, "... -> ...", partial=["sum -> sum"])
    undo = registry.override(mine)
    assert registry.lookup(aten.neg.default).rule is mine
    undo()
    assert registry.lookup(aten.neg.default).rule is not mine
    assert len(changes) == 2


def test_one_plugin_may_not_register_an_op_twice():
    with pytest.raises(RuleError, match="two rules"):
        make(aten.neg.default, aten.neg.default)


def test_only_rules_are_registered():
    with pytest.raises(RuleError, match="is a str"):
        Registrar(Origin("x")).add("m k, k n -> m n")


def test_entries_are_listed_by_pattern_and_plugin():
    registry = Registry()
    registry.accept(make(aten.neg.default, aten.abs.default))
    registry.accept(make(aten.exp.default, name="shardwise-two"))
    assert [str(e.op) for e in registry.ops()] == ["aten.abs.default", "aten.exp.default", "aten.neg.default"]
    assert [str(e.op) for e in registry.ops("neg")] == ["aten.neg.default"]
    assert [str(e.op) for e in registry.ops(plugin="shardwise-two")] == ["aten.exp.default"]
    assert len(registry.rules()) == 3


def test_only_an_operator_of_higher_order_is_registered_as_one():
    registrar = Registrar(Origin("shardwise-one", "shardwise-one", "1.2"))
    operator = torch.ops.higher_order.flex_attention
    registrar.add_higher_order(operator, make)
    registry = Registry()
    registry.accept(registrar)
    assert registry.higher_order == {operator: make}
    with pytest.raises(RuleError, match="OpOverload"):
        registrar.add_higher_order(aten.neg.default, make)
