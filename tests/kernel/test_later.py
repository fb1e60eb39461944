"""Rules by the name of an op: got when the op is first seen, so that rules for a library's ops do not import it."""

import sys
import types

import pytest
import torch

from shardwise.comm.rule_agreement import summary
from shardwise.errors import NoRuleError, PluginLoadError, RuleConflictError, RuleError
from shardwise.kernel.precedence import Origin
from shardwise.kernel.registrar import Registrar
from shardwise.kernel.registry import Registry
from shardwise.rule import rule

NUMBERS = iter(range(1000))


@pytest.fixture
def vision(monkeypatch):
    """``vision.define()`` makes an op, and its rule in a module; ``vision.name`` is the name of the op."""
    name = f"later_test::keep{next(NUMBERS)}"
    library = torch.library.Library("later_test", "FRAGMENT")
    module = f"acme_later_rules_{name.partition('::')[2]}"

    def define():
        library.define(f"{name.partition('::')[2]}(Tensor x) -> Tensor")
        op = getattr(torch.ops.later_test, name.partition("::")[2]).default
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
        sys.modules[module].RULE = rule(op, "... -> ...")
        return op

    yield types.SimpleNamespace(name=name, where=f"{module}:RULE", module=module, define=define)
    library._destroy()


def registry_of(*plugins, prefer=()):
    registry = Registry(prefer)
    for plugin, fill in plugins:
        registrar = Registrar(Origin(plugin, plugin, "1"))
        fill(registrar)
        registry.accept(registrar)
    return registry


def test_the_rule_is_imported_when_the_op_is_first_seen(vision):
    registry = registry_of(("acme", lambda r: r.add_later(vision.name, vision.where)))
    assert vision.module not in sys.modules
    assert list(registry.ops()) == []
    op = vision.define()
    assert op in registry
    assert registry.lookup(op).origin.plugin == "acme"
    assert registry.lookup(op).rule is sys.modules[vision.module].RULE


def test_a_function_may_make_the_rule(vision):
    registry = registry_of(("acme", lambda r: r.add_later(vision.name, lambda op: rule(op, "... -> ..."))))
    op = vision.define()
    assert [entry.op for entry in registry.find(op)] == [op]


def test_what_is_seen_or_not_is_no_difference_between_ranks(vision):
    plugins = ("acme", lambda r: r.add_later(vision.name, vision.where))
    seen, unseen = registry_of(plugins), registry_of(plugins)
    seen.lookup(vision.define())
    assert summary(seen) == summary(unseen)
    assert summary(seen) != summary(registry_of())


def test_see_all_gets_the_rules_of_ops_that_exist_and_names_the_others(vision):
    registry = registry_of(
        ("acme", lambda r: (r.add_later(vision.name, vision.where), r.add_later("nobody::op", "a:B")))
    )
    assert list(registry.see_all()) == [f"{vision.name.replace('::', '.')}.default", "nobody.op.default"]
    op = vision.define()
    assert registry.see_all() == {"nobody.op.default": "no library that is imported has the op"}
    assert [entry.op for entry in registry.ops()] == [op]
    names = [(name, origin.plugin) for name, origin in registry.later()]
    assert names == [(f"{vision.name.replace('::', '.')}.default", "acme"), ("nobody.op.default", "acme")]


def test_two_plugins_conflict_as_anywhere_and_replaces_and_prefer_decide(vision):
    def add(registrar, **options):
        registrar.add_later(vision.name, vision.where, **options)

    op = vision.define()
    with pytest.raises(RuleConflictError):
        registry_of(("a", add), ("b", add)).lookup(op)
    assert registry_of(("a", add), ("b", lambda r: add(r, replaces="a"))).lookup(op).origin.plugin == "b"
    prefer = [(vision.name.replace("::", "."), "a")]
    assert registry_of(("a", add), ("b", add), prefer=prefer).lookup(op).origin.plugin == "a"


@pytest.mark.parametrize("where", ["acme_no_such_module:RULE", "sys:no_such_rule", "sys:path"])
def test_a_rule_that_cannot_be_got_is_an_error_each_time(vision, where):
    registry = registry_of(("acme", lambda r: r.add_later(vision.name, where)))
    op = vision.define()
    for _ in range(2):
        with pytest.raises(PluginLoadError, match="SHARDWISE_DISABLE_PLUGINS=acme") as caught:
            registry.lookup(op)
        assert caught.value.plugin == "acme"
        assert caught.value.__cause__ is not None


def test_a_rule_of_another_op_is_an_error(vision):
    other = rule(torch.ops.aten.neg.default, "... -> ...")
    registry = registry_of(("acme", lambda r: r.add_later(vision.name, lambda _: other)))
    with pytest.raises(PluginLoadError, match=r"the rule is for aten\.neg\.default"):
        registry.lookup(vision.define())


@pytest.mark.parametrize(
    ("name", "where", "found"),
    [
        ("nms", "a:B", "not the name of an op with its namespace"),
        ("torchvision.nms", "a:B", "not the name of an op with its namespace"),
        ("torchvision::nms", "a.B", "does not say where the rule is"),
        ("torchvision::nms", 3, "does not say where the rule is"),
    ],
)
def test_what_cannot_be_read_is_refused_where_it_is_registered(name, where, found):
    with pytest.raises(RuleError, match=found):
        Registrar(Origin("acme")).add_later(name, where)


def test_a_second_rule_of_an_op_is_refused_however_it_is_registered():
    neg = rule(torch.ops.aten.neg.default, "... -> ...")
    first = Registrar(Origin("acme"))
    first.add_later("aten::neg", "a:B")
    for again in (lambda: first.add(neg), lambda: first.add_later("aten::neg", "c:D")):
        with pytest.raises(RuleError, match="two rules"):
            again()
    second = Registrar(Origin("acme"))
    second.add(neg)
    with pytest.raises(RuleError, match="two rules"):
        second.add_later("aten::neg", "a:B")


def test_an_op_of_another_name_has_no_rule(vision):
    registry = registry_of(("acme", lambda r: r.add_later("later_test::another", vision.where)))
    with pytest.raises(NoRuleError):
        registry.lookup(vision.define())
