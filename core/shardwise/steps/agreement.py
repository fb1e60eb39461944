"""The agreement of ranks on what they recorded: the same calls in the same order."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch

from shardwise.comm import groups
from shardwise.errors import RankDisagreementError
from shardwise.kernel.signature import op_name
from shardwise.program.step_graph import CallNode, StepGraph

__all__ = ["agree_on_recording"]


def agree_on_recording(graph: StepGraph) -> None:
    """Raise :class:`RankDisagreementError` on every rank unless all recorded the same calls.

    Every rank must call this.
    """
    mesh: Any = graph.mesh
    dims = tuple(m for m in range(mesh.ndim) if mesh.size(m) > 1)
    if not dims:
        return

    def least_and_most(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return groups.all_reduce(numbers, "min", mesh, dims), groups.all_reduce(numbers, "max", mesh, dims)

    # Each digest covers all calls before it, so the last one covers all.
    digests, before = [], 0
    for call in graph.calls:
        before = crc32(_text(call).encode(), before)
        digests.append(before)
    ends = torch.tensor([len(digests), digests[-1] if digests else 0], device=mesh.device_type)
    least, most = least_and_most(ends)
    if torch.equal(least, most):
        return
    shared = int(least[0])
    least, most = least_and_most(torch.tensor(digests[:shared], dtype=torch.int64, device=mesh.device_type))
    differing = (least != most).nonzero().flatten().tolist()
    at = int(differing[0]) if differing else shared
    mine = _text(graph.calls[at]) if at < len(graph.calls) else "no such call"
    raise RankDisagreementError(
        asked="decide for the whole step that was recorded",
        found=f"the ranks of the mesh ran different calls; the first that differs is number {at + 1}, here {mine}",
        do="Make the same calls on every rank in the step that is learned, or run it under shardwise.learn(False).",
        differences=(mine,),
    )


def _text(call: CallNode) -> str:
    operands = ", ".join(map(str, call.schema.specs))
    strategy = "; ".join(map(str, call.strategies))
    where = f" in {call.module}" if call.module else ""
    return f"{op_name(call.schema.op)}({operands}) as {strategy}{where}, {call.phase}"
