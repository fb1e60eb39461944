"""Write which family has which op, for the error where a family is not installed; `nox -s known_ops` runs it."""

from __future__ import annotations

from shardwise.discovery.process import default_registry
from shardwise.kernel.first_party import FAMILIES
from shardwise.kernel.known_rules import OPS, table
from shardwise.kernel.signature import op_name

__all__ = ["OPS", "text"]


def text() -> str:
    """The text of the file, from the rules of the families that are installed."""
    registry = default_registry()
    ops = [(entry.origin.plugin, op_name(entry.op)) for entry in registry.ops()]
    ops += [(origin.plugin, name) for name, origin in registry.later()]
    return table((family, name) for family, name in ops if family in FAMILIES)


if __name__ == "__main__":
    OPS.write_text(text(), encoding="utf-8")
