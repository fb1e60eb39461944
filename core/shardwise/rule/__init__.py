"""All that a rule is written with. A plugin imports this, ``shardwise.hookspecs`` and ``shardwise.errors``."""

from shardwise.kernel.placements import (
    REPLICATE,
    Partial,
    Placement,
    Replicate,
    Shard,
    check_placements,
    partial,
    shard,
    show,
    show_all,
)
from shardwise.kernel.reductions import REDUCE_OPS
from shardwise.kernel.rule import FullMeshRule, Row, Rows, Rule
from shardwise.kernel.schema import OpSchema, OpStrategy, PlacementStrategy, RuntimeSchemaInfo
from shardwise.kernel.signature import ByType, Call, Kind, Op, signature
from shardwise.kernel.spec import AbstractMesh, Mesh, TensorMeta, TensorSpec
from shardwise.kernel.symbols import chunk, common_factor
from shardwise.rng.sampling import Draw, Region
from shardwise.rule.authoring import einop, full_mesh_rule, like, rule, rule_from
from shardwise.rule.flow import Flow
from shardwise.rule.lowering import Coming, LocalCall, Lowering

__all__ = [
    "AbstractMesh",
    "ByType",
    "Call",
    "Coming",
    "Draw",
    "Flow",
    "FullMeshRule",
    "Kind",
    "LocalCall",
    "Lowering",
    "Mesh",
    "Op",
    "OpSchema",
    "OpStrategy",
    "REDUCE_OPS",
    "Partial",
    "Placement",
    "PlacementStrategy",
    "REPLICATE",
    "Region",
    "Replicate",
    "Row",
    "Rows",
    "Rule",
    "RuntimeSchemaInfo",
    "Shard",
    "TensorMeta",
    "TensorSpec",
    "check_placements",
    "chunk",
    "common_factor",
    "einop",
    "full_mesh_rule",
    "like",
    "partial",
    "rule",
    "rule_from",
    "shard",
    "show",
    "show_all",
    "signature",
]
