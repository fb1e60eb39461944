"""Pickle for worker processes: functions of test modules by value, and ops by their names.

Torch's ops cannot be pickled as they are, so their names are sent. For an op of ``torch.library.custom_op`` the worker
first imports the module that defines it. If no module can be imported, the worker defines the op again. Memory formats
and layouts are sent by name, too: torch calls a format ``torch.channels_last``, and pickle would look for that in every
module that imports torch, and could find it in a test module, which a worker has not got.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from operator import attrgetter
from types import CodeType, ModuleType
from typing import Any

import torch

from shardwise.errors import WorkerError
from shardwise.private_torch.ops import (
    CustomOpDef,
    CustomOpParts,
    OpOverload,
    OpOverloadPacket,
    custom_op_of,
    known_custom_op,
    make_custom_op,
    parts_of,
)

__all__ = ["dumps_by_value", "importable"]

Reduced = tuple[Any, ...]


def dumps_by_value(value: Any) -> bytes:
    """Pickle, ops by name; functions and classes of test modules by value, where cloudpickle is installed."""
    buffer = io.BytesIO()
    pickler = _pickler()(buffer)
    with _short_search():
        pickler.dump(value)
    return buffer.getvalue()


def importable(module: str) -> bool:
    """Whether a fresh process finds a module's package. A folder without ``__init__.py`` is not a package here."""
    package = module.partition(".")[0]
    spec = PathFinder.find_spec(package)
    return package in sys.stdlib_module_names or (spec is not None and spec.origin is not None)


@contextmanager
def _short_search() -> Iterator[None]:
    """Within the block cloudpickle looks up which submodules a function uses, by the names in its code.

    It compares all imported modules with these names otherwise, for each function and each module that the function
    knows: milliseconds for each, where torch is imported. A cloudpickle that has not got this part searches as it does.
    """
    searching = sys.modules.get("cloudpickle.cloudpickle")
    if not hasattr(searching, _SEARCH):
        yield
        return
    _searches.setdefault(_SEARCH, getattr(searching, _SEARCH))
    setattr(searching, _SEARCH, _used_submodules)
    try:
        yield
    finally:
        setattr(searching, _SEARCH, _searches[_SEARCH])


_SEARCH = "_find_imported_submodules"
_searches: dict[str, Any] = {}  # cloudpickle's own, also while several threads pickle


def _used_submodules(code: CodeType, values: Iterable[Any]) -> list[ModuleType]:
    """The imported submodules of the packages among some values that a function with this code can address."""
    packages = [v.__name__ for v in values if isinstance(v, ModuleType) and getattr(v, "__package__", None)]
    used = []
    while packages:
        package = packages.pop()
        below = [name for name in (f"{package}.{part}" for part in code.co_names) if name in sys.modules]
        used += below
        packages += below
    return [sys.modules[name] for name in used]


@cache
def _pickler() -> type[pickle.Pickler]:
    try:
        from cloudpickle import Pickler
    except ImportError:
        from pickle import Pickler

    class OpPickler(Pickler):  # type: ignore[misc]  # one of two classes
        def reducer_override(self, obj: Any) -> Any:
            reduce = _REDUCERS.get(type(obj))
            if reduce is not None:
                return reduce(obj)
            # Pickle by name, as other modules: cloudpickle knows no subclasses of their type, such as torch's configs.
            if isinstance(obj, ModuleType) and type(obj) is not ModuleType and importable(obj.__name__):
                return import_module, (obj.__name__,)
            general = getattr(super(), "reducer_override", None)
            return NotImplemented if general is None else general(obj)

    return OpPickler


# -- ops by name -------------------------------------------------------------------------------------------------


def _reduce_overload(op: Any) -> Reduced:
    return _find, (str(op), custom_op_of(op))


def _reduce_packet(packet: Any) -> Reduced:
    overloads = (getattr(packet, name) for name in packet.overloads())
    return _find, (str(packet), next(filter(None, map(custom_op_of, overloads)), None))


def _reduce_custom_op(definition: Any) -> Reduced:
    parts = parts_of(definition)
    if importable(parts.module):
        return _imported, (parts.name, parts.module)
    if parts.kernel is None:
        raise WorkerError(
            asked=f"send the custom op {parts.name} to a worker",
            found=f"it has kernels for several device types, and a fresh process cannot import {parts.module}",
            do="Define the op in a module that can be imported.",
            op=parts.name,
        )
    # cloudpickle must send the module's definitions by value, because no worker finds the module by its name.
    if parts.module in sys.modules and parts.module != "__main__":
        import cloudpickle

        cloudpickle.register_pickle_by_value(sys.modules[parts.module])
    return _defined_again, (parts,)


def _reduce_constant(constant: Any) -> Reduced:
    """A constant of torch that calls itself ``torch.<name>``."""
    return getattr, (torch, str(constant).removeprefix("torch."))


_REDUCERS: dict[type, Callable[[Any], Reduced]] = {
    torch.memory_format: _reduce_constant,
    torch.layout: _reduce_constant,
    OpOverload: _reduce_overload,
    OpOverloadPacket: _reduce_packet,
    CustomOpDef: _reduce_custom_op,
    type(torch.ops): lambda _: (getattr, (torch, "ops")),
    type(torch.ops.aten): lambda space: (getattr, (torch.ops, space.name)),
}


# -- ops found again ---------------------------------------------------------------------------------------------


def _find(path: str, definition: Any) -> Any:  # noqa: ARG001  # unpickling the definition made the op
    """The op ``acme.swish.default`` or the packet ``acme.swish``."""
    try:
        return attrgetter(path)(torch.ops)
    except AttributeError as error:
        raise WorkerError(
            asked=f"use the op {path} in a worker",
            found="no module that defines it has been imported there",
            do="Import the module in the function that is sent, or make the op with torch.library.custom_op.",
            op=path,
        ) from error


def _imported(name: str, module: str) -> Any:
    import_module(module)
    return known_custom_op(name)


# Ops that this worker has defined. Torch itself keeps no reference to them.
_defined_here: dict[str, Any] = {}


def _defined_again(parts: CustomOpParts) -> Any:
    """The custom op of these parts. A worker defines it at its first use, and keeps that definition."""
    op = known_custom_op(parts.name)
    if op is None:
        op = _defined_here[parts.name] = make_custom_op(parts)
    return op
