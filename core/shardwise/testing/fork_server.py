"""The fork server of multiprocessing, started where the temporary folder's path is too long for its socket, too."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver

from shardwise.errors import WorkerError

__all__ = ["ensure_running"]

SHORT_FOLDERS = ("/tmp", "/var/tmp")  # noqa: S108  # multiprocessing makes a folder of its own in it

_ROOM = 103 - len("/pymp-12345678/listener-12345678")
"""Bytes of a temporary folder's path: the socket's address has 103 on macOS, and 107 on Linux."""


def ensure_running() -> None:
    """Start the fork server, unless it runs.

    Raises :class:`WorkerError` where the path of its socket would be too long all the same.
    """
    with _room_for_a_socket():
        try:
            forkserver.ensure_running()
        except OSError as error:
            if "path too long" not in str(error):
                raise
            raise WorkerError(
                asked="start a fork server",
                found=f"the temporary folder {tempfile.gettempdir()} has a path that is too long for a socket",
                do=f"Set TMPDIR to a folder whose path has at most {_ROOM} bytes.",
            ) from error


@contextmanager
def _room_for_a_socket() -> Iterator[None]:
    """Have multiprocessing make its folder in a short one where the temporary folder leaves no room."""
    given = tempfile.gettempdir()
    short = given
    if len(os.fsencode(given)) > _ROOM:
        short = next((folder for folder in SHORT_FOLDERS if os.access(folder, os.W_OK | os.X_OK)), given)
    before, tempfile.tempdir = tempfile.tempdir, short
    try:
        yield
    finally:
        tempfile.tempdir = before
