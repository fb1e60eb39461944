"""Tensors that lie elsewhere than in the step from which a program was learned.

The layouts that the program read in that step are kept. One that it reads later only may be another one, and code that
takes it for the first one would be wrong in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import LearnedLayoutWarning, warn_user
from shardwise.kernel.placements import Placement, is_strided, show_all
from shardwise.kernel.tags import Tag

__all__ = ["note_asked", "now_elsewhere", "remember_layouts", "warn_of_another_layout"]

_ASKED = "_shardwise_asked"

now_elsewhere: dict[Tag, tuple[Placement, ...]] = {}
"""By tag, how a result of the recorded step lay. Empty where nothing is learned, and once it has been told of."""


def remember_layouts(recorded: Mapping[Tag, tuple[Placement, ...]]) -> None:
    """Have :func:`warn_of_another_layout` know how the results of a step lay before its program was learned."""
    now_elsewhere.clear()
    now_elsewhere.update(recorded)


def note_asked(tensor: Any) -> None:
    """Note that the program has asked for the layout of this tensor, and so knows it."""
    tensor.__dict__[_ASKED] = True


def warn_of_another_layout(tensor: Any) -> None:
    """Warn, once, where the program reads the part of a tensor whose layout was decided on since."""
    now = tensor._spec.placements
    before = now_elsewhere.get(tensor._spec.tag)
    if before is None or before == now or _ASKED in tensor.__dict__ or is_strided((*before, *now)):
        return
    now_elsewhere.clear()
    warn_user(
        f"to_local() of a tensor that lies as {show_all(now)}. In the step from which the program was learned it lay "
        f"as {show_all(before)}. Take its layout from x.placements, or ask for one with x.redistribute(...); "
        "SHARDWISE_LEARN=off turns learning off.",
        LearnedLayoutWarning,
    )
