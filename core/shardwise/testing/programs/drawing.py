"""Drawing programs: calls of registered ops with the arguments of sample calls, on the results of earlier calls."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from shardwise.kernel.placements import REPLICATE, Placement, partial, shard
from shardwise.kernel.reductions import REDUCE_OPS
from shardwise.kernel.rule import AnyRule
from shardwise.kernel.signature import Op, op_name, signature
from shardwise.testing.judge import comparable
from shardwise.testing.partials import can_be_partial
from shardwise.testing.programs.machine import Machine, call_on, quietly, written_names
from shardwise.testing.programs.program import Call, Leaf, Line, Move, Program, Value, op_called
from shardwise.testing.samples import Samples, samples_of
from shardwise.testing.trial import copied, flat_operands, with_operands

__all__ = ["Catalogue", "draw"]

Form = tuple[torch.Size, torch.dtype]

# Small enough that a program takes milliseconds.
_MOST_ELEMENTS = 1200
_MOST_DIMS = 6
# Beyond this a tolerance that is relative to the largest value would hide what is small.
_LARGEST = 1e5
# Tries per line of a program: the op may refuse its operands.
_TRIES = 8
_MOVED, _CONNECTED, _REUSED, _OF_ANY_SHAPE, _WITH_GRAD, _SOME_RULE = 0.12, 0.75, 0.6, 0.3, 0.5, 0.5


@frozen(eq=False)
class _Sample:
    """One sample call, its tensor operands apart."""

    op: Op
    values: tuple[Any, ...]
    operands: tuple[Tensor | None, ...]


@define(eq=False)
class Catalogue:
    """The sample calls of all ops that programs are made of, by op and by the form of each operand."""

    _by_rule: list[list[Op]] = field(factory=list)
    _by_op: dict[Op, list[_Sample]] = field(factory=dict)
    _by_form: dict[Form, dict[Op, list[tuple[_Sample, int]]]] = field(factory=lambda: defaultdict(dict))
    _elementwise: list[Op] = field(factory=list)

    @property
    def ops(self) -> list[Op]:
        """All ops that may be called."""
        return list(self._by_op)

    def add(self, rules: Iterable[AnyRule], samples: Samples, without: Collection[Op] = ()) -> None:
        """Add the ops of rules with their sample calls (see :func:`shardwise.testing.samples.samples_of`), but for
        those that cannot run on the ranks.
        """
        for rule in rules:
            ops = [op for op in rule.ops if op not in without]
            with quietly():
                known = [op for op in ops if op in self._by_op or self._add(op, samples_of(op, samples))]
            if known:
                self._by_rule.append(known)

    def _add(self, op: Op, samples: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> bool:
        for args, kwargs in samples:
            values = tuple(signature(op).bind(args, kwargs))
            operands = tuple(flat_operands(op, values))
            if not _is_small(operands) or any(isinstance(v, torch.Generator) for v in values):
                continue
            sample = _Sample(op, values, operands)
            self._by_op.setdefault(op, []).append(sample)
            for i, tensor in enumerate(operands):
                if tensor is not None:
                    self._by_form[tensor.shape, tensor.dtype].setdefault(op, []).append((sample, i))
        if op in self._by_op and torch.Tag.pointwise in op.tags:
            self._elementwise.append(op)
        return op in self._by_op

    def any_sample(self, rng: random.Random) -> _Sample:
        """A sample of any op: of each rule as often as of each other, or of each op."""
        ops = rng.choice(self._by_rule) if rng.random() < _SOME_RULE else list(self._by_op)
        return rng.choice(self._by_op[rng.choice(ops)])

    def sample_with(self, value: Tensor, rng: random.Random) -> tuple[_Sample, int] | None:
        """A sample with an operand of the form of ``value``, and which; elementwise ops take any shape."""
        fitting = self._by_form.get((value.shape, value.dtype), {})
        if fitting and rng.random() > _OF_ANY_SHAPE:
            return rng.choice(fitting[rng.choice(list(fitting))])
        sample = rng.choice(self._by_op[rng.choice(self._elementwise)]) if self._elementwise else None
        first = None if sample is None else sample.operands[0]
        return None if sample is None or first is None or first.dtype != value.dtype else (sample, 0)


def _is_small(operands: Sequence[Tensor | None]) -> bool:
    return all(t is None or (t.numel() <= _MOST_ELEMENTS and t.ndim <= _MOST_DIMS) for t in operands)


def draw(catalogue: Catalogue, rng: random.Random, mesh_shape: tuple[int, ...], most_calls: int = 8) -> Program:
    """A program of 1 to ``most_calls`` calls on a mesh of this shape, the same for the same random numbers."""
    drawing = _Drawing(catalogue, rng, mesh_shape, Machine(grad=rng.random() < _WITH_GRAD))
    wanted = rng.randint(1, most_calls)
    with quietly():
        for _ in range(_TRIES * wanted):
            if drawing.calls == wanted:
                break
            drawing.extend()
        return drawing.program()


@define(eq=False)
class _Drawing:
    """A program while it is drawn; every line has run on one device."""

    catalogue: Catalogue
    rng: random.Random
    mesh_shape: tuple[int, ...]
    machine: Machine
    lines: list[Line] = field(factory=list)
    calls: int = 0
    _next: int = 0

    def extend(self) -> None:
        """Add a redistribution, or a call with its new leaves; nothing where the op refuses its operands."""
        if self.machine.values and self.rng.random() < _MOVED:
            source = self.rng.choice(list(self.machine.values))
            placements = self._placements(self.machine.values[source])
            self._run(Move(self._name(), source, placements))
            return
        sample, fixed = self._sample()
        leaves, chosen = self._operands(sample, fixed)
        whole = {leaf.name: leaf.value for leaf in leaves} | self.machine.values
        call = self._call(sample, chosen, whole)
        if call is None or self._overlaps(call):
            return
        try:
            lines: list[Line] = [*leaves, call]
            for line in lines:
                self.machine.run(line)
        except Exception:  # noqa: BLE001  # autograd refuses some calls that the op itself takes
            for line in leaves:
                self.machine.values.pop(line.name, None)
            return
        self.lines += [*leaves, call]
        self.calls += 1

    def _run(self, line: Line) -> None:
        self.machine.run(line)
        self.lines.append(line)

    def _name(self) -> int:
        self._next += 1
        return self._next - 1

    def _sample(self) -> tuple[_Sample, dict[int, int]]:
        """A sample, and the earlier values that stand for some of its operands (index -> name)."""
        usable = [name for name, value in self.machine.values.items() if _is_usable(value)]
        if usable and self.rng.random() < _CONNECTED:
            # Late ones more often than early ones.
            name = usable[max(self.rng.randrange(len(usable)), self.rng.randrange(len(usable)))]
            choice = self.catalogue.sample_with(self.machine.values[name], self.rng)
            if choice is not None and _may_replace(choice[0].operands[choice[1]], self.machine.values[name]):
                return choice[0], {choice[1]: name}
        return self.catalogue.any_sample(self.rng), {}

    def _operands(self, sample: _Sample, fixed: Mapping[int, int]) -> tuple[list[Leaf], list[int | None]]:
        """Names for the operands: of earlier values where they fit, else of new leaves, which are given, too."""
        leaves: list[Leaf] = []
        chosen: list[int | None] = []
        for i, tensor in enumerate(sample.operands):
            if tensor is None:
                chosen.append(None)
            elif i in fixed:
                chosen.append(fixed[i])
            else:
                alike = [n for n, v in self.machine.values.items() if _is_alike(tensor, v)]
                if alike and self.rng.random() < _REUSED:
                    chosen.append(self.rng.choice(alike))
                else:
                    leaves.append(Leaf(self._name(), copied(tensor.detach()), self._placements(tensor)))
                    chosen.append(leaves[-1].name)
        return leaves, chosen

    def _placements(self, value: Tensor) -> tuple[Placement, ...]:
        """Random placements: sharded as often as replicated and partial together."""
        partials = [partial(kind) for kind in REDUCE_OPS if can_be_partial(kind, value.dtype)]
        shards: list[Placement] = [shard(d) for d in range(value.ndim)] or [REPLICATE]
        kind = self.rng.choice(partials) if partials else REPLICATE
        return tuple(
            self.rng.choice([self.rng.choice(shards), self.rng.choice(shards), REPLICATE, kind])
            for _ in self.mesh_shape
        )

    def _call(self, sample: _Sample, chosen: Sequence[int | None], whole: Mapping[int, Tensor]) -> Call | None:
        """The call, tried on copies; ``None`` where the op refuses it or does what a program is not to do."""
        by_chance = any(n in self.machine.values and self.machine.is_loose(n) for n in chosen if n is not None)
        if by_chance and _looks_at_values(sample.op):
            return None
        if self.machine.grad and any(arg.is_out for arg in signature(sample.op).args):
            return None  # with gradients torch refuses most of these, and not the same ones on tensors of a subclass
        wrapped = [None if name is None else Value(name) for name in chosen]
        args, kwargs = signature(sample.op).unbind(with_operands(sample.op, sample.values, wrapped))
        call = Call((), op_name(sample.op), tuple(args), kwargs)
        own = {n: copied(whole[n].detach()) for n in call.operands}
        before = {n: (t.shape, t.stride()) for n, t in own.items()}
        try:
            tensors, _ = call_on(call, own)
        except Exception:  # noqa: BLE001  # whatever an op raises for a call that it does not take
            return None
        if not _is_small(tensors) or before != {n: (t.shape, t.stride()) for n, t in own.items()}:
            return None
        return evolve(call, names=tuple(self._name() for _ in tensors))

    def _overlaps(self, call: Call) -> bool:
        """Whether the call writes memory that another of its operands has: what comes out then is chance.

        An elementwise op may read the very tensor that it writes.
        """
        written = written_names(call)
        memory = {name: self.machine.memory(name) for name in call.operands if name in self.machine.values}
        if torch.Tag.pointwise in op_called(call.op).tags and len(written) == 1:
            return any(memory.get(name) == m for name in written for other, m in memory.items() if other != name)
        memories = [memory[name] for name in call.operands if name in memory]
        return any(memories.count(memory[name]) > 1 for name in written if name in memory)

    def program(self) -> Program:
        """All of it, with the values that are followed back."""
        program = Program(self.mesh_shape, tuple(self.lines), (), self.machine.grad)
        return self._with_backward(program) if self.machine.grad else program

    def _can_follow(self, name: int) -> bool:
        value = self.machine.values[name]
        return value.requires_grad and value.numel() > 0 and _is_usable(value) and not self.machine.is_loose(name)

    def _cotangent_placements(self, name: int) -> tuple[Placement, ...]:
        choices = [REPLICATE, *map(shard, range(self.machine.values[name].ndim))]
        return tuple(self.rng.choice(choices) for _ in self.mesh_shape)

    def _with_backward(self, program: Program) -> Program:
        made = [n for line in self.lines if isinstance(line, Call) for n in line.names if n in self.machine.values]
        roots = list(dict.fromkeys(n for n in made if self._can_follow(n)))[-2:]
        followed = evolve(program, backward=tuple((n, self._cotangent_placements(n)) for n in roots))
        try:
            gradients = self.machine.gradients(followed) if roots else {}
        except Exception:  # noqa: BLE001  # no formula, or what it needs was overwritten
            return program
        return followed if gradients else program


def _looks_at_values(op: Op) -> bool:
    return torch.Tag.dynamic_output_shape in op.tags or torch.Tag.data_dependent_output in op.tags


def _is_usable(value: Tensor) -> bool:
    """Whether a value is useful for comparisons: finite, and not so large that it hides differences in other values."""
    value = comparable(value.detach())
    if not (value.is_floating_point() or value.is_complex()) or not value.numel():
        return True
    return bool(value.isfinite().all()) and float(value.abs().max()) < _LARGEST


def _is_alike(wanted: Tensor, value: Tensor) -> bool:
    return (
        value.shape == wanted.shape
        and value.dtype == wanted.dtype
        and _is_usable(value)
        and _may_replace(wanted, value)
    )


def _may_replace(wanted: Tensor | None, value: Tensor) -> bool:
    """Integers may be indices: they stay in the range of those that the op was given."""
    if wanted is None or value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool:
        return wanted is not None
    if not value.numel():
        return True
    return bool(wanted.numel()) and bool(value.min() >= wanted.min()) and bool(value.max() <= wanted.max())
