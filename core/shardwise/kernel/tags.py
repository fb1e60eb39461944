"""Tags: where in a program a tensor comes from, in a form that is the same in every step and on every rank.

A call is known by its op, its static arguments and the tags of its operands. The tag of a parameter is its qualified
name without digits, so that equal layers are the same. The tag of a result follows from the op and the tags of its
operands, some ops deep. So a decision about a call holds wherever a program makes that call, and survives control flow,
new batch sizes and a restart. Tags are part of specs only while a program runs by decisions.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from attrs import frozen

from shardwise.kernel.signature import op_name

if TYPE_CHECKING:
    from shardwise.kernel.schema import OpSchema

__all__ = ["DEPTH", "Tag", "call_digest", "tag_of_name", "tag_of_result"]

DEPTH = 4
"""How many ops deep a tag looks. With 4, keys of transformers tell layers' ends from their middles."""


@frozen(cache_hash=True)
class Tag:
    """``levels[k]`` is a digest of what made the tensor, cut off ``k`` ops before it."""

    levels: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.levels[-1]:016x}"


def _digest(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def tag_of_name(name: str, depth: int = DEPTH) -> Tag:
    """The tag of a parameter or buffer by its name. Digits do not count: ``blocks.3.weight`` is ``blocks.#.weight``."""
    return Tag((_digest("name", re.sub(r"\d+", "#", name)),) * (depth + 1))


def tag_of_result(schema: OpSchema, operands: Sequence[Tag | None], index: int, depth: int = DEPTH) -> Tag:
    """The tag of result ``index`` of a call whose operands have these tags, flat. Sizes play no part."""
    op, statics = op_name(schema.op), _statics(schema)
    levels = [_digest(op, index)]
    for k in range(depth):
        below = [None if tag is None else tag.levels[min(k, len(tag.levels) - 1)] for tag in operands]
        levels.append(_digest(op, statics, index, below))
    return Tag(tuple(levels))


def call_digest(schema: OpSchema, operands: Sequence[Tag | None], *, sizes: bool) -> int:
    """A number for a call: its op, its static arguments and the tags of its operands; with or without its sizes."""
    shapes = [None if spec is None else tuple(spec.shape) for spec in schema.specs] if sizes else []
    ndims = [None if spec is None else spec.ndim for spec in schema.specs]
    levels = [None if tag is None else tag.levels[-1] for tag in operands]
    return _digest(op_name(schema.op), _statics(schema, sizes=sizes), levels, ndims, shapes)


def _statics(schema: OpSchema, *, sizes: bool = False) -> list[str]:
    return [
        repr(value)
        for arg, value in zip(schema.signature.args, schema.values, strict=True)
        if arg.name in schema.info.by_value and (sizes or not arg.is_size) and not isinstance(value, torch.device)
    ]
