"""How an error of the user's program ends a command: with the program's own lines."""

from __future__ import annotations

import inspect
import os
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from shardwise.errors import PlacementCountError, ShardingError
from shardwise.kernel.plurals import counted

__all__ = [
    "OWN_MESH",
    "TO_NAME",
    "check_takes",
    "is_of_meshes",
    "naming_mesh_dims",
    "program_errors",
    "staying_in_folder",
]

TO_NAME = "--names gives the mesh dims their names, as in --names dp,tp."
"""What to do where a program places by name and the command was given no names."""

_NOT_RUN = (
    (inspect.iscoroutinefunction, "an async function"),
    (inspect.isgeneratorfunction, "a generator function"),
    (inspect.isasyncgenfunction, "an async generator function"),
)


@contextmanager
def program_errors(program: str) -> Iterator[None]:
    """Show what the program raises as a message; what shardwise raises comes through, on purpose or by mistake."""
    from shardwise.tools.program_errors import program_traceback, traceback_text

    try:
        yield
    except (ShardingError, click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except SystemExit as error:
        raise click.ClickException(f"{program} ended the process: SystemExit: {error.code}") from error
    except Exception as error:
        if program_traceback(error) is None and not isinstance(error, SyntaxError):
            raise
        what = f"{program} raised {type(error).__name__}: {error}".rstrip(": ")
        hint = OWN_MESH if is_of_meshes("".join(traceback.format_tb(error.__traceback__))) else ""
        raise click.ClickException(f"{what}\n{traceback_text(error)}{hint}".rstrip()) from error


@contextmanager
def staying_in_folder() -> Iterator[None]:
    """Come back to the current folder, if there is one to come back to: a program that changes it changes it for one
    run alone.
    """
    before = None
    with suppress(OSError):
        before = Path.cwd()
    try:
        yield
    finally:
        if before is not None:
            with suppress(OSError):
                os.chdir(before)


@contextmanager
def naming_mesh_dims(names: object) -> Iterator[None]:
    """Say how the mesh dims get names, where a program places by names that the command was not given."""
    try:
        yield
    except PlacementCountError as error:
        if names:
            raise
        raise type(error)(asked=error.asked, found=error.found, do=f"{error.do} {TO_NAME}", **error.fields) from error


OWN_MESH = (
    "\nA program that is given a mesh makes no process group and no mesh of its own: use `mesh`, or mesh['tp'] for one "
    "of its dims."
)


def is_of_meshes(calls: str) -> bool:
    """Whether torch's code for meshes and process groups raised an error with this traceback."""
    files = re.findall(r'^  File "(.*?)", line', calls, re.MULTILINE)[-1:]
    return any(
        file.endswith(("torch/distributed/distributed_c10d.py", "torch/distributed/device_mesh.py")) for file in files
    )


def check_takes(program: str, function: Callable[..., Any], *arguments: str, do: str = "") -> None:
    """Raise ``click.ClickException`` for a function that cannot be called with these arguments and no others."""
    for is_kind, kind in _NOT_RUN:
        if is_kind(function):
            raise click.ClickException(
                f"{program} is {kind}, and calling it runs nothing. Write a function that runs a step, or returns one."
            )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C: the call itself says what is wrong
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        given = f"{counted(len(arguments), 'argument')}, {', '.join(arguments)}" if arguments else "no argument"
        name = getattr(function, "__name__", "function")
        raise click.ClickException(
            f"{program} is called with {given}, and it is {name}{signature}: {error}. {do}".rstrip()
        ) from None
