"""Whether a thread compiles a graph, by its stack: the thread that asks is another one, and torch's own flags are not
its.
"""

from __future__ import annotations

from pathlib import Path
from types import FrameType

import torch

__all__ = ["compiling_frame"]

_TORCH = Path(torch.__file__).parent
# Functions in which a compiler is at work: Dynamo's for a frame of Python, Inductor's for a graph. That of the backward
# pass runs apart from the first. By name, as an import of them takes a second.
_COMPILERS = {
    (str(_TORCH / "_dynamo" / "convert_frame.py"), "_compile"),
    (str(_TORCH / "_inductor" / "compile_fx.py"), "compile_fx_inner"),
}


def compiling_frame(innermost: FrameType | None) -> FrameType | None:
    """The outermost frame of a compiler in the thread with this innermost frame; None where it compiles nothing."""
    outermost, frame = None, innermost
    while frame is not None:
        if (frame.f_code.co_filename, frame.f_code.co_name) in _COMPILERS:
            outermost = frame
        frame = frame.f_back
    return outermost
