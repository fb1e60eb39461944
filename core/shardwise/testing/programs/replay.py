"""The ranks' side: runs a program through the dispatcher and says what this rank holds after each line."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from shardwise.errors import DeviceMismatchError, NoRuleError, NoStrategyError, PlainTensorError
from shardwise.kernel.placements import Placement
from shardwise.kernel.spec import TensorMeta, TensorSpec
from shardwise.private_torch.dispatch import memory_of
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tensor.shards import scatter_local
from shardwise.testing.meshes import mesh
from shardwise.testing.partials import place
from shardwise.testing.programs.machine import call_on, cotangents, flows, follow_back, written_names
from shardwise.testing.programs.program import Call, Leaf, Line, Move, Program

__all__ = ["BACKWARD", "Held", "LineOutcome", "replay"]

BACKWARD = "backward"


@frozen(eq=False)
class Held:
    """What this rank holds of one value: its local tensor, and where the whole one lies; no placements for none.

    ``plain`` names the type of a value that is no MeshTensor.
    """

    local: Tensor
    placements: tuple[Placement, ...] = ()
    meta: TensorMeta | None = None
    plain: str = ""

    def __reduce__(self) -> Any:
        # A tensor's own pickle is a zip archive: ten times slower than its bytes.
        t = self.local
        flat = torch.empty(t.numel(), dtype=t.dtype).copy_(t.reshape(-1))
        data = flat.view(torch.uint8).numpy().tobytes() if t.numel() else b""
        return _held, (data, tuple(t.shape), t.dtype, self.placements, self.meta, self.plain)


def _held(
    data: bytes,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    placements: tuple[Placement, ...],
    meta: TensorMeta | None,
    plain: str,
) -> Held:
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype)
    return Held(flat.reshape(shape), placements, meta, plain)


@frozen(eq=False)
class LineOutcome:
    """What became of one line on this rank: ``state`` is ran, refused, left (it needs what was refused), or raised.

    ``why`` is the error of one that was refused or raised.
    """

    state: str
    why: str = ""
    values: Mapping[int, Held] = field(factory=dict)
    others: tuple[Any, ...] = ()


def replay(program: Program, watched: Sequence[Sequence[int]]) -> list[LineOutcome]:
    """Run a program on this rank. ``watched`` are the values to look at after each line.

    One outcome a line, and one more for the backward pass, if there is one. After a line that raised, or that could
    not write what it should, nothing runs any more. An error that only this rank has ends it, so that the others,
    which may wait for it, are not left to wait for long.
    """
    run = _Replay(program, mesh(program.mesh_shape))
    with warnings.catch_warnings(), torch.set_grad_enabled(program.grad):
        warnings.simplefilter("ignore")
        outcomes = []
        for line, names in zip(program.lines, watched, strict=True):
            outcomes.append(run.line(line, names))
            if run.ended:
                return outcomes
        if program.backward:
            outcomes.append(run.backward())
    return outcomes


@define(eq=False)
class _Replay:
    program: Program
    device_mesh: Any
    values: dict[int, Any] = field(factory=dict)
    ended: bool = False

    def line(self, line: Line, watched: Sequence[int]) -> LineOutcome:
        needed = line.operands if isinstance(line, Call) else [line.source] if isinstance(line, Move) else []
        if not all(name in self.values for name in needed):
            self.ended = _writes(line)
            return LineOutcome("left")
        try:
            others = self._run(line)
        except (NoRuleError, NoStrategyError, PlainTensorError) as error:
            self.ended = _writes(line)
            return LineOutcome("refused", f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001  # whatever it is, it is told by its name
            raise LineFailedError(f"{line}: {type(error).__name__}: {error}\n{traceback.format_exc()}") from None
        if _writes(line) and any(_is_stale(self.values.get(name)) for name in watched):
            # A view that had to be copied does not see what is written to its base; nor does a program count on it.
            self.ended = True
            return LineOutcome("left", "a view of what it writes is a copy")
        return LineOutcome("ran", "", {n: _seen(self.values[n]) for n in watched if n in self.values}, others)

    def _run(self, line: Line) -> tuple[Any, ...]:
        if isinstance(line, Leaf):
            self.values[line.name] = self._leaf(line)
            return ()
        if isinstance(line, Move):
            self.values[line.name] = _moved(self.values[line.source], line.placements)
            return ()
        tensors, others = call_on(line, self.values)
        for name, tensor in zip(line.names, tensors, strict=True):
            if tensor is not None:
                self.values[name] = tensor
        return others

    def _leaf(self, line: Leaf) -> MeshTensor:
        spec = TensorSpec(self.device_mesh, line.placements, TensorMeta.of(line.value))
        local = place(line.value, spec, torch.Generator().manual_seed(line.name))[spec.coordinate()]
        return MeshTensor(local, spec, self.program.grad and flows(line.value))

    def backward(self) -> LineOutcome:
        roots = [self.values.get(name) for name, _ in self.program.backward]
        if any(root is None for root in roots):
            return LineOutcome("left")
        given = []
        for (_, placements), whole in zip(self.program.backward, cotangents(self.program, self.values), strict=True):
            spec = TensorSpec(self.device_mesh, placements, TensorMeta.of(whole))
            given.append(MeshTensor(scatter_local(whole, spec), spec))
        try:
            gradients = follow_back(self.program, self.values, roots, given)
        except (DeviceMismatchError, NoRuleError, NoStrategyError, PlainTensorError) as error:
            # Some of torch's formulas make plain constants, or ask what would come out on the meta device.
            return LineOutcome("refused", f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001  # whatever it is, it is told by its name
            raise LineFailedError(f"{BACKWARD}: {type(error).__name__}: {error}\n{traceback.format_exc()}") from None
        return LineOutcome("ran", "", {n: _seen(g) for n, g in gradients.items() if g is not None})


class LineFailedError(RuntimeError):
    """A line raised an error that is not a refusal."""


def _moved(source: Any, placements: Sequence[Placement]) -> Any:
    """The value in other places, in memory of its own: a tensor that stays where it is would be the source itself."""
    moved = source.redistribute(placements=placements)
    with torch.no_grad():
        stays = memory_of(moved.to_local()) == memory_of(source.to_local())
    return moved.clone() if stays else moved


def _writes(line: Line) -> bool:
    return isinstance(line, Call) and bool(written_names(line))


def _is_stale(value: Any) -> bool:
    return isinstance(value, MeshTensor) and value.spec.is_copy


def _seen(value: Any) -> Held:
    if not isinstance(value, MeshTensor):
        return Held(torch.as_tensor(value).detach().clone(), plain=type(value).__name__)
    spec = value.spec
    local = value.to_local().detach().clone()
    return Held(local, spec.placements, spec.tensor_meta)
