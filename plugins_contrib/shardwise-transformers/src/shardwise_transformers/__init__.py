"""Models of transformers on a mesh: their own tensor-parallel and expert-parallel plans as placements."""

from shardwise_transformers.errors import ModelPlanError, PlacementStyleError, StyleError
from shardwise_transformers.experts import run_experts_locally
from shardwise_transformers.files import save
from shardwise_transformers.placing import distribute, generate, place_batch
from shardwise_transformers.reading import Plan, expert_parallel, tensor_parallel
from shardwise_transformers.writing import to_ep_plan, to_tp_plan

__all__ = [
    "ModelPlanError",
    "PlacementStyleError",
    "Plan",
    "StyleError",
    "distribute",
    "expert_parallel",
    "generate",
    "place_batch",
    "run_experts_locally",
    "save",
    "tensor_parallel",
    "to_ep_plan",
    "to_tp_plan",
]
