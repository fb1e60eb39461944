"""The transforms of ``torch.func`` and autograd's older ``vmap``: what their tensors hold, and how to run below them.

None of it is public, and a transform gives a program a tensor of its own around a tensor of another class. Without a
part the program gets the error that this tensor has no such attribute, or that says which part is missing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd import forward_ad, functional

from shardwise.private_torch.imports import when_imported
from shardwise.private_torch.parts import find_part, torch_part

__all__ = [
    "ASKS_OF_TANGENTS",
    "above_batches",
    "are_transforms_active",
    "below_batches",
    "below_transforms",
    "give_attributes",
    "has_tangent",
    "held",
    "is_differentiated_by_torch",
    "is_drawn_by_vmap",
    "is_functionalized",
    "is_wrapped",
]

_TO = "take a MeshTensor through a transform of torch.func"

are_transforms_active: Callable[[], bool] = find_part("torch._C._are_functorch_transforms_active") or (lambda: False)
"""Whether this thread is inside a function that ``torch.func`` transforms."""

is_wrapped: Callable[[Any], bool] = find_part("torch._C._functorch.is_functorch_wrapped_tensor") or (lambda _: False)
"""Whether a tensor is one of a transform's, around another tensor."""

_inside: Callable[[Any], Any] = torch_part("torch._C._functorch.get_unwrapped", _TO)
_batch_dim: Callable[[Any], int] = torch_part("torch._C._functorch.maybe_get_bdim", _TO)
_has_batch: Callable[[Any], bool] = torch_part("torch._C._functorch.is_batchedtensor", _TO)


def held(tensor: Any) -> tuple[Any, list[int]]:
    """The innermost tensor of one of a transform's, and where in it each dim of that tensor is: ``vmap`` hides one."""
    places = list(range(tensor.dim()))
    while is_wrapped(tensor):
        if _has_batch(tensor):
            hidden = _batch_dim(tensor)
            places = [d if d < hidden else d + 1 for d in places]
        tensor = _inside(tensor)
    return tensor, places


_cleared: Callable[[], Any] = torch_part("torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack", _TO)
_interpreters: Callable[[], list[Any]] = torch_part(
    "torch._functorch.pyfunctorch.retrieve_all_functorch_interpreters", _TO
)


@contextmanager
def below_transforms() -> Iterator[None]:
    """A context outside of all transforms, with the grad mode that holds there."""
    if not are_transforms_active():
        yield
        return
    modes = [ask() for one in _interpreters() if (ask := getattr(one, "prev_grad_mode", None)) is not None]
    with ExitStack() as stack:
        if not all(modes):
            stack.enter_context(torch.no_grad())
        stack.enter_context(_cleared())
        yield


def is_drawn_by_vmap() -> bool:
    """Whether ``vmap`` refuses random numbers, or draws others for each tensor that it goes over."""
    if not are_transforms_active():
        return False
    return any((ask := getattr(one, "randomness", None)) is not None and ask() != "same" for one in _interpreters())


def is_functionalized() -> bool:
    """Whether ``functionalize`` is among the transforms: it takes no function with derivatives of its own."""
    return any(one.key().name == "Functionalize" for one in _interpreters())


# -- autograd's vmap -------------------------------------------------------------------------------------------------

# That of `torch.autograd.functional` and of `is_grads_batched`. It has no public name for what its tensors hold.
_is_of_autograd: Callable[[Any], bool] = find_part("torch._C._functorch.is_legacy_batchedtensor") or (lambda _: False)
_open: Callable[[], int] = torch_part("torch._C._vmapmode_increment_nesting", _TO)
_close: Callable[[], int] = torch_part("torch._C._vmapmode_decrement_nesting", _TO)
_to_front: Callable[..., Any] = torch_part("torch._remove_batch_dim", _TO)
_hide: Callable[..., Any] = torch_part("torch._add_batch_dim", _TO)


def below_batches(tensor: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """The tensor in one of autograd's ``vmap``, with the hidden dims in front, and their levels; else the tensor."""
    if not _is_of_autograd(tensor):
        return tensor, []
    level = _open() - 1
    _close()
    levels: list[int] = []
    while level and _is_of_autograd(tensor):
        one, two = (_to_front(tensor, level, size, 0) for size in (1, 2))
        if one.shape == two.shape:  # else torch has made a dim of the size that it was told: there is no such dim
            tensor = one
            levels.insert(0, level)
        level -= 1
    return tensor, levels


def above_batches(tensor: torch.Tensor, levels: Iterable[int]) -> torch.Tensor:
    """A tensor with dims in front, as one in ``vmap`` again. The inverse of :func:`below_batches`."""
    for level in levels:
        tensor = _hide(tensor, 0, level)
    return tensor


ASKS_OF_TANGENTS: Any = find_part("torch.ops.aten._has_same_storage_numel.default")
"""The op by which autograd asks whether a tangent and its primal have memory of the same size; it copies the tangent if
they have not. No program calls it. Without the op nobody asks.
"""

# -- forward mode ----------------------------------------------------------------------------------------------------


def _level() -> int:
    """The number of the open levels of forward mode, less one."""
    return getattr(forward_ad, "_current_level", 0)


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a tangent. No public function says whether forward mode is on, and most programs never turn
    it on.
    """
    return _level() >= 0 and forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def is_differentiated_by_torch() -> bool:
    """Whether a function of ``torch.autograd.functional`` calls: it makes leaves of a program's tensors, so that no
    mark tells them from leaves of the program. Only the stack says so.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename == functional.__file__:
            return True
        frame = frame.f_back
    return False


# -- attributes ------------------------------------------------------------------------------------------------------


class _OfWrapped:
    """An attribute that tensors of transforms around a tensor of a class have, and that no other tensor has."""

    def __init__(self, name: str, cls: type, read: Callable[[Any], Any]) -> None:
        self.name = name
        self.cls = cls
        self.read = read

    def __get__(self, tensor: Any, owner: type) -> Any:
        if tensor is None:  # torch lists what its class has, and takes this for nothing
            return None
        if is_wrapped(tensor) and isinstance(held(tensor)[0], self.cls):
            return self.read(tensor)
        raise AttributeError(f"{owner.__name__!r} object has no attribute {self.name!r}", name=self.name, obj=tensor)


def give_attributes(cls: type, readers: dict[str, Callable[[Any], Any]]) -> None:
    """Give tensors of transforms around a tensor of a class some attributes. ``readers`` say how each is read.

    These tensors are of the class ``torch.Tensor`` itself, and all that is made of them is: there is no class to
    inherit from, and C++ makes them. Other plain tensors answer as if nothing had been given, to dynamo too.
    """
    for name, read in readers.items():
        setattr(torch.Tensor, name, _OfWrapped(name, cls, read))
    when_imported("torch._dynamo.variables.tensor", lambda module: _forget(module, readers))


def _forget(module: Any, names: Iterable[str]) -> None:
    """Dynamo reads what a plain tensor has from the class."""
    known = getattr(module, "all_tensor_attrs", {})
    for name in names:
        known.pop(name, None)
