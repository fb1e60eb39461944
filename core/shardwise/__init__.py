"""Ordinary PyTorch code on a mesh of devices; every fact about how an op may be sharded comes from a plugin."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwise import random
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
from shardwise.tensor.sharing import sharing_views

if TYPE_CHECKING:
    from shardwise.kernel.registry import Override
    from shardwise.kernel.rule import AnyRule
    from shardwise.steps.learning import learn
    from shardwise.steps.planning import plan
    from shardwise.tensor.local_function import local
    from shardwise.tensor.prefetch import prefetch
    from shardwise.tools.calibrate import calibrate
    from shardwise.tools.explain import explain
    from shardwise.tools.visualize import visualize

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
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explain",
    "full",
    "learn",
    "local",
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
    "visualize",
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


def _picture(tensor: MeshTensor) -> str:
    """How a MeshTensor lies, for notebooks; nothing is computed or sent."""
    from shardwise.tools.visualize import visualize

    return visualize(tensor).svg()


MeshTensor._repr_html_ = _picture  # type: ignore[attr-defined]  # what notebooks call


def override(*rules: "AnyRule") -> "Override":
    """Give rules precedence over those of all plugins in this process.

    They apply until the returned object is called, or for the length of a ``with``. Every rank must override the same
    rules at the same point of the program. Raises :class:`RuleError` for a value that is not a rule.
    """
    from shardwise.discovery.process import default_registry

    return default_registry().override(*rules)


_MODULES = {"local": "shardwise.tensor.local_function", "visualize": "shardwise.tools.visualize"}


def __getattr__(name: str) -> Any:
    """Import what few programs need at its first use."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if name == "calibrate":
        from shardwise.tools.calibrate import calibrate

        return calibrate
    if name == "explain":
        from shardwise.tools.explain import explain

        return explain
    if name == "learn":
        from shardwise.steps.learning import learn

        return learn
    if name == "plan":
        from shardwise.steps.planning import plan

        return plan
    if name == "prefetch":
        from shardwise.tensor.prefetch import prefetch

        return prefetch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
