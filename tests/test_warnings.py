"""A warning names the line to look at: of the program that called shardwise, or of a plugin."""

import contextlib
import warnings
from pathlib import Path

import pytest

from shardwise.errors import warn_user

CORE = Path(warn_user.__code__.co_filename).parent


def compiled(name, text, **names):
    """The functions of a module whose file has that name."""
    scope = {"__name__": Path(name).stem, "warn_user": warn_user, **names}
    exec(compile(text, name, "exec"), scope)  # noqa: S102  # of this file
    return scope


def caught(function):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        function()
    return [(one.filename, one.lineno) for one in told]


INNER = compiled(
    str(CORE / "comm" / "any.py"), "def call(then):\n    then()\ndef warn():\n    warn_user('so', UserWarning)"
)


def test_it_is_the_line_of_the_program_through_all_that_lies_between():
    handler = compiled("<shardwise handler of aten.mm>", "def call(then):\n    then()")["call"]
    plugin = compiled("/site/acme/lowering.py", "def lower(then):\n    then()")["lower"]

    program = compiled(
        "/home/ada/train.py",
        PROGRAM,
        warn=INNER["warn"],
        call=handler,
        plugin=plugin,
        entered=contextlib.contextmanager(compiled(str(CORE / "any.py"), ENTERED, warn=INNER["warn"])["entered"]),
    )
    assert caught(program["direct"]) == [("/home/ada/train.py", 2)]
    assert caught(program["through"]) == [("/home/ada/train.py", 5)], "a lowering is not the program"
    assert caught(program["block"]) == [("/home/ada/train.py", 7)]


PROGRAM = """def direct():
    warn()
def through():

    call(lambda: plugin(warn))
def block():
    with entered():
        pass
"""
ENTERED = "def entered():\n    warn()\n    yield"


def test_commands_and_the_demo_are_programs():
    command = compiled(str(CORE / "cli" / "any.py"), "def run():\n    warn()", warn=INNER["warn"])["run"]
    assert caught(command) == [(str(CORE / "cli" / "any.py"), 2)]


def test_it_is_the_line_of_a_plugin_that_raised_what_is_warned_of():
    plugin = compiled("/site/acme/plugin.py", "def register():\n    raise ValueError('no')")["register"]
    inner = compiled(str(CORE / "any.py"), "def load(f):\n    f()")["load"]
    with pytest.raises(ValueError, match="no") as raised:
        inner(plugin)
    error = raised.value
    # The first entry of the trace is this test's.
    error.__traceback__ = error.__traceback__.tb_next
    assert caught(lambda: warn_user("so", UserWarning, at=error)) == [("/site/acme/plugin.py", 2)]


def test_one_line_warns_once_where_the_filter_says_so():
    def twice():
        warnings.simplefilter("default")
        for _ in range(2):
            INNER["warn"]()

    assert len(caught(twice)) == 1


def test_nothing_in_shardwise_warns_in_another_way():
    allowed = {CORE / "errors.py", CORE / "engine" / "replication.py", CORE / "engine" / "judging.py"}
    others = [path for path in CORE.rglob("*.py") if "warnings.warn" in path.read_text() and path not in allowed]
    assert not others
