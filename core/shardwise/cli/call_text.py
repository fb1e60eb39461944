"""A call as it is written on the command line: the name of the op, operands as ``f32[8,16] S(0),R``, arguments."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, frozen

from shardwise.cli.ops import one_of, ops_named
from shardwise.cli.tensor_text import DTYPES, TENSOR, read_tensor
from shardwise.discovery.process import default_registry
from shardwise.errors import CallError, PlacementError
from shardwise.kernel.mesh import Mesh
from shardwise.kernel.placements import parse_placement
from shardwise.kernel.plurals import counted
from shardwise.kernel.signature import Arg, Kind, Op, signature
from shardwise.kernel.spec import TensorSpec
from shardwise.private_torch.ops import schema_of
from shardwise.tools.call_binding import bind_call, call_error

__all__ = ["Operand", "arguments_of", "find_op", "parse_arguments", "parse_operand"]

_OPERAND = re.compile(
    rf"\s*(?:(?P<name>[A-Za-z_]\w*)\s*:)?\s*(?:(?P<none>-)|(?P<tensor>{TENSOR})\s*"
    r"(?:strides?\s*\((?P<strides>[\d,\s]*)\))?\s*(?P<placements>.*))\s*\Z"
)
_LONG_STRIDED = re.compile(r"_StridedShard\((?:dim=)?(-?\d+), *(?:sf=|split_factor=)?(\d+)\)\Z")
_COMMA_BETWEEN = re.compile(r",(?![^()]*\))")
_LONG_PLACEMENT = re.compile(r"(Shard|Replicate|Partial)\((?:\w+=)?['\"]?([\w]*)['\"]?\)\Z")


@frozen
class Operand:
    """A tensor of the call. ``name`` is None if its position decides, ``spec`` is None for an absent operand."""

    name: str | None
    spec: TensorSpec | None


# -- operands --------------------------------------------------------------------------------------------------------


def parse_operand(text: str, mesh: Mesh) -> Operand:
    """Read ``f32[8,16] S(0),R``, with a name in front (``self: ...``) or ``-`` for None.

    ``strides(1,8)`` may stand behind the shape; without it the tensor is row-major. Placements are written as shardwise
    prints them, one per mesh dim, or as torch does. Raises :class:`CallError` or a kind of :class:`PlacementError`.
    """
    match, asked = _OPERAND.match(text), f"read the operand {text!r}"
    if match is None:
        raise CallError(
            asked=asked,
            found="it is not a dtype, a shape and placements",
            do="Write f32[8,16] S(0),R (name: in front where it helps, - for None).",
            operand=text,
        )
    if match["none"]:
        return Operand(match["name"], None)
    meta = read_tensor(match["tensor"], asked)
    if match["strides"] is not None:
        strides = tuple(int(word) for word in match["strides"].split(",") if word.strip())
        if len(strides) != meta.ndim:
            raise CallError(
                asked=asked,
                found=f"{counted(len(strides), 'stride')} for {counted(meta.ndim, 'dim')}",
                do="Give one stride per dim, in elements.",
                operand=text,
            )
        meta = evolve(meta, stride=strides)
    inner = match["placements"].strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1]
    try:
        placements = tuple(parse_placement(_short(word.strip())) for word in _COMMA_BETWEEN.split(inner) if inner)
        return Operand(match["name"], TensorSpec(mesh, placements, meta))
    except PlacementError as error:
        raise type(error)(asked=f"{asked}: {error.asked}", found=error.found, do=error.do, **error.fields) from None


def _short(word: str) -> str:
    """``S(0)`` for ``Shard(0)`` or ``Shard(dim=0)``, and so on."""
    if strided := _LONG_STRIDED.match(word):
        return f"_S({strided[1]}, {strided[2]})"
    match = _LONG_PLACEMENT.match(word)
    if match is None:
        return word
    letter = match[1][0]
    return letter if letter == "R" or not match[2] else f"{letter}({match[2]})"


# -- static arguments ------------------------------------------------------------------------------------------------


def parse_arguments(texts: Sequence[str]) -> dict[str, str]:
    """The texts ``name=value`` by name; the op decides what a value means."""
    arguments = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip().isidentifier():
            raise CallError(
                asked=f"read the argument {text!r}",
                found="it is not name=value",
                do="Write --arg dim=1, --arg 'size=[2, 3]', --arg dtype=bf16.",
            )
        arguments[name.strip()] = value.strip()
    return arguments


def _value(op: Op, arg: Arg, text: str) -> Any:
    """The value of a Python literal, or of a name in torch: a dtype, a layout, a memory format, a device."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        pass
    declared = next(str(a.type) for a in schema_of(op).arguments if a.name == arg.name)
    if text in DTYPES:
        return DTYPES[text]
    word = text.removeprefix("torch.")
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
        raise call_error(op, f"it is given {counted(len(operands), 'operand')}, {len(rest)} more than it takes")
    bind_call(op, (), values)
    return values


def _put(op: Op, arg: Arg, spec: TensorSpec | None, values: dict[str, Any]) -> None:
    if arg.kind is Kind.TENSORS:
        values.setdefault(arg.name, []).append(spec)
    elif arg.kind is Kind.TENSOR and arg.name not in values:
        values[arg.name] = spec
    else:
        fault = "is given twice" if arg.name in values else "is not a tensor: give it with --arg"
        raise call_error(op, f"its argument {arg.name!r} {fault}", argument=arg.name)


# -- the op ----------------------------------------------------------------------------------------------------------


def find_op(text: str, operands: Sequence[Operand], arguments: Mapping[str, str]) -> Op:
    """The op of a name. Without an overload, it is the overload with a rule that the call fits.

    Raises :class:`CallError` if there is not one, or several overloads fit.
    """
    registry = default_registry()
    ops = ops_named(text, registry)

    def takes_call(op: Op) -> bool:
        try:
            arguments_of(op, operands, arguments)
        except CallError:
            return False
        return True

    return one_of(text, [op for op in ops if op in registry] or ops, takes_call)
