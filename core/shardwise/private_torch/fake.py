"""Tensors without data, and process groups without other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from attrs import define
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from shardwise.private_torch.dispatch import FOREACH_MODULES, support_foreach

__all__ = ["fake_store", "fake_tensors", "is_rehearsing", "is_unknowable", "rehearsing"]


@contextmanager
def fake_tensors() -> Iterator[None]:
    """A context in which tensors have a device but no data, and optimizers treat them as that device's tensors.

    The public alternative, the meta device, runs other kernels than a real device: no fused attention, and no fused or
    foreach optimizer.
    """
    known = [getattr(import_module(name), "_foreach_supported_types", []) for name in FOREACH_MODULES]
    before = [list(types) for types in known]
    support_foreach(FakeTensor)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        for types, old in zip(known, before, strict=True):
            types[:] = old


def fake_store() -> Any:
    """The store of a process group that has only this rank. Torch keeps it among its own tests."""
    return import_module("torch.testing._internal.distributed.fake_pg").FakeStore()


@define
class _Process:
    """What tensors without data stand for in this process. It is not per thread: backward runs in other threads."""

    is_rehearsing: bool = False


_process = _Process()


@contextmanager
def rehearsing() -> Iterator[None]:
    """A context in which a program runs on fake tensors, on a mesh without other ranks.

    Outside it a fake tensor stands for a value of a graph (:func:`shardwise.private_torch.tracing.is_traced`).
    """
    before, _process.is_rehearsing = _process.is_rehearsing, True
    try:
        yield
    finally:
        _process.is_rehearsing = before


def is_rehearsing() -> bool:
    """Whether the program runs without data, on a mesh without other ranks."""
    return _process.is_rehearsing


def is_unknowable(error: BaseException) -> bool:
    """Whether an op without data failed because its result depends on data."""
    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))
