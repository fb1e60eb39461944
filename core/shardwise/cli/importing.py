"""Importing a plugin that is to be checked from where it lies, and leaving nothing of it behind."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["imported_from"]


@contextmanager
def imported_from(roots: Sequence[Path], packages: Sequence[str]) -> Iterator[None]:
    """Import these top-level packages from ``roots`` for a while, whatever of that name was imported before."""
    path, before = list(sys.path), dict(sys.modules)
    _forget(packages)
    sys.path[:0] = map(str, roots)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = path
        if roots:
            _forget(packages)
            _restore(before, packages)


def _forget(packages: Sequence[str]) -> None:
    forgotten = [name for name in sys.modules if name.partition(".")[0] in packages]
    for name in forgotten:
        del sys.modules[name]
    if forgotten:
        # A custom op that is freed takes the ops of its name with it, later ones too: so let it be freed now.
        gc.collect()


def _restore(before: dict[str, Any], packages: Sequence[str]) -> None:
    sys.modules.update({name: module for name, module in before.items() if name.partition(".")[0] in packages})
