"""``shardwise new``: what it makes is complete, sound and passes its own tests."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from full_disk import full_disk
from packaging.requirements import Requirement

from shardwise.cli import main
from shardwise.cli.new import FILES, bounds


def run(*arguments):
    return CliRunner().invoke(main, [*map(str, arguments)])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a new plugin."""
    parent = tmp_path_factory.mktemp("new")
    result = run("new", "Acme.New_kernels", "--path", parent, "--author", 'Ada "A" L')
    assert result.exit_code == 0, result.output
    return parent / "acme-new-kernels"


def test_every_file_is_there_and_filled_in(made):
    there = {str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()}
    assert there == {name.format(package="acme_new_kernels") for name in FILES}
    for path in made.rglob("*"):
        if path.is_file() and path.name != "ci.yml":
            assert "$" not in path.read_text(), path
    assert "${{ matrix.python }}" in (made / ".github" / "workflows" / "ci.yml").read_text()


def test_the_metadata(made):
    project = tomllib.loads((made / "pyproject.toml").read_text())["project"]
    assert project["name"] == "acme-new-kernels"
    assert project["authors"] == [{"name": "Ada 'A' L"}]
    assert "shardwise" in project["keywords"]  # by which package indexes find it
    assert project["entry-points"]["shardwise.plugins.v1"] == {"acme-new-kernels": "acme_new_kernels.plugin"}
    (needed,) = map(Requirement, project["dependencies"])
    assert (needed.name, {s.operator for s in needed.specifier}) == ("shardwise", {">=", "<"})
    assert "Ada 'A' L" in (made / "LICENSE").read_text()


@pytest.mark.parametrize(
    ("have", "asked"),
    [
        ("0.1.0.dev0", ">=0.1.0.dev0,<0.2"),
        ("0.9.3", ">=0.9.3,<0.10"),
        ("1.4.2", ">=1.4.2,<2"),
        ("2.0.0+local.1", ">=2.0.0,<3"),
    ],
)
def test_bounds(have, asked):
    assert bounds(have) == asked
    assert Requirement(f"shardwise{asked}").specifier.contains(have, prereleases=True)


def test_the_next_steps_are_printed(tmp_path):
    output = run("new", "acme-steps", "--path", tmp_path).output
    assert output.startswith(f"made {tmp_path / 'acme-steps'}:\n  pyproject.toml\n")
    assert (
        f"  cd {tmp_path / 'acme-steps'}\n  pip install -e '.[test]'\n  pytest\n  shardwise plugins check ." in output
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "not the name of a distribution"),
        ("-acme", "No such option"),
        ("acme kernels", "not the name of a distribution"),
        ("acme-", "not the name of a distribution"),
        ("acme/kernels", "not the name of a distribution"),
        ("7kernels", "makes no package"),
        ("class", "makes no package"),
        ("match", "makes no package"),
        ("json", "there is a module json already"),
        ("torch", "there is a module torch already"),
        ("aten", "torch has the op namespace aten itself"),
        ("shardwise-matmul", "there is a module shardwise_matmul already"),
    ],
)
def test_names_that_cannot_be(tmp_path, name, words):
    result = run("new", name, "--path", tmp_path)
    assert result.exit_code == 2
    assert words in result.output
    assert list(tmp_path.iterdir()) == []


def test_what_exists_is_left_alone(tmp_path):
    (tmp_path / "acme-there").mkdir()
    result = run("new", "acme-there", "--path", tmp_path)
    assert result.exit_code == 1
    assert f"{tmp_path / 'acme-there'} exists already" in result.output
    assert list((tmp_path / "acme-there").iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    result = run("new", "acme-kernels", "--path", tmp_path / "file" / "inner")
    assert result.exit_code == 1
    assert "cannot write" in result.output


def test_nothing_is_left_of_a_plugin_on_a_full_disk(tmp_path):
    for parent in (tmp_path, tmp_path / "inner" / "folders"):
        with full_disk():
            result = run("new", "acme-kernels", "--path", parent, "--author", "Ada")
        assert result.exit_code == 1
        assert f"cannot write {parent / 'acme-kernels'}: File too large" in result.output
        assert not list(tmp_path.rglob("*acme*"))
    assert run("new", "acme-kernels", "--path", tmp_path, "--author", "Ada").exit_code == 0


@pytest.mark.skipif(shutil.which("ruff", path=Path(sys.executable).parent) is None, reason="needs ruff")
@pytest.mark.parametrize("name", ["acme-kernels", "zz", "a-rather-long-name-of-a-distribution-of-kernels"])
def test_ruff_has_nothing_to_say(tmp_path, name):
    assert run("new", name, "--path", tmp_path).exit_code == 0
    ruff = str(Path(sys.executable).parent / "ruff")
    for command in (["format", "--check", "--no-cache"], ["check", "--no-cache"]):
        done = subprocess.run([ruff, *command, str(tmp_path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.sample
def test_the_check_has_nothing_to_say(made):
    result = run("plugins", "check", made, "--strict", "--cases", "10")
    assert result.exit_code == 0, result.output
    assert "0 warnings, 0 failed" in result.output


@pytest.mark.slow
@pytest.mark.sample
def test_installed_it_passes_all_its_tests(made, environment):
    """As its README says, in an environment of its own."""
    env = environment().add_commands()

    def run_there(*command):
        done = env.call(*command, cwd=made)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run_there("pip", "install", "-q", "-e", ".[test]")
    assert "13 passed" in run_there("pytest", "-q", "-p", "no:cacheprovider")
    assert "0 warnings, 0 failed" in run_there("shardwise", "plugins", "check", "--strict", "acme-new-kernels")
    # As a wheel, away from its checkout, it is judged by the samples that it carries.
    run_there("pip", "install", "-q", "--force-reinstall", "--no-deps", ".")
    done = env.call("shardwise", "plugins", "check", "--strict", "--cases", "5", "acme-new-kernels")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[shardwise.samples] acme_new_kernels.samples" in done.stdout
    assert "because  the only rule" in run_there("shardwise", "why", "acme_new_kernels::weighted_sum")
