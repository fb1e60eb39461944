"""How an error of the user's program ends a command: with the program's own lines."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from shardwise.errors import ShardingError
from shardwise.kernel.plurals import counted

__all__ = ["check_takes", "program_errors"]

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
        what = f"{program} raised {type(error).__name__}: {error}"
        raise click.ClickException(f"{what}\n{traceback_text(error)}".rstrip()) from error


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
