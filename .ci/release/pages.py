"""Write the pages of families and of the directory of plugins from their data; `nox -s pages` runs it."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from shardwise.kernel.first_party import FAMILIES
from shardwise.kernel.known_rules import known_plugins, ops_of_families

__all__ = ["PAGES", "directory_page", "families_page"]

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def families_page() -> str:
    """The page of what can be installed by itself."""
    counts = Counter(ops_of_families().values())
    rows = [(f"`{name}`", _about(name.replace("-", "_")), str(counts[name])) for name in sorted(FAMILIES)]
    text = _template("families.md")
    return text.replace("TABLE", table(("distribution", "what it has rules for", "ops"), rows)).replace(
        "COUNT", str(len(FAMILIES))
    )


def directory_page() -> str:
    """The page of plugins that are known."""
    rows = [
        (
            f"`{plugin.name}`",
            plugin.summary,
            ", ".join(f"`{pattern}`" for pattern in plugin.ops),
            f"{plugin.version}: {plugin.oracle}",
            plugin.tested,
            plugin.home,
        )
        for plugin in known_plugins()
    ]
    columns = ("distribution", "what it is for", "ops", "what the oracle says", "tried with", "where")
    return _template("plugins-directory.md").replace("TABLE", table(columns, rows))


def _template(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _about(package: str) -> str:
    tree = ast.parse((ROOT / "plugins" / package / "__init__.py").read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").partition("\n")[0]


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of Markdown."""
    lines = [" | ".join(columns)]
    lines += [" | ".join("---" for _ in lines[0].split(" | ")), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


PAGES = {DOCS / "families.md": families_page, DOCS / "plugins-directory.md": directory_page}

if __name__ == "__main__":
    for path, page in PAGES.items():
        path.write_text(page(), encoding="utf-8")
