"""The change log of the site is made of what towncrier has joined and of what has changed since."""

import re

from changelog_page import changelog_page

SETTINGS = """
[tool.towncrier]
directory = "news"
type = [{ directory = "added", name = "Added" }, { directory = "fixed", name = "Fixed" }]
"""


def made(folder, **files):
    (folder / "pyproject.toml").write_text(SETTINGS)
    (folder / "news").mkdir()
    for name, text in files.items():
        (folder / name.replace("__", "/")).write_text(text)
    return changelog_page(folder)


def test_fragments_are_listed_by_kind_with_the_newest_issue_first(tmp_path):
    page = made(
        tmp_path,
        **{
            "news__9.added.md": "Nine.\n",
            "news__10.added.2.md": "Ten,\nsee [a page](docs/plan.md).\n",
            "news__+note.added.md": "No issue.\n",
            "news__10.fixed.md": "Mended.\n",
        },
    )
    lists = [re.findall(r"^- (.*)$", part, re.MULTILINE) for part in page.split("### ")]
    assert re.findall(r"^##.*", page, re.MULTILINE) == ["## Not released yet", "### Added", "### Fixed"]
    assert lists == [[], ["No issue.", "Ten, see [a page](plan.md).", "Nine."], ["Mended."]]


def test_releases_follow_without_a_second_title(tmp_path):
    page = made(tmp_path, **{"CHANGELOG.md": "# Changelog\n\n## shardwise 0.1\n\n- First.\n"})
    assert re.findall(r"^#.*", page, re.MULTILINE) == ["# Change log", "## shardwise 0.1"]


def test_every_fragment_of_this_repository_is_on_the_page(docs):
    sections = dict(part.split("\n", 1) for part in changelog_page().split("\n## ")[1:])
    fragments = sorted((docs.ROOT / "changelog.d").glob("*.md"))
    assert sections.get("Not released yet", "").count("\n- ") == len(fragments)
