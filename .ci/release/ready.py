"""Whether a tag may be released: it is the version, and the change log has that version and no fragment waits.

Run: python .ci/release/ready.py v0.2.0
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["faults"]

ROOT = Path(__file__).resolve().parents[2]


def faults(tag: str, root: Path = ROOT) -> Iterator[str]:
    """What is missing for a release of that tag."""
    version = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    if tag != f"v{version}":
        yield f"the tag is {tag}, and pyproject.toml has the version {version}"
    log = root / "CHANGELOG.md"
    if not log.is_file() or f"shardwise {version} (" not in log.read_text(encoding="utf-8"):
        yield f"CHANGELOG.md has no part for {version}: run towncrier build"
    waiting = sorted(path.name for path in (root / "changelog.d").glob("*.md"))
    if waiting:
        yield f"changelog.d has fragments that are not in CHANGELOG.md yet, {waiting[0]} for one: run towncrier build"


if __name__ == "__main__":
    found = list(faults(sys.argv[1]))
    sys.exit("\n".join(found))
