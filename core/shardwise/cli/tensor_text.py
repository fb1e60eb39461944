"""Tensors, dtypes and meshes as they are written on the command line: ``f32[8,6]``, ``bfloat16``, ``2x4``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import click
import torch

from shardwise.errors import CallError
from shardwise.kernel.plurals import counted
from shardwise.kernel.tensor_meta import TensorMeta, dtype_name

__all__ = [
    "DTYPES",
    "TENSOR",
    "mesh_dim_names",
    "mesh_option_shape",
    "read_mesh_shape",
    "read_tensor",
    "words_per_mesh_dim",
]

DTYPES: dict[str, torch.dtype] = {
    name: dtype
    for word, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype)
    for name in (dtype_name(dtype), word, f"torch.{word}")
}
"""Every dtype by its short name, by torch's, and as torch prints it."""

_MOST_ELEMENTS = (1 << 63) - 1

TENSOR = r"[A-Za-z_]\w*\s*\[[^\[\]]*\]"
"""A pattern of what may be a tensor: a word and something in brackets."""


def read_tensor(text: str, asked: str) -> TensorMeta:
    """The row-major tensor that ``f32[8,6]`` stands for; ``f32[]`` has no dims.

    Raises :class:`CallError` for a word that is not a dtype and for sizes that are not numbers; it says what was
    ``asked``.
    """
    word, _, rest = text.partition("[")
    dtype = DTYPES.get(word.strip())
    if dtype is None:
        known = " ".join(dict.fromkeys(map(dtype_name, DTYPES.values())))
        raise CallError(asked=asked, found=f"{word.strip()!r} is not a dtype", do=f"Write one of {known}.", text=text)
    sizes = [size.strip() for size in rest.rstrip("] ").split(",")]
    # A comma at the end is as good in Python.
    sizes = sizes[:-1] if not sizes[-1] else sizes
    if not all(re.fullmatch("[0-9]+", size) for size in sizes):
        raise CallError(asked=asked, found=f"{text!r} has sizes that are not numbers", do="Write f32[8,6].", text=text)
    shape = tuple(map(int, sizes))
    if math.prod(shape) > _MOST_ELEMENTS:
        raise CallError(
            asked=asked, found=f"{text!r} has more elements than torch counts", do="Write f32[8,6].", text=text
        )
    return TensorMeta.contiguous(shape, dtype)


# More than any machine has. The arithmetic of torch's meshes ends somewhere above.
_MOST_RANKS = 1 << 20


def read_mesh_shape(text: str) -> tuple[int, ...] | None:
    """The sizes of the mesh dims of ``2x4``; None for what is not a mesh."""
    words = text.lower().split("x")
    return tuple(map(int, words)) if all(word.isdigit() and int(word) for word in words) else None


def mesh_option_shape(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """The value of a ``--mesh`` option; None where it is not given."""
    if value is None:
        return None
    shape = read_mesh_shape(value)
    if shape is None:
        raise click.BadParameter(f"{value!r} is not a mesh: write 4, 2x2, 2x4x2", ctx, param)
    if math.prod(shape) > _MOST_RANKS:
        raise click.BadParameter(f"a mesh has at most {_MOST_RANKS:,} ranks, and {value!r} more", ctx, param)
    return shape


def words_per_mesh_dim(option: str, text: str | None, mesh_shape: Sequence[int]) -> list[str] | None:
    """The words of an option, one per mesh dim, with commas; None where it is not given."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if len(words) != len(mesh_shape):
        dims = counted(len(mesh_shape), "dim")
        raise click.UsageError(f"{option} has {counted(len(words), 'name')} and the mesh {dims}: give one per mesh dim")
    return words


def mesh_dim_names(text: str | None, mesh_shape: Sequence[int]) -> list[str] | None:
    """The value of a ``--names`` option: a name of its own per mesh dim."""
    words = words_per_mesh_dim("--names", text, mesh_shape)
    for word in words or ():
        if not word.isidentifier() or words.count(word) > 1:  # type: ignore[union-attr]
            what = "stands twice" if word.isidentifier() else "is not a name"
            raise click.UsageError(f"--names {text!r}: {word!r} {what}; write letters, each name once, as in dp,tp")
    return words
