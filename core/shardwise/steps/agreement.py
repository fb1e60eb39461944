"""The agreement of ranks on what they recorded: the same calls in the same order, with the same results read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any
from zlib import crc32

import torch

from shardwise.comm import groups
from shardwise.errors import RankDisagreementError
from shardwise.kernel.placements import show_all
from shardwise.kernel.signature import Kind, op_name
from shardwise.kernel.spec import TensorSpec
from shardwise.program.step_graph import Sink, StepGraph

__all__ = ["agree_on_recording", "recording_digest"]


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
    texts = list(_texts(graph))
    for text in texts:
        before = crc32(text.encode(), before)
        digests.append(before)
    ends = torch.tensor([len(digests), digests[-1] if digests else 0], device=mesh.device_type)
    least, most = least_and_most(ends)
    if torch.equal(least, most):
        return
    shared = int(least[0])
    least, most = least_and_most(torch.tensor(digests[:shared], dtype=torch.int64, device=mesh.device_type))
    differing = (least != most).nonzero().flatten().tolist()
    at = int(differing[0]) if differing else shared
    mine = texts[at] if at < len(texts) else "no such call"
    raise RankDisagreementError(
        asked="decide for the whole step that was recorded",
        found=f"the ranks of the mesh ran different calls; the first that differs is number {at + 1}, here {mine}",
        do="Make the same calls on every rank in the step that is learned, or run it under shardwise.learn(False).",
        differences=(mine,),
    )


def recording_digest(graph: StepGraph) -> str:
    """A digest of all that the ranks must have recorded alike."""
    return hashlib.sha256("\n".join(_texts(graph)).encode()).hexdigest()


def _texts(graph: StepGraph) -> Iterator[str]:
    """Per call, all that a decision about it follows from: its operands, where they come from, and its arguments.

    Tensors have no numbers of the recording: a rank may have recorded calls that nobody needs, to print something.
    """
    made = {t: f" of call {n}" for n, call in enumerate(graph.calls, 1) for t in call.results if t is not None}
    inputs: dict[int, str] = {}

    def operand(spec: TensorSpec | None, tensor: int | None) -> str:
        if spec is None or tensor is None:
            return "-"
        source = made.get(tensor)
        if source is None:
            name = graph.tensors[tensor].name
            source = inputs.setdefault(tensor, f" of input {len(inputs) + 1}{f' ({name})' if name else ''}")
        return f"{spec}{source}"

    for call in graph.calls:
        operands = iter(zip(call.schema.specs, call.operands, strict=True))
        shown = []
        for arg, value in zip(call.schema.signature.args, call.schema.values, strict=True):
            if arg.kind is Kind.TENSOR:
                shown.append(operand(*next(operands)))
            elif arg.kind is Kind.TENSORS:
                shown += [operand(*next(operands)) for _ in value or ()]
            elif arg.name in call.schema.info.by_value and _is_plain(value) and value != arg.default:
                shown.append(f"{arg.name}={value}")
        strategy = "; ".join(map(str, call.strategies))
        where = f" in {call.module}" if call.module else ""
        ends = "".join(map(_end, (sink for t in call.results if t is not None for sink in graph.ends.get(t, ()))))
        yield f"{op_name(call.schema.op)}({', '.join(shown)}) as {strategy}{where}, {call.phase}{ends}"


def _end(sink: Sink) -> str:
    """What the program does with a result itself. Decisions follow from it, too."""
    return ", then read by to_local()" if sink.stays else f", then asked for as {show_all(sink.placements)}"


def _is_plain(value: Any) -> bool:
    """Whether a value has the same text on every rank: not that of an object in memory."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (int, float, str, torch.dtype, torch.layout, torch.memory_format))
