"""Run a program to observe it: the training step that it returns, phase by phase, and stand-ins for its data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from attrs import define, frozen
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise.discovery.process import default_registry
from shardwise.errors import CallError
from shardwise.kernel.arguments import kind_of
from shardwise.kernel.nested import tensors_in
from shardwise.kernel.signature import Op, signature
from shardwise.private_torch.dispatch import in_backward
from shardwise.private_torch.ops import is_composite

__all__ = [
    "PHASES",
    "Phases",
    "TrainingStep",
    "Watch",
    "is_split_first",
    "run_returned",
    "running_compiled_code_eagerly",
    "stand_in_number",
]

PHASES = ("forward", "backward", "optimizer")
"""``forward`` is all that runs neither in a backward pass nor in an optimizer's step."""


@define
class Phases:
    """The phase that the program is in."""

    saw_backward: bool = False
    """Whether an op has run in a backward pass."""
    _open_steps: int = 0

    @property
    def current(self) -> str:
        """One of :data:`PHASES`."""
        return "backward" if in_backward() else "optimizer" if self._open_steps else "forward"

    def of_op(self) -> str:
        """The phase of the op that runs now; a backward pass is remembered."""
        self.saw_backward = self.saw_backward or in_backward()
        return self.current

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Count optimizer steps while the context lasts."""

        def step_begins(*_: Any) -> None:
            self._open_steps += 1

        def step_ends(*_: Any) -> None:
            self._open_steps -= 1

        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(step_begins).remove)
            stack.callback(register_optimizer_step_post_hook(step_ends).remove)
            yield


def running_compiled_code_eagerly() -> AbstractContextManager[None]:
    """A context in which what a program compiles runs op by op.

    Under a mode that watches ops torch compiles nothing. Without this it raises where ``fullgraph=True`` asks for a
    graph.
    """
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


class Watch(Protocol):
    """What observes a program while :func:`run_returned` runs it."""

    phases: Phases

    def watching(self) -> AbstractContextManager[Any]:
        """A context whose ops are observed."""

    def begins(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Forget what was observed: the step of a model and its arguments begins here."""

    def first_gradients(self, roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Ones for the tensors that the backward pass starts from. The forward pass is over."""

    def backward_ended(self, parameters: Sequence[nn.Parameter]) -> None:
        """The parameters have their gradients, and the optimizer has not run."""


@frozen
class TrainingStep:
    """A model, its inputs, and its optimizer; ``optimizer`` is None where there is not one."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    optimizer: torch.optim.Optimizer | None


def run_returned(returned: Any, asked: str, watch: Watch, *, fused: bool | None = None) -> TrainingStep | None:
    """Run the step that ``(model, inputs)`` or ``(model, inputs, optimizer)`` asks for; without an optimizer, AdamW's.

    Any other result is the output of a program that ran by itself. Its backward pass follows, unless one ran already,
    and None is returned. Raises :class:`CallError` for a model without inputs, and for a function, which nothing calls.
    """
    if not _is_step(returned, asked, watch):
        if not watch.phases.saw_backward:
            _run_backward(returned, watch)
        return None
    model, inputs, optimizer = (*returned, None, None)[:3]
    args: tuple[Any, ...] = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    args = () if inputs is None or isinstance(inputs, Mapping) else args
    kwargs = inputs if isinstance(inputs, Mapping) else {}
    # What built the model and its inputs is not part of the step.
    watch.begins(model, args, kwargs)
    with watch.watching():
        outputs = model(*args, **kwargs)
    _run_backward(outputs, watch)
    del outputs
    parameters = [p for p in model.parameters() if p.requires_grad]
    watch.backward_ended(parameters)
    if optimizer is None and parameters:
        optimizer = torch.optim.AdamW(parameters, fused=fused)
    if optimizer is not None:
        with watch.watching():
            optimizer.step()
    return TrainingStep(model, args, kwargs, optimizer)


def _is_step(returned: Any, asked: str, watch: Watch) -> bool:
    """Whether a program returned a step to run. Raises :class:`CallError` for what looks like one and cannot be run."""
    listed = returned if isinstance(returned, (tuple, list)) else (returned,)
    modules = [isinstance(value, nn.Module) for value in listed]
    optimizers = [isinstance(value, torch.optim.Optimizer) or value is None for value in listed[2:]]
    if modules[:1] == [True] and 1 < len(listed) <= len(("model", "inputs", "optimizer")) and all(optimizers):
        return True
    has_run = watch.phases.saw_backward or any(t.requires_grad for t in tensors_in(listed))
    in_dict = isinstance(returned, Mapping) and any(isinstance(value, nn.Module) for value in returned.values())
    if ((any(modules) or in_dict) and not has_run) or modules[:1] == [True] or callable(returned):
        raise CallError(
            asked=asked,
            found="it returned a module without inputs"
            if isinstance(returned, nn.Module)
            else f"it returned {', '.join(map(kind_of, listed))}, and that is not a step that can be run",
            do="Return (model, inputs) or (model, inputs, optimizer), or run the step and return its loss.",
        )
    return False


def _run_backward(outputs: Any, watch: Watch) -> None:
    roots = [t for t in tensors_in(outputs) if t.requires_grad]
    gradients = watch.first_gradients(roots)
    if roots:
        with watch.watching():
            torch.autograd.backward(roots, gradients)


# -- ops -------------------------------------------------------------------------------------------------------------


def is_split_first(op: Op) -> bool:
    """Whether the dispatcher would run the op as others: inference mode dispatches composite ops as they are."""
    return op.namespace != "prim" and op not in default_registry() and is_composite(op)


def stand_in_number(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool | int | float | complex | None:
    """A number for an op whose result data decides: a loss to print, a count of steps. None for an op with tensors as
    results.
    """
    if any(result.is_tensor for result in signature(op).results):
        return None
    # One number is as good as another, and a program rarely stops at a 1.
    dtype = next(tensors_in([args, kwargs])).dtype
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1j if dtype.is_complex else 1
