"""All that a rule is written with. A plugin imports this, ``shardwise.hookspecs`` and ``shardwise.errors``."""

from shardwise.kernel.mesh import AbstractMesh, Mesh
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
from shardwise.kernel.reductions import REDUCE_OPS, neutral
from shardwise.kernel.rule import FullMeshRule, Row, Rows, Rule
from shardwise.kernel.schema import OpSchema, OpStrategy, PlacementStrategy, RuntimeSchemaInfo
from shardwise.kernel.signature import ByType, Call, Kind, Op, is_of_tensors, signature
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.symbols import chunk, common_factor
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.private_torch.tracing import is_recorded, is_traced, is_without_data
from shardwise.rng.sampling import Draw, Region
from shardwise.rule.authoring import einop, full_mesh_rule, like, rule, rule_from
from shardwise.rule.counted import call_if, tensor_if, tied_to
from shardwise.rule.facts import Facts, affine, decreasing, linear, monotone, moves
from shardwise.rule.flow import Flow
from shardwise.rule.infinite_factors import multiply, multiply_matrices, reduced
from shardwise.rule.iterated import iterated, iterated_over, iterates_over
from shardwise.rule.kernel_results import in_memory_format, like_operand, row_major, strides_of_kernel
from shardwise.rule.labels import ANY, UNMOVED, Labels, dim_of, each, labels, replaced, whole
from shardwise.rule.lowering import AsyncResult, LocalCall, Lowering

__all__ = [
    "ANY",
    "AbstractMesh",
    "AsyncResult",
    "ByType",
    "Call",
    "Draw",
    "Facts",
    "Flow",
    "FullMeshRule",
    "Kind",
    "Labels",
    "LocalCall",
    "Lowering",
    "Mesh",
    "Op",
    "OpSchema",
    "OpStrategy",
    "Partial",
    "Placement",
    "PlacementStrategy",
    "REDUCE_OPS",
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
    "UNMOVED",
    "affine",
    "call_if",
    "check_placements",
    "chunk",
    "common_factor",
    "decreasing",
    "dim_of",
    "each",
    "einop",
    "full_mesh_rule",
    "in_memory_format",
    "is_recorded",
    "is_traced",
    "is_without_data",
    "iterated",
    "iterated_over",
    "iterates_over",
    "labels",
    "like",
    "like_operand",
    "linear",
    "monotone",
    "moves",
    "multiply",
    "multiply_matrices",
    "neutral",
    "partial",
    "reduced",
    "replaced",
    "row_major",
    "rule",
    "rule_from",
    "shard",
    "show",
    "show_all",
    "is_of_tensors",
    "signature",
    "strides_of_kernel",
    "tensor_if",
    "tied_to",
    "whole",
]
