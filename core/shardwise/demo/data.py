"""Real text that every machine has: the source of Python's own standard library."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from shardwise.demo.settings import Settings

__all__ = ["batches", "corpus"]


def corpus() -> Tensor:
    """The bytes of the standard library's top-level modules, in the order of their names: uint8, one dim."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def batches(settings: Settings) -> Iterator[tuple[Tensor, Tensor]]:
    """One pair (ids, next ids) per step, int64 of shape ``(batch, context)``, drawn by the settings' seed."""
    text = corpus()
    generator = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.steps):
        starts = torch.randint(len(text) - settings.context, (settings.batch,), generator=generator)
        windows = torch.stack([text[start : start + settings.context + 1] for start in starts.tolist()]).long()
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
