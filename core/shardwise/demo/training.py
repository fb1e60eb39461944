"""The training loop: plain torch, the same for one device and for a mesh."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from shardwise.demo.data import Batches
from shardwise.demo.settings import RunSettings

__all__ = ["Keeper", "Step", "train"]

MAX_NORM = 1.0


@frozen
class Step:
    """One finished step: its number from 1, its loss in nats per byte, its gradient's norm, and how long it took.

    ``seconds`` is 0 for a step of an earlier process.
    """

    number: int
    loss: float
    norm: float
    seconds: float


class Keeper(Protocol):
    """Saves a run and continues it."""

    def resume(self, model: nn.Module, optimizer: Optimizer, data: Batches) -> list[Step]:
        """Continue a run, and return the steps until then."""

    def after(self, steps: list[Step], last: int, model: nn.Module, optimizer: Optimizer, data: Batches) -> None:
        """Called after each step; ``last`` is the number of the last one."""


def train(
    model: nn.Module,
    data: Batches,
    settings: RunSettings,
    place: Callable[[Tensor], Tensor],
    tell: Callable[[Step], None],
    keeper: Keeper | None = None,
    backward: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> list[Step]:
    """Train by AdamW and return the steps. ``place`` puts a batch on the model's device or mesh; ``tell`` is called
    with each step. Backward passes run in the context that ``backward`` makes.
    """
    # Fused: one operator for all parameters.
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, fused=True)
    steps = [] if keeper is None else keeper.resume(model, optimizer, data)
    for step in steps:
        tell(step)
    for number, (ids, targets) in enumerate(data, start=len(steps) + 1):
        start = time.perf_counter()
        scores = model(place(ids))
        loss = functional.cross_entropy(scores.flatten(0, 1), place(targets).flatten())
        optimizer.zero_grad()
        with backward():
            loss.backward()  # type: ignore[no-untyped-call]
        # AdamW hides a gradient of the wrong scale. The norm shows it, so it is compared, too.
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, foreach=True)
        optimizer.step()
        steps.append(Step(number, loss.item(), norm.item(), time.perf_counter() - start))
        tell(steps[-1])
        if keeper is not None:
            keeper.after(steps, settings.steps, model, optimizer, data)
    return steps
