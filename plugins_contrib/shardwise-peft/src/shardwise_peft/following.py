"""Where an adapter's weights lie, as follows from the weight that they adapt.

LoRA adds ``B @ A`` to a weight, A from the inputs to a few numbers and B from those to the outputs. Along a mesh dim

=======================  ==========================  ==========================  =====================
the base weight is       A                           B and its bias              DoRA's magnitudes
=======================  ==========================  ==========================  =====================
cut by outputs           whole                       cut by outputs              cut by outputs
cut by inputs            cut by inputs               whole                       whole
whole                    whole                       whole                       whole
=======================  ==========================  ==========================  =====================

so that the adapter's result lies as that of the base layer, and adding the two sends nothing. An embedding has its
table's rows as inputs and its features as outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import frozen
from peft.tuners.lora import LoraLayer
from torch import nn

from shardwise import Placement, Replicate
from shardwise.kernel.placements import shard_dim, split_factor, strided_shard

__all__ = ["adapter_places", "adapter_weights"]

#: The dict of a layer that has the weights, and the dim of such a weight that the outputs, or the inputs, are.
OUTPUTS = {"lora_B": 0, "lora_embedding_B": 0, "lora_magnitude_vector": 0}
INPUTS = {"lora_A": 1, "lora_embedding_A": 1}


@frozen
class _Dims:
    """Which dim of a base weight the outputs are, and which the inputs."""

    outputs: int
    inputs: int


def adapter_weights(model: nn.Module) -> Iterator[tuple[str, LoraLayer, str]]:
    """The name of every weight of a LoRA adapter, the layer that it adapts, and which of its dicts has the weight."""
    for prefix, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            for kind in (*INPUTS, *OUTPUTS):
                for name, _ in getattr(layer, kind, nn.Module()).named_parameters():
                    yield f"{prefix}.{kind}.{name}" if prefix else f"{kind}.{name}", layer, kind


def adapter_places(
    layer: LoraLayer, kind: str, name: str, ndim: int, base: tuple[Placement, ...]
) -> tuple[Placement, ...]:
    """The placements of one weight of an adapter, one per mesh dim, by those of the base layer's weight."""
    dims = _dims(layer)
    if dims is None:
        return (Replicate(),) * len(base)
    if kind in INPUTS:
        return tuple(_moved(place, dims.inputs, INPUTS[kind]) for place in base)
    is_of_conv = kind == "lora_magnitude_vector" and ndim > 1  # [1, out, 1, 1]
    return tuple(_moved(place, dims.outputs, 1 if is_of_conv else OUTPUTS[kind]) for place in base)


def _dims(layer: Any) -> _Dims | None:
    """``None`` for layers whose adapters peft lays out in other ways: those are whole."""
    base = layer.get_base_layer()
    if isinstance(base, nn.Embedding):
        return _Dims(outputs=1, inputs=0)
    if isinstance(base, nn.MultiheadAttention) or hasattr(layer, "parameter_name"):
        return None
    if getattr(base, "groups", 1) != 1:
        return None  # the inputs of a group are a part of all inputs
    return _Dims(outputs=1, inputs=0) if getattr(layer, "fan_in_fan_out", False) else _Dims(outputs=0, inputs=1)


def _moved(place: Placement, dim: int, to: int) -> Placement:
    """The same cut of another tensor's dim; whole where it is another dim that is cut."""
    return strided_shard(to, split_factor(place)) if shard_dim(place) == dim else Replicate()
