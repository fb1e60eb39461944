"""Ordinary PyTorch code on a mesh of devices; every fact about how an op may be sharded comes from a plugin."""

from typing import TYPE_CHECKING, Any

from shardwise import leaving, random, state_dicts, stepping
from shardwise.api import distribute_module, distribute_tensor
from shardwise.draws import manual_seed
from shardwise.errors import ShardingError
from shardwise.factories import empty, full, ones, rand, randint, randn, randperm, zeros
from shardwise.placements import Partial, Placement, Replicate, Shard
from shardwise.prefetch import prefetch
from shardwise.replication import replicate_unknown
from shardwise.spec import TensorMeta, TensorSpec
from shardwise.tensor import MeshTensor

if TYPE_CHECKING:
    from shardwise.calibration import calibrate
    from shardwise.explanation import explain
    from shardwise.registry import Override
    from shardwise.rule import AnyRule

__all__ = [
    "MeshTensor",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "ShardingError",
    "TensorMeta",
    "TensorSpec",
    "calibrate",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explain",
    "full",
    "manual_seed",
    "ones",
    "override",
    "prefetch",
    "rand",
    "randint",
    "randn",
    "random",
    "randperm",
    "replicate_unknown",
    "zeros",
]

stepping.install()
leaving.install()
state_dicts.install()


def override(*rules: "AnyRule") -> "Override":
    """Put rules above those of all plugins in this process: until what comes back is called, or during a ``with``.

    Every rank of a program must do so alike and at the same point. Raises :class:`RuleError` for what is no rule.
    """
    from shardwise.discovery import default_registry

    return default_registry().override(*rules)


def __getattr__(name: str) -> Any:
    """What few programs need is imported when it is asked for."""
    if name == "calibrate":
        from shardwise.calibration import calibrate

        return calibrate
    if name == "explain":
        from shardwise.explanation import explain

        return explain
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
