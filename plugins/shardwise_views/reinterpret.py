"""Views that read the same memory as another type: complex as real, one dtype as another."""

from __future__ import annotations

import torch

from shardwise.rule import Call, Flow, TensorMeta, rule, rule_from

__all__ = ["RULES"]

aten = torch.ops.aten
# Real and imaginary parts add up separately; neither products nor extremes of complex numbers go by parts.
LINEAR = ("sum -> sum", "avg -> avg")

VIEW_AS_REAL = rule(
    [aten.view_as_real.default, aten.view_as_real_copy.default, aten.view_as_real_copy.out],
    {"self": "...", "->": "... _"},
    partial=LINEAR,
)
VIEW_AS_COMPLEX = rule(
    [aten.view_as_complex.default, aten.view_as_complex_copy.default, aten.view_as_complex_copy.out],
    {"self": "... _", "->": "..."},
    partial=LINEAR,
)
CONJ = rule(
    [aten._conj.default, aten._conj_copy.default, aten._conj_copy.out],
    "... -> ...",
    partial=[*LINEAR, "product -> product"],
)
NEG_VIEW = rule(
    [aten._neg_view.default, aten._neg_view_copy.default, aten._neg_view_copy.out],
    "... -> ...",
    partial=[*LINEAR, "max -> min", "min -> max"],
)


@rule_from([aten.view.dtype, aten.view_copy.dtype, aten.view_copy.dtype_out])
def VIEW_DTYPE(self: TensorMeta, call: Call) -> Flow:
    """Bits read as another dtype: the last dim is whole unless elements keep their size; no partial passes."""
    after = call.outputs[0]
    assert after is not None
    names: list[str | None] = [f"d{i}" for i in range(self.ndim)]
    if after.dtype.itemsize != self.dtype.itemsize:
        names[-1:] = [None]
    return Flow([names], [names], partial=("* -> *",) if after.dtype == self.dtype else ())


RULES = (VIEW_AS_REAL, VIEW_AS_COMPLEX, CONJ, NEG_VIEW, VIEW_DTYPE)
