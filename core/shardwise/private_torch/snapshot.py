"""The snapshot of the dispatcher's state that torch takes above autograd, for torch before 2.13.

There ``__torch_dispatch__`` may only be reached after torch's own kernel for the key ``PythonTLSSnapshot``, which keeps
the state of the thread for it. A kernel of ours for that key takes the place of torch's, for its op; no function takes
the snapshot from Python. But torch's kernel still runs for every other op: one of ours that does nothing but call
back has it taken, and what it calls back runs with the snapshot. From 2.13 on torch does not ask for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["with_snapshot"]

_NEEDED = torch.__version__ < "2.13"  # compared as versions

# Where the dispatcher may look next for a tensor subclass, for a mode, and for tensors of these backends.
_KEYS = ("Python", "AutogradCPU", "AutogradCUDA", "AutogradMeta", "CPU", "CUDA", "Meta")


class _Called(threading.local):
    """What is to be called in this thread."""

    function: Callable[[], None] | None = None


_called = _Called()


def with_snapshot(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of ``call(*args, **kwargs)``, which sends an op on to keys below the snapshot's."""
    if not _NEEDED:
        return call(*args, **kwargs)
    results: list[Any] = []
    errors: list[BaseException] = []

    def attempt() -> None:
        try:
            results.append(call(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  # C++ lies between here and the caller, who gets it as it is
            errors.append(error)

    _called.function = attempt
    _calling_back().default(list(_tensors((*args, *kwargs.values()))))
    if errors:
        raise errors[0]
    return results[0]


@cache
def _calling_back() -> Any:
    """The op that calls back."""
    library: Any = _LIBRARY
    library.define("with_snapshot(Tensor[] operands) -> ()")
    for key in _KEYS:
        library.impl("with_snapshot", _call_back, key)
    return torch.ops.shardwise_private.with_snapshot


_LIBRARY = torch.library.Library("shardwise_private", "FRAGMENT")  # type: ignore[no-untyped-call]


def _call_back(_operands: Any) -> None:
    function, _called.function = _called.function, None
    assert function is not None, "only with_snapshot may call this op"
    function()


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
