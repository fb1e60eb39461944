"""The streams that a command writes to: closed ones, ones that have few letters, and a disk that is full."""

from __future__ import annotations

import codecs
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import click

__all__ = ["open_streams", "writing_any_letter"]

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
_SPELLED = "shardwise.spelled"
_SPELLINGS = str.maketrans({"µ": "u", "…": "...", "─": "-", "│": "|"} | dict.fromkeys("┌┬┐├┼┤└┴┘", "+"))


def open_streams() -> None:
    """Have stdin, stdout and stderr lead nowhere where this process was started without them: the next file that is
    opened would be in the place of one, and be written over.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
            os.set_inheritable(nowhere, True)  # the processes that the command starts need it as well
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115  # for as long as the process runs
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


@contextmanager
def writing_any_letter() -> Iterator[None]:
    """Have a letter that stdout's encoding has not be spelled with those that it has, and end the command with one line
    where the disk is full. As the command's own process alone: the stream stays as it is made here.
    """
    codecs.register_error(_SPELLED, _spelled)
    if getattr(sys.stdout, "errors", None) == "strict" and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors=_SPELLED)
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        where = "" if error.filename is None else f" {error.filename}"
        with suppress(OSError):
            click.echo(f"Error: cannot write{where or ' the output'}: {error.strerror}", err=True)
        _forget_stdout()
        raise SystemExit(1) from None


def _spelled(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end].translate(_SPELLINGS)
    return letters.encode("ascii", "backslashreplace").decode("ascii"), error.end


def _forget_stdout() -> None:
    """What is still to be written would fail again when Python ends, with a message of its own."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
