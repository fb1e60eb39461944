"""A context in which a program stays on its device: the host never waits for it, and no tensor is elsewhere.

A step that waits for the device leaves it idle each time. Such waits are easy to write and hard to see: a number that
is read, a mask as an index, a copy from memory that is not pinned.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from shardwise.comm.call_sites import short_line, users_frame
from shardwise.errors import HostWaitError
from shardwise.kernel.nested import tensors_in
from shardwise.kernel.signature import Op, op_name
from shardwise.private_torch.dispatch import watching
from shardwise.private_torch.ops import is_composite
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tools.program import stand_in_number

__all__ = ["HostWait", "on_device"]

_READS = "reads a number or a shape from the device"
_TO_HOST = "copies from the device to the host"
_FROM_HOST = "copies from memory of the host that is not pinned"
_MIXED = "has operands on the host and on the device"

_COPIES = ("aten._to_copy.default", "aten.copy_.default", "prims.device_put.default")


@frozen
class HostWait:
    """An op that made the host wait, or that had an operand elsewhere: its name, what it does, the program's line."""

    op: str
    does: str
    site: str

    def __str__(self) -> str:
        return f"{self.op} {self.does}, at {self.site}"


@contextmanager
def on_device(device_type: str = "cuda", *, raises: bool = True) -> Iterator[list[HostWait]]:
    """A context in which an op that leaves the device raises :class:`HostWaitError`, with its line in the program.

    It sees the ops that run on a rank's local tensors, in backward passes too, with data or without (a rehearsal). What
    counts: a number or a shape that is read from the device (``item``, ``bool``, ``nonzero``, a mask as an index), a
    copy to the host, a copy from memory that is not pinned, and an op with operands on both sides. An operand on the
    host with one element and no dims counts too: on a device it is a copy, or an op that may be captured in no graph.

    Yields the list of what was found. With ``raises=False`` all are noted and nothing raises; a number that is not
    there is 1, as in a rehearsal.
    """
    watch = _Watch(torch.device(device_type).type, raises)
    with watching(watch.run, _is_split):
        yield watch.found


def _is_split(op: Op) -> bool:
    return op.namespace != "prim" and is_composite(op)


@define
class _Watch:
    device_type: str
    raises: bool
    found: list[HostWait] = field(factory=list)

    def run(self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an op of local tensors; those of MeshTensors go to their dispatcher, whose local ops come here."""
        operands = list(tensors_in([args, kwargs]))
        if any(isinstance(t, MeshTensor) for t in operands):
            return NotImplemented
        does = self._does(op, args, kwargs, operands)
        if does is not None:
            self._note(op_name(op), does)
        if does == _READS:
            number = stand_in_number(op, args, kwargs) if _is_without_data(operands) else None
            if number is not None:
                return number
        return op(*args, **kwargs)

    def _does(self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], operands: Sequence[Tensor]) -> str | None:
        sides = {t.device.type == self.device_type for t in operands if t.device.type != "meta"}
        if op_name(op) in _COPIES:
            return self._copies(op, args, kwargs)
        if len(sides) > 1:
            return _MIXED
        tags = op.tags
        reads = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
        by_mask = op_name(op).startswith(("aten.index.Tensor", "aten._unsafe_index")) and any(
            t.dtype in (torch.bool, torch.uint8) for t in operands[1:]
        )
        return _READS if True in sides and ((reads and not _is_index(op)) or by_mask) else None

    def _copies(self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        """What a copy does that leaves the device or comes to it."""
        into = op_name(op) == "aten.copy_.default"
        source: Tensor = args[1] if into else args[0]
        to = args[0].device if into else kwargs.get("device") or (args[1] if len(args) > 1 else None) or source.device
        sides = source.device.type == self.device_type, torch.device(to).type == self.device_type
        if sides == (True, False):
            return _TO_HOST
        return _FROM_HOST if sides == (False, True) and not _is_pinned(source) else None

    def _note(self, op: str, does: str) -> None:
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        frame = users_frame(frame)
        wait = HostWait(op, does, "-" if frame is None else short_line(frame.f_code, frame.f_lasti))
        self.found.append(wait)
        if self.raises:
            raise HostWaitError(
                asked=f"run {op} on the device alone",
                found=f"it {does}, at {wait.site}",
                do="Keep the number on the device, pin the memory, or do it outside of on_device().",
                op=op,
                site=wait.site,
            )


def _is_index(op: Op) -> bool:
    """Whether an op is an index by tensors, whose result's shape only a mask makes depend on data."""
    return op_name(op) in ("aten.index.Tensor", "aten._unsafe_index.Tensor")


def _is_without_data(operands: Sequence[Tensor]) -> bool:
    return any(type(t) is not Tensor and type(t) is not torch.nn.Parameter for t in operands)


def _is_pinned(tensor: Tensor) -> bool:
    return tensor.is_pinned()
