"""Settings: words that people write, patterns of ``prefer``, and what cannot be read."""

import math
import re
import warnings
from pathlib import Path

import pytest

from shardwise import settings
from shardwise.errors import SettingsError
from shardwise.settings import PREFIX, VARIABLES, Settings, preferred, read_settings

ROOT = Path(__file__).parents[1]


_LONG = f"0x{'f' * 5000}"
_TOO_LONG = "it has a number of hundreds of digits"


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
        pytest.param("SHARDWISE_KEEP_MOVED", "9" * 5000, _TOO_LONG, id="5000 digits"),
        ("SHARDWISE_VERIFY", "nan", "'nan' is not a share of calls"),
        ("SHARDWISE_PREFER", "aten.mm=a,aten.mm=b", "it names two plugins for 'aten.mm'"),
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
        *(
            pytest.param(f"[tool.shardwise]\n{key} = {value}", _TOO_LONG, id=f"long {key}")
            for key, value in {
                **dict.fromkeys(("verify", "wait-limit", "check-replicas", "keep-moved"), _LONG),
                "prefer": f"{{a = {_LONG}}}",
                "communication": f"[{_LONG}]",
            }.items()
        ),
        pytest.param(f"[tool.shardwise]\nprefer = {'[' * 5000}", "it is nested too deeply", id="nested"),
        ("[tool.shardwise\n", "line 1"),
        ("[tool.'shardwise']\nplugins =", "Invalid value"),
        ("[tool.shardwise]\nstrict = [1]", "[1] is neither on nor off"),
        ("[tool.shardwise]\nlearn = {a = 1}", "is none of on, off and auto"),
        ("[tool.shardwise]\ncheck-ranks = true\ncheck_ranks = false", "'check-ranks' is set twice, by - and by _"),
        ("[tool.shardwise]\nprefer = {'' = 'acme'}", "does not map ops to plugins"),
        ("[tool]\nshardwise = 3", "is not a table"),
        ("[shardwise]\nstrict = true", "its table is [shardwise], which nobody reads. Write [tool.shardwise]"),
    ],
)
def test_a_pyproject_that_cannot_be_read(text, found, tmp_path):
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(SettingsError) as caught:
        read_settings({}, tmp_path)
    assert found in str(caught.value)
    assert str(tmp_path / "pyproject.toml") in str(caught.value)


def test_a_broken_pyproject_that_does_not_speak_of_shardwise_is_nobodys_error(tmp_path):
    for text in ("[tool.other\n", "tool = 3  # not of shardwise\n"):
        (tmp_path / "pyproject.toml").write_text(text)
        assert read_settings({}, tmp_path) == Settings()


@pytest.mark.parametrize("where", [".", "below/further"])
def test_an_unreadable_pyproject_is_named_in_a_warning(where, tmp_path):
    # Whoever runs the tests may be allowed to read everything, so permissions would not do.
    (tmp_path / "pyproject.toml").symlink_to("/proc/self/mem")
    (tmp_path / where).mkdir(parents=True, exist_ok=True)
    with pytest.warns(RuntimeWarning) as caught:
        assert read_settings({"SHARDWISE_STRICT": "1"}, tmp_path / where).strict
    (warning,) = caught
    assert warning.filename == __file__
    assert str(warning.message).startswith(f"{tmp_path / 'pyproject.toml'} cannot be read: [Errno 5]")
    # Once for a process, which reads its settings some ten times.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_settings({}, tmp_path / where) == Settings()


def test_below_an_unreadable_pyproject_a_nearer_one_holds_and_above_it_a_farther_one(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "pyproject.toml").symlink_to("/proc/self/mem")
    (tmp_path / "pyproject.toml").write_text("[tool.shardwise]\nstrict = true\n")
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        assert read_settings({}, tmp_path / "a" / "b").strict
    (tmp_path / "a" / "b" / "pyproject.toml").write_text("[tool.shardwise]\nlearn = true\n")
    read = read_settings({}, tmp_path / "a" / "b")
    assert (read.learn, read.strict) == (True, False)


def test_a_folder_that_one_may_not_enter(tmp_path, monkeypatch):
    def forbidden(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr("pathlib.Path.read_bytes", forbidden)
    with pytest.warns(RuntimeWarning, match="Permission denied"):
        assert read_settings({}, tmp_path) == Settings()


@pytest.mark.parametrize(
    "text", ["tool.shardwise.strict = true\n[tool", "dependencies = ['shardwise'\n", "\xffshardwise"]
)
def test_a_broken_pyproject_that_speaks_of_shardwise_is_named_in_a_warning(text, tmp_path):
    (tmp_path / "pyproject.toml").write_bytes(text.encode("latin-1"))
    (tmp_path / "below").mkdir()
    with pytest.warns(RuntimeWarning, match=re.escape(str(tmp_path / "pyproject.toml"))):
        assert read_settings({}, tmp_path / "below") == Settings()


def test_a_current_folder_that_is_gone(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.warns(RuntimeWarning, match="the current folder"):
        assert read_settings({"SHARDWISE_LEARN": "1"}).learn
    monkeypatch.chdir(tmp_path)


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


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("SHARDWISE_CHEK", "SHARDWISE_CHECK_RANKS"),
        ("SHARDWISE_COMMUNICATON", "SHARDWISE_COMMUNICATION"),
        ("SHARDWISE_WAIT", "SHARDWISE_WAIT_LIMIT"),
        ("SHARDWISE_PLUGIN", "SHARDWISE_PLUGINS"),
        ("SHARDWISE_KEEP_MOVE", "SHARDWISE_KEEP_MOVED"),
        ("SHARDWISE_CHECK_RANK", "SHARDWISE_CHECK_RANKS"),
        ("SHARDWISE_LINK", "SHARDWISE_LINKS"),
    ],
)
def test_a_variable_that_does_not_exist_names_the_nearest(variable, nearest, tmp_path):
    with pytest.raises(SettingsError, match=f"there is no variable '{variable}'. The nearest is {nearest}.") as raised:
        read_settings({variable: ""}, tmp_path)
    assert raised.value.setting == variable


def test_a_variable_like_no_other_lists_all(tmp_path):
    with pytest.raises(SettingsError, match=r"Correct or unset it\. There are SHARDWISE_PLUGINS,") as raised:
        read_settings({"SHARDWISE_Q": ""}, tmp_path)
    assert "SHARDWISE_CHECK_STRIDES" in str(raised.value)
    assert "SHARDWISE_PROGRAM_SLICES" not in str(raised.value)
    with pytest.raises(SettingsError, match="Correct or unset it"):  # and no message names it as the nearest
        read_settings({"SHARDWISE_PROGRAM_SLICE": ""}, tmp_path)
    assert read_settings({"OTHER_Q": "", **dict.fromkeys(["SHARDWISE_LINKS"], "off")}, tmp_path) == Settings()


def test_a_key_that_does_not_exist_names_the_nearest(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.shardwise]\nkeep-move = 3")
    with pytest.raises(SettingsError, match=r"The nearest is keep-moved\."):
        read_settings({}, tmp_path)


def test_a_lock_of_a_pyproject_lies_beside_it(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.shardwise]\nlock = 'rules.lock'")
    (tmp_path / "below").mkdir()
    assert read_settings({}, tmp_path / "below").lock == str(tmp_path / "rules.lock")
    assert read_settings({"SHARDWISE_LOCK": "other.lock"}, tmp_path).lock == "other.lock"
    with pytest.raises(SettingsError, match="does not name a file"):
        read_settings({"SHARDWISE_LOCK": " "}, tmp_path)


def test_every_variable_that_code_and_pages_name_is_known():
    files = [p for part in ("core", "plugins", "plugins_contrib", "tests") for p in (ROOT / part).rglob("*")]
    texts = {p: p.read_text() for p in files if p.suffix in (".py", ".tmpl") and p.is_file() and p != Path(__file__)}
    texts |= {p: p.read_text() for p in (ROOT / ".ci" / "run", ROOT / "noxfile.py", ROOT / "pyproject.toml")}
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    # The one on purpose, of which the page shows the error.
    texts |= {p: p.read_text().replace("SHARDWISE_PREFR", "") for p in pages}
    named = {(name, str(p)) for p, text in texts.items() for name in re.findall(rf"\b{PREFIX}[A-Z_]*[A-Z]\b", text)}
    assert not [(name, path) for name, path in sorted(named) if name not in VARIABLES]


def test_the_page_on_plugins_has_one_table_with_every_setting():
    page = (ROOT / "docs" / "plugins.md").read_text()
    table = page.partition("| environment | pyproject | meaning |\n")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(SHARDWISE_\w+)=[^`]*` \| `([\w-]+) = ", table, re.MULTILINE)
    assert dict(rows) == {variable: key for key, (_, _, variable) in settings._KEYS.items()}
