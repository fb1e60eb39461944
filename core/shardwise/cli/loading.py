"""Importing what a user names on the command line: a module, a file, a function in one."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import click

__all__ = ["load_function", "load_module"]


def load_module(text: str) -> ModuleType:
    """The module ``package.module`` or ``path/to/file.py``; the working directory is on the path, as under python -m.

    What the module itself raises comes through.
    """
    if text.endswith(".py"):
        return _load_file(Path(text))
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(text)
    except ModuleNotFoundError as error:
        # A module that the named one misses is another matter.
        if error.name is None or not f"{text}.".startswith(f"{error.name}."):
            raise
        raise click.ClickException(f"there is no module {text}: {error}") from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise click.ClickException(f"there is no file {path}")
    # As under `python path/to/file.py`: what lies beside the file can be imported.
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses and pickle look a class's module up.
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def load_function(text: str) -> Callable[[], Any]:
    """The callable of ``package.module:name`` or ``path/to/file.py:name``."""
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name.isidentifier():
        raise click.UsageError(f"{text!r} names no function: write package.module:function or path/to/file.py:function")
    found = getattr(load_module(where), name, None)
    if not callable(found):
        raise click.ClickException(f"{where} has no function {name!r}")
    function: Callable[[], Any] = found
    return function
