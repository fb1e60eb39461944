"""What a program raised, told by its own calls: those of shardwise that led to the program are left out."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from types import TracebackType

import torch

__all__ = ["program_lines", "program_traceback", "traceback_text"]

_OURS = str(Path(__file__).resolve().parents[1])
_TORCH = str(Path(torch.__file__).resolve().parent)
# What a command calls between itself and a program: the standard library, but not what is installed in it.
_LIBRARY = str(Path(traceback.__file__).parent)


def program_traceback(error: BaseException) -> TracebackType | None:
    """The part of an error's traceback from the first call outside of shardwise on; None where there is not one."""
    part = error.__traceback__
    while part is not None and _leads_to_program(part.tb_frame.f_code.co_filename):
        part = part.tb_next
    return part


def _leads_to_program(file: str) -> bool:
    is_library = file.startswith(_LIBRARY) and "site-packages" not in file
    return is_library or file.startswith((_OURS, "<frozen "))


def traceback_text(error: BaseException) -> str:
    """The calls of a program that led to an error, as Python shows them.

    Calls inside of torch and shardwise are counted instead, but for the last one. All are shown where shardwise itself
    raised another error than its own: that may be a mistake of shardwise.
    """
    frames = list(traceback.extract_tb(program_traceback(error)))
    if frames and frames[-1].filename.startswith(_OURS):
        return "".join(traceback.format_list(frames))
    lines, hidden = [], 0
    for frame in frames:
        if frame.filename.startswith((_OURS, _TORCH)) and frame is not frames[-1]:
            hidden += 1
            continue
        if hidden:
            lines.append(f"  ... {hidden} more inside of torch and shardwise ...\n")
            hidden = 0
        lines += traceback.format_list([frame])
    return "".join(lines)


def program_lines(text: str, *, on_purpose: bool) -> str:
    """The calls of a program in the text of a traceback, as :func:`traceback_text` shows those of an error.

    The error itself, which the text ends with, is left out; what a syntax error shows of a file is kept. ``on_purpose``
    says that shardwise raised it, and that it is no mistake of shardwise.
    """
    frames = list(
        re.finditer(r'^  File "(?P<file>.*?)", line .*\n(?:(?:    .*)?\n)*', f"{text.rstrip()}\n", re.MULTILINE)
    )
    if frames and frames[-1]["file"].startswith(_OURS):
        if not on_purpose:
            return "".join(frame[0] for frame in frames).rstrip()
        last = next((n for n, frame in reversed(list(enumerate(frames))) if not _is_inside(frame["file"])), -1)
        frames = frames[: last + 1]
    lines: list[str] = []
    hidden = 0
    for frame in frames:
        if _is_inside(frame["file"]) and frame is not frames[-1]:
            hidden += bool(lines)
            continue
        if hidden:
            lines.append(f"  ... {hidden} more inside of torch and shardwise ...\n")
            hidden = 0
        lines.append(frame[0])
    return "".join(lines).rstrip()


def _is_inside(file: str) -> bool:
    return file.startswith((_OURS, _TORCH, "<frozen "))
