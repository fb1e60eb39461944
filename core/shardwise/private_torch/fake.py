"""Tensors without data, and process groups without other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from attrs import define
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from shardwise.private_torch.dispatch import FOREACH_MODULES, support_foreach

__all__ = [
    "fake_store",
    "fake_strides",
    "fake_tensors",
    "is_rehearsing",
    "is_unknowable",
    "rehearsing",
    "shape_needs_data",
]


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


def fake_strides(op: Any, arguments: Mapping[str, Any], device_type: str) -> list[tuple[int, ...] | None]:
    """The strides of an op's tensor results as the kernels of a device type return them, ``None`` if undefined.

    ``arguments`` are the op's by name, with ``(shape, stride, dtype)`` for a tensor. The meta device is the public
    alternative. Its kernel of ``convolution`` does not know the memory formats of real kernels.
    """
    with FakeTensorMode():

        def tensor(value: Any) -> Any:
            match value:
                case (shape, stride, torch.dtype() as dtype):
                    return torch.empty_strided(shape, stride, dtype=dtype, device=device_type)
            return value

        results = op(**{name: tensor(value) for name, value in arguments.items()})
    parts = results if isinstance(results, (tuple, list)) else (results,)
    return [None if part is None else part.stride() for part in parts]


def fake_store() -> Any:
    """The store of a process group that has only this rank. Torch keeps it among its own tests."""
    return import_module("torch.testing._internal.distributed.fake_pg").FakeStore()


@define
class _Process:
    """Whether this process rehearses. It is not per thread, because backward runs in other threads."""

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


def shape_needs_data(error: RuntimeError) -> bool:
    """Whether a fake kernel asked for a size that depends on data (``torch.library.get_ctx().new_dynamic_size()``).

    On the meta device torch has no answer, and raises a plain RuntimeError. Its text is all that tells it from others.
    """
    return "output Tensor with data-dependent shape" in str(error)
