"""Draw random programs: calls of registered ops with the arguments of sample calls, on the results of earlier calls."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from shardwise.kernel.factors import has_factors
from shardwise.kernel.placements import REPLICATE, Placement, partial, shard, shard_dim, strided_shard
from shardwise.kernel.reductions import REDUCE_OPS
from shardwise.kernel.rule import AnyRule
from shardwise.kernel.signature import Op, op_name, signature
from shardwise.testing.judge import comparable
from shardwise.testing.partials import can_be_partial
from shardwise.testing.programs.machine import (
    Machine,
    call_on,
    decided_by_chance,
    has_values_of,
    quietly,
    written_names,
)
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
from shardwise.testing.samples import Samples, samples_of
from shardwise.testing.trial import copied, flat_operands, with_operands

__all__ = ["Catalogue", "draw"]

Form = tuple[torch.Size, torch.dtype]

# Tensors are so small that a program takes milliseconds.
_MOST_ELEMENTS = 1200
_MOST_DIMS = 6
# Torch cannot load what it pickles of these, and programs are sent to the ranks.
_WITHOUT_PICKLE = {torch.uint16, torch.uint32, torch.uint64}
# A tolerance is relative to the largest value. Beyond this value it would hide differences in small values.
_LARGEST = 1e5
# The share of copies and of assignments to ``.data``, and that of copies among the two.
_COPIED, _OF_COPIES = 0.06, 0.5
# Tries per call of a program: the op may refuse its operands.
_TRIES = 8
#: How many of the shards are strided, where the size of the dim allows it.
_INSIDE = 0.25
# The shares of moves, of calls that use an earlier value, of other operands that do, of calls with any elementwise op,
# of programs with gradients, and of samples that are chosen by rule and not by op.
# How often a leaf has other strides than a contiguous tensor, and from how many dims on.
_TURNED, _TURNED_DIMS = 0.3, 2
_MOVED, _CONNECTED, _REUSED, _OF_ANY_SHAPE, _WITH_GRAD, _SOME_RULE = 0.12, 0.75, 0.6, 0.3, 0.5, 0.5


@frozen(eq=False)
class _Sample:
    """One sample call: its schema arguments, and its tensor operands."""

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
        """Add the ops of rules with their sample calls (see :func:`shardwise.testing.samples.samples_of`).

        Ops in ``without`` are left out, because they cannot run on the ranks.
        """
        for rule in rules:
            ops = [op for op in rule.ops if op not in without]
            for op in ops:
                if op not in self._by_op:
                    with quietly():
                        self._add_samples(op, samples_of(op, samples))
            with_samples = [op for op in ops if op in self._by_op]
            if with_samples:
                self._by_rule.append(with_samples)

    def _add_samples(self, op: Op, samples: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> None:
        for args, kwargs in samples:
            values = tuple(signature(op).bind(args, kwargs))
            operands = tuple(flat_operands(op, values))
            if not _is_small(operands) or any(isinstance(v, torch.Generator) for v in values):
                continue
            if any(t is not None and t.dtype in _WITHOUT_PICKLE for t in operands):
                continue
            sample = _Sample(op, values, operands)
            self._by_op.setdefault(op, []).append(sample)
            for i, tensor in enumerate(operands):
                if tensor is not None:
                    self._by_form[tensor.shape, tensor.dtype].setdefault(op, []).append((sample, i))
        if op in self._by_op and torch.Tag.pointwise in op.tags:
            self._elementwise.append(op)

    def any_sample(self, rng: random.Random) -> _Sample:
        """A sample of any op. Half of the time all rules are equally likely, and else all ops."""
        ops = rng.choice(self._by_rule) if rng.random() < _SOME_RULE else list(self._by_op)
        return rng.choice(self._by_op[rng.choice(ops)])

    def sample_with(self, value: Tensor, rng: random.Random) -> tuple[_Sample, int] | None:
        """A sample that ``value`` fits, and the index of the operand that it fits. Elementwise ops take any shape."""
        fitting = self._by_form.get((value.shape, value.dtype), {})
        if fitting and rng.random() > _OF_ANY_SHAPE:
            return rng.choice(fitting[rng.choice(list(fitting))])
        sample = rng.choice(self._by_op[rng.choice(self._elementwise)]) if self._elementwise else None
        first = None if sample is None else sample.operands[0]
        return None if sample is None or first is None or first.dtype != value.dtype else (sample, 0)


def _is_small(operands: Sequence[Tensor | None]) -> bool:
    return all(t is None or (t.numel() <= _MOST_ELEMENTS and t.ndim <= _MOST_DIMS) for t in operands)


def draw(catalogue: Catalogue, rng: random.Random, mesh_shape: tuple[int, ...], most_calls: int = 8) -> Program:
    """A program of 1 to ``most_calls`` calls on a mesh of this shape. The same random numbers give the same program."""
    drawing = _Drawing(catalogue, rng, mesh_shape, Machine(grad=rng.random() < _WITH_GRAD))
    calls = rng.randint(1, most_calls)
    with quietly():
        for _ in range(_TRIES * calls):
            if drawing.calls == calls:
                break
            drawing.extend()
        return drawing.program()


@define(eq=False)
class _Drawing:
    """A program while it is drawn. Each of its lines has run on one device."""

    catalogue: Catalogue
    rng: random.Random
    mesh_shape: tuple[int, ...]
    machine: Machine
    lines: list[Line] = field(factory=list)
    calls: int = 0
    _next: int = 0

    def extend(self) -> None:
        """Add a redistribution, or a call with its new leaves. Add nothing if the op refuses its operands."""
        if self.machine.values and self.rng.random() < _MOVED:
            source = self.rng.choice(list(self.machine.values))
            placements = self._placements(self.machine.values[source])
            move = Move(self._name(), source, placements)
            # Autograd refuses to read one of several views after a write to another.
            with suppress(RuntimeError):
                self.machine.run(move)
                self.lines.append(move)
            return
        if self.machine.values and self.rng.random() < _COPIED:
            self._extend_by_copy()
            return
        sample, fixed = self._choose_sample()
        leaves, operands = self._choose_operands(sample, fixed)
        whole = {leaf.name: leaf.value for leaf in leaves} | self.machine.values
        call = self._try_call(sample, operands, whole)
        if call is None or self._overlaps(call, whole) or not _heeds_strides(call, whole):
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

    def _extend_by_copy(self) -> None:
        """Add a copy of a value, or give one value the memory of another."""
        values = self.machine.values
        source = self.rng.choice(list(values))
        # Autograd does not see a write to memory that it has saved through a copy that shares it.
        ways = ["deepcopy"] if self.machine.grad else list(WAYS_TO_COPY)
        line: Line = Copy(self._name(), source, self.rng.choice(ways))
        if not self.machine.grad and self.rng.random() > _OF_COPIES:
            # Not to a tensor with several names: an op may return its operand itself on one device alone.
            targets = [n for n, value in values.items() if [id(v) for v in values.values()].count(id(value)) == 1]
            line = Assign(self.rng.choice(targets or [source]), source)
        try:
            self.machine.run(line)
        except Exception:  # noqa: BLE001  # torch has no copy.copy of some dtypes, and no .data across some
            return
        self.lines.append(line)

    def _name(self) -> int:
        self._next += 1
        return self._next - 1

    def _choose_sample(self) -> tuple[_Sample, dict[int, int]]:
        """A sample, and the names of earlier values that replace operands of it, by index."""
        usable = [name for name, value in self.machine.values.items() if _is_usable(value)]
        if usable and self.rng.random() < _CONNECTED:
            # Late values are chosen more often than early ones.
            name = usable[max(self.rng.randrange(len(usable)), self.rng.randrange(len(usable)))]
            choice = self.catalogue.sample_with(self.machine.values[name], self.rng)
            if choice is not None and _may_replace(choice[0].operands[choice[1]], self.machine.values[name]):
                return choice[0], {choice[1]: name}
        return self.catalogue.any_sample(self.rng), {}

    def _choose_operands(self, sample: _Sample, fixed: Mapping[int, int]) -> tuple[list[Leaf], list[int | None]]:
        """New leaves, and the name of each operand: an earlier value that fits, or a new leaf."""
        leaves: list[Leaf] = []
        operands: list[int | None] = []
        for i, tensor in enumerate(sample.operands):
            if tensor is None:
                operands.append(None)
                continue
            if i in fixed:
                operands.append(fixed[i])
                continue
            same_form = [
                name
                for name, value in self.machine.values.items()
                if value.shape == tensor.shape and value.dtype == tensor.dtype
            ]
            values = self.machine.values
            fitting = [n for n in same_form if _is_usable(values[n]) and _may_replace(tensor, values[n])]
            if fitting and self.rng.random() < _REUSED:
                operands.append(self.rng.choice(fitting))
            else:
                value = self._lay_out(tensor.detach(), any(arg.written for arg in signature(sample.op).args))
                leaves.append(Leaf(self._name(), value, self._placements(tensor)))
                operands.append(leaves[-1].name)
        return leaves, operands

    def _lay_out(self, value: Tensor, is_written: bool) -> Tensor:
        """A copy of a value, now and then with other strides: dims in another order, gaps, or an expanded dim.

        An expanded dim repeats the first element of that dim. An op that writes gets none, and neither do integers:
        which indices an op may be given can depend on where they are.
        """
        if value.ndim < _TURNED_DIMS or not value.is_contiguous() or self.rng.random() > _TURNED:
            return copied(value)
        match self.rng.choice(["channels last", "any order", "gaps", "expanded"]):
            case "channels last":
                order = [0, *range(2, value.ndim), 1]
            case "gaps":
                wide = value.new_zeros([*value.shape[:-1], 2 * value.shape[-1]])
                wide[..., ::2] = value
                return wide[..., ::2]
            case "expanded" if not is_written and value.is_floating_point():
                dim = self.rng.randrange(value.ndim)
                return value.narrow(dim, 0, min(1, value.shape[dim])).clone().expand_as(value)
            case _:
                order = self.rng.sample(range(value.ndim), value.ndim)
        back = sorted(range(len(order)), key=order.__getitem__)
        return value.permute(order).clone(memory_format=torch.contiguous_format).permute(back)

    def _placements(self, value: Tensor) -> tuple[Placement, ...]:
        """Random placements. Half of them are sharded, the others replicated or partial."""
        partials = [partial(kind) for kind in REDUCE_OPS if can_be_partial(kind, value.dtype)]
        shards: list[Placement] = [shard(d) for d in range(value.ndim)] or [REPLICATE]
        kind = self.rng.choice(partials) if partials else REPLICATE
        drawn = tuple(
            self.rng.choice([self.rng.choice(shards), self.rng.choice(shards), REPLICATE, kind])
            for _ in self.mesh_shape
        )
        inside = tuple(self._inside(placement, value) for placement in drawn)
        return inside if has_factors(value.shape, inside, self.mesh_shape) else drawn

    def _inside(self, placement: Placement, value: Tensor) -> Placement:
        """Now and then a strided shard in place of a plain one, where the size of the dim is a product."""
        dim = shard_dim(placement)
        if dim is None or self.rng.random() > _INSIDE:
            return placement
        pieces = [f for f in range(1, value.shape[dim] + 1) if value.shape[dim] % f == 0]
        return strided_shard(dim, self.rng.choice(pieces or [1]))

    def _try_call(self, sample: _Sample, names: Sequence[int | None], whole: Mapping[int, Tensor]) -> Call | None:
        """The call with these operands. It is tried on copies; ``None`` if the op refuses it, or a program must not
        have it.
        """
        by_chance = any(n in self.machine.values and self.machine.is_loose(n) for n in names if n is not None)
        if by_chance and {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(sample.op.tags):
            return None  # its shapes or its plain results would be chance
        if self.machine.grad and signature(sample.op).has_outs:
            return None  # with gradients torch refuses most of these, but not the same ones for a subclass of Tensor
        wrapped = [None if name is None else Value(name) for name in names]
        args, kwargs = signature(sample.op).unbind(with_operands(sample.op, sample.values, wrapped))
        call = Call((), op_name(sample.op), tuple(args), kwargs)
        own = {n: copied(whole[n].detach()) for n in call.operands}
        if any(_is_expanded(own[n]) for n in written_names(call)):
            return None  # some kernels write beyond the memory of such a tensor
        before = {n: (t.shape, t.stride()) for n, t in own.items()}
        try:
            tensors, _ = call_on(call, own)
        except Exception:  # noqa: BLE001  # an op may raise anything for a call that it refuses
            return None
        if not _is_small(tensors) or before != {n: (t.shape, t.stride()) for n, t in own.items()}:
            return None
        return evolve(call, names=tuple(self._name() for _ in tensors))

    def _overlaps(self, call: Call, whole: Mapping[int, Tensor]) -> bool:
        """Whether the call writes memory of another of its operands: then chance decides its results.

        An elementwise op may read the tensor that it writes.
        """
        written = {*written_names(call), *_written_in_silence(call, whole)}
        memory = {name: self.machine.memory(name) for name in call.operands if name in self.machine.values}
        if torch.Tag.pointwise in op_called(call.op).tags and len(written) == 1:
            return any(memory.get(name) == m for name in written for other, m in memory.items() if other != name)
        memories = [memory[name] for name in call.operands if name in memory]
        return any(memories.count(memory[name]) > 1 for name in written if name in memory)

    def program(self) -> Program:
        """The whole program; with gradients, its backward pass starts from the last two values that allow it."""
        program = Program(self.mesh_shape, tuple(self.lines), (), self.machine.grad)
        if not self.machine.grad:
            return program
        roots: dict[int, Tensor] = {}
        for name in (n for line in self.lines if isinstance(line, Call) for n in line.names):
            value = self.machine.values.get(name)
            if value is None or not (value.requires_grad and value.numel() and _is_usable(value)):
                continue
            if not self.machine.is_loose(name):
                roots.setdefault(name, value)
        backward = []
        for name, value in list(roots.items())[-2:]:
            choices = [REPLICATE, *map(shard, range(value.ndim))]
            backward.append((name, tuple(self.rng.choice(choices) for _ in self.mesh_shape)))
        followed = evolve(program, backward=tuple(backward))
        try:
            gradients = self.machine.gradients(followed) if roots else {}
        except Exception:  # noqa: BLE001  # an op has no formula, or a later line overwrote what the formula needs
            return program
        return followed if gradients else program


def _written_in_silence(call: Call, whole: Mapping[int, Tensor]) -> Iterable[int]:
    """The operands that a call changes, such as running statistics, whose schema does not say so for all ops."""
    own = {n: copied(whole[n].detach()) for n in call.operands}
    call_on(call, own)
    return [n for n, tensor in own.items() if not has_values_of(tensor, whole[n])]


def _heeds_strides(call: Call, whole: Mapping[int, Tensor]) -> bool:
    """Whether one device computes the same from contiguous copies. Some kernels read an operand as if it were so, and
    some refuse one that is so.
    """
    if decided_by_chance(op_called(call.op)) or all(whole[n].is_contiguous() for n in call.operands):
        return True
    if "strided" in call.op:
        return True  # which strides the operand has is part of the call
    try:
        turned, _ = call_on(call, {n: copied(whole[n].detach()) for n in call.operands})
        straight, _ = call_on(call, {n: whole[n].detach().clone(memory_format=_ROW_MAJOR) for n in call.operands})
    except Exception:  # noqa: BLE001  # whatever the op raises
        return False
    return all(
        a is None
        or (a.shape == b.shape and torch.allclose(comparable(a), comparable(b), rtol=1e-3, atol=1e-3, equal_nan=True))
        for a, b in zip(turned, straight, strict=True)
    )


_ROW_MAJOR = torch.contiguous_format


def _is_expanded(value: Tensor) -> bool:
    return any(n > 1 and step == 0 for n, step in zip(value.shape, value.stride(), strict=True))


def _is_usable(value: Tensor) -> bool:
    """Whether a value is useful for comparisons: finite, and not so large that it hides differences in other values."""
    value = comparable(value.detach())
    if not (value.is_floating_point() or value.is_complex()) or not value.numel():
        return True
    return bool(value.isfinite().all()) and float(value.abs().max()) < _LARGEST


def _may_replace(operand: Tensor | None, value: Tensor) -> bool:
    """Whether a value may replace an operand of a sample. Integers may be indices, so they must stay in its range."""
    if operand is None or value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool:
        return operand is not None
    if not value.numel():
        return True
    if not operand.numel():
        return False
    # As floating-point numbers: torch has no minimum of the large unsigned integers.
    (low, high), (least, most) = value.double().aminmax(), operand.double().aminmax()
    return bool(low >= least) and bool(high <= most)
