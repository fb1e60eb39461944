"""Where in the user's program a collective was issued."""

from __future__ import annotations

import contextlib
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType

import torch

from shardwise.kernel.handlers import HANDLER_FILE

__all__ = [
    "OURS",
    "TORCH",
    "Site",
    "in_line",
    "is_inner",
    "is_of_torch",
    "operation",
    "short_line",
    "site_of",
    "users_frame",
    "users_frames",
]

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
    "steps",
    "tools",
    "checkpoint",
    "private_torch",
    "random.py",
)
TORCH = str(Path(torch.__file__).parent)
OURS = (*(str(_CORE / part) for part in _INNER), "<shardwise")
"""How the names of files begin whose code a program did not write: torch's and shardwise's."""
_COMPILED = str(Path(TORCH) / "_dynamo")
_NOT_THE_USERS = (
    TORCH,
    *OURS,
    "<string>",
    "<eval_with_key>",
    "<frozen ",
    str(getattr(find_spec("typing_extensions"), "origin", "<typing_extensions>")),  # around what torch deprecates
    contextlib.__file__,  # around contexts and what they decorate
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


def site_of(frame: FrameType | None) -> Site | None:
    """The site of what runs in a frame; None without a frame of the user."""
    user, called = users_frames(frame)
    return None if user is None or called is None else (user.f_code, user.f_lasti, called.f_code)


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's program at or around a frame."""
    return users_frames(frame)[0]


def users_frames(frame: FrameType | None) -> tuple[FrameType | None, FrameType | None]:
    """The innermost frame of the user's program at or around a frame, and what it called: the handler of an op, or the
    next frame.

    What runs below a handler, such as a lowering of a plugin, is not the user's.
    """
    user: FrameType | None = None
    called: FrameType | None = None
    inner: FrameType | None = None
    handler: FrameType | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_inner[file] and not is_of_torch(frame):
            if user is None:
                user, called = frame, handler or inner
        elif file.startswith(HANDLER_FILE):
            user, called, handler = None, None, frame
        inner, frame = frame, frame.f_back
    return user, called


def is_of_torch(frame: FrameType) -> bool:
    """Whether torch wrote the code of a frame while the program ran, into a file of any name."""
    return str(frame.f_globals.get("__name__")).startswith("torch.")


def operation(code: CodeType) -> str:
    """What the user's program called: an op for which a handler ran, a graph, or a function."""
    if code.co_filename.startswith(_COMPILED):
        return "a compiled graph"
    if code.co_filename.startswith(HANDLER_FILE):
        return code.co_filename.removeprefix(HANDLER_FILE).rstrip(">")
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
