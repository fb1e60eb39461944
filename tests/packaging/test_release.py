"""The workflows, and what a release must have: versions and names are said once, or agree."""

import re
import tomllib
from pathlib import Path

import pytest
from ready import faults

from shardwise.private_torch.parts import TESTED_TORCH

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"
TEMPLATE = ROOT / "core" / "shardwise" / "cli" / "template" / "ci.yml.tmpl"


def listed(path, name):
    """The versions of a list in a workflow or in the noxfile."""
    (found,) = re.findall(rf"^\s*{name}\s*[:=] \[(.*)\]$", path.read_text(), re.MULTILINE)
    return re.findall(r'"([\d.]+)"', found)


def test_every_matrix_has_the_releases_of_torch_that_the_doctor_calls_tested():
    releases = listed(ROOT / "noxfile.py", "TORCH")
    assert (releases[0], releases[-1]) == TESTED_TORCH
    assert listed(WORKFLOWS / "tests.yml", "torch") == releases
    assert listed(TEMPLATE, "torch") == releases


def test_every_python_that_the_metadata_names_is_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)}
    for path in (WORKFLOWS / "tests.yml", TEMPLATE):
        matrix = path.read_text().partition("matrix:")[2].partition("steps:")[0]
        assert set(re.findall(r'"(3\.\d+)"', matrix)) == named


def test_a_workflow_runs_sessions_that_exist():
    sessions = set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE))
    lines = [
        line for path in WORKFLOWS.glob("*.yml") for line in re.findall(r"nox -s (.*)$", path.read_text(), re.MULTILINE)
    ]
    called = {name for line in lines for name in re.findall(r"\w+", re.sub(r"\(.*\)", "", line))}
    assert {"lint", "types", "torch", "distributions"} <= called <= sessions


def test_the_publishing_job_alone_may_ask_for_an_identity_and_has_no_password():
    text = (WORKFLOWS / "release.yml").read_text()
    assert text.count("id-token: write") == 1
    assert text.index("publish:") < text.index("id-token: write")
    assert "secrets." not in text
    assert "password" not in re.sub(r"#.*", "", text)


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "changelog.d").mkdir()
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# shardwise 1.2.0 (2030-01-01)\n")
    return tmp_path


def test_a_tag_that_may_be_released(checkout):
    assert list(faults("v1.2.0", checkout)) == []


@pytest.mark.parametrize("tag", ["1.2.0", "v1.2.1", "v1.2.0rc1"])
def test_a_tag_that_is_not_the_version(checkout, tag):
    assert list(faults(tag, checkout)) == [f"the tag is {tag}, and pyproject.toml has the version 1.2.0"]


def test_a_change_log_that_is_not_written(checkout):
    (checkout / "changelog.d" / "7.added.md").write_text("Something.")
    (checkout / "CHANGELOG.md").write_text("# shardwise 1.1.0 (2029-01-01)\n")
    assert [fault.partition(":")[0] for fault in faults("v1.2.0", checkout)] == [
        "CHANGELOG.md has no part for 1.2.0",
        "changelog.d has fragments that are not in CHANGELOG.md yet, 7.added.md for one",
    ]


def test_this_checkout_is_not_ready_while_fragments_wait():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    waiting = any((ROOT / "changelog.d").glob("*.md"))
    assert bool(list(faults(f"v{version}"))) >= waiting


@pytest.mark.parametrize("name", ["CITATION.cff", "SECURITY.md", "CODE_OF_CONDUCT.md"])
def test_what_people_look_for_in_a_repository_is_there_and_the_readme_says_so(name):
    assert (ROOT / name).read_text().strip()
    assert f"]({name})" in (ROOT / "README.md").read_text()
    assert "version:" not in (ROOT / "CITATION.cff").read_text().replace("cff-version:", "")
