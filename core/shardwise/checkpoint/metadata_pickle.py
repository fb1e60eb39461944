"""The list of a checkpoint's tensors, ``.metadata``, read without running anything of it.

It is a pickle, and unpickling can call any function. Python's unpickler with a list of allowed names is not enough:
five bytes make it allocate 64 GiB (a place in its memo), a few more hash nested tuples for a year, and a name alone is
an object whose attributes can be set. So the pickle is interpreted here. It has the operations that Python's pickler
writes for such a list; it makes new objects of eight classes, and a key is a text or a place in a tensor.
"""

from __future__ import annotations

import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwise.private_torch.saved import MemoryFormat, StorageInfo, layout_named

__all__ = ["load_metadata"]

_MODULE = "torch.distributed.checkpoint.metadata"

_CLASSES: dict[tuple[str, str], type] = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StorageInfo,
    **{
        (_MODULE, kind.__name__): kind
        for kind in (
            BytesStorageMetadata,
            ChunkStorageMetadata,
            Metadata,
            MetadataIndex,
            StorageMeta,
            TensorProperties,
            TensorStorageMetadata,
        )
    },
}
"""What a list is made of: an instance is new, and its state are its attributes."""


def _size(*of: Any) -> torch.Size:
    (sizes,) = of
    if type(sizes) not in (tuple, torch.Size) or any(type(n) is not int or not 0 <= n < 1 << 63 for n in sizes):
        raise _wrong("a size that is not made of whole numbers")
    return torch.Size(sizes)


def _path(kind: type) -> Callable[..., Any]:
    def make(*parts: Any) -> Any:
        if not all(type(part) is str for part in parts):
            raise _wrong("a path that is not made of texts")
        return kind(*parts)

    return make


def _memory_format(of: Any, name: Any) -> Any:
    if type(of) is not _Name or of != _MEMORY_FORMAT or type(name) is not str or name not in MemoryFormat.__members__:
        raise _wrong("an attribute of something else than the memory formats")
    return MemoryFormat.__members__[name]


_MEMORY_FORMAT = (_MODULE, "_MEM_FORMAT_ENCODING")

_CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): layout_named,
    _MEMORY_FORMAT: MemoryFormat,
    # Python 3.11.0 to 3.11.3 write a member of an enum as an attribute of its class; protocol 2 names the module so.
    **{(module, "getattr"): _memory_format for module in ("builtins", "__builtin__")},
    ("collections", "OrderedDict"): lambda: OrderedDict(),  # noqa: PLW0108  # without contents
    # Where pathlib keeps its classes differs between releases of Python. A path of another system is read, too.
    **{(module, "PosixPath"): _path(PurePosixPath) for module in ("pathlib", "pathlib._local")},
    **{(module, "WindowsPath"): _path(PureWindowsPath) for module in ("pathlib", "pathlib._local")},
}
"""Names that are called, and what is called in their place."""


class _Name(tuple[str, str]):
    """A module and a name in it, which may be called and nothing else."""

    __slots__ = ()


def _wrong(found: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(f"it has {found}, which is not part of a list of tensors")


def load_metadata(data: bytes) -> Any:
    """What the pickle holds. Raises :class:`pickle.UnpicklingError` for one that is not a list of tensors.

    Time and memory are proportional to the bytes that were given.
    """
    return _Machine(data).run()


_STOP = ord(".")


class _Machine:
    """The machine of Python's pickles, as far as a list of tensors needs it."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.fresh: dict[int, Any] = {}  # objects that were made here and have no state yet

    def run(self) -> Any:
        data, operations = self.data, _OPERATIONS
        try:
            while True:
                code = data[self.at]
                self.at += 1
                if code == _STOP:
                    (value,) = self.stack
                    if type(value) is _Name:
                        raise _wrong("a name alone")
                    return value
                operation = operations.get(code)
                if operation is None:
                    raise _wrong(f"the operation {bytes((code,))!r}")
                operation(self)
        except (IndexError, KeyError, ValueError, TypeError, AttributeError, RuntimeError, struct.error) as error:
            message = f"byte {self.at} of {len(data)}: {type(error).__name__}: {str(error)[:200]}"
            raise pickle.UnpicklingError(message) from error

    # -- bytes -------------------------------------------------------------------------------------------------------

    def take(self, n: int) -> bytes:
        end = self.at + n
        if end > len(self.data):
            raise pickle.UnpicklingError(f"it is cut short: {n} bytes at byte {self.at} of {len(self.data)}")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def number(self, n: int) -> int:
        return int.from_bytes(self.take(n), "little")

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        text = self.data[self.at : end].decode("ascii")
        self.at = end + 1
        return text

    # -- the stack -----------------------------------------------------------------------------------------------------

    def pop(self) -> Any:
        if self.marks and len(self.stack) <= self.marks[-1]:
            raise _wrong("an operation without operands")
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def top(self, kind: type) -> Any:
        value = self.stack[-1]
        if not isinstance(value, kind) or (self.marks and len(self.stack) <= self.marks[-1]):
            raise _wrong(f"an operation on a {type(value).__name__}")
        return value

    # -- operations ----------------------------------------------------------------------------------------------------

    def set_items(self, pairs: list[Any]) -> None:
        table = self.top(dict)
        if len(pairs) % 2:
            raise _wrong("a key without a value")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not (type(key) is str or (type(key) is MetadataIndex and id(key) not in self.fresh)):
                raise _wrong(f"a {type(key).__name__} as a key")
            if key in table:
                raise _wrong(f"the key {str(key)[:200]!r} twice")
            table[key] = value

    def name(self, module: Any, name: Any) -> None:
        key = (module, name)
        if not (type(module) is str and type(name) is str):
            raise _wrong("a name that is not a text")
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            self.stack.append(dtype)
        elif key in _CLASSES or key in _CALLS:
            self.stack.append(_Name(key))
        else:
            raise pickle.UnpicklingError(f"it names {module}.{name}"[:300] + ", which is not part of a list of tensors")

    def call(self) -> None:
        arguments, called = self.pop(), self.pop()
        if type(called) is not _Name or called not in _CALLS or type(arguments) is not tuple:
            raise _wrong("a call of something else than a name")
        self.stack.append(_CALLS[called](*arguments))

    def new(self) -> None:
        arguments, called = self.pop(), self.pop()
        if type(called) is not _Name or called not in _CLASSES or arguments != ():
            raise _wrong("an object of another class")
        kind = _CLASSES[called]
        made: Any = object.__new__(kind)
        self.fresh[id(made)] = made
        self.stack.append(made)

    def build(self) -> None:
        state, made = self.pop(), self.stack[-1]
        if id(made) not in self.fresh:
            raise _wrong(f"a state for a {type(made).__name__}")
        del self.fresh[id(made)]
        if type(made) is TensorProperties:
            made.__setstate__(state)  # type: ignore[no-untyped-call]
        elif type(state) is dict and not any(type(key) is not str or key.startswith("__") for key in state):
            if type(made) is MetadataIndex:
                _check_index(state)
            vars(made).update(state)
        else:
            raise _wrong("a state without names")

    def memoize(self, place: int) -> None:
        # A dict, so that a far place takes no more memory than a near one.
        self.memo[place] = self.stack[-1]

    def mark(self) -> None:
        self.marks.append(len(self.stack))


def _check_index(state: dict[str, Any]) -> None:
    offset = state.get("offset")
    if type(state.get("fqn")) is not str or not (offset is None or type(offset) is torch.Size):
        raise _wrong("a place in a tensor without the tensor's name")


def _signed(machine: _Machine, n: int) -> int:
    return int.from_bytes(machine.take(n), "little", signed=True)


_OPERATIONS: dict[int, Callable[[_Machine], Any]] = {
    ord("\x80"): lambda m: m.take(1),  # PROTO
    ord("\x95"): lambda m: m.take(8),  # FRAME: all bytes are here already
    ord("("): _Machine.mark,
    ord("N"): lambda m: m.stack.append(None),
    ord("\x88"): lambda m: m.stack.append(True),
    ord("\x89"): lambda m: m.stack.append(False),
    ord("J"): lambda m: m.stack.append(_signed(m, 4)),  # BININT
    ord("K"): lambda m: m.stack.append(m.number(1)),
    ord("M"): lambda m: m.stack.append(m.number(2)),
    ord("\x8a"): lambda m: m.stack.append(_signed(m, m.number(1))),  # LONG1
    ord("G"): lambda m: m.stack.append(struct.unpack(">d", m.take(8))[0]),  # BINFLOAT
    ord("\x8c"): lambda m: m.stack.append(m.take(m.number(1)).decode("utf-8", "surrogatepass")),
    ord("X"): lambda m: m.stack.append(m.take(m.number(4)).decode("utf-8", "surrogatepass")),
    ord("\x8d"): lambda m: m.stack.append(m.take(m.number(8)).decode("utf-8", "surrogatepass")),
    ord("}"): lambda m: m.stack.append({}),
    ord("]"): lambda m: m.stack.append([]),
    ord(")"): lambda m: m.stack.append(()),
    ord("t"): lambda m: m.stack.append(tuple(m.pop_to_mark())),
    ord("\x85"): lambda m: m.stack.append((m.pop(),)),
    ord("\x86"): lambda m: m.stack.append((m.pop(), m.pop())[::-1]),
    ord("\x87"): lambda m: m.stack.append((m.pop(), m.pop(), m.pop())[::-1]),
    ord("s"): lambda m: m.set_items([m.pop(), m.pop()][::-1]),  # SETITEM
    ord("u"): lambda m: m.set_items(m.pop_to_mark()),
    ord("a"): lambda m: _append(m, [m.pop()]),
    ord("e"): lambda m: _append(m, m.pop_to_mark()),
    ord("c"): lambda m: m.name(m.line(), m.line()),  # GLOBAL
    ord("\x93"): lambda m: m.name(*(m.pop(), m.pop())[::-1]),  # STACK_GLOBAL
    ord("R"): _Machine.call,
    ord("\x81"): _Machine.new,
    ord("b"): _Machine.build,
    ord("\x94"): lambda m: m.memoize(len(m.memo)),
    ord("q"): lambda m: m.memoize(m.number(1)),
    ord("r"): lambda m: m.memoize(m.number(4)),
    ord("h"): lambda m: m.stack.append(m.memo[m.number(1)]),
    ord("j"): lambda m: m.stack.append(m.memo[m.number(4)]),
}


def _append(machine: _Machine, items: list[Any]) -> None:
    machine.top(list).extend(items)
