"""What ships with shardwise, by name: the distribution of core, those of the families of ops, and their version.

A release has a distribution for each family, one for core and ``shardwise``, which requires them all. A checkout is
one distribution, ``shardwise``, with everything in it. All of one release have the same version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import Distribution

__all__ = ["CORE", "FAMILIES", "PROJECT", "core_distribution", "core_version", "is_first_party", "requirement"]

PROJECT = "shardwise"
"""The distribution that has, or requires, everything. Settings and ``replaces=`` mean all families by it."""

CORE = "shardwise-core"

FAMILIES = tuple(
    f"{PROJECT}-{family}"
    for family in (
        *("conv", "embedding", "linalg", "loss", "matmul", "norm", "optim"),
        *("pointwise", "random", "reduce", "spectral", "tensor", "views"),
    )
)
"""The families of ops, each a plugin of this name."""

_DISTRIBUTIONS = frozenset({PROJECT, CORE, *FAMILIES})


def is_first_party(distribution: str) -> bool:
    """Whether the distribution, by its normalised name, ships with shardwise."""
    return distribution in _DISTRIBUTIONS


def core_distribution() -> Distribution:
    """The installed distribution that has core. Raises :class:`PackageNotFoundError` if none has metadata."""
    from importlib.metadata import Distribution, PackageNotFoundError  # only here: few processes ask

    try:
        return Distribution.from_name(CORE)
    except PackageNotFoundError:
        return Distribution.from_name(PROJECT)


def core_version() -> str:
    """The version of the installed core."""
    return core_distribution().version


def requirement(name: str) -> str:
    """What pip installs to get a distribution: of those that ship with shardwise, the version of this core."""
    if not is_first_party(name):
        return name
    from importlib.metadata import PackageNotFoundError  # as above

    try:
        return f"{name}=={core_version()}"
    except PackageNotFoundError:
        return name
