"""Which distributions are known to have a rule for an op, installed or not. Read when an error is made.

``known_ops.txt`` has the families that ship with shardwise, ``known_plugins.toml`` other plugins that are known.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from attrs import frozen

from shardwise.kernel.first_party import CORE, FAMILIES, PROJECT

__all__ = ["KnownPlugin", "known_names", "known_plugins", "ops_of_families", "providers", "table"]

_FOLDER = Path(__file__).parent
OPS = _FOLDER / "known_ops.txt"
PLUGINS = _FOLDER / "known_plugins.toml"


@frozen
class KnownPlugin:
    """A plugin of the directory: its name, what it is for, patterns of the names of its ops, what the oracle said of
    which of its versions, and the versions that it was tried with.
    """

    name: str
    summary: str
    ops: tuple[str, ...]
    version: str
    oracle: str
    tested: str
    home: str

    def has(self, op: str) -> bool:
        """Whether the name of an op (``acme.mix.default``) matches one of the patterns."""
        return any(fnmatchcase(op, pattern) for pattern in self.ops)


def providers(op: str) -> tuple[str, ...]:
    """The distributions that are known to have a rule for an op, by its full name: those of shardwise first."""
    family = ops_of_families().get(op)
    others = (plugin.name for plugin in known_plugins() if plugin.has(op))
    return (*((family,) if family else ()), *others)


@cache
def ops_of_families() -> Mapping[str, str]:
    """The family of shardwise that has a rule, by the name of the op."""
    families: dict[str, str] = {}
    family = ""
    for line in OPS.read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            packet, *overloads = line.split()
            families |= dict.fromkeys((f"{packet}.{overload}" for overload in overloads), family)
        elif not line.startswith("#"):
            family = line
    return families


@cache
def known_plugins() -> tuple[KnownPlugin, ...]:
    """The plugins of the directory, by name."""
    tables: list[dict[str, Any]] = tomllib.loads(PLUGINS.read_text(encoding="utf-8"))["plugin"]
    plugins = (KnownPlugin(**{**one, "ops": tuple(one["ops"])}) for one in tables)
    return tuple(sorted(plugins, key=lambda plugin: plugin.name))


def known_names() -> frozenset[str]:
    """The names that somebody has: those of shardwise's distributions, and those of the directory."""
    return frozenset((PROJECT, CORE, *FAMILIES, *(plugin.name for plugin in known_plugins())))


def table(ops: Iterable[tuple[str, str]]) -> str:
    """The text of ``known_ops.txt`` from pairs of a family and the full name of an op."""
    packets: dict[str, dict[str, list[str]]] = {}
    for family, name in sorted(set(ops)):
        packet, _, overload = name.rpartition(".")
        packets.setdefault(family, {}).setdefault(packet, []).append(overload)
    lines = ["# The family that has a rule for an op: packet and overloads. `nox -s known_ops` writes it."]
    for family, of_family in packets.items():
        lines += [family, *(f" {packet} {' '.join(overloads)}" for packet, overloads in of_family.items())]
    return "\n".join(lines) + "\n"
