"""The kit for testing rules and programs: the oracle that judges a rule, a pool of real workers, and meshes.

The worker pool sends functions of test modules by cloudpickle, which the extra ``shardwise[test]`` brings.
"""

from shardwise.testing.inference import InferenceError, Inferred, infer
from shardwise.testing.meshes import mesh
from shardwise.testing.oracle import Report, RuleRefuted, check_plugin, check_rule
from shardwise.testing.pool import RankFailure, WorkerPool

__all__ = [
    "InferenceError",
    "Inferred",
    "RankFailure",
    "Report",
    "RuleRefuted",
    "WorkerPool",
    "check_plugin",
    "check_rule",
    "infer",
    "mesh",
]
