"""Whether a thread compiles a graph, by its stack: the thread that asks is another one, and torch's own flags are not
its.
"""

from __future__ import annotations

from pathlib import Path
from types import FrameType

import torch

__all__ = ["compiles"]

_TORCH = Path(torch.__file__).parent
# Functions in which a compiler is at work: Dynamo's for a frame of Python, Inductor's for a graph. That of the backward
# pass runs apart from the first. By name, as an import of them takes a second.
_COMPILERS = {
    (str(_TORCH / "_dynamo" / "convert_frame.py"), "_compile"),
    (str(_TORCH / "_inductor" / "compile_fx.py"), "compile_fx_inner"),
}


def compiles(frame: FrameType | None) -> bool:
    """Whether the thread whose innermost frame this is compiles something."""
    while frame is not None:
        if (frame.f_code.co_filename, frame.f_code.co_name) in _COMPILERS:
            return True
        frame = frame.f_back
    return False
