"""How much memory the decisions for a recorded step may take: what was asked for, or what the device has left."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import torch
from attrs import frozen

__all__ = ["MemoryLimit"]

_OF_GRADIENT = Fraction(2)  # a parameter and its gradient


@frozen
class MemoryLimit:
    """What a rank may hold at a time: ``nbytes`` in all, or ``spare`` bytes more than in the step as it was recorded.

    ``state`` is the bytes of a parameter with its gradient and its optimizer's states, over those of the parameter.
    """

    state: Fraction
    nbytes: int | None
    spare: int | None

    @classmethod
    def after(
        cls, optimizer: torch.optim.Optimizer, device: str, nbytes: int | None, *, is_first: bool = True
    ) -> MemoryLimit | None:
        """The limit after a step of an optimizer, which its first one gave its states; ``nbytes`` were asked for.

        None where nothing was asked for and the device says nothing of its memory, as a CPU, whose memory is that of
        all ranks of a host and of all other programs.
        """
        parameters, states = _bytes_of(optimizer)
        spare = None if nbytes is not None else _left(device, states if is_first else 0)
        if nbytes is None and spare is None:
            return None
        return cls(_OF_GRADIENT + (Fraction(states, parameters) if parameters else 0), nbytes, spare)

    def of(self, recorded: int) -> int:
        """The bytes of the limit for a step that held so many as it was recorded."""
        return recorded + (self.spare or 0) if self.nbytes is None else self.nbytes


def _bytes_of(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """The bytes of this rank's parameters with a state, and of their states."""
    parameters = states = 0
    for parameter, state in optimizer.state.items():
        parameters += _local_bytes(parameter)
        states += sum(_local_bytes(value) for value in _tensors(state.values()))
    return parameters, states


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (value for value in values if isinstance(value, torch.Tensor))


def _local_bytes(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.nbytes)


def _left(device: str, states: int) -> int | None:
    """The bytes that this process has never taken from its device, less those of the states, which are new.

    What the caching allocator has reserved counts as taken, with its gaps: a learned step has gaps, too.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device:
        return None
    free, _ = torch.accelerator.get_memory_info()
    peak, now = torch.accelerator.max_memory_reserved(), torch.accelerator.memory_reserved()
    return max(0, free - (peak - now) - states)
