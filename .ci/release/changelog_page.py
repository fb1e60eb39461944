"""The change log as a page of the site: ``mkdocs.yml`` names this file as a hook, and no copy of it is kept.

What towncrier has joined at releases is ``CHANGELOG.md``; what has changed since then are the fragments.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["changelog_page", "on_files"]

ROOT = Path(__file__).resolve().parents[2]
_HEAD = "# Change log\n\nWhat a user can notice. [What may change, and how you are told](status.md).\n"


def changelog_page(root: Path = ROOT) -> str:
    """The page in Markdown: what is not released yet, then the releases."""
    return "\n".join([_HEAD, *_unreleased(root), *_released(root)])


def _unreleased(root: Path) -> Iterator[str]:
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["towncrier"]
    folder = root / settings["directory"]
    sections = {
        kind["name"]: sorted(folder.glob(f"*.{kind['directory']}*.md"), key=_order) for kind in settings["type"]
    }
    if any(sections.values()):
        yield "## Not released yet\n"
    for name, fragments in sections.items():
        if fragments:
            yield f"### {name}\n"
            yield "\n".join(f"- {_sentence(fragment)}" for fragment in fragments) + "\n"


def _order(fragment: Path) -> tuple[int, str]:
    """Newest issues first; fragments without one before them."""
    issue = fragment.name.partition(".")[0]
    return (-int(issue) if issue.isdigit() else -(10**9), fragment.name)


def _sentence(fragment: Path) -> str:
    # Fragments name pages from the root of the repository.
    return " ".join(fragment.read_text(encoding="utf-8").split()).replace("](docs/", "](")


def _released(root: Path) -> Iterator[str]:
    file = root / "CHANGELOG.md"
    if file.exists():
        lines = file.read_text(encoding="utf-8").splitlines()
        # Its title is the page's.
        yield "\n".join(lines[1:] if lines[:1] and lines[0].startswith("# ") else lines)


def on_files(files: Any, *, config: Any) -> Any:
    """Called by mkdocs with the files of the site."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "changelog.md", content=changelog_page()))
    return files
