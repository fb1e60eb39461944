"""Who is running an op: a line of the user's program, torch's own machinery, or shardwise."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import FrameType

import torch

__all__ = ["is_call_of_program", "is_in_optimizer_step", "users_line"]

_CORE = Path(__file__).parents[1]
_INNER = ("kernel", "rng", "rule", "discovery", "planning", "comm", "engine", "tensor", "private_torch", "random.py")
_OURS = (*(str(_CORE / part) for part in _INNER), "<shardwise")
_GENERATED = ("<string>", "<eval_with_key>")
_TORCH = str(Path(torch.__file__).parent)
_NOT_THE_USERS = (_TORCH, *_OURS, *_GENERATED)
_GRAPHS = f"{_TORCH}/_functorch/_aot_autograd"
_COLLECTIVES = f"{_TORCH}/distributed"
_OPTIMIZERS = f"{_TORCH}/optim/optimizer.py"


def users_line() -> tuple[str, int]:
    """File and line of the innermost frame of neither torch nor shardwise; ``("<unknown>", 0)`` without one."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
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

    Otherwise a compiled graph, a collective of torch's or shardwise itself did. ``mode`` is the file of the mode.
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
            if file.startswith(_COLLECTIVES):
                return False
            if not file.startswith(_TORCH):
                asks = not file.startswith(_OURS)
        frame = frame.f_back
    return asks is not False


# Files between a mode and whoever calls an op under it.
_BETWEEN = (str(_CORE / "private_torch" / "dispatch.py"),)
