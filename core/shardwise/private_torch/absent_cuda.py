"""Autograd for fake CUDA tensors where there is no CUDA device.

A fake tensor takes ``device="cuda"`` anywhere, and forward passes run. Autograd asks C++ for more: a guard of the
device type, whose streams it compares, and hooks that say whether the accelerator is there. A torch without CUDA has
neither. The guard is one that torch lets Python make (:class:`torch._C._acc.DeviceGuard`, meant for other device
types), put in CUDA's place. Of the hooks, some questions are answered with yes while the context lasts. No public
function does either. Torch has its own answer for builds with CUDA and without a device
(``_ensureCUDADeviceGuardSet``), which is not enough for a backward pass.

Which methods these are is found by asking: each question is put to a table whose methods note that they are called. So
nothing depends on their order, which releases change.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.errors import CallError

__all__ = ["autograd_of_fake_cuda"]

_Pointer = ctypes.c_void_p
_Method = ctypes.CFUNCTYPE(ctypes.c_long, _Pointer, _Pointer)
_METHODS = 64  # entries of the hooks' table that are copied; it has about 50

_CUDA, _PRIVATE = 1, 20  # c10::DeviceType
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
_HOOKS = "_ZN2at6detail12getCUDAHooksEv"


@contextmanager
def autograd_of_fake_cuda() -> Iterator[None]:
    """A context in which autograd takes fake CUDA tensors. Its passes run in the calling thread.

    Raises :class:`CallError` where this torch does not let it.
    """
    try:
        table = _answering_hooks()
        hooks = _hooks()
    except (AttributeError, OSError, ValueError, RuntimeError) as error:
        raise CallError(
            asked="run a program as on CUDA, without a CUDA device",
            found=f"torch {torch.__version__} has no place for a stand-in of the device ({error})",
            do="Use a torch that is built with CUDA on a machine with a device, or device='cpu'.",
        ) from error
    before = hooks.value
    hooks.value = ctypes.addressof(table)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        hooks.value = before


# -- the guard -------------------------------------------------------------------------------------------------------


@cache
def _put_guard() -> None:
    """Give CUDA a guard with one device and one stream, for as long as the process.

    Torch's own guard that does nothing says that each stream is one of device -1, and autograd finds no such device. A
    guard made by Python says device 0, and torch ends the process if Python code runs in one of its other methods while
    an exception is on its way. So the guard is one made by Python, and only the method that returns the stream is its
    own: the others are those of torch's.
    """

    class Guard(torch._C._acc.DeviceGuard):
        def type_(self) -> Any:
            return torch._C._autograd.DeviceType.CUDA

    guards = (_Pointer * (_PRIVATE + 1)).in_dll(_library("libc10"), _GUARDS)
    if guards[_PRIVATE]:
        raise RuntimeError("another device type has registered itself")
    no = _Method(lambda _self, _argument: 0)
    if not guards[_CUDA]:
        # Torch puts its guard only in place of one that counts no devices.
        empty = _object((_Pointer * _METHODS)(*[_address(no)] * _METHODS))
        guards[_CUDA] = ctypes.addressof(empty)
    torch._C._ensureCUDADeviceGuardSet()
    methods = _methods_of(guards[_CUDA])
    with FakeTensorMode(), torch.device("cuda"):
        leaf = torch.ones(2, requires_grad=True)
        before = guards[_CUDA]
        asked = _asked(lambda: torch.autograd.graph.get_gradient_edge(leaf), {}, lambda to: _swap(guards, _CUDA, to))
        if asked is None or guards[_CUDA] != before:
            raise RuntimeError("autograd does not ask the guard for a stream")
    guard = Guard()
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    made, guards[_PRIVATE] = guards[_PRIVATE], None
    methods[asked] = _methods_of(made)[asked]
    assert made is not None
    _Pointer.from_address(made).value = ctypes.addressof(methods)
    guards[_CUDA] = made
    _kept.extend([guard, methods])
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(guard))  # threads of autograd may outlive this module


def _methods_of(address: int | None) -> Any:
    """A copy of the table of an object's methods."""
    table = _Pointer.from_address(address or 0).value or 0
    return (_Pointer * _METHODS)(*(_Pointer * _METHODS).from_address(table))


def _object(methods: Any) -> Any:
    """An object of C++ that has these methods and no data."""
    made = _Pointer(ctypes.addressof(methods))
    _kept.extend([made, methods])
    return made


def _swap(guards: Any, number: int, methods: Any) -> Callable[[], None]:
    """Put a guard of these methods in a place, and return what puts the old one back."""
    before = guards[number]
    guards[number] = ctypes.addressof(_object(methods))

    def back() -> None:
        guards[number] = before

    return back


# -- the hooks -------------------------------------------------------------------------------------------------------


@cache
def _answering_hooks() -> Any:
    """A table of the methods of CUDA's hooks, in which those that autograd asks return 1."""
    _put_guard()
    questions: list[Callable[[], object]] = [
        lambda: torch._C._get_accelerator().type == "cuda",
        _backward_question(),
    ]
    yes = _Method(lambda _self, _argument: 1)
    answered: dict[int, Any] = {}
    for question in questions:
        while (asked := _asked(question, answered, _swap_hooks)) is not None:
            if asked in answered:
                raise RuntimeError("its hooks cannot be told apart")
            answered[asked] = yes
    if not answered:
        raise RuntimeError("it does not ask the hooks")
    table = _methods_of(ctypes.addressof(_hooks()))
    for number, method in answered.items():
        table[number] = _address(method)
    _kept.extend([yes, table])
    return table


_kept: list[Any] = []


def _backward_question() -> Callable[[], object]:
    """A backward pass of one addition of fake CUDA tensors; true if it ran."""
    mode = FakeTensorMode()
    with mode, torch.device("cuda"):
        leaf = torch.ones(2, requires_grad=True)
        gradient = torch.ones(2)

    def run() -> bool:
        leaf.grad = None
        with torch.autograd.set_multithreading_enabled(False), mode:
            torch.autograd.backward([leaf + leaf], [gradient])
        return True

    return run


def _swap_hooks(methods: Any) -> Callable[[], None]:
    hooks = _hooks()
    before = hooks.value
    hooks.value = ctypes.addressof(methods)

    def back() -> None:
        hooks.value = before

    return back


def _asked(
    question: Callable[[], object], answered: dict[int, Any], swap: Callable[[Any], Callable[[], None]]
) -> int | None:
    """The number of the first method that a question calls and that is not answered; None if there is not one.

    ``swap`` puts a table of methods where the question looks, and returns what takes it away.
    """
    called: list[int] = []

    def noting(number: int) -> Any:
        def method(_self: int, _argument: int) -> int:
            called.append(number)
            return 0

        return _Method(method)

    methods = [answered.get(number) or noting(number) for number in range(_METHODS)]
    table = (_Pointer * _METHODS)(*map(_address, methods))
    back = swap(table)
    try:
        question()
    except RuntimeError:
        if not called:
            raise
    finally:
        back()
    _kept.append(methods)
    return called[0] if called else None


@cache
def _hooks() -> Any:
    """The first word of CUDA's hooks: where their methods are."""
    get = getattr(_library("libtorch_cpu"), _HOOKS)
    get.restype = _Pointer
    return _Pointer.from_address(get())


def _address(method: Any) -> int | None:
    return ctypes.cast(method, _Pointer).value


def _library(name: str) -> ctypes.CDLL:
    folder = Path(torch.__file__).parent / "lib"
    files = sorted(folder.glob(f"{name}.*"))
    if not files:
        raise OSError(f"there is no {name} beside it")
    return ctypes.CDLL(str(files[0]))
