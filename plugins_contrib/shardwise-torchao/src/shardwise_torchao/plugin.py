"""The plugin's hook: the rules of torchao's operators by name. Neither torchao nor a rule is imported here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.hookspecs import hookimpl

if TYPE_CHECKING:
    from shardwise.hookspecs import Registrar

# torchao's other operators for CPU are made of torch's, which have rules; those that need its compiled library have
# none.
RULES = {
    "quantize_affine_float8_non_decomposed": "QUANTIZE",
    "dequantize_affine_float8_non_decomposed": "DEQUANTIZE",
}


@hookimpl
def shardwise_register(registry: Registrar) -> None:
    """Register the rules of this plugin."""
    for op, name in RULES.items():
        registry.add_later(f"torchao::{op}", f"shardwise_torchao.float8:{name}")
