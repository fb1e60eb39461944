"""Which rule holds where several plugins have one: override, prefer, replaces, first-party; else a conflict."""

import pytest

pytestmark = pytest.mark.slow  # environments take seconds each: .ci/run takes those that are marked

MM = ("mm", "m k, k n -> m n", "reduce={'k': 'sum'}")

ASK = """
    import json, torch
    from shardwise.discovery.process import default_registry
    from shardwise.errors import NoRuleError, RuleConflictError

    registry = default_registry()

    def ask(op):
        try:
            return str(registry.lookup(op).origin)
        except NoRuleError:
            return None
        except RuleConflictError as error:
            return [str(error), error.settings]

    aten = torch.ops.aten
    asked = {"_copy_from_and_resize": aten._copy_from_and_resize.default, "mm": aten.mm.default, "add": aten.add.Tensor}
    print(json.dumps({name: ask(op) for name, op in asked.items()}))
"""


@pytest.fixture(scope="module")
def rivals(tmp_path_factory, shardwise_wheel, installed):
    """Two plugins with a rule for an op without another; one of them has one for mm, which first-party has, too."""
    folder = tmp_path_factory.mktemp("rivals")
    both = (
        installed.source_of()
        + """
    MM = rule(torch.ops.aten.mm.default, "m k, k n -> m n", replicate=["k"])

    @hookimpl(specname="shardwise_register")
    def more(registry):
        registry.add(MM)
"""
    )
    wheels = [
        installed.make_wheel(folder, "acme-kernels", both),
        installed.make_wheel(folder, "bolt-kernels", version="2.1"),
    ]
    return installed.Environment(folder / "env").install(shardwise_wheel, *wheels)


@pytest.fixture(scope="module")
def conflict(rivals):
    return rivals.answer(ASK)


def test_two_rules_for_one_op_are_a_conflict_of_that_op_alone(conflict):
    assert conflict["add"].startswith("shardwise-pointwise")
    message, _ = conflict["_copy_from_and_resize"]
    assert "aten._copy_from_and_resize.default" in message


def test_a_conflict_names_both_distributions_their_versions_and_source_lines(conflict):
    message, _ = conflict["_copy_from_and_resize"]
    for name, version in (("acme-kernels", "1.0"), ("bolt-kernels", "2.1")):
        assert f"{name} {version} at " in message
        assert f"{name.replace('-', '_')}_plugin.py:6" in message


def test_a_third_party_rule_beside_a_first_party_one_is_a_conflict_too(conflict):
    message, _ = conflict["mm"]
    assert "acme-kernels 1.0" in message
    assert "shardwise-matmul (shardwise " in message


@pytest.mark.sample
def test_the_setting_that_a_conflict_names_resolves_it(rivals, conflict):
    _, settings = conflict["_copy_from_and_resize"]
    variable, _, value = settings["environment"].partition("=")
    assert variable in conflict["_copy_from_and_resize"][0]
    chosen = rivals.answer(ASK, **{variable: value.strip('"')})
    assert chosen["_copy_from_and_resize"] == "acme-kernels 1.0"
    assert chosen["mm"] == conflict["mm"]
    (rivals.cwd / "pyproject.toml").write_text(settings["pyproject"])
    try:
        assert rivals.answer(ASK)["_copy_from_and_resize"] == "acme-kernels 1.0"
    finally:
        (rivals.cwd / "pyproject.toml").unlink()


def test_prefer_takes_names_without_overload_and_patterns_the_closest_first(rivals):
    answer = rivals.answer(ASK, SHARDWISE_PREFER="*=bolt-kernels, aten.m*=acme-kernels, aten.mm=shardwise")
    assert answer["_copy_from_and_resize"] == "bolt-kernels 2.1"
    assert answer["mm"].startswith("shardwise-matmul")
    # a pattern says nothing of ops that its plugin does not have
    assert answer["add"].startswith("shardwise-pointwise")


def test_prefer_for_a_plugin_without_a_rule_for_the_op_is_no_silent_wish(rivals):
    message, _ = rivals.answer(ASK, SHARDWISE_PREFER="aten.add.Tensor=acme-kernels")["add"]
    assert "prefer aten.add.Tensor=acme-kernels names a plugin that has no rule for it" in message


@pytest.mark.sample
def test_strict_mode_raises_for_a_conflict_at_load(rivals):
    done = rivals.run(ASK, SHARDWISE_STRICT="1")
    assert done.returncode != 0
    assert "RuleConflictError: find the rule for aten._copy_from_and_resize.default" in done.stderr


def test_replaces_goes_before_first_party_and_prefer_and_override_before_it(environment, wheel, installed):
    source = installed.source_of(*MM[:2], MM[2] + ", replaces='Shardwise'")
    env = environment(wheel("acme-kernels", source))
    assert env.answer(ASK)["mm"] == "acme-kernels 1.0"
    assert env.answer(ASK, SHARDWISE_PREFER="aten.mm.default=shardwise")["mm"].startswith("shardwise-matmul")
    code = """
        import json
        import torch
        import shardwise as sw
        from shardwise.discovery.process import default_registry
        from shardwise.rule import rule

        def holds():
            return str(default_registry().lookup(torch.ops.aten.mm.default).origin)

        found = [holds()]
        mine = rule(torch.ops.aten.mm.default, "R, R -> R")
        with sw.override(mine):
            found.append(holds())
        found.append(holds())
        undo = default_registry().override(mine)
        found.append(holds())
        undo()
        print(json.dumps([*found, holds()]))
    """
    preferred = "shardwise-matmul (shardwise "
    answer = env.answer(code, SHARDWISE_PREFER="aten.mm.default=shardwise-matmul")
    answer = [name.partition("0.")[0] for name in answer]
    assert answer == [preferred, "override (this process -)", preferred, "override (this process -)", preferred]


def test_a_hook_may_say_replaces_for_all_its_rules(environment, wheel, installed):
    source = installed.source_of(*MM).replace("registry.add(RULE)", "registry.add(RULE, replaces='shardwise')")
    assert environment(wheel("acme-kernels", source)).answer(ASK)["mm"] == "acme-kernels 1.0"


@pytest.mark.sample
def test_two_plugins_that_replace_first_party_are_a_conflict(environment, wheel, installed):
    source = installed.source_of(*MM[:2], MM[2] + ", replaces='shardwise'")
    message, _ = environment(wheel("acme-kernels", source), wheel("bolt-kernels", source)).answer(ASK)["mm"]
    assert "acme-kernels" in message
    assert "bolt-kernels" in message


@pytest.mark.parametrize("order", [("acme-kernels", "bolt-kernels"), ("bolt-kernels", "acme-kernels")])
def test_the_order_of_installation_decides_nothing(environment, wheel, installed, order):
    """Bolt replaces Acme; both ways round, the winner and the order of the list are the same."""
    sources = {
        "acme-kernels": installed.source_of(),
        "bolt-kernels": installed.source_of(options="replaces='acme-kernels'"),
    }
    wheels = {name: wheel(name, source) for name, source in sources.items()}
    env = environment()
    for name in order:
        env.install(wheels[name])
    code = """
        import json, torch
        from shardwise.discovery.process import default_registry, statuses
        winner = str(default_registry().lookup(torch.ops.aten._copy_from_and_resize.default).origin)
        print(json.dumps([winner, [s.plugin.origin.plugin for s in statuses()][:2]]))
    """
    assert env.answer(code) == ["bolt-kernels 1.0", ["acme-kernels", "bolt-kernels"]]
