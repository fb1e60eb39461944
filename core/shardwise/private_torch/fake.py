"""Tensors without data, and process groups without other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from attrs import define
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from shardwise.errors import CallError
from shardwise.private_torch.dispatch import FOREACH_TYPES, support_foreach
from shardwise.private_torch.parts import find_part, torch_part

__all__ = [
    "added",
    "fake_store",
    "fake_strides",
    "fake_tensors",
    "has_cuda",
    "has_no_fake",
    "is_rehearsing",
    "is_unknowable",
    "rehearsing",
    "replaced",
    "shape_needs_data",
    "standing_in",
]


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """A context in which attributes of a module or a class have other values. Those that it lacks are left out."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    try:
        for name in before:
            setattr(owner, name, values[name])
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def added(owner: Any, **values: Any) -> Iterator[None]:
    """A context in which a class has methods in place of those that it inherits."""
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            delattr(owner, name)


@contextmanager
def fake_tensors() -> Iterator[None]:
    """A context in which tensors have a device but no data, and optimizers treat them as that device's tensors.

    The public alternative, the meta device, runs other kernels than a real device: no fused attention, and no fused or
    foreach optimizer.
    """
    known = [types for types in map(find_part, FOREACH_TYPES) if types is not None]
    before = [list(types) for types in known]
    support_foreach(FakeTensor)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with (
            mode,
            replaced(torch.utils, swap_tensors=_swapping_under(mode)),
            replaced(torch.amp.GradScaler, **_scaler_methods()),
            added(torch.Tensor, pin_memory=_pinned, is_pinned=_is_pinned),
        ):
            yield
    finally:
        for types, old in zip(known, before, strict=True):
            types[:] = old


# Marks what stands for pinned memory: the storage, which views share.
_PINNED = "_shardwise_is_pinned"


def _pinned(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """``tensor.pin_memory()``, of which fake tensors know nothing.

    In a rehearsal a tensor that names no device lies on the device, also one that a program makes on the host. It needs
    no pinning.
    """
    if not isinstance(tensor, FakeTensor):
        return _PIN_MEMORY(tensor) if device is None else _PIN_MEMORY(tensor, device)  # type: ignore[no-any-return]
    if tensor.device.type != "cpu" or _is_pinned(tensor):
        return tensor
    copy = tensor.clone()
    setattr(copy.untyped_storage(), _PINNED, True)
    return copy


def _is_pinned(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    if not isinstance(tensor, FakeTensor):
        return bool(_IS_PINNED(tensor, *args, **kwargs))
    return hasattr(tensor.untyped_storage(), _PINNED)


_PIN_MEMORY: Any = torch.Tensor.pin_memory
_IS_PINNED: Any = torch.Tensor.is_pinned


def _scaler_methods() -> dict[str, Any]:
    """What replaces methods of a scaler of gradients."""
    if find_part("torch.amp.GradScaler._maybe_opt_step") is not None:
        return {"_maybe_opt_step": _step_with_finite_gradients}
    return {"step": torch_part("torch.amp.GradScaler._maybe_opt_step", "take a step of a GradScaler without data")}


def _step_with_finite_gradients(_scaler: Any, optimizer: Any, _state: Any, *args: Any, **kwargs: Any) -> Any:
    """The step of a scaler whose gradients are finite. It reads from the device whether they are, to skip a step, and
    the number that stands for what data decides would skip each.
    """
    return optimizer.step(*args, **kwargs)


def _swapping_under(mode: FakeTensorMode) -> Callable[[Any, Any], None]:
    """``torch.utils.swap_tensors``, by which ``module.to(dtype)`` replaces a fake parameter.

    It refuses tensors with weak references. The mode has some, to tensors that it made of others, and lives well
    without.
    """
    swap: Callable[[Any, Any], None] = torch.utils.swap_tensors

    def swap_forgotten(one: Any, other: Any) -> None:
        memo = mode.fake_tensor_converter.meta_converter.tensor_memo
        for key in [key for key, tensor in memo.items() if tensor is one or tensor is other]:
            del memo[key]
        swap(one, other)

    return swap_forgotten


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
    return torch_part("torch.testing._internal.distributed.fake_pg.FakeStore", "run without the other ranks")()


@define
class _Process:
    """Whether this process rehearses, and whether a stand-in answers for a CUDA device. It is not per thread, because
    backward runs in other threads.
    """

    is_rehearsing: bool = False
    has_stand_in: bool = False


_process = _Process()


@contextmanager
def rehearsing() -> Iterator[None]:
    """A context in which a program runs on fake tensors, on a mesh without other ranks.

    Outside it a fake tensor stands for a value of a graph (:func:`shardwise.private_torch.tracing.is_traced`).
    """
    before, _process.is_rehearsing = _process.is_rehearsing, True
    try:
        # What all functions that send objects read them with: torch.distributed has no public place for it.
        with replaced(torch.distributed.distributed_c10d, _tensor_to_object=_no_object):
            yield
    finally:
        _process.is_rehearsing = before


def _no_object(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise CallError(
        asked="receive an object from other ranks (all_gather_object, broadcast_object_list and others; checkpoints)",
        found="this is a rehearsal, whose tensors have no data",
        do="Rehearse the step without it: call it where the program trains.",
    )


def is_rehearsing() -> bool:
    """Whether the program runs without data, on a mesh without other ranks."""
    return _process.is_rehearsing


@contextmanager
def standing_in() -> Iterator[None]:
    """A context in which a stand-in answers for a CUDA device that is not there."""
    before, _process.has_stand_in = _process.has_stand_in, True
    try:
        yield
    finally:
        _process.has_stand_in = before


def has_cuda() -> bool:
    """Whether there is a CUDA device with kernels. Where a stand-in answers, ``torch.cuda.is_available()`` says yes."""
    return torch.cuda.is_available() and not _process.has_stand_in


def is_unknowable(error: BaseException) -> bool:
    """Whether an op without data failed because its result depends on data."""
    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))


def has_no_fake(error: Exception) -> bool:
    """Whether a custom op has no fake kernel. The text of torch's plain RuntimeError is all that tells it apart."""
    return isinstance(error, RuntimeError) and "no fake impl registered" in str(error)


def shape_needs_data(error: RuntimeError) -> bool:
    """Whether a fake kernel asked for a size that depends on data (``torch.library.get_ctx().new_dynamic_size()``).

    On the meta device torch has no answer, and raises a plain RuntimeError. Its text is all that tells it from others.
    """
    return "output Tensor with data-dependent shape" in str(error)
