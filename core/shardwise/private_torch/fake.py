"""Tensors and process groups without data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from shardwise.private_torch.dispatch import _FOREACH_MODULES, support_foreach

__all__ = ["fake_store", "fake_tensors", "is_unknowable"]


@contextmanager
def fake_tensors() -> Iterator[None]:
    """A context in which tensors have a device and no data, and optimizers treat them as that device's tensors.

    Tensors on the meta device, the public way, take other kernels than those of a real device: no fused attention, no
    fused or foreach optimizer.
    """
    known = [getattr(import_module(name), "_foreach_supported_types", []) for name in _FOREACH_MODULES]
    before = [list(types) for types in known]
    support_foreach(FakeTensor)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        for types, old in zip(known, before, strict=True):
            types[:] = old


def fake_store() -> Any:
    """The store of a process group in which only this rank is there; torch has it among its own tests."""
    return import_module("torch.testing._internal.distributed.fake_pg").FakeStore()


def is_unknowable(error: BaseException) -> bool:
    """Whether an op without data could not go on because data decides its result."""
    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))
