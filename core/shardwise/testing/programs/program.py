"""Programs as data: tensors on a mesh, the calls that follow, and redistributions between them.

A program names its values by numbers. ``str(program)`` is a Python expression that makes it again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from shardwise.discovery.process import default_registry
from shardwise.kernel.placements import Partial, Placement, Shard, StridedShard
from shardwise.kernel.signature import Op
from shardwise.testing.exact_parts import few_digits
from shardwise.testing.judge import comparable
from shardwise.testing.values import made

__all__ = [
    "WAYS_TO_COPY",
    "Assign",
    "Call",
    "Copy",
    "Leaf",
    "Line",
    "Move",
    "Program",
    "Value",
    "drawn",
    "is_drawn",
    "leaf",
    "op_called",
    "operands_of",
]


@frozen
class Value:
    """The value of that number, as an argument of a call."""

    name: int

    def __repr__(self) -> str:
        return f"Value({self.name})"


@frozen(eq=False)
class Leaf:
    """A whole tensor that is put on the mesh: partial pieces are random, the same for the same name.

    The value of a partial leaf is rounded to so few digits that its pieces are it exactly. So what compares bits, or
    jumps, gives the ranks what it gives one device.
    """

    name: int
    value: Tensor
    placements: tuple[Placement, ...]

    def __attrs_post_init__(self) -> None:
        if any(isinstance(placement, Partial) for placement in self.placements):
            object.__setattr__(self, "value", few_digits(self.value))

    @property
    def names(self) -> tuple[int, ...]:
        return (self.name,)

    def __str__(self) -> str:
        value, turned = self.value, ""
        if is_drawn(self):
            return f"drawn({self.name}, {tuple(value.shape)}, {value.dtype}, {_shown(self.placements)})"
        if not value.is_contiguous():
            turned = f", stride={tuple(value.stride())}"
        form = f"{value.dtype}, {_shown(self.placements)}, {tuple(value.shape)}{turned}"
        return f"leaf({self.name}, {value.tolist()}, {form})"


def leaf(
    name: int,
    values: Any,
    dtype: torch.dtype,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
) -> Leaf:
    """A :class:`Leaf` of nested lists, of that shape (which says more than empty lists) and those strides."""
    value = torch.tensor(values, dtype=dtype).reshape(tuple(shape))
    if stride is not None and 0 in stride:
        for dim in (d for d, step in enumerate(stride) if step == 0):
            value = value.narrow(dim, 0, min(1, value.shape[dim]))
        value = value.expand(tuple(shape))
    elif stride is not None:
        value = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype).copy_(value)
    return Leaf(name, value, tuple(placements))


def drawn(name: int, shape: Sequence[int], dtype: torch.dtype, placements: Sequence[Placement]) -> Leaf:
    """A :class:`Leaf` of random values, which its name decides."""
    return Leaf(name, made(shape, dtype, name), tuple(placements))


def is_drawn(line: Leaf) -> bool:
    """Whether :func:`drawn` makes this leaf."""
    other = drawn(line.name, line.value.shape, line.value.dtype, line.placements)
    return line.value.is_contiguous() and torch.equal(comparable(line.value), comparable(other.value))


@frozen(eq=False)
class Move:
    """A redistribution of a value, which makes a new one; on one device a copy."""

    name: int
    source: int
    placements: tuple[Placement, ...]

    @property
    def names(self) -> tuple[int, ...]:
        return (self.name,)

    def __str__(self) -> str:
        return f"Move({self.name}, {self.source}, {_shown(self.placements)})"


@frozen(eq=False)
class Copy:
    """A value copied by ``copy.copy`` or ``copy.deepcopy``, or taken as its ``.data``; see :data:`WAYS_TO_COPY`."""

    name: int
    source: int
    way: str

    @property
    def names(self) -> tuple[int, ...]:
        return (self.name,)

    def __str__(self) -> str:
        return f'Copy({self.name}, {self.source}, "{self.way}")'


WAYS_TO_COPY: Mapping[str, Callable[[Tensor], Tensor]] = {
    "copy": lambda tensor: copy.copy(tensor.detach()),
    "deepcopy": lambda tensor: copy.deepcopy(tensor.detach()),
    "data": lambda tensor: tensor.data,
}


@frozen(eq=False)
class Assign:
    """``target.data = source``: from now on the target has the memory and the form of the source."""

    target: int
    source: int

    @property
    def names(self) -> tuple[int, ...]:
        return ()

    def __str__(self) -> str:
        return f"Assign({self.target}, {self.source})"


@frozen(eq=False)
class Call:
    """A call of an op overload (``aten.add.Tensor``); ``names`` are those of its tensor results, lists flattened.

    Tensors among the arguments are :class:`Value`.
    """

    names: tuple[int, ...]
    op: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(factory=dict)

    def __str__(self) -> str:
        named = "" if not self.kwargs else f", {dict(self.kwargs)!r}"
        return f'Call({self.names}, "{self.op}", {self.args!r}{named})'

    @property
    def operands(self) -> list[int]:
        """The names of the values that it takes, in order."""
        return list(_names_in([*self.args, *self.kwargs.values()]))


Line = Leaf | Move | Copy | Assign | Call


def operands_of(line: Line) -> list[int]:
    """The names of the values that a line needs."""
    match line:
        case Call():
            return line.operands
        case Move() | Copy():
            return [line.source]
        case Assign():
            return [line.target, line.source]
        case Leaf():
            return []


@frozen(eq=False)
class Program:
    """Lines in order on a mesh of this shape, and the values whose gradients are followed back, if any.

    ``backward`` has the names of those values and where the gradients that are given to them lie.
    """

    mesh_shape: tuple[int, ...]
    lines: tuple[Line, ...]
    backward: tuple[tuple[int, tuple[Placement, ...]], ...] = ()
    grad: bool = False

    def __str__(self) -> str:
        lines = "".join(f"        {line},\n" for line in self.lines)
        pairs = "".join(f"({name}, {_shown(placements)}), " for name, placements in self.backward)
        rest = f"    backward=({pairs}),\n" if pairs else ""
        rest += "    grad=True,\n" if self.grad else ""
        return f"Program(\n    {self.mesh_shape},\n    (\n{lines}    ),\n{rest})"

    @property
    def calls(self) -> list[Call]:
        return [line for line in self.lines if isinstance(line, Call)]


def _shown(placements: Sequence[Placement]) -> str:
    inner = ", ".join(map(_shown_placement, placements))
    return f"({inner}{',' if len(placements) == 1 else ''})"


def _shown_placement(placement: Placement) -> str:
    if isinstance(placement, StridedShard):
        return f"_StridedShard({placement.dim}, split_factor={placement.split_factor})"
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})"
    return f'Partial("{placement.reduce_op}")' if isinstance(placement, Partial) else "Replicate()"


def _names_in(value: Any) -> Iterator[int]:
    if isinstance(value, Value):
        yield value.name
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _names_in(part)


def op_called(name: str) -> Op:
    """The overload of a name such as ``aten.add.Tensor``. Plugins are loaded, since they may define it, or what they
    import.
    """
    registry = default_registry()
    namespace, base, overload = name.split(".")
    if not hasattr(getattr(torch.ops, namespace), base):
        registry.read_modules()
    op: Op = getattr(getattr(getattr(torch.ops, namespace), base), overload)
    return op
