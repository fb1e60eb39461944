"""Quantised linear layers for shardwise meshes: weights of 8 or 4 bits, run tensor-parallel.

The rules that make torch's quantised products run on a mesh come in by the entry point; see ``plugin``.
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
