"""Deformable convolution, ``deform_conv2d``, and its gradients: by batch, output channels, input channels, groups.

Channels may be in groups by the weight (``groups``) and by the offsets (``offset_groups``). A shard of channels takes
whole groups of both. Positions are whole: an offset may point anywhere in the picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

import torch
from attrs import evolve, frozen

from shardwise.rule import Call, Flow, LocalCall, Rows, TensorMeta, rule_from

__all__ = ["CONVOLUTION", "CONVOLUTION_BACKWARD"]

vision = torch.ops.torchvision

# The names of the two numbers of groups, in the op and in its gradient.
GROUPS = {"n_weight_grps": "n_offset_grps", "groups": "offset_groups"}


@frozen
class _Groups:
    """The numbers of groups of a call, and the names that it has for them."""

    name: str
    offset_name: str
    weight: int
    offset: int

    @classmethod
    def of(cls, call: Call) -> _Groups:
        name = next(name for name in GROUPS if name in call.args)
        return cls(name, GROUPS[name], call.args[name], call.args[GROUPS[name]])

    @property
    def common(self) -> int:
        """Into how many parts channels may be cut so that no group of either kind is cut."""
        if self.weight == 1 or self.offset == 1:
            return max(self.weight, self.offset)
        return gcd(self.weight, self.offset)


@frozen
class _Dims:
    """The dims of every tensor of a call. ``by_channel``: a shard of input channels has offsets of its own."""

    input: tuple[Any, ...]
    weight: tuple[Any, ...]
    offset: tuple[Any, ...]
    mask: tuple[Any, ...]
    bias: tuple[Any, ...]
    result: tuple[Any, ...]
    by_channel: bool


def _dims(call: Call, groups: _Groups) -> _Dims:
    """Within groups of the weight, channels in and out are cut together; else each by itself."""

    def parts(name: str, size: int) -> Any:
        """A dim of which each part of the channels has a section."""
        return ((name, groups.common), (f"{name}'", size // groups.common)) if groups.common > 1 else name

    channels, weight = call.args["input"].shape[1], call.args["weight"]
    into: Any = None
    out: Any = None
    name = "i" if groups.weight == 1 else "g"
    if groups.weight == 1:
        into, out = parts(name, channels), "o"
    elif groups.common > 1:
        into, out = parts(name, channels), parts(name, weight.shape[0])
    kernel = (out, into if groups.weight == 1 else None)
    by_channel = groups.offset > 1 and groups.common > 1
    sections = [parts(name, call.args[of].shape[1]) if by_channel else None for of in ("offset", "mask")]
    is_masked = call.args["use_mask"]
    return _Dims(
        input=("n", into, None, None),
        weight=(*kernel, None, None),
        offset=("n", sections[0], None, None),
        # Without a mask torchvision passes a tensor [n, 1].
        mask=("n", sections[1], None, None) if is_masked else ("n", None),
        bias=(out,),
        result=("n", out, None, None),
        by_channel=by_channel,
    )


def _by_groups(flow: Flow, call: Call, by_channel: str, operand: int, common: int) -> Rows:
    """The rows of the flow; in the row ``by_channel`` of input channels the ranks divide the common groups."""
    rows = flow.bind(call).rows
    divides = ((operand, 1, common),) if common > 1 else ()
    return Rows(tuple(evolve(row, divides=divides) if row.name == by_channel else row for row in rows))


def _local_groups(local: LocalCall) -> Mapping[str, int]:
    """The numbers of groups of this rank's channels."""
    groups = _Groups.of(local.call)
    shards = local.spec("input").shards_per_dim[1]
    return {
        groups.name: groups.weight // shards if groups.weight > 1 else 1,
        groups.offset_name: groups.offset // shards if groups.offset > 1 else 1,
    }


def _multiply_adds(call: Call) -> float:
    """Floating-point operations of the product with the weight, which follows the look-up."""
    weight: TensorMeta = call.args["weight"]
    offset: TensorMeta = call.args["offset"]
    return 2.0 * offset.shape[0] * offset.shape[2] * offset.shape[3] * weight.numel


@rule_from(vision.deform_conv2d.default, local_args=_local_groups, work=_multiply_adds)
def CONVOLUTION(call: Call) -> Rows:
    """Batch, output channels, groups; sharded input channels leave a partial sum, bias included."""
    groups = _Groups.of(call)
    dims = _dims(call, groups)
    section = "i" if dims.by_channel else "R"
    masked = call.args["use_mask"]
    rows = ["sum, R, R, R, sum -> sum", "R, sum, R, R, sum -> sum", "avg, R, R, R, R -> avg", "R, avg, R, R, R -> avg"]
    if masked:
        rows += ["R, R, R, sum, sum -> sum", "R, R, R, avg, R -> avg"]
    by_channel = f"i, i, {section}, {section if masked else 'R'}, sum -> sum"
    if groups.weight == 1:
        rows.insert(0, by_channel)
    flow = Flow(
        [dims.input, dims.weight, dims.offset, dims.mask, dims.bias],
        [dims.result],
        replicate={"i"},
        partial=rows,
    )
    return _by_groups(flow, call, by_channel, 0, groups.common)


@rule_from(vision._deform_conv2d_backward.default, local_args=_local_groups, work=lambda call: 2 * _multiply_adds(call))
def CONVOLUTION_BACKWARD(call: Call) -> Rows:
    """A gradient that lacks the sharded dim is a partial sum; that of the bias does not depend on the input."""
    groups = _Groups.of(call)
    dims = _dims(call, groups)
    of_offset = ("i", "i") if dims.by_channel else ("R", "sum")
    of_mask = of_offset if call.args["use_mask"] else ("R", "sum")
    by_channel = f"R, i, i, {of_offset[0]}, {of_mask[0]}, R -> i, i, {of_offset[1]}, {of_mask[1]}, R"
    flow = Flow(
        [dims.result, dims.input, dims.weight, dims.offset, dims.mask, dims.bias],
        [dims.input, dims.weight, dims.offset, dims.mask, dims.bias],
        reduce={"n": "sum", "o": "sum", "g": "sum"},
        replicate={"i"},
        partial=[by_channel] if groups.weight == 1 else [],
        linear="grad",
    )
    return _by_groups(flow, call, by_channel, 1, groups.common)
