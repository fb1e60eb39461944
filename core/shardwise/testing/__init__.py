"""The kit for testing rules and programs: a pool of real workers, meshes, and what judges a rule.

The worker pool sends functions of test modules by cloudpickle, which the extra ``shardwise[test]`` brings.
"""

from shardwise.testing.meshes import mesh
from shardwise.testing.pool import RankFailure, WorkerPool

__all__ = ["RankFailure", "WorkerPool", "mesh"]
