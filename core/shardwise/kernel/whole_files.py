"""Files that this library writes: whole or not at all, and no other thing is replaced by one."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

__all__ = ["write_whole"]

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL  # a file that is there, also a link to one, is not opened


def write_whole(path: Path, text: str) -> None:
    """Put a file of UTF-8 in the place of whatever file has the name: readers see the one or the other.

    Raises :class:`OSError`, also where the name is that of a folder, a pipe or a device: a new file would replace it
    for every program of the machine. A link is replaced, and what it leads to is not touched.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a file")
    # Of a length of its own: a name may be as long as names can be.
    beside = path.parent / f".{os.getpid()}.{secrets.token_hex(4)}.part"
    try:
        with os.fdopen(os.open(beside, _NEW | getattr(os, "O_BINARY", 0), 0o666), "wb") as file:
            file.write(text.encode("utf-8"))
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
