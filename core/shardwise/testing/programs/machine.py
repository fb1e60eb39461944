"""Run a program on one device, line by line. The ranks of a mesh are compared with the values after each line."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from shardwise.kernel.signature import Op, signature
from shardwise.private_torch.dispatch import memory_of
from shardwise.testing.judge import comparable
from shardwise.testing.programs.program import (
    WAYS_TO_COPY,
    Assign,
    Call,
    Copy,
    Leaf,
    Line,
    Move,
    Program,
    Value,
    op_called,
)
from shardwise.testing.trial import TOLERANCE, copied, split_results
from shardwise.testing.values import made

__all__ = [
    "After",
    "Machine",
    "call_on",
    "cotangents",
    "decided_by_chance",
    "flows",
    "has_values_of",
    "follow_back",
    "quietly",
    "reference",
    "run_alone",
    "written_names",
]

_UNDEFINED = ("empty", "new_empty")


@frozen(eq=False)
class After:
    """The state after one line: the values that the line computed or changed, and its results that are not tensors.

    ``loose`` are the names of values that chance decides; only their form can be compared. ``tolerance`` is the
    coarsest one of the operations that led to the values.
    """

    values: Mapping[int, Tensor]
    others: tuple[Any, ...]
    loose: frozenset[int]
    tolerance: float


@define(eq=False)
class Machine:
    """One device: the values by name, and the memory whose content chance decides."""

    grad: bool
    values: dict[int, Tensor] = field(factory=dict)
    _loose: set[int] = field(factory=set)
    _coarse: dict[int, float] = field(factory=dict)

    def run(self, line: Line) -> After:
        """Run one line. Raises what torch raises."""
        with torch.set_grad_enabled(self.grad):
            if isinstance(line, Leaf):
                value = copied(line.value)
                self.values[line.name] = value.requires_grad_() if self.grad and flows(value) else value
                return self._after([], [line.name], (), loose=False)
            if isinstance(line, Move):
                self.values[line.name] = self.values[line.source].clone()
                return self._after([line.source], [line.name], (), loose=self.is_loose(line.source))
            if isinstance(line, Copy):
                self.values[line.name] = WAYS_TO_COPY[line.way](self.values[line.source])
                return self._after([line.source], [line.name], (), loose=self.is_loose(line.source))
            if isinstance(line, Assign):
                self.values[line.target].data = self.values[line.source]
                return self._after([line.source], [line.target], (), loose=self.is_loose(line.source))
            op = op_called(line.op)
            operands = line.operands
            loose = any(map(self.is_loose, operands)) or decided_by_chance(op)
            before = {name: self.values[name].detach().clone() for name in operands}
            tensors, others = call_on(line, self.values)
            for name, tensor in zip(line.names, tensors, strict=True):
                if tensor is not None:
                    self.values[name] = tensor
            # Values change with their memory: with what the schema says is written, and with whatever has changed.
            written = written_names(line)
            written += [n for n, was in before.items() if not has_values_of(self.values[n], was)]
            memory = {memory_of(self.values[name]) for name in written}
            changed = [name for name, value in self.values.items() if memory_of(value) in memory]
            names = [*(n for n in line.names if n in self.values), *changed]
            if not loose and has_failed(op, tensors):
                self._loose.update(self.memory(n) for n in names if self.values[n].dtype != torch.int32)
            return self._after(operands, names, others, loose=loose)

    def _after(self, before: Sequence[int], names: Sequence[int], others: tuple[Any, ...], *, loose: bool) -> After:
        results = dict.fromkeys(names)
        coarse = max([self._coarse.get(memory_of(self.values[n]), 0.0) for n in before], default=0.0)
        tolerance = max([coarse, *(TOLERANCE.get(self.values[n].dtype, 0.0) for n in (*before, *results))])
        for name in results:
            memory = memory_of(self.values[name])
            self._coarse[memory] = max(tolerance, self._coarse.get(memory, 0.0))
            if loose:
                self._loose.add(memory)
        snapshots = {name: copied(self.values[name].detach()) for name in results}
        shaky = frozenset(name for name in results if self.is_loose(name))
        return After(snapshots, others, shaky, tolerance)

    def is_loose(self, name: int) -> bool:
        """Whether chance decides a value."""
        return memory_of(self.values[name]) in self._loose

    def memory(self, name: int) -> int:
        """A key of the memory of a value. Other memory has another key."""
        return memory_of(self.values[name])

    def gradients(self, program: Program) -> dict[int, Tensor | None]:
        """The gradient of each leaf that has one."""
        roots = [self.values[name] for name, _ in program.backward]
        return follow_back(program, self.values, roots, cotangents(program, self.values))


def follow_back(
    program: Program, values: Mapping[int, Any], roots: Sequence[Any], root_gradients: Sequence[Any]
) -> dict[int, Any]:
    """Gradients by the name of the leaf, for plain tensors and for MeshTensors."""
    leaves = [line.name for line in program.lines if isinstance(line, Leaf) and flows(line.value)]
    gradients = torch.autograd.grad(roots, [values[n] for n in leaves], root_gradients, allow_unused=True)
    return dict(zip(leaves, gradients, strict=True))


def cotangents(program: Program, values: Mapping[int, Any]) -> list[Tensor]:
    """The whole gradients of the values that the backward pass starts from."""
    return [made(values[name].shape, values[name].dtype, name) for name, _ in program.backward]


def reference(program: Program) -> tuple[list[After], dict[int, Tensor | None]]:
    """The states of one device after each line, and the gradients."""
    machine = Machine(program.grad)
    with quietly():
        after = [machine.run(line) for line in program.lines]
        return after, machine.gradients(program) if program.backward else {}


@contextmanager
def quietly() -> Iterator[None]:
    """Hide warnings: some sample calls are at the limits of what ops accept, and torch warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def decided_by_chance(op: Op) -> bool:
    """Whether the op draws random numbers, or returns memory that nobody wrote."""
    return torch.Tag.nondeterministic_seeded in op.tags or str(op).split(".")[1].startswith(_UNDEFINED)


def has_failed(op: Op, results: Sequence[Tensor | None]) -> bool:
    """Whether a call of linear algebra says by its result ``info`` that it failed. Torch leaves what it has come to in
    the other results, and says of none that it means anything; integers, such as pivots, are compared all the same.
    """
    of = signature(op).results
    if len(of) != len(results):
        return False
    said = (value for result, value in zip(of, results, strict=True) if result.name in {"info", "infos"})
    return any(bool((value != 0).any()) for value in said if value is not None)


def flows(value: Tensor) -> bool:
    """Whether a leaf of this kind takes part in the backward pass."""
    return value.dtype in (torch.float32, torch.float64)


def filled_in(line: Call, values: Mapping[int, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call with values in place of their names."""
    return [_filled(a, values) for a in line.args], {k: _filled(a, values) for k, a in line.kwargs.items()}


def _filled(argument: Any, values: Mapping[int, Any]) -> Any:
    if isinstance(argument, Value):
        return values[argument.name]
    if isinstance(argument, (list, tuple)):
        return [_filled(part, values) for part in argument]
    return argument


def written_names(line: Call) -> list[int]:
    """The names of the operands that a call writes."""
    op = op_called(line.op)
    named = signature(op)
    names: list[int] = []
    for arg, value in zip(named.args, named.bind(line.args, line.kwargs), strict=True):
        if arg.written:
            names += [v.name for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, Value)]
    return names


def call_on(line: Call, values: Mapping[int, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Tensor results (lists flattened) and other results of a call on these values. Each call seeds torch's generator
    anew.
    """
    op = op_called(line.op)
    torch.manual_seed(1 + sum(line.names) + len(line.op))
    args, kwargs = filled_in(line, values)
    return split_results(op, op(*args, **kwargs))


def has_values_of(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape have the same values; a NaN is the same as a NaN."""
    tensor, other = comparable(tensor.detach()), comparable(other)
    return torch.equal(tensor, other) or torch.allclose(tensor, other, rtol=0, atol=0, equal_nan=True)


def run_alone(line: Call, values: Mapping[int, Tensor]) -> tuple[dict[int, Tensor], tuple[Any, ...]]:
    """Run one call on copies of these values. Returns the copies and the tensor results by name, and other results."""
    own = {name: copied(values[name]) for name in line.operands}
    with torch.no_grad():
        tensors, others = call_on(line, own)
    results = dict(own)
    results |= {name: t for name, t in zip(line.names, tensors, strict=True) if t is not None}
    return results, others
