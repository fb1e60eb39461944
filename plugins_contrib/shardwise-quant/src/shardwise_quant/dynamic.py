"""The 4-bit product that quantises its activations itself, row by row. Its packed weight is one opaque vector."""

from __future__ import annotations

import torch

from shardwise.rule import rule

__all__ = ["RULES"]

aten = torch.ops.aten

DYN_QUANT_PACK = rule(
    aten._dyn_quant_pack_4bit_weight.default, {"weights": "R", "scales_zeros": "R", "bias": "R", "->": "R"}
)
# Each row has its own scale and zero, so rows may be sharded. The product is not linear in a row.
DYN_QUANT_MM = rule(aten._dyn_quant_matmul_4bit.default, {"inp": "m _", "packed_weights": "R", "->": "m _"})

RULES = (DYN_QUANT_PACK, DYN_QUANT_MM)
