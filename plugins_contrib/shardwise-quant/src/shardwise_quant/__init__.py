"""Quantised linear layers for shardwise meshes: weights of 8 or 4 bits, run tensor-parallel.

The entry point registers the rules that run torch's quantised products on a mesh; see ``plugin``.
"""

from shardwise_quant.linear import (
    DynamicInt8Linear,
    Int4Linear,
    Int8Linear,
    QuantisationError,
    quantise,
    tensor_parallel,
)

__all__ = ["DynamicInt8Linear", "Int4Linear", "Int8Linear", "QuantisationError", "quantise", "tensor_parallel"]
