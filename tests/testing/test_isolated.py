"""Isolated registries: exactly the named rules hold, in this process, for as long as they should."""

import pytest
import torch

from shardwise.discovery.process import default_registry
from shardwise.errors import NoRuleError, RuleConflictError, RuleError
from shardwise.kernel import dispatcher
from shardwise.kernel.engine import started
from shardwise.rule.authoring import rule
from shardwise.testing import isolated_registry

aten = torch.ops.aten
RELU = rule(aten.relu.default, "... -> ...")
UNRULED = rule(aten._copy_from_and_resize.default, "R, R -> R")


def test_a_registry_is_empty_and_this_process_s(registry):
    assert default_registry() is registry
    assert registry.rules() == []
    with pytest.raises(NoRuleError, match="none is installed"):
        registry.lookup(aten.mm.default)
    registry.add(RELU, plugin="acme")
    assert default_registry().lookup(aten.relu.default).origin.plugin == "acme"


def test_an_installed_one_has_the_plugins_beside(installed_registry):
    assert aten.mm.default in installed_registry
    installed_registry.add(UNRULED)
    assert installed_registry.lookup(aten._copy_from_and_resize.default).rule is UNRULED
    installed_registry.add(RELU)
    with pytest.raises(RuleConflictError, match="test"):
        installed_registry.lookup(aten.relu.default)
    installed_registry.override(RELU)
    assert installed_registry.lookup(aten.relu.default).rule is RELU


def test_what_is_no_rule_is_refused(registry):
    with pytest.raises(RuleError, match="is an int"):
        registry.add(3)


def test_the_old_one_is_back_afterwards_also_after_an_error():
    before = default_registry()
    with isolated_registry(RELU) as registry:
        assert default_registry() is registry
        assert registry.lookup(aten.relu.default).rule is RELU
    assert default_registry() is before
    with pytest.raises(NoRuleError), isolated_registry() as registry:
        registry.lookup(aten.relu.default)
    assert default_registry() is before


def test_plans_are_forgotten_on_the_way_in_and_out():
    versions = [dispatcher.rules_version()]
    with isolated_registry():
        versions.append(dispatcher.rules_version())
    versions.append(dispatcher.rules_version())
    assert versions[0] < versions[1] < versions[2]


def test_a_new_registry_at_the_address_of_an_old_one_is_listened_to():
    """Plans were bound to the id of a registry, which the next one may be given."""
    for _ in range(20):
        with isolated_registry(RELU) as registry:
            started.engine.registry()
            before = dispatcher.rules_version()
            registry.override(UNRULED)
            assert dispatcher.rules_version() > before
        del registry
