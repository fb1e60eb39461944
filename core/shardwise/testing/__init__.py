"""The kit for testing rules, plugins and programs.

The oracle judges a rule, or all rules of a plugin, on simulated ranks (:func:`check_rule`, :func:`check_plugin`).
:func:`check_gradients` runs an op and its backward on real ranks of a :class:`WorkerPool`. :class:`PluginTests` is a
test class that does both. :mod:`shardwise.testing.pytest_plugin` has fixtures, and :mod:`shardwise.testing.strategies`
has hypothesis strategies. The extra ``shardwise[test]`` installs what these need: pytest, hypothesis, and cloudpickle,
which sends functions of test modules to the workers.
"""

from shardwise.testing.gradients import GradientRefuted, RanksReport, check_gradients
from shardwise.testing.inference import InferenceError, Inferred, infer
from shardwise.testing.isolated import IsolatedRegistry, isolated_registry
from shardwise.testing.local_functions import LocalRefuted, LocalReport, check_local
from shardwise.testing.meshes import mesh
from shardwise.testing.on_device import HostWait, on_device
from shardwise.testing.oracle import check_plugin, check_rule
from shardwise.testing.pool import WorkerPool
from shardwise.testing.report import Report, RuleRefuted
from shardwise.testing.schema_samples import samples_from_schema
from shardwise.testing.suite import PluginTests
from shardwise.testing.values import made
from shardwise.testing.worker import RankFailure

__all__ = [
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
