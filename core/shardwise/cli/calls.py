"""A call as it is written on the command line: the op's name, its operands as ``f32[8,16] S(0),R``, its arguments."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from attrs import frozen
from torch._ops import OpOverloadPacket

from shardwise.discovery import default_registry
from shardwise.errors import CallError
from shardwise.explanation import bind_call, call_error
from shardwise.placements import Placement, parse_placement
from shardwise.private_torch import schema_of
from shardwise.signature import Arg, Kind, Op, op_name, signature
from shardwise.spec import Mesh, TensorMeta, TensorSpec, dtype_name

__all__ = ["Operand", "arguments_of", "find_op", "parse_arguments", "parse_operand"]

_OPERAND = re.compile(
    r"\s*(?:(?P<name>[A-Za-z_]\w*)\s*:)?\s*"
    r"(?:(?P<none>-)|(?P<dtype>\w+)\s*\[(?P<shape>[\d,\s]*)\]\s*"
    r"(?:strides?\s*\((?P<strides>[\d,\s]*)\))?\s*(?P<placements>.*))\s*\Z"
)
_DTYPES = {
    name: dtype
    for word, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype)
    for name in (word, dtype_name(dtype))
}
_LONG_PLACEMENT = re.compile(r"(Shard|Replicate|Partial)\((?:\w+=)?['\"]?([\w]*)['\"]?\)\Z")


@frozen
class Operand:
    """A tensor of the call; ``name`` is None where its place decides, ``spec`` where it is absent."""

    name: str | None
    spec: TensorSpec | None


# -- operands --------------------------------------------------------------------------------------------------------


def parse_operand(text: str, mesh: Mesh) -> Operand:
    """Read ``f32[8,16] S(0),R``, with a name in front (``self: ...``) or ``-`` for None.

    ``strides(1,8)`` may stand behind the shape; without it the tensor is row-major. Placements are written as shardwise
    prints them, one per mesh dim, or as torch does. Raises :class:`CallError` or a kind of :class:`PlacementError`.
    """
    found = _OPERAND.match(text)
    if found is None or (found["dtype"] and found["dtype"] not in _DTYPES):
        known = " ".join(sorted({dtype_name(d) for d in _DTYPES.values() if not d.is_floating_point or d.itemsize > 1}))
        raise CallError(
            asked=f"read the operand {text!r}",
            found="it is not a dtype, a shape and placements" if found is None else f"there is no {found['dtype']}",
            do=f"Write f32[8,16] S(0),R (name: in front where it helps, - for None). Dtypes: {known}.",
            operand=text,
        )
    if found["none"]:
        return Operand(found["name"], None)
    shape, dtype = _ints(found["shape"]), _DTYPES[found["dtype"]]
    meta = TensorMeta.contiguous(shape, dtype)
    if found["strides"] is not None:
        meta = TensorMeta(shape, _ints(found["strides"]), dtype)
    if len(meta.stride) != meta.ndim:
        raise CallError(
            asked=f"read the operand {text!r}",
            found=f"{len(meta.stride)} strides for {meta.ndim} dims",
            do="Give one stride per dim, in elements.",
            operand=text,
        )
    return Operand(found["name"], TensorSpec(mesh, tuple(_placements(found["placements"])), meta))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",") if word.strip())


def _placements(text: str) -> list[Placement]:
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1]
    return [parse_placement(_short(word.strip())) for word in inner.split(",")] if inner else []


def _short(word: str) -> str:
    """``S(0)`` for ``Shard(0)`` or ``Shard(dim=0)``, and so on."""
    found = _LONG_PLACEMENT.match(word)
    if found is None:
        return word
    letter = found[1][0]
    return letter if letter == "R" or not found[2] else f"{letter}({found[2]})"


# -- static arguments ------------------------------------------------------------------------------------------------


def parse_arguments(texts: Sequence[str]) -> dict[str, str]:
    """``name=value`` as given, by name; what a value means depends on the op."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip().isidentifier():
            raise CallError(
                asked=f"read the argument {text!r}",
                found="it is no name=value",
                do="Write --arg dim=1, --arg 'size=[2, 3]', --arg dtype=bf16.",
            )
        found[name.strip()] = value.strip()
    return found


def _value(op: Op, arg: Arg, text: str) -> Any:
    """A Python literal, or what torch has under a name: a dtype, a layout, a memory format, a device."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        pass
    declared = next(str(a.type) for a in schema_of(op).arguments if a.name == arg.name)
    word = text.removeprefix("torch.")
    if word in _DTYPES:
        return _DTYPES[word]
    if isinstance(getattr(torch, word, None), (torch.layout, torch.memory_format)):
        return getattr(torch, word)
    if "Device" in declared:
        return torch.device(text)
    if "str" in declared:
        return text
    raise call_error(op, f"{arg.name}={text} is neither a Python literal nor a dtype", argument=arg.name)


# -- the call --------------------------------------------------------------------------------------------------------


def arguments_of(op: Op, operands: Sequence[Operand], arguments: Mapping[str, str]) -> dict[str, Any]:
    """The call's arguments by name; operands without a name go to the tensor arguments in schema order.

    Raises :class:`CallError` for what the op's schema does not allow.
    """
    declared = {a.name: a for a in signature(op).args}
    unknown = [n for n in (*arguments, *(o.name for o in operands)) if n is not None and n not in declared]
    if unknown:
        raise call_error(op, f"it has no argument {unknown[0]!r}", argument=unknown[0])
    values = {name: _value(op, declared[name], text) for name, text in arguments.items()}
    for operand in operands:
        if operand.name is not None:
            _put(op, declared[operand.name], operand.spec, values)
    rest = [o.spec for o in operands if o.name is None]
    for arg in signature(op).tensor_args:
        if rest and arg.name not in values and not arg.is_out:
            count = len(rest) if arg.kind is Kind.TENSORS else 1
            for spec in rest[:count]:
                _put(op, arg, spec, values)
            rest = rest[count:]
    if rest:
        raise call_error(op, f"{len(operands)} operands are given, {len(rest)} more than it takes")
    bind_call(op, (), values)
    return values


def _put(op: Op, arg: Arg, spec: TensorSpec | None, values: dict[str, Any]) -> None:
    if arg.kind is Kind.TENSORS:
        values.setdefault(arg.name, []).append(spec)
    elif arg.kind is Kind.TENSOR and arg.name not in values:
        values[arg.name] = spec
    else:
        found = "is given twice" if arg.name in values else "is no tensor: give it with --arg"
        raise call_error(op, f"its argument {arg.name!r} {found}", argument=arg.name)


# -- the op ----------------------------------------------------------------------------------------------------------


def find_op(text: str, operands: Sequence[Operand], arguments: Mapping[str, str]) -> Op:
    """The op of a name: ``aten.mm.default``, ``aten::mm``, ``mm``; without an overload, the one that the call fits.

    Raises :class:`CallError` when there is none, or when several overloads could be meant.
    """
    found = _overloads(text)
    if not found:
        raise _unknown(text)
    if len(found) == 1:
        return found[0]
    registry = default_registry()
    ruled = [op for op in found if op in registry] or found
    fitting = [op for op in ruled if _fits(op, operands, arguments)]
    if len(fitting) == 1:
        return fitting[0]
    default = [op for op in fitting or ruled if op_name(op).endswith(".default")]
    if default:
        return default[0]
    ruled = fitting or ruled
    shown = "".join(f"\n  {op_name(op)}: {schema_of(op)}" for op in ruled)
    raise CallError(
        asked=f"explain a call of {text}",
        found=f"{'several' if fitting else 'none'} of its overloads fit{'s' * (not fitting)} the operands",
        do=f"Name one of them:{shown}",
        op=text,
        overloads=tuple(map(op_name, ruled)),
    )


def _fits(op: Op, operands: Sequence[Operand], arguments: Mapping[str, str]) -> bool:
    try:
        arguments_of(op, operands, arguments)
    except CallError:
        return False
    return True


def _overloads(text: str) -> list[Op]:
    """Every overload that the name may stand for."""
    words = text.replace("::", ".").split(".")
    if len(words) == 1:
        spaces = dict.fromkeys(["aten", *(entry.op.namespace for entry in default_registry().ops())])
        tries: list[tuple[str, str, str | None]] = [(space, words[0], None) for space in spaces]
    elif len(words) == 2:  # noqa: PLR2004  # namespace.op or op.overload
        tries = [(words[0], words[1], None), ("aten", words[0], words[1])]
    else:
        tries = [(words[0], words[1], ".".join(words[2:]))]
    for space, name, overload in tries:
        packet = getattr(getattr(torch.ops, space), name, None)
        if isinstance(packet, OpOverloadPacket):
            return [getattr(packet, o) for o in packet.overloads() if overload in (None, o)]  # type: ignore[no-untyped-call]
    return []


def _unknown(text: str) -> CallError:
    known = {op_name(e.op).removesuffix(".default") for e in default_registry().ops()}
    near = get_close_matches(text, [*known, *(n.split(".", 1)[1] for n in known)], 3)
    return CallError(
        asked=f"explain a call of {text}",
        found="torch has no such op" + (f"; near to it: {', '.join(near)}" if near else ""),
        do="`shardwise rules` lists the ops that have rules; --import MODULE imports what defines an op.",
        op=text,
    )
