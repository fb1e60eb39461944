"""The names of the testing kit, which are imported at their first use."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from shardwise import testing

ASKED = """
import sys
import shardwise.testing.pytest_plugin, shardwise.testing.report
print([name for name in ("torch", "numpy") if name in sys.modules])
"""


def test_a_process_that_only_shares_tests_out_imports_no_torch():
    asked = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True)
    assert asked.stdout.strip() == "[]"


@pytest.mark.parametrize("name", testing.__all__)
def test_each_name_is_that_of_its_module(name, monkeypatch):
    monkeypatch.delitem(vars(testing), name, raising=False)
    assert getattr(testing, name) is getattr(import_module(f"shardwise.testing.{testing._WHERE[name]}"), name)
    assert name in dir(testing)


def test_no_module_has_the_name_of_something_else():
    """Its import would put it there."""
    modules = {path.stem for path in Path(testing.__path__[0]).iterdir()}
    assert not modules & set(testing.__all__)


def test_a_name_that_is_not_there_is_an_error():
    with pytest.raises(AttributeError, match=r"module 'shardwise.testing' has no attribute 'chek_rule'"):
        _ = testing.chek_rule
