"""Sample calls as text: ``f32[8,6], i64[5] < 8, [f32[4], f32[4]], 1, keepdim=True``."""

from __future__ import annotations

import ast
import re
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from shardwise.cli.tensor_text import DTYPES, TENSOR, read_tensor
from shardwise.errors import CallError
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.testing.values import Sample

__all__ = ["read_sample"]

# Stands for a tensor while Python reads the rest: a name and its place in the text.
_MARK = "_tensor_"
_CONSTANTS = {"inf": float("inf"), "nan": float("nan")}


def read_sample(text: str, seed: int = 0) -> Sample:
    """A sample from its text: the arguments of a call, with a dtype and sizes in place of each tensor.

    Floats are normal numbers. Integers lie from 0 up to the smallest size of the call's other tensors, so that they may
    be indices into any of them. ``i64[5] < 30`` and ``-3 <= i64[5] < 4`` give another range, also of floats.

    Raises :class:`CallError` for any other text.
    """
    return _Reader(text, torch.Generator().manual_seed(seed)).sample()


@define(eq=False)
class _Reader:
    text: str
    generator: torch.Generator
    tensors: list[str] = field(factory=list, init=False)
    smallest: int = field(default=5, init=False)

    def sample(self) -> Sample:
        try:
            tree = ast.parse(f"call({re.sub(TENSOR, self._marked, self.text)})", mode="eval").body
        except SyntaxError:
            tree = None
        if not isinstance(tree, ast.Call) or any(k.arg is None for k in tree.keywords):
            raise self.error("it is not a list of arguments", "Write them as in a call.")
        metas = map(self.meta, self.tensors)
        sizes = [n for meta in metas if meta.dtype.is_floating_point or meta.dtype.is_complex for n in meta.shape]
        self.smallest = min((n for n in sizes if n), default=5)
        named = {k.arg: self.value(k.value) for k in tree.keywords if k.arg is not None}
        return [self.value(node) for node in tree.args], named

    def _marked(self, match: re.Match[str]) -> str:
        self.tensors.append(match[0])
        return f"{_MARK}{len(self.tensors) - 1}"

    def meta(self, text: str) -> TensorMeta:
        return read_tensor(text, f"read the sample {self.text!r}")

    def written(self, node: ast.expr) -> str:
        """What a person wrote for it."""
        return re.sub(rf"{_MARK}(\d+)", lambda match: self.tensors[int(match[1])], ast.unparse(node))

    def value(self, node: ast.expr) -> Any:
        """What one argument stands for."""
        if _is_tensor(node):
            return self.tensor(node, None, None)
        if isinstance(node, ast.Compare):
            return self.bounded(node)
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Name) and node.id in _CONSTANTS:
            return _CONSTANTS[node.id]
        if isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) in DTYPES:
            return DTYPES[ast.unparse(node)]
        return self.literal(node)

    def literal(self, node: ast.expr) -> Any:
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise self.error(
                f"{self.written(node)!r} is neither a tensor nor a literal",
                "Write a tensor as f32[8,6], a dtype as f32, other arguments as Python literals.",
            ) from None

    def bounded(self, node: ast.Compare) -> Tensor:
        """``t < high`` or ``low <= t < high``."""
        ops = [type(op) for op in node.ops]
        sides = [node.left, *node.comparators]
        if ops == [ast.Lt] and _is_tensor(sides[0]):
            return self.tensor(sides[0], 0, self.literal(sides[1]))
        if ops == [ast.LtE, ast.Lt] and _is_tensor(sides[1]):
            return self.tensor(sides[1], self.literal(sides[0]), self.literal(sides[2]))
        raise self.error(f"{self.written(node)!r} is not a range", "Write i64[5] < 9 or -3 <= i64[5] < 9.")

    def tensor(self, node: ast.expr, low: float | None, high: float | None) -> Tensor:
        """A tensor with values in ``[low, high)``."""
        meta = self.meta(self.written(node))
        shape, dtype = meta.shape, meta.dtype
        if dtype == torch.bool:
            return torch.rand(shape, generator=self.generator) < 0.5  # noqa: PLR2004
        if not (dtype.is_floating_point or dtype.is_complex):
            start, end = int(low or 0), int(self.smallest if high is None else high)
            return torch.randint(start, max(end, start + 1), shape, generator=self.generator).to(dtype)
        if low is None or high is None:
            wide = torch.complex128 if dtype.is_complex else torch.float64
            return torch.randn(shape, generator=self.generator, dtype=wide).to(dtype)
        return (torch.rand(shape, generator=self.generator, dtype=torch.float64) * (high - low) + low).to(dtype)

    def error(self, found: str, do: str) -> CallError:
        return CallError(asked=f"read the sample {self.text!r}", found=found, do=do, text=self.text)


def _is_tensor(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id.startswith(_MARK)
