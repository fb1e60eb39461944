"""Files that this library writes: whole or not at all, and no other thing is replaced by one."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

__all__ = ["write_together", "write_whole"]

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL  # a file that is there, also a link to one, is not opened


def write_whole(path: Path, text: str) -> None:
    """Put a file of UTF-8 in the place of whatever file has the name: readers see the one or the other.

    Raises :class:`OSError`, also where the name is that of a folder, a pipe or a device: a new file would replace it
    for every program of the machine. A link is replaced, and what it leads to is not touched.
    """
    write_together({path: text})


def write_together(texts: Mapping[Path, str]) -> None:
    """The same for files that belong together: while one of them cannot be written, not one is replaced."""
    parts: dict[Path, Path] = {}
    try:
        for path, text in texts.items():
            if path.exists() and not path.is_file():
                raise OSError(errno.EINVAL, "it is not a file")
            data = _encoded(text)
            # Of a length of its own: a name may be as long as names can be.
            parts[path] = path.parent / f".{os.getpid()}.{secrets.token_hex(4)}.part"
            with os.fdopen(os.open(parts[path], _NEW | getattr(os, "O_BINARY", 0), 0o666), "wb") as file:
                file.write(data)
        for path, beside in parts.items():
            beside.replace(path)
    finally:
        for beside in parts.values():
            beside.unlink(missing_ok=True)


def _encoded(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:  # of a file's name that is not UTF-8, as Python reads it
        raise OSError(errno.EILSEQ, f"UTF-8 has no {error.object[error.start]!r}") from error
