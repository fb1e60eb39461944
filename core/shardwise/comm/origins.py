"""Where MeshTensors come from, in a form that the ranks can compare while :func:`check_ranks` is on.

Two ranks that loop over a set in different orders issue the same collectives at the same lines, by the same plans, for
other tensors. Nothing about the collective tells them apart, and its data cannot: each rank has its own part. What
differs is the history of the tensor. So each result of an op has an origin: a digest of the op, of its numbers and of
the origins of its operands. It starts from tensors that the ranks have distributed, which are counted.

The same value has the same origin on every rank, also where one rank runs further ops of its own. What has no origin
(a tensor from ``from_local``, from a graph, or from before the check) counts as the same as any other such tensor.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
from attrs import frozen
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.call_sites import OURS, short_line, users_frame
from shardwise.comm.collective_log import subject_code
from shardwise.kernel.dispatcher import check_calls
from shardwise.kernel.engine import Handler, started
from shardwise.kernel.nested import tensors_in
from shardwise.kernel.signature import Op, op_name, signature
from shardwise.kernel.world import PerWorld
from shardwise.private_torch.dispatch import leave_out_of_graphs

__all__ = ["ORIGIN", "Origin", "derive", "origins_of", "start", "subject_of", "subject_of_distributed", "track_origins"]


@frozen(cache_hash=True)
class Origin:
    """Where a tensor comes from: the same ``digest`` on every rank that has this tensor, and ``text`` for people."""

    digest: str
    text: str

    def __str__(self) -> str:
        return f"{self.text} ({self.digest})"


ORIGIN = "_shardwise_origin"
"""The attribute of a tensor that has its origin: torch swaps no tensors with weak references. It is not saved."""
_DISTRIBUTED = "distributed tensor"
_numbers: Counter[int] = Counter()
# Of the tensors that were distributed, by the hash of their mesh. One rank may have rehearsed a program before.
_counts = PerWorld(_numbers, _numbers.clear)

# Numbers that may differ between ranks in the last bit, and objects, whose text has an address, do not count.
_COUNT = (int, str, torch.dtype, type(None))


def start(tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    """A tensor was distributed over a mesh by a call that all its ranks make. Cheap, so it is noted always."""
    counts = _counts.now()
    counts[hash(mesh)] += 1
    number = counts[hash(mesh)]
    tensor.__dict__[ORIGIN] = Origin(_digest("distributed", number), f"{_DISTRIBUTED} {number}")


def subject_of(leaf: torch.Tensor, name: str) -> int:
    """A number for the gradient of a leaf, the same on every rank; 0 where nothing tells the leaf from others. Tensors
    that were distributed are counted; a ``name`` counts where nothing was sent for it.
    """
    origin = _origin(leaf)
    if origin is not None and origin.text.startswith(_DISTRIBUTED):
        return subject_code(origin.digest, f"the gradient of {repr(name) if name else origin.text}")
    return subject_code(name, f"the gradient of {name!r}") if name else 0


def subject_of_distributed(tensor: torch.Tensor, name: str) -> int:
    """The same for a tensor itself, where it is one that was distributed and not the result of an op."""
    origin = _origin(tensor)
    return 0 if origin is None else _own_subject(origin, name)


@lru_cache(maxsize=4096)
def _own_subject(origin: Origin, name: str) -> int:
    if not origin.text.startswith(_DISTRIBUTED):
        return 0
    return subject_code(f"itself {origin.digest}", repr(name) if name else origin.text)


def derive(asked: str, source: torch.Tensor, result: torch.Tensor) -> None:
    """A tensor was made of another one by something else than an op."""
    if _tracked:
        result.__dict__[ORIGIN] = Origin(_digest(asked, _described(source)), _at(asked))


def origins_of(frame: FrameType | None, user: FrameType | None) -> list[Origin]:
    """The origins of the tensors for which a collective is issued: the operands of the outermost call to shardwise.

    Further calls inside of it may depend on a rank's part, for example where that is empty.
    """
    outermost: FrameType | None = None
    while frame is not None and frame is not user:
        if frame.f_code.co_filename.startswith(OURS):
            outermost = frame
        frame = frame.f_back
    if outermost is None:
        return []
    code = outermost.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    operands = tensors_in([outermost.f_locals.get(name) for name in names])
    return [origin for origin in map(_origin, operands) if origin is not None]


_tracked: list[AbstractContextManager[None]] = []


def track_origins() -> AbstractContextManager[None]:
    """A context in which results of ops have origins."""
    return _Tracking()


class _Tracking(AbstractContextManager[None]):
    def __enter__(self) -> None:
        self._calls = check_calls(_around)
        self._calls.__enter__()
        _tracked.append(self)

    def __exit__(self, *error: object) -> None:
        _tracked.remove(self)
        self._calls.__exit__(None, None, None)


def _around(handle: Handler, op: Op) -> Handler:
    """A handler whose results and written operands have origins."""
    name = op_name(op)
    arguments = signature(op).args

    def handle_and_note(
        cls: Any, op: Op, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        call = _digest(name, _described(args), _described(kwargs))  # before the call, which may write its operands
        result = handle(cls, op, types, args, kwargs)
        operands = {arg.name: value for arg, value in zip(arguments, args, strict=False)} | dict(kwargs)
        written = [operands.get(arg.name) for arg in arguments if arg.written]
        text = _at(name)
        for i, tensor in enumerate(tensors_in([written, result])):
            if isinstance(tensor, started.tensor_class):
                tensor.__dict__[ORIGIN] = Origin(_digest(call, i), text)
        return result

    leave_out_of_graphs(handle_and_note)
    return handle_and_note


def _origin(tensor: torch.Tensor) -> Origin | None:
    return tensor.__dict__.get(ORIGIN)


def _described(value: Any) -> str:
    """An argument in a text that is the same on every rank."""
    if isinstance(value, torch.Tensor):
        origin = _origin(value)
        return "tensor" if origin is None else origin.digest
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_described(part)}' for key, part in value.items())}}}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_described, value))}]"
    return repr(value) if isinstance(value, _COUNT) else type(value).__name__


def _digest(*parts: Any) -> str:
    return hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=6).hexdigest()


def _at(asked: str) -> str:
    """What was asked for, and the user's line."""
    user = users_frame(sys._getframe(2))  # noqa: SLF001  # documented
    line = "an unknown line" if user is None else short_line(user.f_code, user.f_lasti)
    return f"the result of {asked} at {line}"
