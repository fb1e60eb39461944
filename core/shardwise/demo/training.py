"""The training loop: plain torch, the same for one device and for a mesh."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional

from shardwise.demo.settings import Settings

__all__ = ["Step", "train"]

MAX_NORM = 1.0


@frozen
class Step:
    """One finished step: its number from 1, its loss in nats per byte, its gradient's norm, and how long it took."""

    number: int
    loss: float
    norm: float
    seconds: float


def train(
    model: nn.Module,
    data: Iterator[tuple[Tensor, Tensor]],
    settings: Settings,
    place: Callable[[Tensor], Tensor],
    tell: Callable[[Step], None],
) -> list[Step]:
    """Train by AdamW and give the steps; ``place`` puts a batch where the model lies, ``tell`` hears of every step."""
    # Fused: one operator for all parameters.
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, fused=True)
    steps = []
    for number, (ids, targets) in enumerate(data, start=1):
        start = time.perf_counter()
        scores = model(place(ids))
        loss = functional.cross_entropy(scores.flatten(0, 1), place(targets).flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        # AdamW forgives a gradient of the wrong scale; the norm does not, so it is kept and compared.
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, foreach=True)
        optimizer.step()
        steps.append(Step(number, loss.item(), norm.item(), time.perf_counter() - start))
        tell(steps[-1])
    return steps
