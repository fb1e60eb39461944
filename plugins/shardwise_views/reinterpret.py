"""Views that read the same memory as another type: complex as real, one dtype as another."""

from __future__ import annotations

import torch

from shardwise.rule import Call, Flow, TensorMeta, like, rule, rule_from

__all__ = ["RULES"]

aten = torch.ops.aten

# Real and imaginary parts add up separately; products and extremes of complex numbers need both.
VIEW_AS_REAL = rule(
    [aten.view_as_real.default, aten.view_as_real_copy.default, aten.view_as_real_copy.out],
    {"self": "...", "->": "... _"},
    linear="self",
)
VIEW_AS_COMPLEX = rule(
    [aten.view_as_complex.default, aten.view_as_complex_copy.default, aten.view_as_complex_copy.out],
    {"self": "... _", "->": "..."},
    linear="self",
)
CONJ = rule(
    [aten._conj.default, aten._conj_copy.default, aten._conj_copy.out],
    "... -> ...",
    linear="self",
    partial=["product -> product"],
)
NEG_VIEW = rule(
    [aten._neg_view.default, aten._neg_view_copy.default, aten._neg_view_copy.out],
    "... -> ...",
    linear="self",
    decreasing="self",
)


@rule_from([aten.view.dtype, aten.view_copy.dtype, aten.view_copy.dtype_out])
def VIEW_DTYPE(self: TensorMeta, call: Call) -> Flow:
    """Bits read as another dtype: the last dim is whole unless elements keep their size; no partial tensor passes."""
    after = call.outputs[0]
    assert after is not None
    resized = after.dtype.itemsize != self.dtype.itemsize
    return like(self, whole=(-1,) if resized else (), moves="self" if after.dtype == self.dtype else ())


RULES = (VIEW_AS_REAL, VIEW_AS_COMPLEX, CONJ, NEG_VIEW, VIEW_DTYPE)
