"""Ordinary PyTorch code on a mesh of devices; every fact about how an op may be sharded comes from a plugin.

Names are imported at their first use, so that a command that needs no tensor imports no torch.
"""

import sys
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from shardwise import checkpoint, errors, random, testing
    from shardwise.comm.call_comparison import check_ranks
    from shardwise.comm.policy import communication
    from shardwise.discovery.process import override
    from shardwise.engine.plain_tensors import plain
    from shardwise.engine.replication import replicate_unknown
    from shardwise.errors import ShardingError
    from shardwise.kernel.placements import Partial, Placement, Replicate, Shard
    from shardwise.kernel.spec import TensorSpec
    from shardwise.kernel.tensor_meta import TensorMeta
    from shardwise.rng.generator import manual_seed
    from shardwise.steps.learning import learn
    from shardwise.steps.planning import plan
    from shardwise.tensor.distribute import distribute_tensor
    from shardwise.tensor.factories import empty, full, ones, rand, randint, randn, randperm, zeros
    from shardwise.tensor.late_grads import accumulate
    from shardwise.tensor.local_function import local
    from shardwise.tensor.mesh_tensor import MeshTensor
    from shardwise.tensor.modules import distribute_module
    from shardwise.tensor.on_mesh import on
    from shardwise.tensor.prefetch import prefetch
    from shardwise.tensor.printing import print  # noqa: A004  # as accelerate and others call it
    from shardwise.tensor.replica_check import check_replicas
    from shardwise.tensor.sharing import sharing_views
    from shardwise.tools.calibrate import calibrate
    from shardwise.tools.explain import explain
    from shardwise.tools.spot_check import verify
    from shardwise.tools.timeline import timeline
    from shardwise.tools.visualize import visualize

# By the module that has them; a name without one is a module of this package.
_NAMES = {
    "comm.call_comparison": ("check_ranks",),
    "comm.policy": ("communication",),
    "discovery.process": ("override",),
    "engine.plain_tensors": ("plain",),
    "engine.replication": ("replicate_unknown",),
    "errors": ("ShardingError",),
    "kernel.placements": ("Partial", "Placement", "Replicate", "Shard"),
    "kernel.spec": ("TensorSpec",),
    "kernel.tensor_meta": ("TensorMeta",),
    "rng.generator": ("manual_seed",),
    "steps.learning": ("learn",),
    "steps.planning": ("plan",),
    "tensor.distribute": ("distribute_tensor",),
    "tensor.factories": ("empty", "full", "ones", "rand", "randint", "randn", "randperm", "zeros"),
    "tensor.late_grads": ("accumulate",),
    "tensor.local_function": ("local",),
    "tensor.mesh_tensor": ("MeshTensor",),
    "tensor.modules": ("distribute_module",),
    "tensor.on_mesh": ("on",),
    "tensor.prefetch": ("prefetch",),
    "tensor.printing": ("print",),
    "tensor.replica_check": ("check_replicas",),
    "tensor.sharing": ("sharing_views",),
    "tools.calibrate": ("calibrate",),
    "tools.explain": ("explain",),
    "tools.spot_check": ("verify",),
    "tools.timeline": ("timeline",),
    "tools.visualize": ("visualize",),
}
_PACKAGES = ("checkpoint", "errors", "random", "testing")
# What other libraries look up here, and no program: not in __all__.
_FOR_LIBRARIES = {"tensor.array_functions": ("einsum", "tensordot", "transpose")}
_WHERE = {name: module for module, names in (_NAMES | _FOR_LIBRARIES).items() for name in names}

# Names that people look for here, and where to find what they are for.
_ELSEWHERE = {
    "DTensor": "the class of tensors on a mesh is shardwise.MeshTensor",
    "DeviceMesh": "it is in torch.distributed.device_mesh",
    "from_local": "it is a method, shardwise.MeshTensor.from_local",
    "fully_shard": "shardwise.distribute_module shards parameters; docs/cookbook/from-fsdp2.md shows how",
    "init_device_mesh": "it is in torch.distributed.device_mesh",
    "load": "it is shardwise.checkpoint.load",
    "parallelize_module": "shardwise.distribute_module takes patterns and placements; docs/migration.md shows how",
    "redistribute": "it is a method of tensors, x.redistribute(placements=...)",
    "save": "it is shardwise.checkpoint.save",
}

__all__ = [  # __getattr__ has them
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
    "checkpoint",
    "communication",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "errors",
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
    "print",
    "rand",
    "randint",
    "randn",
    "random",
    "randperm",
    "replicate_unknown",
    "sharing_views",
    "testing",
    "timeline",
    "verify",
    "visualize",
    "zeros",
]


def __getattr__(name: str) -> Any:
    """Import a name at its first use."""
    if name in _WHERE:
        value = getattr(import_module(f"shardwise.{_WHERE[name]}"), name)
    elif name in _PACKAGES:
        value = import_module(f"shardwise.{name}")
    else:
        where = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        text = f"module {__name__!r} has no attribute {name!r}{where}"
        raise AttributeError(text, name=name, obj=sys.modules[__name__])
    globals()[name] = value
    if "shardwise.tensor" in sys.modules:
        _start()
    return value


@cache
def _start() -> None:
    """Tell the package of tensors, once it is there, what packages above it do."""
    from shardwise.comm import rule_agreement
    from shardwise.tensor import MeshTensor, modules

    modules.at_module.append(_learn_by_itself)
    MeshTensor._repr_html_ = _picture  # type: ignore[attr-defined]  # what notebooks call
    rule_agreement.at_first_use.append(_verify_if_asked)


def _picture(tensor: "MeshTensor") -> str:
    """How a MeshTensor lies, for notebooks; nothing is computed or sent."""
    from shardwise.tools.visualize import visualize

    return visualize(tensor).svg()


def _verify_if_asked() -> None:
    """Check calls from the first use of a mesh on, where the setting ``verify`` says so."""
    from shardwise.comm import rule_agreement
    from shardwise.settings import read_settings

    rule_agreement.at_first_use.remove(_verify_if_asked)
    if read_settings().verify:
        from shardwise.tools.spot_check import verify_if_asked

        verify_if_asked()


def _learn_by_itself(mesh: "DeviceMesh") -> None:
    """Learn a program from its first ``distribute_module`` on, as the setting ``learn`` says."""
    from shardwise.settings import read_settings

    if read_settings().learn is not False:
        from shardwise.steps.automatic import learn_by_itself

        learn_by_itself(mesh)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
