"""Sample calls as text: ``f32[8,6], i64[5] < 8, [f32[4], f32[4]], 1, keepdim=True``."""

from __future__ import annotations

import ast
import re
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from shardwise.errors import ShardingError
from shardwise.spec import dtype_name
from shardwise.testing.samples import Sample

__all__ = ["SampleTextError", "read_sample"]

_DTYPES = {dtype_name(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_NO_DIMS = re.compile(r"\b([a-z]+\d*)\[\s*\]")
_CONSTANTS = {"inf": float("inf"), "nan": float("nan")}


class SampleTextError(ShardingError):
    """A sample call on the command line cannot be read."""


def read_sample(text: str, seed: int = 0) -> Sample:
    """A sample from its text: the arguments of a call, with a dtype and sizes in place of each tensor.

    Floats are normal numbers. Integers lie from 0 up to the smallest size of the call's other tensors, so that they may
    be indices into any; ``i64[5] < 30`` and ``-3 <= i64[5] < 4`` say another range, also of floats.
    """
    return _Reader(text, torch.Generator().manual_seed(seed)).sample()


@define(eq=False)
class _Reader:
    text: str
    generator: torch.Generator
    smallest: int = field(default=5, init=False)

    def sample(self) -> Sample:
        try:
            # Python has no name[] without an index: a tensor without dims.
            text = _NO_DIMS.sub(r"\1[()]", self.text)
            tree = ast.parse(f"call({text})", mode="eval").body
        except SyntaxError as error:
            raise self.error("it is not a list of arguments", "Write them as in a call.") from error
        if not isinstance(tree, ast.Call) or any(k.arg is None for k in tree.keywords):
            raise self.error("it is not a list of arguments", "Write them as in a call.")
        sizes = [
            n for node in ast.walk(tree) if isinstance(node, ast.Subscript) and _is_float(node) for n in _sizes(node)
        ]
        self.smallest = min((n for n in sizes if n), default=5)
        named = {k.arg: self.value(k.value) for k in tree.keywords if k.arg is not None}
        return [self.value(node) for node in tree.args], named

    def value(self, node: ast.expr) -> Any:
        """What one argument stands for."""
        if isinstance(node, ast.Subscript):
            return self.tensor(node, None, None)
        if isinstance(node, ast.Compare):
            return self.bounded(node)
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Name) and node.id in _CONSTANTS:
            return _CONSTANTS[node.id]
        if isinstance(node, ast.Name) and node.id in _DTYPES:
            return _DTYPES[node.id]
        return self.literal(node)

    def literal(self, node: ast.expr) -> Any:
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise self.error(
                f"{ast.unparse(node)!r} is neither a tensor nor a literal",
                "Write a tensor as f32[8,6], a dtype as f32, other arguments as Python literals.",
            ) from None

    def bounded(self, node: ast.Compare) -> Tensor:
        """``t < high`` or ``low <= t < high``."""
        ops = [type(op) for op in node.ops]
        sides = [node.left, *node.comparators]
        if ops == [ast.Lt] and isinstance(sides[0], ast.Subscript):
            return self.tensor(sides[0], 0, self.literal(sides[1]))
        if ops == [ast.LtE, ast.Lt] and isinstance(sides[1], ast.Subscript):
            return self.tensor(sides[1], self.literal(sides[0]), self.literal(sides[2]))
        raise self.error(f"{ast.unparse(node)!r} is no range", "Write i64[5] < 9 or -3 <= i64[5] < 9.")

    def tensor(self, node: ast.Subscript, low: float | None, high: float | None) -> Tensor:
        """A tensor with values in ``[low, high)``."""
        dtype = _DTYPES.get(node.value.id) if isinstance(node.value, ast.Name) else None
        if dtype is None:
            raise self.error(
                f"{ast.unparse(node.value)!r} is no dtype", f"Use one of {', '.join(sorted(_DTYPES))}, as in f32[8,6]."
            )
        try:
            shape = tuple(_sizes(node))
        except (ValueError, TypeError):
            raise self.error(f"{ast.unparse(node)!r} has sizes that are no numbers", "Write f32[8,6].") from None
        if dtype == torch.bool:
            return torch.rand(shape, generator=self.generator) < 0.5  # noqa: PLR2004
        if not (dtype.is_floating_point or dtype.is_complex):
            start, end = int(low or 0), int(self.smallest if high is None else high)
            return torch.randint(start, max(end, start + 1), shape, generator=self.generator).to(dtype)
        if low is None or high is None:
            wide = torch.complex128 if dtype.is_complex else torch.float64
            return torch.randn(shape, generator=self.generator, dtype=wide).to(dtype)
        return (torch.rand(shape, generator=self.generator, dtype=torch.float64) * (high - low) + low).to(dtype)

    def error(self, found: str, do: str) -> SampleTextError:
        return SampleTextError(asked=f"read the sample {self.text!r}", found=found, do=do, text=self.text)


def _sizes(node: ast.Subscript) -> list[int]:
    value = ast.literal_eval(node.slice)
    sizes = list(value) if isinstance(value, tuple) else [value]
    if not all(isinstance(n, int) and n >= 0 for n in sizes):
        raise ValueError(ast.unparse(node))
    return sizes


def _is_float(node: ast.Subscript) -> bool:
    dtype = _DTYPES.get(node.value.id) if isinstance(node.value, ast.Name) else None
    try:
        return dtype is not None and (dtype.is_floating_point or dtype.is_complex) and bool(_sizes(node))
    except (ValueError, TypeError):
        return False
