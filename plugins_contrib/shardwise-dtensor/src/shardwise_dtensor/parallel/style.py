"""The styles of ``parallelize_module``: torch's own classes with MeshTensor in place of DTensor.

Their arguments, their errors and what they do to a module are torch's. They change a module in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import shardwise
from shardwise_dtensor.torch_private import second_copy

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel.style import (
        ColwiseParallel,
        ParallelStyle,
        PrepareModuleInput,
        PrepareModuleInputOutput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
    )
else:
    _copy = second_copy(
        "torch.distributed.tensor.parallel.style",
        DTensor=shardwise.MeshTensor,
        distribute_module=shardwise.distribute_module,
        distribute_tensor=shardwise.distribute_tensor,
    )
    ColwiseParallel = _copy.ColwiseParallel
    ParallelStyle = _copy.ParallelStyle
    PrepareModuleInput = _copy.PrepareModuleInput
    PrepareModuleInputOutput = _copy.PrepareModuleInputOutput
    PrepareModuleOutput = _copy.PrepareModuleOutput
    RowwiseParallel = _copy.RowwiseParallel
    SequenceParallel = _copy.SequenceParallel
    for _name in _copy.__all__:
        getattr(_copy, _name).__module__ = __name__  # where pickle finds it

__all__ = [
    "ParallelStyle",
    "ColwiseParallel",
    "RowwiseParallel",
    "SequenceParallel",
    "PrepareModuleInput",
    "PrepareModuleOutput",
    "PrepareModuleInputOutput",
]
