"""What pyproject.toml, the folders, the README and the pinned versions say of one another."""

import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PLUGINS = sorted(path.parent.name for path in (ROOT / "plugins").glob("shardwise_*/__init__.py"))
GROUP = "shardwise.plugins.v1"


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.lower().replace("_", "-").split("==") for line in lines if line and not line.startswith("#"))


def test_every_plugin_folder_ships_and_has_its_entry_point():
    assert PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == [
        "core/shardwise",
        *(f"plugins/{name}" for name in PLUGINS),
    ]
    assert PYPROJECT["project"]["entry-points"][GROUP] == {name.replace("_", "-"): f"{name}.plugin" for name in PLUGINS}


def test_the_installed_entry_points_are_those_of_the_checkout():
    installed = {entry.name: entry.value for entry in entry_points(group=GROUP) if entry.dist.name == "shardwise"}
    assert installed == PYPROJECT["project"]["entry-points"][GROUP], "re-install: entry points changed"


def requirements():
    project = PYPROJECT["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    return [Requirement(line) for line in project["dependencies"] + extras]


@pytest.mark.parametrize("requirement", requirements(), ids=lambda requirement: requirement.name)
def test_every_dependency_is_pinned_within_its_range(requirement):
    assert requirement.specifier.contains(pins()[requirement.name])


def test_torch_is_pinned_to_the_tested_version():
    assert pins()["torch"] == "2.13.0"


def test_the_readme_has_the_two_commands_that_ci_runs():
    commands = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("pip install")]
    assert commands == [
        "pip install -c constraints.txt . && shardwise demo",
        "pip install -c constraints.txt -e '.[test]' && pytest",
    ]
