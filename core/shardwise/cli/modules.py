"""Modules that a user names on the command line, and those of a plugin that is imported from where it lies."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from shardwise.cli.program_errors import check_takes
from shardwise.kernel.arguments import kind_of

__all__ = [
    "import_option",
    "imported_from",
    "load_function",
    "load_function_of_mesh",
    "load_module",
    "refuse_no_file",
    "run_file",
]


def load_module(text: str) -> ModuleType:
    """The module ``package.module`` or ``path/to/file.py``; the working directory is on the path, as under python -m.

    A file that is loaded already is not run again: an op can be defined once. What the module itself raises comes
    through.
    """
    if text.endswith(".py"):
        refuse_no_file(Path(text))
        path = Path(text).resolve()
        loaded = next((m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == str(path)), None)
        if loaded is not None:
            return loaded
        # As under `python path/to/file.py`: what lies beside the file can be imported.
        _find_in(path.parent)
        name = str(path) if path.stem in sys.modules else path.stem
        try:
            return run_file(path, name, keep=True)
        except BaseException:
            sys.modules.pop(name, None)
            raise
    _find_in(Path.cwd())
    try:
        return importlib.import_module(text)
    except ModuleNotFoundError as error:
        # A module that the named one misses is another matter.
        if error.name is None or not f"{text}.".startswith(f"{error.name}."):
            raise
        raise click.ClickException(f"there is no module {text}: {error}") from error


def refuse_no_file(path: Path) -> None:
    """Raise ``click.ClickException`` where a program's file is not there."""
    if path.is_dir():
        raise click.ClickException(f"{path} is a folder, not a file")
    if not path.is_file():
        raise click.ClickException(f"there is no file {path}; {_instead_of(path)}")


def _instead_of(path: Path) -> str:
    folder = path.resolve().parent
    if not folder.is_dir():
        return f"there is no folder {path.parent} either"
    near = get_close_matches(path.name, [p.name for p in folder.glob("*.py")], n=1)
    return f"the nearest in that folder is {near[0]}" if near else f"the folder is {folder}"


def _find_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def run_file(path: Path, name: str, *, keep: bool = False) -> ModuleType:
    """Run a file as a new module; ``keep`` leaves it in ``sys.modules``, where dataclasses and pickle look it up.

    Raises what the file raises, and :class:`SyntaxError` for what is not a file of Python.
    """
    if path.suffix != ".py":
        raise SyntaxError(f"{path} is not a .py file")
    if b"\0" in path.read_bytes():  # Python 3.11 raises a ValueError that names no file
        raise SyntaxError("it has null bytes, so it is not Python", (str(path), 1, None, None))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if keep:
        sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_HOW = "package.module:function or path/to/file.py:function"
_SHOWN = 8  # names of functions in an error


def load_function(text: str) -> Callable[[], Any]:
    """The callable of ``package.module:name`` or ``path/to/file.py:name``."""
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name.isidentifier():
        raise click.UsageError(f"{text!r} does not name a function: write {_HOW}")
    if not where.endswith(".py") and not all(part.isidentifier() for part in where.split(".")):
        raise click.UsageError(f"{where!r} is neither a module nor a .py file: write {_HOW}")
    module = load_module(where)
    value = getattr(module, name, None)
    if not callable(value):
        own = [n for n, v in vars(module).items() if inspect.isfunction(v) and not n.startswith("_")]
        near = get_close_matches(name, own, n=1)
        hint = f"; the nearest is {near[0]}" if near else f"; its functions are {_listed(own)}" if own else ""
        kind = f", it is {kind_of(value)}" if hasattr(module, name) else ""
        raise click.ClickException(f"{where} has no function {name!r}{kind}{hint}")
    function: Callable[[], Any] = value
    return function


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def load_function_of_mesh(text: str) -> Callable[..., Any]:
    """As :func:`load_function`; raises ``click.ClickException`` for a function that takes no mesh, or more."""
    function: Callable[..., Any] = load_function(text)
    do = "Write `def step(mesh):`, and give it what else it needs by defaults, or by a function around it."
    check_takes(text, function, "mesh", do=do)
    return function


def _import_each(ctx: click.Context, param: click.Parameter, value: Sequence[str]) -> None:  # noqa: ARG001  click's
    for text in () if ctx.resilient_parsing else value:
        try:
            load_module(text)
        except click.ClickException:
            raise
        except SystemExit as error:
            raise click.ClickException(f"{text} ended the process at import: SystemExit: {error.code}") from error
        except Exception as error:
            raise click.ClickException(f"cannot import {text}: {type(error).__name__}: {error}") from error


import_option = click.option(
    "--import",
    multiple=True,
    metavar="MODULE_OR_FILE",
    expose_value=False,
    callback=_import_each,
    help="Import this first: it defines the op, and perhaps its rule. Repeatable.",
)
"""The option of every command that takes an op: modules and files are imported before the op is looked for."""


# -- a plugin from where it lies -------------------------------------------------------------------------------------


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
            sys.modules.update({name: module for name, module in before.items() if name.partition(".")[0] in packages})


def _forget(packages: Sequence[str]) -> None:
    forgotten = [name for name in sys.modules if name.partition(".")[0] in packages]
    for name in forgotten:
        del sys.modules[name]
    if forgotten:
        # A custom op that is freed takes the ops of its name with it, later ones too: so let it be freed now.
        gc.collect()
