"""The bridge between shardwise and torch's DTensor, in both directions.

:func:`export` registers shardwise rules with DTensor. :func:`register_op_strategy` and :func:`register_prop_rule` make
shardwise rules of functions written for DTensor; the classes that such functions use are torch's own, under torch's
names.
"""

from shardwise_dtensor.classic import register_op_strategy, register_prop_rule, rules_of
from shardwise_dtensor.exporting import Export, Exported, Preview, export, export_plugin, preview
from shardwise_dtensor.older import OutputSharding, PlacementStrategy
from shardwise_dtensor.torch_private import (
    DTensorSpec,
    OpSchema,
    OpSpec,
    OpStrategy,
    PlacementList,
    RuntimeSchemaInfo,
    StrategyType,
    TensorMeta,
    TupleStrategy,
)

__all__ = [
    "Export",
    "Exported",
    "Preview",
    "export",
    "export_plugin",
    "preview",
    "register_op_strategy",
    "register_prop_rule",
    "rules_of",
    "DTensorSpec",
    "OpSchema",
    "OpSpec",
    "OpStrategy",
    "OutputSharding",
    "PlacementList",
    "PlacementStrategy",
    "RuntimeSchemaInfo",
    "StrategyType",
    "TensorMeta",
    "TupleStrategy",
]
