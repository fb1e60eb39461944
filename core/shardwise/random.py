"""Random numbers that do not depend on the mesh; see docs/random.md.

The module itself is what ``torch.distributed.checkpoint`` calls stateful: a checkpoint can save and load it, as in
 ``save({"model": ..., "random": shardwise.random})``.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from shardwise.rng.generator import get_state, manual_seed, mode, set_state, using
from shardwise.tools.one_device import on_one_device

__all__ = ["get_state", "load_state_dict", "manual_seed", "mode", "on_one_device", "set_state", "state_dict", "using"]

_STATE = "state"


def state_dict() -> dict[str, Tensor]:
    """The state of the generator, as :func:`get_state` returns it, in a dict."""
    return {_STATE: get_state()}


def load_state_dict(state: Mapping[str, Tensor]) -> None:
    """Set the state that :func:`state_dict` returned. Every rank must load the same state."""
    set_state(state[_STATE])
