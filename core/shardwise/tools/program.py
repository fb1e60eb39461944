"""What a function under study returns: a model with its inputs, and perhaps an optimizer, for one step of training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import nn

from shardwise.errors import CallError
from shardwise.kernel.nested import tensors_in

__all__ = ["Step", "roots_of", "step_of"]


@frozen
class Step:
    """A step that is still to be run; ``optimizer`` is None where none was returned."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    optimizer: torch.optim.Optimizer | None


def step_of(returned: Any, asked: str) -> Step | None:
    """The step that ``(model, inputs)`` or ``(model, inputs, optimizer)`` asks for; None for other results, the outputs
    of a program that ran by itself. Raises :class:`CallError` for a model without inputs.
    """
    if isinstance(returned, nn.Module):
        raise CallError(
            asked=asked,
            found="it returned a module without inputs",
            do="Return (model, inputs) or (model, inputs, optimizer), or run the model itself.",
        )
    if not (isinstance(returned, tuple) and returned and isinstance(returned[0], nn.Module)):
        return None
    model, inputs, optimizer = (*returned, None, None)[:3]
    if isinstance(inputs, Mapping):
        return Step(model, (), inputs, optimizer)
    args = tuple(inputs) if isinstance(inputs, (tuple, list)) else () if inputs is None else (inputs,)
    return Step(model, args, {}, optimizer)


def roots_of(outputs: Any) -> list[torch.Tensor]:
    """The tensors of an output that require grad: where its backward pass starts."""
    return [t for t in tensors_in(outputs) if t.requires_grad]
