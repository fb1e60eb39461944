"""The tests of a plugin as one class: they pass for a right plugin, and name what is wrong in others."""

import textwrap
from types import ModuleType

import pytest
import torch

from shardwise.errors import PluginLoadError
from shardwise.hookspecs import hookimpl
from shardwise.rule.authoring import rule
from shardwise.testing import PluginTests, made

aten = torch.ops.aten
pytest_plugins = ["pytester"]


# -- as a third party has it: the tests of this class run here ---------------------------------------------------


@hookimpl
def shardwise_register(registry):
    registry.add(
        rule(aten.tanh.default, "... -> ..."),
        rule(aten.mm.default, "m k, k n -> m n", reduce={"k": "sum"}),
        rule(aten._fft_r2c.default, "... -> _", replicate=["..."]),
    )


acme = ModuleType("acme_plugin_of_the_kit")
acme.shardwise_register = shardwise_register


class TestAcme(PluginTests):
    plugin = acme
    samples = {aten.mm.default: [((made((5, 7)), made((7, 3))), {})]}  # noqa: RUF012
    unsampled = {aten._fft_r2c.default: "its normalisation is beyond guessing"}  # noqa: RUF012
    rank_cases = 4


# -- what it does with others ------------------------------------------------------------------------------------

HEAD = """
    import torch
    from shardwise.rule import rule, rule_from, Row, Rows, shard, partial
    from shardwise.testing import PluginTests, made
    aten = torch.ops.aten
    pytest_plugins = ["shardwise.testing.pytest_plugin"]
    PAIR = [((made((5, 7)), made((7, 3))), {})]
    MM = rule(aten.mm.default, "m k, k n -> m n", reduce={"k": "sum"})
"""


@pytest.fixture
def outcome(pytester):
    """``outcome(source)`` runs a test file in this process: its result by test name, and what was printed."""

    def run(source):
        pytester.makepyfile(textwrap.dedent(HEAD) + textwrap.dedent(source))
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", "--import-mode=importlib", "-rA", "-vv")

    return run


def test_a_right_plugin_passes(outcome):
    done = outcome("""
        class TestRight(PluginTests):
            plugin = [MM]
            samples = {aten.mm.default: PAIR}
            rank_cases = 0
    """)
    done.assert_outcomes(passed=4, skipped=2)
    done.stdout.fnmatch_lines(["PASSED *::TestRight::test_the_oracle_accepts?aten.mm.default?"])


def test_a_planted_wrong_rule_fails_with_its_row_and_line(outcome):
    done = outcome("""
        WRONG = rule(aten.relu.default, "... -> ...", partial=["sum -> sum"])
        class TestWrong(PluginTests):
            plugin = [MM, WRONG]
            samples = {aten.mm.default: PAIR}
            rank_cases = 0
    """)
    done.assert_outcomes(passed=4, failed=1, skipped=2)
    done.stdout.fnmatch_lines(["*row 'sum -> sum' of the rule for aten.relu.default (*.py:*)*"])
    done.stdout.fnmatch_lines(["FAILED*test_the_oracle_accepts?aten.relu.default?*"])


def test_what_is_not_judged_must_be_stated_and_reasons_must_hold(outcome):
    done = outcome("""
        @rule_from(aten.relu.default)
        def NEVER(x):
            never = Row((shard(0),), (shard(0),), "never", divides=((0, 0, 1),))
            return Rows((never, Row((partial("sum"),), (partial("sum"),), "bad")) if False else (never,))
        class TestSilent(PluginTests):
            plugin = [rule(aten.mm.default, "m k, k n -> m n", reduce={"k": "sum"}), NEVER]
            rank_cases = 0
        class TestStale(PluginTests):
            plugin = [MM]
            samples = {aten.mm.default: PAIR}
            unsampled = {aten.mm.default: "nobody knows"}
            unexercised = {"aten.mm.default: shard m": "too wide"}
            rank_cases = 0
    """)
    done.stdout.fnmatch_lines(["*ops without a sample that they take: aten.mm.default. Give each samples*"])
    done.stdout.fnmatch_lines(["*rows that no sample reaches: aten.relu.default: never. Give each a sample*"])
    done.stdout.fnmatch_lines(["*a reason is stated for aten.mm.default, which are not among the ops*"])
    done.stdout.fnmatch_lines(["*a reason is stated for aten.mm.default: shard m, which are not among the rows*"])


def test_a_plugin_that_does_not_load_fails_its_tests_and_not_the_collection(outcome):
    done = outcome("""
        class TestMissing(PluginTests):
            plugin = "acme-of-nobody"
        class TestNone(PluginTests):
            pass
        def test_other():
            pass
    """)
    assert done.parseoutcomes()["passed"] == 1
    assert "errors" not in done.parseoutcomes()
    done.stdout.fnmatch_lines(["*'acme-of-nobody': it is not installed*", "*it names no plugin*"])


def test_the_class_says_what_it_wants():
    class Nameless(PluginTests):
        pass

    with pytest.raises(PluginLoadError, match=r"Nameless: it names no plugin. Set plugin ="):
        Nameless.subject()


THIRD_PARTY = {
    "acme_ops.py": """
        import torch
        from torch import Tensor
        from torch.library import custom_op

        @custom_op("acme_third::gate", mutates_args=())
        def gate(x: Tensor, by: Tensor) -> Tensor:
            return x * torch.sigmoid(by)

        @custom_op("acme_third::gate_backward", mutates_args=())
        def gate_backward(grad: Tensor, x: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
            s = torch.sigmoid(by)
            return grad * s, grad * x * s * (1 - s)

        gate.register_fake(lambda x, by: torch.empty_like(x))
        gate_backward.register_fake(lambda grad, x, by: (torch.empty_like(x), torch.empty_like(by)))
        gate.register_autograd(
            lambda ctx, grad: gate_backward(grad, *ctx.saved_tensors),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        )
    """,
    "acme_plugin.py": """
        from shardwise.hookspecs import hookimpl

        @hookimpl
        def shardwise_register(registry):
            import acme_ops
            from shardwise.rule import rule
            registry.add(
                rule(acme_ops.gate, "..., ... -> ..."), rule(acme_ops.gate_backward, "..., ..., ... -> ..., ...")
            )
    """,
    "test_acme.py": """
        import acme_ops
        import acme_plugin
        import torch
        from hypothesis import given, settings
        from shardwise.rule import shard
        from shardwise.testing import PluginTests, check_rule, isolated_registry, mesh
        from shardwise.testing.strategies import samples
        import shardwise as sw

        pytest_plugins = ["shardwise.testing.pytest_plugin"]

        class TestAcme(PluginTests):
            plugin = acme_plugin
            imports = ("acme_ops",)
            rank_cases = 4

        @settings(max_examples=5, deadline=None)
        @given(samples(acme_ops.gate))
        def test_gate_is_linear(sample):
            (x, by), _ = sample
            torch.testing.assert_close(acme_ops.gate(2 * x, by), 2 * acme_ops.gate(x, by))

        def test_it_adds_rules(registry):
            registry.add(*TestAcme.subject().rules)
            assert acme_ops.gate._opoverload in registry

        def program():
            with isolated_registry(*TestAcme.subject().rules, installed=True):
                x = sw.distribute_tensor(torch.ones(5, 7), mesh((4,)), [shard(0)])
                return acme_ops.gate(x, x).placements

        def test_a_program(pool):
            assert pool.run(program) == [(shard(0),)] * 4
    """,
}


@pytest.mark.slow
def test_a_third_party_s_test_file_passes_in_a_process_of_its_own(pytester):
    for name, source in THIRD_PARTY.items():
        pytester.path.joinpath(name).write_text(textwrap.dedent(source))
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=280)
    done.assert_outcomes(passed=11)
