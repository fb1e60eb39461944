"""What the distributions of a release say of themselves; tests/installed/test_distributions.py installs them."""

import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from distributions import build, projects, toml

from shardwise.kernel.first_party import CORE, FAMILIES, PROJECT

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PYPROJECT["project"]["version"]


def test_there_is_one_for_core_one_for_each_family_and_one_that_requires_them_all():
    assert set(projects()) == {CORE, *FAMILIES, PROJECT}


def test_all_have_the_version_of_the_checkout_and_require_exactly_it():
    for name, content in projects().items():
        project = content["project"]
        assert project["version"] == VERSION
        required = {
            CORE: PYPROJECT["project"]["dependencies"],
            PROJECT: [f"{one}=={VERSION}" for one in (CORE, *FAMILIES)],
        }
        assert project["dependencies"] == required.get(name, [f"{CORE}=={VERSION}"])


def test_a_family_has_its_own_entry_point_and_the_commands_are_those_of_core():
    group = "shardwise.plugins.v1"
    entries = PYPROJECT["project"]["entry-points"][group]
    for name, content in projects().items():
        project = content["project"]
        assert project.get("entry-points", {}) == ({group: {name: entries[name]}} if name in FAMILIES else {})
        assert project.get("scripts", {}) == (PYPROJECT["project"]["scripts"] if name == CORE else {})


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    paths = build(tmp_path_factory.mktemp("wheels"))
    return {path.name.partition("-")[0].replace("_", "-"): zipfile.ZipFile(path) for path in paths}


def test_every_file_of_the_packages_is_in_exactly_one_wheel(wheels):
    files = [name for wheel in wheels.values() for name in wheel.namelist() if ".dist-info/" not in name]
    roots = (ROOT / "core", ROOT / "plugins")
    sources = [path.relative_to(root).as_posix() for root in roots for path in root.rglob("*") if path.is_file()]
    assert sorted(files) == sorted(name for name in sources if "__pycache__" not in name)


def test_every_wheel_has_types_a_licence_and_a_page(wheels):
    for name, wheel in wheels.items():
        names = wheel.namelist()
        assert any(one.endswith("licenses/LICENSE") for one in names)
        assert name == PROJECT or any(one.endswith("/py.typed") for one in names)
        (path,) = (one for one in names if one.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(wheel.read(path).decode())
        assert metadata["Name"] == name
        assert metadata["Summary"]
        assert metadata.get_payload().startswith(f"# {name}\n")


def test_toml_reads_what_is_written():
    value = {"a b": ['x\n"y"', 1, True], "c": {"d.e": "é"}}
    assert tomllib.loads(f"value = {toml(value)}")["value"] == value
