"""Where in the user's program a collective was issued."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType

import torch

__all__ = ["Site", "in_line", "is_inner", "operation", "short_line", "site_of_caller", "users_frame"]

_CORE = Path(__file__).parents[1]
_INNER = (
    "kernel",
    "rng",
    "rule",
    "discovery",
    "planning",
    "program",
    "comm",
    "engine",
    "tensor",
    "tools",
    "private_torch",
)
_HANDLER = "<shardwise handler of "
_NOT_THE_USERS = (
    str(Path(torch.__file__).parent),
    *(str(_CORE / part) for part in _INNER),
    "<shardwise",
    "<string>",
    "<eval_with_key>",
    "<frozen ",
)
_SUFFIXES = 3  # so many names of a path are shown and compared: ranks may have a program in different folders


class _IsInner(dict[str, bool]):
    """By file name, whether its code is torch's or ours."""

    def __missing__(self, file: str) -> bool:
        is_inner = self[file] = file.startswith(_NOT_THE_USERS)
        return is_inner


is_inner = _IsInner()

Site = tuple[CodeType, int, CodeType]
"""The code of the innermost frame of the user's program, its last instruction, and the code that it called."""


def site_of_caller() -> Site | None:
    """The site of whoever called the caller of this function; None without a frame of the user."""
    frame_at = sys._getframe  # noqa: SLF001  # documented, and the only way that does not make a frame of each level
    depth = 2
    try:
        while is_inner[frame_at(depth + 1).f_code.co_filename]:
            depth += 1
        frame = frame_at(depth + 1)
    except ValueError:  # the stack ends
        return None
    return frame.f_code, frame.f_lasti, frame_at(depth).f_code


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's program at or around a frame."""
    while frame is not None and is_inner[frame.f_code.co_filename]:
        frame = frame.f_back
    return frame


def operation(code: CodeType) -> str:
    """What the user's program called: an op for which a handler ran, or a function."""
    if code.co_filename.startswith(_HANDLER):
        return code.co_filename.removeprefix(_HANDLER).rstrip(">")
    return str(getattr(code, "co_qualname", code.co_name))


def short_line(code: CodeType, last: int) -> str:
    """File and line of an instruction; of the file's path the last names, which are the same on all ranks."""
    line = next((line for start, end, line in code.co_lines() if start <= last < end), None)
    path = Path(code.co_filename)
    return f"{'/'.join(path.relative_to(path.anchor).parts[-_SUFFIXES:])}:{line or code.co_firstlineno}"


def in_line(site: Site | None) -> str:
    """A site in words."""
    if site is None:
        return "at an unknown line"
    code, last, called = site
    return f"{operation(called)} at {short_line(code, last)}"
