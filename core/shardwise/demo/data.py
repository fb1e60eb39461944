"""Real text that every machine has: the source of Python's own standard library."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from shardwise.demo.settings import RunSettings

__all__ = ["Batches", "batches", "corpus"]


def corpus() -> Tensor:
    """The bytes of the standard library's top-level modules, in the order of their names: uint8, one dim."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


class Batches:
    """One pair (ids, next ids) per step, int64 of shape ``(batch, context)``, drawn by the settings' seed.

    An iterator whose position can be saved and loaded.
    """

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._text = corpus()
        self._generator = torch.Generator().manual_seed(settings.seed)
        self._position = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        settings, text = self._settings, self._text
        if self._position >= settings.steps:
            raise StopIteration
        self._position += 1
        starts = torch.randint(len(text) - settings.context, (settings.batch,), generator=self._generator)
        windows = torch.stack([text[start : start + settings.context + 1] for start in starts.tolist()]).long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = state["position"]
        self._generator.set_state(state["generator"])


def batches(settings: RunSettings) -> Batches:
    """The batches of a run, from its first step on."""
    return Batches(settings)
