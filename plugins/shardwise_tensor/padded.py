"""A padded batch in torch's encoder, which makes a nested tensor of it on one device.

A mesh has no nested tensors: placements say how dense memory is divided. In inference ``nn.TransformerEncoder`` makes
one of a batch and of the mask of what is real in it, hands it from layer to layer, and pads it with zeros again. On a
mesh a stand-in takes its place, which has the dense batch and the mask. It knows the steps of a layer, which runs on
the batch with the mask, and padding, which writes what is not real. Anything else is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardwise.errors import NoRuleError

__all__ = ["PaddedBatch", "is_left_aligned", "padded_batch"]

aten = torch.ops.aten

# What torch calls a mask of the keys that are padding.
_PADDING = 1
# The arguments of a layer without a mask, and where attention has its mask.
_OF_LAYER, _MASK = 18, 9
_VIEWS = (aten.view.default, aten._unsafe_view.default)
# What a layer with hooks calls besides attention, which calculates each position by itself.
_BY_POSITION = (
    aten.add.Tensor,
    aten.addmm.default,
    aten.dropout.default,
    aten.gelu.default,
    aten.linear.default,
    aten.mm.default,
    aten.layer_norm.default,
    aten.native_layer_norm.default,
    aten.relu.default,
    *_VIEWS,
)


def is_left_aligned(_x: Tensor, real: Tensor) -> bool:
    """Whether no row of a mask has something real behind padding."""
    return real.shape[1] <= 1 or not bool((real[:, 1:] > real[:, :-1]).any())


def padded_batch(batch: Tensor, real: Tensor, mask_check: bool = True) -> PaddedBatch:
    """The stand-in for the nested tensor of what is real in a batch."""
    if mask_check and not is_left_aligned(batch, real):
        raise RuntimeError("Expected mask to be left-aligned")
    return _stand_in(batch, real)


def _stand_in(batch: Tensor, real: Tensor) -> PaddedBatch:
    # One number in memory. torch.zeros would lie on the mesh under sw.on.
    padded = torch.tensor(0.0, dtype=batch.dtype, device=batch.device).expand(batch.shape).as_subclass(PaddedBatch)
    padded.batch, padded.is_real = batch, real
    return padded


class PaddedBatch(Tensor):
    """``batch``, of which ``is_real`` says for each position whether it is real or padding."""

    batch: Tensor
    is_real: Tensor

    #: Under ``sw.on``, too, its ``__torch_dispatch__`` is called where it is the first operand, before a MeshTensor's.
    meets_mesh_tensors = True

    # As a parameter: none. The layers of an encoder take other steps for a tensor that has one.
    __torch_function__ = torch.nn.Parameter.__torch_function__

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates it as an instance method
        cls, op: Any, _types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        padded = next((t for t in args if isinstance(t, cls)), None)
        dense = [t.batch if isinstance(t, cls) else t for t in args]
        if padded is None or kwargs:  # in a list, for example
            return _refuse(op)
        if op is aten.to_padded_tensor.default and dense[2:] == [list(padded.batch.shape)]:
            return padded.batch.masked_fill(padded.is_real.logical_not().unsqueeze(-1), dense[1])
        if op is aten._transformer_encoder_layer_fwd.default and len(dense) == _OF_LAYER:
            return _stand_in(op(*dense, padded.is_real.logical_not(), _PADDING), padded.is_real)
        if op is aten._native_multi_head_attention.default and dense[_MASK:] == [None, False]:
            result, weights = op(*dense[:_MASK], padded.is_real.logical_not(), False, True, _PADDING)
            return _stand_in(result, padded.is_real), weights
        if op not in _BY_POSITION or (op in _VIEWS and dense[1][-1] != padded.batch.shape[-1]):
            return _refuse(op)
        results = op(*dense)
        first, *rest = results if isinstance(results, tuple) else (results,)
        is_real = padded.is_real.view(first.shape[:-1])
        return (_stand_in(first, is_real), *rest) if rest else _stand_in(first, is_real)


def _refuse(op: Any) -> NoReturn:
    raise NoRuleError(
        asked=f"run {op} in torch's fast path for a padded batch on MeshTensors",
        found="it has a nested tensor there, and shardwise has none but for the layers of torch's own encoder",
        do="Make the nn.TransformerEncoder with enable_nested_tensor=False; it then gives other values where the batch "
        "is padded.",
        op=str(op),
    )
