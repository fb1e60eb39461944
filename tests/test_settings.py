"""Settings: words that people write, patterns of ``prefer``, and what cannot be read."""

import math

import pytest

from shardwise.errors import SettingsError
from shardwise.settings import Settings, preferred, read_settings


@pytest.mark.parametrize("word", ["0", "false", "No", " off ", "FALSE"])
def test_words_for_off(word, tmp_path):
    assert not read_settings({"SHARDWISE_AUTOLOAD": word}, tmp_path).autoload


@pytest.mark.parametrize("word", ["1", "true", "Yes", " on "])
def test_words_for_on(word, tmp_path):
    assert read_settings({"SHARDWISE_STRICT": word}, tmp_path).strict


def test_unset_and_empty_are_not_the_same(tmp_path):
    assert read_settings({}, tmp_path).plugins is None
    assert read_settings({"SHARDWISE_PLUGINS": " "}, tmp_path).plugins == frozenset()


@pytest.mark.parametrize(("word", "nbytes"), [("0", 0), ("100", 100), ("4 KiB", 4096), ("1GiB", 1 << 30)])
def test_numbers_of_bytes(word, nbytes, tmp_path):
    assert read_settings({"SHARDWISE_KEEP_MOVED": word}, tmp_path).keep_moved == nbytes


def test_numbers_of_what_is_checked(tmp_path):
    found = read_settings({"SHARDWISE_WAIT_LIMIT": "2.5", "SHARDWISE_VERIFY": "0.001"}, tmp_path)
    assert (found.wait_limit, found.verify) == (2.5, 0.001)
    assert read_settings({"SHARDWISE_WAIT_LIMIT": "Off"}, tmp_path).wait_limit == math.inf
    (tmp_path / "pyproject.toml").write_text("[tool.shardwise]\ncheck-replicas = 100\nwait-limit = false\nverify = 1")
    found = read_settings({}, tmp_path)
    assert (found.check_replicas, found.wait_limit, found.verify) == (100, math.inf, 1.0)


def test_defaults(tmp_path):
    assert read_settings({}, tmp_path) == Settings()


@pytest.mark.parametrize(
    ("variable", "value", "found"),
    [
        ("SHARDWISE_AUTOLOAD", "maybe", "'maybe' is neither on nor off"),
        ("SHARDWISE_STRICT", "", "'' is neither on nor off"),
        ("SHARDWISE_PREFER", "aten.mm", "'aten.mm' is not a pair"),
        ("SHARDWISE_PREFER", "=acme", "'=acme' is not a pair"),
        ("SHARDWISE_KEEP_MOVED", "much", "'much' is not a number of bytes"),
        ("SHARDWISE_WAIT_LIMIT", "0", "'0' is not a number of seconds"),
        ("SHARDWISE_WAIT_LIMIT", "soon", "'soon' is not a number of seconds"),
        ("SHARDWISE_CHECK_REPLICAS", "1.5", "'1.5' is not a number of steps"),
        ("SHARDWISE_CHECK_REPLICAS", "-1", "'-1' is not a number of steps"),
        ("SHARDWISE_VERIFY", "2", "'2' is not a share of calls"),
        ("SHARDWISE_VERIFY", "nan", "'nan' is not a share of calls"),
    ],
)
def test_an_environment_variable_that_cannot_be_read(variable, value, found, tmp_path):
    with pytest.raises(SettingsError, match=f"read {variable}: {found}"):
        read_settings({variable: value}, tmp_path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[tool.shardwise]\nplugin = []", "there is no setting 'plugin'"),
        ("[tool.shardwise]\nplugins = 'a'\nstrict = 2", "2 is neither on nor off"),
        ("[tool.shardwise]\nplugins = [1]", "is not a list of names"),
        ("[tool.shardwise]\nprefer = ['aten.mm']", "does not map ops to plugins"),
        ("[tool.shardwise]\nrandom = 'fast'", "'fast' is not a mode of drawing random numbers"),
        ("[tool.shardwise\n", "line 1"),
        ("[tool]\nshardwise = 3", "is not a table"),
    ],
)
def test_a_pyproject_that_cannot_be_read(text, found, tmp_path):
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(SettingsError) as caught:
        read_settings({}, tmp_path)
    assert found in str(caught.value)
    assert str(tmp_path / "pyproject.toml") in str(caught.value)


def test_a_broken_pyproject_that_does_not_speak_of_shardwise_is_nobodys_error(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.other\n")
    assert read_settings({}, tmp_path) == Settings()


def test_everything_in_pyproject(tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        "[tool.shardwise]\nplugins = ['A_b']\ndisable_plugins = ['c']\nautoload = false\nstrict = true\n"
        "random = 'Local'\n"
        "[tool.shardwise.prefer]\n'aten::mm' = 'A.B'\n"
    )
    read = read_settings({}, tmp_path)
    assert (read.plugins, read.disabled, read.autoload, read.strict) == ({"a-b"}, {"c"}, False, True)
    assert read.prefer == (("aten.mm", "a-b"),)
    assert read.random == "local"
    assert read_settings({"SHARDWISE_RANDOM": "counter"}, tmp_path).random == "counter"


def test_the_closest_preference_holds():
    pairs = [("*", "a"), ("aten.m*", "b"), ("aten.mm", "c"), ("aten.mm.out", "d")]
    chosen = [preferred(pairs, op) for op in ("aten.add.Tensor", "aten.mul.Tensor", "aten.mm.default", "aten.mm.out")]
    assert [plugin for _, plugin in chosen] == ["a", "b", "c", "d"]
    assert preferred(pairs[1:], "aten.add.Tensor") is None
