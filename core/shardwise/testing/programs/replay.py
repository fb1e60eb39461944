"""Run a program on one rank of a mesh, and report the values that this rank holds after each line."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from shardwise.errors import DeviceMismatchError, NoRuleError, NoStrategyError, PlainTensorError, RankFailedError
from shardwise.kernel.local_strides import in_order, lies_as
from shardwise.kernel.placements import Placement
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta, unexpanded
from shardwise.private_torch.dispatch import memory_of
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tensor.shards import scatter_local
from shardwise.testing.meshes import mesh
from shardwise.testing.partials import place
from shardwise.testing.programs.machine import call_on, cotangents, flows, follow_back, written_names
from shardwise.testing.programs.program import (
    WAYS_TO_COPY,
    Assign,
    Call,
    Copy,
    Leaf,
    Line,
    Move,
    Program,
    operands_of,
)

__all__ = ["BACKWARD", "Held", "LineOutcome", "leaf_on_mesh", "replay"]

BACKWARD = "backward"
_NO_DERIVATIVE = re.compile(r"derivative for (\S+) is not implemented")


@frozen(eq=False)
class Held:
    """A rank's part of one value: its local tensor, and the placements and the meta of the whole value.

    For a value that is not a MeshTensor, ``plain`` names its type, and there is no meta.
    """

    local: Tensor
    placements: tuple[Placement, ...] = ()
    meta: TensorMeta | None = None
    plain: str = ""

    def __reduce__(self) -> Any:
        # A tensor's own pickle is a zip archive, ten times slower than its bytes.
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
    """The outcome of one line on this rank. ``state`` is ran, refused, or left (it needs a value that was refused).

    ``why`` is the error of a refusal.
    """

    state: str
    why: str = ""
    values: Mapping[int, Held] = field(factory=dict)
    others: tuple[Any, ...] = ()


def replay(program: Program, watched: Sequence[Sequence[int]]) -> list[LineOutcome]:
    """Run a program on this rank. ``watched`` are the names of the values to report after each line.

    Returns one outcome per line, and one for the backward pass if there is one. The run ends at a line that could not
    write its operand. An error that is not a refusal is raised at once, so that other ranks do not wait for this one.
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
        if not all(name in self.values for name in operands_of(line)):
            self.ended = _writes(line)
            return LineOutcome("left")
        try:
            others = self._run(line)
            for name in watched:
                _check_strides(self.values.get(name))
        except (NoRuleError, NoStrategyError, PlainTensorError) as error:
            self.ended = _writes(line)
            return LineOutcome("refused", f"{type(error).__name__}: {error}")
        except RankFailedError:  # by its type the pool knows that the ranks are not in step
            raise
        except Exception as error:  # noqa: BLE001  # whatever it is, its name is reported
            raise LineFailedError(f"{line}: {type(error).__name__}: {error}\n{traceback.format_exc()}") from None
        return LineOutcome("ran", "", {n: _seen(self.values[n]) for n in watched if n in self.values}, others)

    def _run(self, line: Line) -> tuple[Any, ...]:
        if isinstance(line, Leaf):
            self.values[line.name] = leaf_on_mesh(line, self.device_mesh, requires_grad=self.program.grad)
            return ()
        if isinstance(line, Move):
            # The value gets memory of its own. If the placements do not change, redistribute returns the source itself.
            # Otherwise it keeps the strides, and one device clones, which leaves no gaps.
            source = self.values[line.source]
            moved = source.redistribute(placements=line.placements)
            # Not to_local(): who records a step for a plan takes a part that is read for one that must stay.
            stays = memory_of(moved._local_tensor) == memory_of(source._local_tensor)
            has_gaps = moved.spec.tensor_meta.to_meta_tensor().clone().stride() != moved.stride()
            self.values[line.name] = moved.clone() if stays or has_gaps else moved
            return ()
        if isinstance(line, Copy):
            self.values[line.name] = WAYS_TO_COPY[line.way](self.values[line.source])
            return ()
        if isinstance(line, Assign):
            self.values[line.target].data = self.values[line.source]
            return ()
        tensors, others = call_on(line, self.values)
        for name, tensor in zip(line.names, tensors, strict=True):
            if tensor is not None:
                self.values[name] = tensor
        return others

    def backward(self) -> LineOutcome:
        roots = [self.values.get(name) for name, _ in self.program.backward]
        if any(root is None for root in roots):
            return LineOutcome("left")
        grads = []
        for (_, placements), whole in zip(self.program.backward, cotangents(self.program, self.values), strict=True):
            spec = TensorSpec(self.device_mesh, placements, TensorMeta.of(whole))
            grads.append(MeshTensor(scatter_local(whole, spec), spec))
        try:
            gradients = follow_back(self.program, self.values, roots, grads)
        except (DeviceMismatchError, NoRuleError, NoStrategyError, PlainTensorError) as error:
            # Some of torch's formulas make plain constants, or ask what would come out on the meta device.
            return LineOutcome("refused", f"{type(error).__name__}: {error}")
        except RankFailedError:
            raise
        except Exception as error:  # noqa: BLE001  # whatever it is, its name is reported
            without = _NO_DERIVATIVE.search(str(error))
            if without and without[1] in {_packet_name(call.op) for call in self.program.calls}:
                # An op of the program itself, in torch as well. Its kernel may return an operand itself (of empty ones
                # _fake_quantize_learnable_per_tensor_affine_backward does), and on one device that has its gradient.
                return LineOutcome("refused", f"no derivative: {error}")
            raise LineFailedError(f"{BACKWARD}: {type(error).__name__}: {error}\n{traceback.format_exc()}") from None
        return LineOutcome("ran", "", {n: _seen(g) for n, g in gradients.items() if g is not None})


def _packet_name(op: str) -> str:
    """An op as torch's messages have it: ``aten::mm`` for ``aten.mm.default``."""
    return op.rpartition(".")[0].replace(".", "::", 1)


def leaf_on_mesh(line: Leaf, device_mesh: Any, *, requires_grad: bool) -> MeshTensor:
    """The value of a leaf on this rank. Of leaves that cannot have a gradient ``requires_grad`` asks none."""
    spec = TensorSpec(device_mesh, line.placements, unexpanded(TensorMeta.of(line.value)))
    generator = torch.Generator().manual_seed(line.name)
    local = place(line.value, spec, generator, exact=True)[spec.coordinate()]
    return MeshTensor(in_order(local, spec.tensor_meta), spec, requires_grad and flows(line.value))


class LineFailedError(RuntimeError):
    """A line raised an error that is not a refusal."""


def _writes(line: Line) -> bool:
    return isinstance(line, Assign) or (isinstance(line, Call) and bool(written_names(line)))


def _check_strides(value: Any) -> None:
    """Raise if a value's local tensor does not lie in memory as its spec says."""
    if isinstance(value, MeshTensor):
        local, meta = _part_of(value), value.spec.tensor_meta
        if not lies_as(meta, local.shape, local.stride()):
            raise AssertionError(f"{value.spec} has strides {meta.stride}, its local tensor has {local.stride()}")


def _seen(value: Any) -> Held:
    if not isinstance(value, MeshTensor):
        return Held(torch.as_tensor(value).detach().clone(), plain=type(value).__name__)
    spec = value.spec
    return Held(_part_of(value).clone(), spec.placements, spec.tensor_meta)


def _part_of(value: MeshTensor) -> Tensor:
    """The part of this rank. Torch lets nobody read one of several views with its gradient after a write to it."""
    with torch.no_grad():
        return value.to_local()
