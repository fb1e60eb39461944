"""Who is running an op: a line of the user's program, torch's own machinery, or shardwise."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import FrameType

from shardwise.comm.call_sites import OURS, TORCH, users_frame

__all__ = ["is_call_of_program", "is_in_optimizer_step", "users_line"]

_GRAPHS = f"{TORCH}/_functorch/_aot_autograd"
_COLLECTIVES = f"{TORCH}/distributed"
_OPTIMIZERS = f"{TORCH}/optim/optimizer.py"

# Torch's files that copy, read or share memory: they make an empty tensor and give it that memory. Or, the last two,
# that give it the class of a parameter of a lazy module, and that read the memory of a table themselves.
_MEMORY = tuple(
    f"{TORCH}/{file}"
    for file in (
        "storage.py",
        "_utils.py",
        "serialization.py",
        "multiprocessing/",
        "nn/parameter.py",
        "quasirandom.py",
    )
)


def users_line() -> tuple[str, int]:
    """File and line of the innermost frame of the user's program; ``("<unknown>", 0)`` without one."""
    frame = users_frame(inspect.currentframe())
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("<unknown>", 0)


def is_in_optimizer_step() -> bool:
    """Whether a step of an optimizer runs: torch wraps each ``step`` in a function of its own."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename == _OPTIMIZERS and frame.f_code.co_name == "wrapper":
            return True
        frame = frame.f_back
    return False


def is_call_of_program(mode: str) -> bool:
    """Whether the program asked for the op that reached a mode of the dispatcher, also by way of torch's layers.

    Otherwise a compiled graph, a collective of torch's, its copies of memory or shardwise itself did. ``mode`` is the
    file of the mode.
    """
    frame: FrameType | None = inspect.currentframe()
    asks: bool | None = None
    reached = False
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_GRAPHS):
            return False  # also below code that a compiler has written
        if file == mode:
            reached = True
        elif reached and asks is None and file not in _BETWEEN:
            if file.startswith((_COLLECTIVES, *_MEMORY)):
                return False
            if not file.startswith(TORCH):
                asks = not file.startswith(OURS)
        frame = frame.f_back
    return asks is not False


# Files between a mode and whoever calls an op under it.
_BETWEEN = (str(Path(__file__).parents[1] / "private_torch" / "dispatch.py"),)
