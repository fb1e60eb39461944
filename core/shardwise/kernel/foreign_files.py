"""Files that somebody else may have made: read to a bound, and JSON and TOML that mean one thing."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO

__all__ = [
    "LARGEST",
    "leads_out",
    "load_json",
    "load_toml",
    "read_beginning",
    "read_bytes",
    "read_text",
    "reason",
    "short",
]

LARGEST = 256 << 20
"""The most bytes of a file of text that are read: the largest plans have a few MiB."""


def read_bytes(path: Path, limit: int = LARGEST) -> bytes:
    """The bytes of a file. Raises :class:`OSError`, and :class:`ValueError` for more than ``limit`` bytes."""
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > limit else file.read(limit + 1)
    if max(size, len(data)) > limit:
        raise ValueError(f"it has more than {limit} bytes")
    return data


def read_beginning(path: Path, count: int) -> bytes:
    """The first bytes of a file. Raises as :func:`read_bytes`."""
    with _opened(path) as file:
        return file.read(count)


def _opened(path: Path) -> BinaryIO:
    """A file and nothing else: to open a pipe would wait for whoever writes it. What is looked at is what was opened,
    as another thing may have the name a moment later.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    number = os.open(path, flags)
    mode = os.fstat(number).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(number, "rb")
    os.close(number)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise ValueError("it is not a file")


def read_text(path: Path, limit: int = LARGEST) -> str:
    """The text of a file of UTF-8, with plain line ends, and without the mark that editors of Windows begin it with.

    Raises :class:`OSError` and :class:`ValueError`.
    """
    return read_bytes(path, limit).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def load_json(text: str) -> Any:
    """The data of JSON. Raises :class:`ValueError`, also for a key that is there twice, for numbers that are not
    finite and for nesting that no file of this library has.
    """
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"it has the key {short(next(k for k in keys if keys.count(k) > 1))!r} twice")
    return table


def _refuse(number: str) -> Any:
    raise ValueError(f"{number} is not a number that files have")


def load_toml(text: str) -> dict[str, Any]:
    """The data of TOML. Raises :class:`ValueError`, also for whole numbers of more than the 64 bits that TOML has:
    Python reads them in hexadecimal and prints none of 4,300 digits, not even in a message.
    """
    import tomllib  # only here: most programs read no such file

    try:
        content = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    inside: list[Any] = [content]
    while inside:
        value = inside.pop()
        if isinstance(value, (dict, list)):
            inside.extend(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, int) and value.bit_length() > _BITS:
            raise ValueError("it has a number of more than 64 bits")
    return content


_BITS = 63  # and the sign


def leads_out(folder: Path, name: str) -> bool:
    """Whether a name that a file of the folder gives leads out of the folder, by itself or by a link."""
    # The file may have been made on another system, so a name of either is judged as both.
    if "\0" in name or any(".." in path.parts or path.anchor for path in (PurePosixPath(name), PureWindowsPath(name))):
        return True
    # Not Path.resolve, which raises RuntimeError for a link to itself.
    return not Path(os.path.realpath(folder / name)).is_relative_to(os.path.realpath(folder))


def short(value: object, most: int = 200) -> str:
    """A text from a file for a message: cut where it is long."""
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} letters)"


def reason(error: BaseException) -> str:
    """An error as the reason in a message."""
    return short(
        error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    )
