"""Locks of rules: the same bytes everywhere, and anything else than what they have is refused."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from click.testing import CliRunner
from mutations import drawing, mutated, watched

from shardwise import checkpoint
from shardwise.cli import main
from shardwise.discovery import frozen_rules, loading, process
from shardwise.discovery.entry_points import discover
from shardwise.discovery.frozen_rules import digest_of_code, freeze, read_lock
from shardwise.errors import LockError, RulesWarning

RULE = """
    import torch
    from shardwise.hookspecs import hookimpl
    from shardwise.rule import rule

    @hookimpl
    def shardwise_register(registry):
        registry.add(rule(torch.ops.aten._copy_from_and_resize.default, "{notation}"))
"""


@pytest.fixture
def acme(tmp_path, monkeypatch, fresh):
    """``acme(notation, version)`` installs a plugin that is a package with a module beside its plugin."""
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(str(site))

    def put(notation="R, R -> R", version="1.0", more=""):
        package, about = site / "acme_frozen", site / "acme_frozen.dist-info"
        for folder in (package, about):
            folder.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text("")
        (package / "plugin.py").write_text(textwrap.dedent(RULE.format(notation=notation)))
        (package / "more.py").write_text(more)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme-frozen\nVersion: {version}\n")
        (about / "entry_points.txt").write_text("[shardwise.plugins.v1]\nacme-frozen = acme_frozen.plugin\n")
        for name in [name for name in sys.modules if name.startswith("acme_frozen")]:
            del sys.modules[name]
        fresh()
        return package

    yield put
    for name in [name for name in sys.modules if name.startswith("acme_frozen")]:
        del sys.modules[name]


@pytest.fixture
def lock(tmp_path, acme, monkeypatch):
    """The lock of all plugins, acme-frozen 1.0 among them, in force."""
    acme()
    path = tmp_path / "rules.lock"
    assert CliRunner().invoke(main, ["plugins", "freeze", "--out", str(path)]).exit_code == 0
    monkeypatch.setenv("SHARDWISE_LOCK", str(path))
    acme()
    return path


def refusal():
    with pytest.raises(LockError) as raised:
        process.default_registry()
    return raised.value


def test_what_is_locked_is_loaded(lock):
    process.default_registry()
    read = read_lock(str(lock))
    assert read == freeze(process.statuses())
    assert read.text() == lock.read_text()
    assert [(p.name, p.version, p.ops) for p in read.plugins if p.name == "acme-frozen"] == [("acme-frozen", "1.0", 1)]
    assert [p.origin for p in read.plugins] == sorted(p.origin for p in read.plugins)


def test_another_version_is_refused_before_it_is_imported(lock, acme):
    acme(version="1.1")
    error = refusal()
    assert (error.plugin, error.locked, error.differs) == ("acme-frozen", "version 1.0", "version 1.1")
    assert "acme-frozen: locked is version 1.0, found is version 1.1" in str(error)
    assert str(lock) in str(error)
    assert "acme_frozen" not in sys.modules


@pytest.mark.parametrize("change", [{"notation": "S(0), R -> R"}, {"more": "x = 1"}], ids=["rule", "module beside it"])
def test_other_code_of_the_same_version_is_refused_before_it_is_imported(lock, acme, change):
    acme(**change)
    error = refusal()
    assert error.plugin == "acme-frozen"
    assert error.locked.startswith("code sha256:")
    assert error.differs.endswith("of the same version")
    assert "acme_frozen" not in sys.modules


def test_other_rules_of_the_same_code_are_refused(lock):
    read = read_lock(str(lock))
    (one,) = [plugin for plugin in read.plugins if plugin.name == "acme-frozen"]
    lock.write_text(lock.read_text().replace(one.rules, "sha256:" + "0" * 64))
    error = refusal()
    assert (error.plugin, error.differs.partition(" ")[0]) == ("acme-frozen", "rules")
    assert process._process.registry is None


def test_a_lock_that_changes_while_plugins_are_imported_is_the_one_that_was_read_before(lock, monkeypatch):
    """What a plugin is judged by after its import is not for its import to write."""

    def load_and_remove(*args, **kwargs):
        lock.unlink()
        return load(*args, **kwargs)

    load = loading.load
    monkeypatch.setattr(loading, "load", load_and_remove)
    process.default_registry()
    assert not lock.exists()


def test_a_plugin_that_is_not_there_and_one_too_many(lock, monkeypatch, fresh):
    monkeypatch.setenv("SHARDWISE_DISABLE_PLUGINS", "acme-frozen")
    error = refusal()
    assert (error.plugin, error.locked) == ("acme-frozen", "acme-frozen 1.0")
    assert "no such plugin" in error.differs
    monkeypatch.delenv("SHARDWISE_DISABLE_PLUGINS")
    head, *tables = lock.read_text().split("[[plugin]]")
    lock.write_text("[[plugin]]".join([head, *(t for t in tables if "acme-frozen" not in t)]))
    fresh()
    error = refusal()
    assert (error.plugin, error.locked, error.differs) == ("acme-frozen", "nothing of that name", "acme-frozen 1.0")


def test_another_shardwise_is_refused(lock):
    lock.write_text(lock.read_text().replace('shardwise = "', 'shardwise = "9', 1))
    assert refusal().plugin == "shardwise"


def test_the_command_lists_what_is_refused_and_does_not_import_it(lock, acme):
    acme(version="1.1", more="x = 1")
    result = CliRunner().invoke(main, ["plugins", "--json"])
    rows = {row["plugin"]: row for row in json.loads(result.stdout)}
    assert (result.exit_code, rows["acme-frozen"]["status"]) == (1, "refused")
    assert "version 1.0, and found is version 1.1" in rows["acme-frozen"]["reason"]
    assert rows["shardwise-matmul"]["status"] == "loaded"
    assert "acme_frozen" not in sys.modules
    # Only `freeze` loads it, to write a new lock.
    assert 'version = "1.1"' in CliRunner().invoke(main, ["plugins", "freeze"]).stdout


def test_a_broken_plugin_is_not_frozen(acme):
    (acme() / "plugin.py").write_text("raise OSError('no libacme.so')")
    result = CliRunner().invoke(main, ["plugins", "freeze"])
    assert result.exit_code == 1
    assert "acme-frozen 1.0 failed: OSError: no libacme.so" in result.stderr


def test_a_lock_that_cannot_be_written_or_read(fresh, tmp_path, monkeypatch):
    result = CliRunner().invoke(main, ["plugins", "freeze", "--out", str(tmp_path / "nowhere" / "rules.lock")])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "rules.lock cannot be written: No such file or directory" in result.stderr
    monkeypatch.setenv("SHARDWISE_LOCK", str(tmp_path / "nowhere"))
    fresh()
    error = refusal()
    assert error.path == str(tmp_path / "nowhere")
    assert "it is not a lock of rules that can be read: No such file or directory" in str(error)
    result = CliRunner().invoke(main, ["plugins", "--json"])
    assert result.exit_code == 1
    assert {row["status"] for row in json.loads(result.stdout)} == {"refused"}


def test_line_ends_and_byte_code_are_no_part_of_a_digest(acme):
    package = acme(more="x = 1\ny = 2\n")
    (plugin,) = [plugin for plugin in discover() if plugin.origin.plugin == "acme-frozen"]
    before = digest_of_code(plugin)
    (package / "more.py").write_bytes(b"x = 1\r\ny = 2\r\n")
    (package / "__pycache__").mkdir(exist_ok=True)
    (package / "__pycache__" / "more.cpython-311.pyc").write_bytes(b"\0")
    assert digest_of_code(plugin) == before
    (package / "more.py").rename(package / "other.py")
    assert digest_of_code(plugin) != before


def test_a_namespace_has_parts_of_others(tmp_path, monkeypatch):
    for name in ("ours", "theirs"):
        (tmp_path / "acme_space" / name).mkdir(parents=True)
        (tmp_path / "acme_space" / name / "__init__.py").write_text(f"name = {name!r}")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert frozen_rules._package_of("acme_space.ours.plugin") == tmp_path / "acme_space" / "ours"


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.usefixtures("fresh")
def test_another_process_writes_the_same_bytes():
    script = f"import sys; sys.path[:] = {sys.path!r}; from shardwise.cli import main; main(['plugins', 'freeze'])"
    environ = {"PYTHONHASHSEED": "1", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, check=True, text=True)
    assert done.stdout == freeze(process.statuses()).text()
    assert 'name = "shardwise-matmul"' in done.stdout


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [("code = ", "# code = ", "has no code"), ("ops = ", "opps = 1\nops = ", "is called 'opps'")],
)
def test_an_entry_that_lacks_a_line_or_has_one_too_many_is_told_in_words_of_the_file(lock, old, new, words):
    lock.write_text(lock.read_text().replace(old, new, 1))
    with pytest.raises(LockError, match=words):
        read_lock(str(lock))


@pytest.mark.parametrize("number", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_locks_are_attacked(lock, number):
    good, text = read_lock(str(lock)), lock.read_bytes()
    for seed in range(number):
        what, data = mutated(drawing(seed), text, [text.replace(b"1.0", b"1.1")])
        lock.write_bytes(data)
        try:
            with watched(lock.parent):
                read = read_lock(str(lock))
        except LockError as error:
            assert str(lock) in str(error)  # noqa: PT017
        else:
            assert isinstance(read, type(good)), (seed, what)


# -- checkpoints ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_other_rules_is_a_warning_that_names_them(acme, tmp_path):
    acme()
    process.default_registry()
    saved = checkpoint.save({"x": torch.ones(2)}, tmp_path / "run", step=1)
    recorded = json.loads((saved.path / "checkpoint.json").read_text())["rules"]
    assert recorded["acme-frozen"].startswith("acme-frozen 1.0 ")
    checkpoint.load({"x": torch.zeros(2)}, tmp_path / "run")
    acme(version="1.1", more="x = 1")
    process.default_registry()
    with pytest.warns(
        RulesWarning, match=r"other rules: acme-frozen: acme-frozen 1\.0 \w+ then, acme-frozen 1\.1"
    ) as told:
        checkpoint.load(state := {"x": torch.zeros(2)}, tmp_path / "run")
    assert told[0].filename == __file__
    assert torch.equal(state["x"], torch.ones(2))


@pytest.mark.usefixtures("fresh")
def test_a_program_without_rules_records_none_and_is_not_warned(tmp_path):
    saved = checkpoint.save({"x": torch.ones(2)}, tmp_path, step=1)
    assert "rules" not in json.loads((saved.path / "checkpoint.json").read_text())
    checkpoint.load({"x": torch.zeros(2)}, tmp_path)
    assert not process.is_filled()
