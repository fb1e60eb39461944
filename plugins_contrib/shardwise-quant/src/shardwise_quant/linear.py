"""Linear layers with quantised weights: ordinary modules, whose tensors are buffers that can be distributed.

Weights are quantised symmetrically, one scale for each output row (8 bits), or with a scale and a zero for each group
of a row (4 bits). The layers are for inference: they have no gradient with respect to weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from shardwise.rule import Placement, shard
from shardwise_quant.blocked import block_rows, pack

__all__ = ["DynamicInt8Linear", "Int4Linear", "Int8Linear", "QuantisationError", "quantise", "tensor_parallel"]

MAX_INT8 = 127
MAX_INT4 = 15
GROUP_SIZES = (32, 64, 128, 256)

Module = TypeVar("Module", bound=nn.Module)


class QuantisationError(ValueError):
    """A layer cannot be quantised as asked."""


def _by_rows(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values ``[m, k]`` in int8 and a positive scale per row, ``[m, 1]`` in ``dtype``; the largest becomes 127."""
    wide = values.float()
    scales = (wide.abs().amax(1, keepdim=True) / MAX_INT8).clamp(min=torch.finfo(dtype).tiny).to(dtype)
    return (wide / scales.float()).round().clamp(-MAX_INT8, MAX_INT8).to(torch.int8), scales


class _Quantised(nn.Module, ABC):
    """The base of the layers: sizes, an optional bias, leading dims of the input flattened into rows.

    ``BY`` says which dim of each buffer is sharded when the layer is sharded by its outputs or by its inputs.
    """

    BY: ClassVar[Mapping[str, Mapping[str, int]]] = {
        "outputs": {"weight": 0, "scales": 0, "bias": 0},
        "inputs": {"weight": 1},
    }

    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        bias: Tensor | None = linear.bias  # torch's annotation leaves out None
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    @abstractmethod
    def product(self, rows: Tensor) -> Tensor:
        """``[m, in_features]`` times the weight, without the bias."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``, in the dtype of ``x``."""
        rows = x if x.ndim == 2 else x.reshape(-1, self.in_features)  # noqa: PLR2004  a matrix
        y = self.product(rows)
        y = y if self.bias is None else y + self.bias
        return y if x.ndim == 2 else y.reshape(*x.shape[:-1], self.out_features)  # noqa: PLR2004  as above

    def extra_repr(self) -> str:
        """Sizes, as ``nn.Linear`` shows them."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Int8Linear(_Quantised):
    """Weights of 8 bits, activations unquantised: ``aten._weight_int8pack_mm``.

    Buffers: ``weight`` int8 ``[out, in]``, ``scales`` ``[out]`` in the dtype of the layer, ``bias`` ``[out]`` or
    ``None``.
    """

    weight: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight, scales = _by_rows(linear.weight.detach(), linear.weight.dtype)
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales.flatten())

    def product(self, rows: Tensor) -> Tensor:
        """``[m, in_features]`` times the weight, without the bias."""
        product: Tensor = torch.ops.aten._weight_int8pack_mm.default(rows, self.weight, self.scales)
        return product


class DynamicInt8Linear(_Quantised):
    """Weights of 8 bits, and activations that each call quantises row by row: ``aten._int_mm``.

    Buffers as in :class:`Int8Linear`, with ``scales`` in float32. The integer product is exact: a mesh gives the same
    bits as one device.
    """

    weight: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight, scales = _by_rows(linear.weight.detach(), torch.float32)
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales.flatten())

    def product(self, rows: Tensor) -> Tensor:
        """``[m, in_features]`` times the weight, without the bias."""
        whole, of_rows = _by_rows(rows, torch.float32)
        product: Tensor = torch.ops.aten._int_mm.default(whole, self.weight.t())
        return (product.float() * of_rows * self.scales).to(rows.dtype)


class Int4Linear(_Quantised):
    """Weights of 4 bits with a scale and a zero for each group of inputs; CPU.

    Buffers: ``weight`` uint8 ``[out / b, in, b / 2]`` with ``b`` the rows that this CPU packs into a block, so that dim
    0 is sharded by outputs and dim 1 by inputs; ``scales_and_zeros`` ``[in / group_size, out, 2]`` in the dtype of the
    layer; ``bias`` ``[out]`` or ``None``. Raises :class:`QuantisationError` if ``out`` is not a multiple of ``b``, or
    ``in`` not a multiple of the group size.
    """

    BY: ClassVar[Mapping[str, Mapping[str, int]]] = {
        "outputs": {"weight": 0, "scales_and_zeros": 1, "bias": 0},
        "inputs": {"weight": 1, "scales_and_zeros": 0},
    }

    weight: Tensor
    scales_and_zeros: Tensor

    def __init__(self, linear: nn.Linear, group_size: int = 64) -> None:
        super().__init__(linear)
        self.group_size = group_size
        _check_int4(linear, group_size)
        grouped = linear.weight.detach().float().reshape(linear.out_features, -1, group_size)
        low, high = grouped.amin(2), grouped.amax(2)
        scales = ((high - low) / MAX_INT4).clamp(min=torch.finfo(torch.float32).tiny)
        whole = ((grouped - low[..., None]) / scales[..., None]).round().clamp(0, MAX_INT4)
        # The kernel's weight is (q - 8) * scale + zero.
        both = torch.stack([scales, low + 8 * scales], -1).transpose(0, 1).contiguous()
        self.register_buffer("weight", pack(whole.flatten(1).to(torch.int32)))
        self.register_buffer("scales_and_zeros", both.to(linear.weight.dtype))

    def product(self, rows: Tensor) -> Tensor:
        """``[m, in_features]`` times the weight, without the bias."""
        op = torch.ops.shardwise_quant.int4_linear.default
        product: Tensor = op(rows, self.weight, self.scales_and_zeros, self.group_size)
        return product


def tensor_parallel(module: nn.Module, by: Mapping[str, str], mesh_dim: str = "tp") -> dict[str, dict[str, Placement]]:
    """Placements for :func:`shardwise.distribute_module`: quantised layers by name, each ``"outputs"`` or ``"inputs"``.

    A layer sharded by its outputs (column-parallel) followed by one sharded by its inputs (row-parallel) needs one
    reduction, behind the second. Raises :class:`QuantisationError` for a name that is not a quantised layer.
    """
    placements: dict[str, dict[str, Placement]] = {}
    for name, side in by.items():
        layer = module.get_submodule(name)
        if not isinstance(layer, _Quantised) or side not in layer.BY:
            raise QuantisationError(
                f"{name!r} is a {type(layer).__name__}, to be sharded by {side!r}. Name a quantised layer, and "
                "'outputs' or 'inputs'."
            )
        buffers = dict(layer.named_buffers(recurse=False))
        placements |= {f"{name}.{key}": {mesh_dim: shard(dim)} for key, dim in layer.BY[side].items() if key in buffers}
    return placements


def _check_int4(linear: nn.Linear, group_size: int) -> None:
    if linear.weight.device.type != "cpu":
        raise QuantisationError(
            f"Int4Linear packs for CPU, and the layer is on {linear.weight.device}. Move it to CPU, or use Int8Linear."
        )
    if group_size not in GROUP_SIZES or linear.in_features % group_size:
        raise QuantisationError(
            f"Int4Linear cannot make groups of {group_size} of {linear.in_features} inputs. Use a group size of "
            f"{', '.join(map(str, GROUP_SIZES))} that divides them."
        )
    if linear.out_features % block_rows():
        raise QuantisationError(
            f"Int4Linear packs {block_rows()} rows into a block on this CPU, and the layer has {linear.out_features} "
            "outputs. Pad them to a multiple, or use Int8Linear."
        )


def quantise(module: Module, make: Callable[[nn.Linear], nn.Module]) -> Module:
    """Replace every ``nn.Linear`` below ``module`` by ``make(linear)``, in place; returns the module.

    ``make`` is one of the layers of this package, or a function that calls one. A linear layer that several parents
    share is replaced by one layer.
    """
    layers: dict[int, nn.Module] = {}
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                if id(child) not in layers:
                    layers[id(child)] = make(child)
                setattr(parent, name, layers[id(child)])
    return module
