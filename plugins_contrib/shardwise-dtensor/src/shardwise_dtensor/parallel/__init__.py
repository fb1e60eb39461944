"""Tensor parallelism by styles: the names and modules of ``torch.distributed.tensor.parallel``, for MeshTensors."""

from shardwise_dtensor.parallel.api import StyleError, parallelize_module
from shardwise_dtensor.parallel.loss import loss_parallel
from shardwise_dtensor.parallel.style import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = [
    "ParallelStyle",
    "ColwiseParallel",
    "RowwiseParallel",
    "SequenceParallel",
    "PrepareModuleInput",
    "PrepareModuleOutput",
    "PrepareModuleInputOutput",
    "StyleError",
    "loss_parallel",
    "parallelize_module",
]
