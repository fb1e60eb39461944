"""Which tensors the branches of a ``torch.cond`` read, the one that is not taken included.

A gradient of zeros is not the same as none: an optimizer steps on a parameter with zeros, and decays it. Torch knows
what a branch reads because it traces both. Here each branch runs once on the meta device, where a run needs no data and
sends nothing, and a mode notes the tensors that its ops meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardwise.kernel.nested import tensors_in
from shardwise.private_torch.dispatch import OpMode
from shardwise.private_torch.trees import tree_map_only

__all__ = ["reachable", "read_by"]


def read_by(branches: Iterable[Callable[..., Any]], operands: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors that an op of at least one branch reads. Who asks for a shape reads nothing.

    A branch that does not run without data, because it asks for a number of a tensor, counts as one that reads whatever
    it can reach.
    """
    read: dict[int, torch.Tensor] = {}
    for branch in branches:
        noted = _noted(branch, operands)
        read |= {id(tensor): tensor for tensor in (reachable([*operands, branch]) if noted is None else noted)}
    return list(read.values())


def _noted(branch: Callable[..., Any], operands: Sequence[Any]) -> list[torch.Tensor] | None:
    stand_ins = _StandIns()
    ops = _Ops(stand_ins)
    try:
        with torch.no_grad(), torch.device("meta"), stand_ins, ops:
            branch(*tree_map_only(torch.Tensor, stand_ins.of, tuple(operands)))
    except Exception:  # noqa: BLE001  # whatever a program of others raises where a tensor has no data
        return None
    return list(ops.read.values())


class _StandIns(TorchFunctionMode):
    """Has each function run on tensors without data, in place of those that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.by_tensor: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.by_stand_in: dict[int, torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The one that stands for a tensor: always the same, so that it has the shape that it was given."""
        if tensor.is_meta:
            return tensor
        if id(tensor) not in self.by_tensor:
            stand_in = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            self.by_tensor[id(tensor)] = (tensor, stand_in)  # both live as long as their ids are keys
            self.by_stand_in[id(stand_in)] = tensor
        return self.by_tensor[id(tensor)][1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, self.of, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Ops(OpMode):  # type: ignore[no-untyped-call]  # torch leaves its __init_subclass__ unannotated
    """Notes the tensors whose stand-ins an op reads."""

    def __init__(self, stand_ins: _StandIns) -> None:
        super().__init__()
        self.stand_ins = stand_ins
        self.read: dict[int, torch.Tensor] = {}

    def run(self, op: Any, types: Any, args: Any, kwargs: Any) -> Any:  # noqa: ARG002  # what a mode is given
        for operand in tensors_in([args, kwargs]):
            tensor = self.stand_ins.by_stand_in.get(id(operand))
            if tensor is not None:
                self.read[id(tensor)] = tensor
        return op(*args, **kwargs)


def reachable(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among operands, and those that functions can read: of their closures and the modules there."""
    return _reachable(values, set())


def _reachable(values: Iterable[Any], seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors among operands, and those that functions can read: of their closures and the modules there. Which of
    them a function does read is not known without running it.
    """
    for value in values:
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, torch.nn.Module):
            yield from _reachable([*value.parameters(), *value.buffers()], seen)
        elif isinstance(value, partial):
            yield from _reachable([value.func, *value.args, *value.keywords.values()], seen)
        elif isinstance(value, (list, tuple, dict)):
            yield from _reachable(tensors_in(value), seen)
        elif isinstance(value, MethodType):
            yield from _reachable([value.__self__, value.__func__], seen)
        elif isinstance(value, FunctionType):
            yield from _reachable(_names_of(value), seen)


def _names_of(function: FunctionType) -> Iterator[Any]:
    """What a function's code names outside of itself."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a cell without a value yet
            yield cell.cell_contents
    for name in function.__code__.co_names:
        yield function.__globals__.get(name)
