"""Ordinary PyTorch code on a mesh of devices; every fact about how an op may be sharded comes from a plugin."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwise import random
from shardwise.comm import rule_agreement
from shardwise.engine import shutdown
from shardwise.engine.plain_tensors import plain
from shardwise.engine.replication import replicate_unknown
from shardwise.errors import ShardingError
from shardwise.kernel.placements import Partial, Placement, Replicate, Shard
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.rng.generator import manual_seed
from shardwise.tensor import dcp_state_dicts, distribute, optimizer_step
from shardwise.tensor.distribute import distribute_module, distribute_tensor
from shardwise.tensor.factories import empty, full, ones, rand, randint, randn, randperm, zeros
from shardwise.tensor.late_grads import accumulate
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tensor.on_mesh import on
from shardwise.tensor.replica_check import check_replicas
from shardwise.tensor.sharing import sharing_views

if TYPE_CHECKING:
    from shardwise.comm.call_comparison import check_ranks
    from shardwise.kernel.registry import Override
    from shardwise.kernel.rule import AnyRule
    from shardwise.steps.learning import learn
    from shardwise.steps.planning import plan
    from shardwise.tensor.prefetch import prefetch
    from shardwise.tools.calibrate import calibrate
    from shardwise.tools.explain import explain
    from shardwise.tools.spot_check import verify

__all__ = [
    "MeshTensor",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "ShardingError",
    "TensorMeta",
    "TensorSpec",
    "accumulate",
    "calibrate",
    "check_ranks",
    "check_replicas",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explain",
    "full",
    "learn",
    "manual_seed",
    "on",
    "ones",
    "override",
    "plain",
    "plan",
    "prefetch",
    "rand",
    "randint",
    "randn",
    "random",
    "randperm",
    "replicate_unknown",
    "sharing_views",
    "verify",
    "zeros",
]

optimizer_step.install()
shutdown.install()
dcp_state_dicts.install()


def _learn_if_asked() -> None:
    """Learn from a program's first ``distribute_module`` on, where the setting ``learn`` is on."""
    from shardwise.settings import read_settings

    distribute.at_module.remove(_learn_if_asked)
    if read_settings().learn:
        from shardwise.steps.learning import learn

        learn()


distribute.at_module.append(_learn_if_asked)


def _verify_if_asked() -> None:
    """Check calls from the first use of a mesh on, where the setting ``verify`` says so."""
    from shardwise.settings import read_settings

    rule_agreement.at_first_use.remove(_verify_if_asked)
    if read_settings().verify:
        from shardwise.tools.spot_check import verify_if_asked

        verify_if_asked()


rule_agreement.at_first_use.append(_verify_if_asked)


def override(*rules: "AnyRule") -> "Override":
    """Give rules precedence over those of all plugins in this process.

    They apply until the returned object is called, or for the length of a ``with``. Every rank must override the same
    rules at the same point of the program. Raises :class:`RuleError` for a value that is not a rule.
    """
    from shardwise.discovery.process import default_registry

    return default_registry().override(*rules)


_LAZY = {
    "calibrate": "shardwise.tools.calibrate",
    "check_ranks": "shardwise.comm.call_comparison",
    "explain": "shardwise.tools.explain",
    "learn": "shardwise.steps.learning",
    "plan": "shardwise.steps.planning",
    "prefetch": "shardwise.tensor.prefetch",
    "verify": "shardwise.tools.spot_check",
}


def __getattr__(name: str) -> Any:
    """Import what few programs need at its first use."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
