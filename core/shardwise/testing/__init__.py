"""The kit for testing rules, plugins and programs.

The oracle judges a rule, or all rules of a plugin, on simulated ranks (:func:`check_rule`, :func:`check_plugin`).
:func:`check_gradients` runs an op and its backward on real ranks of a :class:`WorkerPool`. :class:`PluginTests` is a
test class that does both. :mod:`shardwise.testing.pytest_plugin` has fixtures, and :mod:`shardwise.testing.strategies`
has hypothesis strategies. The extra ``shardwise[test]`` installs what these need: pytest, hypothesis, and cloudpickle,
which sends functions of test modules to the workers.

Names are imported at their first use: a process of pytest that only shares tests out needs no torch.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.testing.gradients import GradientRefuted, RanksReport, check_gradients
    from shardwise.testing.host_waits import HostWait, on_device
    from shardwise.testing.inference import InferenceError, Inferred, infer
    from shardwise.testing.isolated import IsolatedRegistry, isolated_registry
    from shardwise.testing.local_functions import LocalRefuted, LocalReport, check_local
    from shardwise.testing.meshes import mesh
    from shardwise.testing.oracle import check_plugin, check_rule
    from shardwise.testing.pool import WorkerPool
    from shardwise.testing.report import Report, RuleRefuted
    from shardwise.testing.schema_samples import samples_from_schema
    from shardwise.testing.suite import PluginTests
    from shardwise.testing.values import made
    from shardwise.testing.worker import RankFailure

# By the module that has them.
_NAMES = {
    "gradients": ("GradientRefuted", "RanksReport", "check_gradients"),
    "host_waits": ("HostWait", "on_device"),
    "inference": ("InferenceError", "Inferred", "infer"),
    "isolated": ("IsolatedRegistry", "isolated_registry"),
    "local_functions": ("LocalRefuted", "LocalReport", "check_local"),
    "meshes": ("mesh",),
    "oracle": ("check_plugin", "check_rule"),
    "pool": ("WorkerPool",),
    "report": ("Report", "RuleRefuted"),
    "schema_samples": ("samples_from_schema",),
    "suite": ("PluginTests",),
    "values": ("made",),
    "worker": ("RankFailure",),
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [  # __getattr__ has them
    "GradientRefuted",
    "HostWait",
    "InferenceError",
    "Inferred",
    "IsolatedRegistry",
    "LocalRefuted",
    "LocalReport",
    "PluginTests",
    "RankFailure",
    "RanksReport",
    "Report",
    "RuleRefuted",
    "WorkerPool",
    "check_gradients",
    "check_local",
    "check_plugin",
    "check_rule",
    "infer",
    "isolated_registry",
    "made",
    "mesh",
    "on_device",
    "samples_from_schema",
]


def __getattr__(name: str) -> Any:
    """Import a name at its first use."""
    if name not in _WHERE:
        text = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(text, name=name, obj=sys.modules[__name__])
    value = getattr(import_module(f"shardwise.testing.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """What is here, and what would be imported."""
    return sorted({*globals(), *_WHERE})
