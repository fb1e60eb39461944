"""What an op's schema says about its arguments and results, read once per op."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import cache, cached_property
from typing import Any

import torch
from attrs import frozen

from shardwise.errors import RuleError
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.private_torch.ops import OpOverload, draws, is_view_in_place, overload_of, schema_of

__all__ = [
    "Arg",
    "ByType",
    "Call",
    "Kind",
    "Op",
    "Result",
    "Signature",
    "as_op",
    "is_of_tensors",
    "op_name",
    "signature",
]

Op = OpOverload


def as_op(op: Any) -> Op | None:
    """The overload that ``op`` names: itself, or the only one of a custom op or of a packet; else ``None``."""
    return op if isinstance(op, Op) else overload_of(op)


class Kind(Enum):
    """What an argument is to the planner."""

    TENSOR = "tensor"
    TENSORS = "list of tensors"
    BY_VALUE = "static, by value"
    BY_TYPE = "static, by type"


@frozen
class Arg:
    """One argument of an op schema."""

    name: str
    kind: Kind
    kwarg_only: bool
    is_out: bool
    written: bool
    is_list: bool
    has_default: bool
    default: Any
    #: Whether it is a size or an index into a dim, which may be a symbol in a graph; dims and flags are not.
    is_size: bool = False


@frozen
class Result:
    """One return of an op schema; ``name`` is empty where the schema has none.

    ``alias`` is the index of the argument whose memory it shares, if any. ``reseats`` says that the argument itself
    becomes this view of it, as in ``x.t_()``: no element is written.
    """

    is_tensor: bool
    is_list: bool
    alias: int | None
    written: bool
    reseats: bool = False
    name: str = ""


@frozen(eq=False)
class Signature:
    """The arguments and results of one op, in schema order. ``draws`` says that it draws from a generator."""

    name: str
    args: tuple[Arg, ...]
    results: tuple[Result, ...]
    draws: bool

    @cached_property
    def makes_tensors(self) -> bool:
        """Whether a result is a new tensor, neither a view of an argument nor the argument itself."""
        return any(r.is_tensor and r.alias is None for r in self.results)

    @cached_property
    def tensor_args(self) -> tuple[Arg, ...]:
        """Arguments that hold tensors, ``out=`` ones included."""
        return tuple(a for a in self.args if a.kind in (Kind.TENSOR, Kind.TENSORS))

    @cached_property
    def writes(self) -> bool:
        """Whether an argument is written."""
        return any(a.written for a in self.args)

    @cached_property
    def has_lists(self) -> bool:
        """Whether an argument is a list of tensors."""
        return any(a.kind is Kind.TENSORS for a in self.args)

    @cached_property
    def has_outs(self) -> bool:
        """Whether an argument is ``out=``."""
        return any(a.is_out for a in self.args)

    @property
    def positional(self) -> tuple[Arg, ...]:
        return tuple(a for a in self.args if not a.kwarg_only)

    def index(self, name: str) -> int | None:
        return next((i for i, a in enumerate(self.args) if a.name == name), None)

    def starts(self, values: Sequence[Any]) -> list[int]:
        """Per argument, the index of its first tensor among all tensor operands of a call, lists flattened.

        A call of ``cat([x, y], out=z)`` has the tensor operands x, y, z: ``tensors`` starts at 0, ``out`` at 2.
        """
        starts, start = [], 0
        for arg, value in zip(self.args, values, strict=True):
            starts.append(start)
            if arg.kind is Kind.TENSOR:
                start += 1
            elif arg.kind is Kind.TENSORS:
                start += len(value or ())
        return starts

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """One value per schema argument, defaults filled in."""
        return [*args, *(kwargs.get(arg.name, arg.default) for arg in self.args[len(args) :])]

    def unbind(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Undo :meth:`bind`: positional arguments and keyword-only ones."""
        positional = tuple(v for v, a in zip(values, self.args, strict=True) if not a.kwarg_only)
        return positional, {a.name: v for v, a in zip(values, self.args, strict=True) if a.kwarg_only}


# Types whose value seldom changes how an op may be sharded; all other non-tensor arguments are keyed by value.
_BY_TYPE = ("number", "Scalar", "float", "List[number]", "List[float]", "Generator")


@cache
def _kind(type_text: str) -> Kind:
    core = type_text.removeprefix("Optional[").removesuffix("]") if type_text.startswith("Optional[") else type_text
    if core == "Tensor":
        return Kind.TENSOR
    if core in ("List[Tensor]", "List[Optional[Tensor]]"):
        return Kind.TENSORS
    return Kind.BY_TYPE if core in _BY_TYPE else Kind.BY_VALUE


# `Tensor(a)[]`: what the elements of a returned list alias is only in the schema's text.
# `SymInt[] size`: only the schema's text says so.
_SIZE = re.compile(r"SymInt(?:\[\d*\])?\??\s+(\w+)")
_LIST_ALIAS = re.compile(r"Tensor\((\w+)\)\[\]")


# By identity, since hashing an OpOverload runs Python code. Each is kept alive, so that no other one gets its id.
_signatures: dict[int, tuple[Op, Signature]] = {}


def signature(op: Op) -> Signature:
    """The signature of an op, cached for the life of the process."""
    known = _signatures.get(id(op))
    if known is None:
        known = _signatures[id(op)] = op, _read(op)
    return known[1]


def is_of_tensors(op: Op) -> bool:
    """Whether an op takes tensors, none in a list, and returns tensors, none in a list.

    A fraction of :func:`signature`, for rules that pick from many overloads those that they are for.
    """
    schema = schema_of(op)
    taken = {kind for a in schema.arguments if (kind := _kind(str(a.type))) in (Kind.TENSOR, Kind.TENSORS)}
    return taken == {Kind.TENSOR} and all(_kind(str(r.type)) is Kind.TENSOR for r in schema.returns)


def _read(op: Op) -> Signature:
    # Attributes of a schema are made anew at each access, so each is asked for once.
    schema = schema_of(op)
    text, arguments, returns = str(schema), schema.arguments, schema.returns
    aliases_of = [a.alias_info for a in arguments]
    reseats = is_view_in_place(op)
    sizes = set(_SIZE.findall(text)) if "SymInt" in text else ()
    returned = {label for r in returns if (alias := r.alias_info) for label in alias.before_set}
    args = []
    for a, alias in zip(arguments, aliases_of, strict=True):
        name, type_text = a.name, str(a.type)
        kind, is_out, has_default = _kind(type_text), a.is_out, a.has_default_value()
        # A written keyword-only argument may be a state that the op updates: then the op does not return it. ATen's
        # lists of `out=` tensors are results, though their ops return nothing.
        is_result = is_out and (kind is Kind.TENSORS or not returned.isdisjoint(alias.before_set))
        default = a.default_value if has_default else None
        written = bool(alias and alias.is_write) and not reseats
        is_list = "List[" in type_text
        args.append(Arg(name, kind, a.kwarg_only, is_result, written, is_list, has_default, default, name in sizes))
    aliases = {label: i for i, alias in enumerate(aliases_of) if alias for label in alias.before_set}
    in_lists = _LIST_ALIAS.findall(text.rpartition("->")[2])
    results = []
    for r in returns:
        kind, alias = _kind(str(r.type)), r.alias_info
        labels = in_lists if kind is Kind.TENSORS else sorted(alias.before_set) if alias else []
        results.append(
            Result(
                is_tensor=kind in (Kind.TENSOR, Kind.TENSORS),
                is_list=kind is Kind.TENSORS,
                alias=aliases.get(labels[0]) if labels else None,
                written=bool(alias and alias.is_write) and not reseats,
                reseats=reseats,
                name=r.name or "",
            )
        )
    return Signature(op_name(op), tuple(args), tuple(results), draws(op))


def op_name(op: Op) -> str:
    """``aten.mm.default`` for ``torch.ops.aten.mm.default``."""
    return str(op)


class ByType:
    """A static argument that is keyed by its type. A rule cannot read its value."""

    __slots__ = ("name", "type")

    def __init__(self, name: str, of: type) -> None:
        self.name = name
        self.type = of

    def _refuse(self, *_: Any) -> Any:
        raise RuleError(
            asked=f"read the value of argument {self.name!r} in a rule",
            found=f"it is keyed by its type ({self.type.__name__}), so a plan is shared by all its values",
            do=f"Declare it: static=({self.name!r},).",
            argument=self.name,
        )

    __bool__ = __int__ = __float__ = __index__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = _refuse

    def __eq__(self, other: object) -> bool:
        # Two of these are compared by type; any other comparison needs the value.
        if isinstance(other, ByType):
            return self.name == other.name and self.type is other.type
        return bool(self._refuse())

    def __hash__(self) -> int:
        return hash((self.name, self.type))

    def __repr__(self) -> str:
        return f"<{self.name}: {self.type.__name__}>"


@frozen(eq=False)
class Call:
    """One call as a rule sees it: metas in place of tensors, no mesh, no placements.

    ``args`` maps every schema argument to a :class:`TensorMeta`, a tuple of them, ``None``, a static value, or a
    :class:`ByType`. ``outputs`` holds the metas of the tensor results, lists flattened. ``is_position`` marks the call
    of one position of zipped lists: it has one element in place of each list.
    """

    op: Op
    args: Mapping[str, Any]
    outputs: tuple[TensorMeta | None, ...]
    is_position: bool = False

    @cached_property
    def signature(self) -> Signature:
        return signature(self.op)

    def _tensors(self) -> Iterator[tuple[str, TensorMeta | None, bool]]:
        for arg in self.signature.tensor_args:
            value = self.args[arg.name]
            if arg.kind is Kind.TENSORS and not self.is_position:
                yield from ((f"{arg.name}[{i}]", meta, arg.is_out) for i, meta in enumerate(value or ()))
            else:
                yield arg.name, value, arg.is_out

    @cached_property
    def length(self) -> int:
        """Positions of the tensor lists of a zipped call: the length of the longest list."""
        lists = (self.args[a.name] for a in self.signature.tensor_args if a.kind is Kind.TENSORS)
        return max((len(value) for value in lists if value), default=0)

    def position(self, i: int) -> Call:
        """The call of one position of the zipped lists: element ``i`` in place of a list, ``None`` of an empty one."""
        args = dict(self.args)
        for arg in self.signature.tensor_args:
            if arg.kind is Kind.TENSORS:
                args[arg.name] = args[arg.name][i] if args[arg.name] else None
        lists = len(self.outputs) // self.length  # an empty list has no results either
        outputs = tuple(self.outputs[k * self.length + i] for k in range(lists))
        return Call(self.op, args, outputs, is_position=True)

    @cached_property
    def operands(self) -> tuple[TensorMeta | None, ...]:
        """Metas of all tensor arguments in schema order, lists flattened, ``out=`` excluded."""
        if not self.signature.has_outs and not self.signature.has_lists:
            return tuple([self.args[arg.name] for arg in self.signature.tensor_args])
        return tuple(meta for _, meta, is_out in self._tensors() if not is_out)

    @cached_property
    def operand_names(self) -> tuple[str, ...]:
        """The names that go with :attr:`operands`: ``self``, ``tensors[0]``."""
        return tuple(name for name, _, is_out in self._tensors() if not is_out)

    @cached_property
    def out_operands(self) -> tuple[TensorMeta | None, ...]:
        """Metas of the ``out=`` tensors."""
        if not self.signature.has_outs:
            return ()
        return tuple(meta for _, meta, is_out in self._tensors() if is_out)

    def __str__(self) -> str:
        shown = ", ".join("-" if m is None else str(m) for m in self.operands)
        return f"{op_name(self.op)}({shown})"


def scalar_type(value: Any) -> type:
    """What a key holds of an argument that is keyed by its type."""
    return torch.SymInt if isinstance(value, torch.SymInt) else type(value)
