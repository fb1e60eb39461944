"""The page on testing: its examples run in order, its tests pass, and its class is one that pytest could collect."""

import re
from pathlib import Path

import pytest

from shardwise.testing import PluginTests, check_plugin

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.sample
def test_the_examples_run(pool, registry, capsys):
    names = {"__name__": "testing_page"}
    for number, example in enumerate(PYTHON.findall(PAGE.read_text())):
        exec(compile(example, f"{PAGE.name} example {number}", "exec"), names)  # noqa: S102  # the text under test
    tests = {name: test for name, test in names.items() if name.startswith("test_")}
    assert set(tests) == {
        "test_gradients", "test_my_rules_hold", "test_a_program", "test_linear_in_x", "test_shards_cover_the_tensor"
    }  # fmt: skip
    tests["test_gradients"](pool)
    tests["test_my_rules_hold"](registry)
    tests["test_a_program"](pool)
    tests["test_linear_in_x"]()
    tests["test_shards_cover_the_tensor"]()
    assert "gradients are those of one device" in capsys.readouterr().out
    assert issubclass(names["TestAcme"], PluginTests)
    assert check_plugin(names["TestAcme"].subject().rules, cases=10).rules == 2
