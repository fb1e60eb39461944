"""One device: runs a program line by line, and keeps the values that the ranks of a mesh are compared with."""

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
from shardwise.testing.programs.program import Call, Leaf, Line, Move, Program, Value, op_called
from shardwise.testing.trial import TOLERANCE, copied, split_results
from shardwise.testing.values import made

__all__ = [
    "After",
    "Machine",
    "call_on",
    "cotangents",
    "decided_by_chance",
    "flows",
    "follow_back",
    "quietly",
    "reference",
    "run_alone",
    "written_names",
]

_UNDEFINED = ("empty", "new_empty")


@frozen(eq=False)
class After:
    """What one line left behind: the values that it made or changed, and its results that are not tensors.

    ``loose`` are the names of values that chance decides, of which the form is all that can be compared;
    ``tolerance`` is the coarsest of what led here.
    """

    values: Mapping[int, Tensor]
    others: tuple[Any, ...]
    loose: frozenset[int]
    tolerance: float


@define(eq=False)
class Machine:
    """One device: the values by name, and which memory chance decides."""

    grad: bool
    values: dict[int, Tensor] = field(factory=dict)
    _loose: set[int] = field(factory=set)
    _coarse: dict[int, float] = field(factory=dict)

    def run(self, line: Line) -> After:
        """Run one line. Raises what torch raises."""
        with torch.set_grad_enabled(self.grad):
            if isinstance(line, Leaf):
                return self._leaf(line)
            if isinstance(line, Move):
                self.values[line.name] = self.values[line.source].clone()
                return self._after([line.source], [line.name], (), loose=self.is_loose(line.source))
            return self._call(line)

    def _leaf(self, line: Leaf) -> After:
        value = copied(line.value)
        self.values[line.name] = value.requires_grad_() if self.grad and flows(value) else value
        return self._after([], [line.name], (), loose=False)

    def _call(self, line: Call) -> After:
        op = op_called(line.op)
        operands = line.operands
        loose = any(map(self.is_loose, operands)) or decided_by_chance(op)
        before = {name: self.values[name].detach().clone() for name in operands}
        tensors, others = call_on(line, self.values)
        for name, tensor in zip(line.names, tensors, strict=True):
            if tensor is not None:
                self.values[name] = tensor
        changed = self._sharing(
            [*written_names(line), *(n for n, was in before.items() if not _same(self.values[n], was))]
        )
        return self._after(operands, [*(n for n in line.names if n in self.values), *changed], others, loose=loose)

    def _sharing(self, written: Sequence[int]) -> list[int]:
        """The names of all values that share memory with what was written: by its schema, or as it shows."""
        memory = {memory_of(self.values[name]) for name in written}
        return [name for name, value in self.values.items() if memory_of(value) in memory]

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
        """Whether chance decides what a value holds."""
        return memory_of(self.values[name]) in self._loose

    def memory(self, name: int) -> int:
        """A key of the memory of a value, which differs from that of other memory."""
        return memory_of(self.values[name])

    def gradients(self, program: Program) -> dict[int, Tensor | None]:
        """The gradient of each leaf that has one."""
        roots = [self.values[name] for name, _ in program.backward]
        return follow_back(program, self.values, roots, cotangents(program, self.values))


def follow_back(
    program: Program, values: Mapping[int, Any], roots: Sequence[Any], given: Sequence[Any]
) -> dict[int, Any]:
    """Gradients by the name of the leaf; both for plain tensors and for those on a mesh."""
    leaves = [line.name for line in program.lines if isinstance(line, Leaf) and flows(line.value)]
    gradients = torch.autograd.grad(roots, [values[n] for n in leaves], given, allow_unused=True)
    return dict(zip(leaves, gradients, strict=True))


def cotangents(program: Program, values: Mapping[int, Any]) -> list[Tensor]:
    """The whole gradients that are given to the values which are followed back."""
    return [made(values[name].shape, values[name].dtype, name) for name, _ in program.backward]


def reference(program: Program) -> tuple[list[After], dict[int, Tensor | None]]:
    """What one device has after each line, and the gradients."""
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
    """Whether the op draws numbers, or hands out memory as it is."""
    return torch.Tag.nondeterministic_seeded in op.tags or str(op).split(".")[1].startswith(_UNDEFINED)


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
    given = named.bind(line.args, line.kwargs)
    names: list[int] = []
    for arg, value in zip(named.args, given, strict=True):
        if arg.written:
            names += [v.name for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, Value)]
    return names


def call_on(line: Call, values: Mapping[int, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Tensor results (lists flattened) and other results of a call on these values; chance starts anew each time."""
    op = op_called(line.op)
    torch.manual_seed(_seed(line))
    args, kwargs = filled_in(line, values)
    return split_results(op, op(*args, **kwargs))


def _same(tensor: Tensor, other: Tensor) -> bool:
    tensor, other = comparable(tensor.detach()), comparable(other)
    return torch.equal(tensor, other) or torch.allclose(tensor, other, rtol=0, atol=0, equal_nan=True)


def _seed(line: Call) -> int:
    return 1 + sum(line.names) + len(line.op)


def run_alone(line: Call, values: Mapping[int, Tensor]) -> tuple[dict[int, Tensor], tuple[Any, ...]]:
    """One call on copies of these values: those afterwards and its tensor results, by name, and its other results."""
    own = {name: copied(values[name]) for name in line.operands}
    with torch.no_grad():
        tensors, others = call_on(line, own)
    results = dict(own)
    results |= {name: t for name, t in zip(line.names, tensors, strict=True) if t is not None}
    return results, others
