"""Sites: where in the program each collective is issued, and why it is sent.

Who asks for a collective is read from the stack while it is issued: the handler of an op, with its plan, or the call of
the program. In a backward pass the stack does not say which module's gradient is computed. There the number of
autograd's node does: nodes are numbered as the forward pass makes them, and the numbers are noted at the borders of
modules. A program that nobody observes pays for none of it.
"""

from __future__ import annotations

import inspect
import sys
import threading
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from attrs import define, field, frozen
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from shardwise.comm.call_sites import is_of_torch
from shardwise.comm.events import Event
from shardwise.kernel.handlers import HANDLER_FILE
from shardwise.private_torch.autograd_nodes import backward_number, running_node, sequence_number
from shardwise.tools.program import Phases
from shardwise.tools.purposes import Purpose, mesh_of, purpose_at

__all__ = ["Line", "Site", "Sites", "shown_path"]

_CORE = f"{Path(__file__).parents[1]}/"
_TORCH = f"{Path(torch.__file__).parent}/"
_MODULE = f"{_TORCH}nn/modules/module.py"
_CALLS_OF_MODULES = ("_call_impl", "inner")
_PYTHON = f"{Path(threading.__file__).parent}/"
#: Above these nothing is the user's: they run a program for somebody who observes it.
_RUNNERS = ("tools/program.py", "tools/rehearse.py")


@frozen(order=True)
class Line:
    """A line of the program; ``number`` is 0 where it is not known."""

    path: str = ""
    number: int = 0

    def __str__(self) -> str:
        return f"{self.path}:{self.number}" if self.number else "(no line)"


@frozen
class Site:
    """One collective of one rank: where in the program it is issued, and why.

    ``module`` is the path of the module, "" outside of modules and ``(root)`` for the outermost one. ``op`` is the op
    that needs the collective, or what the program called. ``nbytes`` are those that this rank sends in. ``implicit``
    says that an op needed it; explicit are the program's own calls, the lines of a plan, and what the layouts of
    parameters ask of their gradients. ``number`` is the event's, ``mesh`` the mesh if that is known, and ``dims`` the
    numbers of its dims.
    """

    phase: str
    module: str
    op: str
    kind: str
    mesh_dims: tuple[str, ...]
    ranks: int
    nbytes: int
    why: str
    implicit: bool
    line: Line
    number: int = field(default=0, eq=False)
    mesh: Any = field(default=None, eq=False, repr=False)
    dims: tuple[int, ...] = field(default=(), eq=False, repr=False)


@frozen
class _Place:
    """A module, and the line that called it or that calls an op in it."""

    module: str
    line: Line
    backward: int = -1


_NOWHERE = _Place("", Line())


@frozen
class _Found:
    """What the stack says: who asks, the line of the program, the mesh, and the module that runs."""

    purpose: Purpose = field(factory=Purpose)
    line: Line = field(factory=Line)
    mesh: Any = None
    module: nn.Module | None = None


@define(eq=False)
class Sites:
    """Finds the site of a collective, in the callback of :func:`shardwise.comm.events.observe`.

    ``mesh_names`` are used where a collective does not say its mesh.
    """

    mesh_names: tuple[str, ...] = ()
    phases: Phases = field(factory=Phases)
    _stack: list[_Place] = field(factory=list)
    # Nodes with numbers from one border up to the next were made at a place: borders, and the place before each.
    _borders: list[int] = field(factory=list)
    _before: list[_Place] = field(factory=list)
    _last: dict[str, Line] = field(factory=dict)
    _paths: dict[int, tuple[nn.Module, str]] = field(factory=dict)
    _parameters: dict[int, tuple[Any, str]] = field(factory=dict)
    _thread: int = field(factory=threading.get_ident)

    @contextmanager
    def following(self) -> Iterator[Sites]:
        """Follow the modules of the program while the context lasts."""
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._enter).remove)
            stack.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            yield self

    def of(self, event: Event) -> Site:
        """The site of a collective that is issued now."""
        found = _read_stack(inspect.currentframe())
        purpose = found.purpose.of_event(event.reason)
        place = self._place(found)
        if backward_number() == -1:
            self._note(place)  # of the node of a call of shardwise, which no op stands for
        module, why = place.module, purpose.why
        if purpose.leaf is not None:
            owner, name = self._owner(purpose.leaf, purpose.name)
            module, why = owner or module, why.format(name=name)
        elif purpose.module is not None:
            module = self._path(purpose.module)
        line = place.line if place.line.number else self._last.get(module, place.line)
        names = self.mesh_names if found.mesh is None else found.mesh.mesh_dim_names
        return Site(
            phase=self.phases.current,
            module=module,
            op=purpose.op,
            kind=event.kind,
            mesh_dims=tuple(names[m] if m < len(names) else f"dim{m}" for m in event.mesh_dims),
            ranks=event.group_size,
            nbytes=event.nbytes,
            why=why,
            implicit=purpose.implicit,
            line=line,
            number=event.number,
            mesh=found.mesh,
            dims=event.mesh_dims,
        )

    @property
    def module(self) -> str:
        """The path of the module that runs, or whose gradient is computed."""
        return self._place(_Found()).module

    def saw_call(self) -> None:
        """Note the line of an op that was just dispatched, for what its backward will send."""
        if torch.is_grad_enabled() and backward_number() == -1 and threading.get_ident() == self._thread:
            number = sequence_number()
            if not self._borders or number > self._borders[-1]:
                self._note(self._place(_read_stack(inspect.currentframe())))

    # -- modules -------------------------------------------------------------------------------------------------

    def name_modules(self, model: nn.Module) -> None:
        """Give the modules and the parameters of a model their paths; those that have one keep it."""
        for name, module in model.named_modules():
            self._paths.setdefault(id(module), (module, _without_compiled(name) or "(root)"))
        for name, parameter in model.named_parameters():
            self._parameters.setdefault(id(parameter), (parameter, _without_compiled(name)))

    def _path(self, module: nn.Module) -> str:
        known = self._paths.get(id(module))
        return type(module).__name__ if known is None else known[1]

    def _owner(self, leaf: Any, noted: str) -> tuple[str, str]:
        known = self._parameters.get(id(leaf))
        path = known[1] if known is not None else noted
        module, _, name = path.rpartition(".")
        return module if module or not path else "(root)", name or "a leaf"

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if id(module) not in self._paths:
            self.name_modules(module)
        place = _Place(self._path(module), _read_stack(inspect.currentframe()).line, backward_number())
        self._last[place.module] = place.line
        self._note(self._stack[-1] if self._stack else _NOWHERE)
        self._stack.append(place)

    def _leave(self, _module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        if self._stack and not torch.compiler.is_compiling():
            self._note(self._stack.pop())

    def _note(self, place: _Place) -> None:
        """Note that nodes made since the last border were made at a place."""
        number = sequence_number() if threading.get_ident() == self._thread else None
        if number is not None and (not self._borders or number > self._borders[-1]):
            self._borders.append(number)
            self._before.append(place)

    def _place(self, found: _Found) -> _Place:
        """The module that runs and the line; in a backward pass those of the forward call whose gradient it is."""
        backward = backward_number()
        inner = self._stack[-1] if self._stack else _NOWHERE
        if backward in (-1, inner.backward):  # or a forward that is run again in a backward pass
            # A module's own hooks run after the global ones, so the stack of the process knows better.
            known = self._paths.get(id(found.module))
            return _Place(inner.module if known is None else known[1], found.line)
        node = running_node()
        at = len(self._borders) if node is None else bisect_right(self._borders, node)
        return self._before[at] if at < len(self._before) else _Place("", Line())


def _without_compiled(name: str) -> str:
    """A path without the modules that ``torch.compile`` puts around others."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


# -- the stack -------------------------------------------------------------------------------------------------------


def _read_stack(frame: FrameType | None) -> _Found:
    """Who asks for what runs now: the innermost op's handler or the outermost call of shardwise by the program, and
    the innermost line of the program outside of it.
    """
    purpose, inner, line = Purpose(), None, Line()
    mesh: Any = None
    module = None
    in_rule = False
    while frame is not None and _file(frame.f_code.co_filename)[1].startswith("tools/"):
        frame = frame.f_back  # who observes
    while frame is not None and not (line.number and module is not None):
        kind, name = _file(frame.f_code.co_filename)
        if kind == "end":
            break
        is_users = kind == "user" and not in_rule and not is_of_torch(frame)  # a rule's own code is not the program
        if is_users and not line.number:
            line = Line(name, frame.f_lineno)
        elif kind == "module" and module is None and frame.f_code.co_name in _CALLS_OF_MODULES:
            module = frame.f_locals.get("self")
        elif line.number:
            pass
        elif kind == "handler":
            if not purpose.is_final:
                purpose = Purpose.of_call(frame, inner)
            in_rule = False
        elif kind == "ours":
            in_rule = in_rule or name == "comm/mesh_comm.py"
            if not purpose.is_final:
                purpose = purpose_at(name, frame, purpose)
        if kind in ("handler", "ours"):
            mesh = mesh_of(name, frame) if mesh is None else mesh
        inner, frame = frame, frame.f_back
    return _Found(purpose, line, mesh, module if isinstance(module, nn.Module) else None)


@lru_cache(maxsize=4096)
def _file(path: str) -> tuple[str, str]:
    """What a frame's file is: ``ours`` with its path in core, ``handler``, ``torch``, ``module``, ``user``, ``end``."""
    if path.startswith(HANDLER_FILE):
        return "handler", path
    if path.startswith(_CORE) and not path.startswith(f"{_CORE}demo/"):
        name = path.removeprefix(_CORE)
        return ("end" if name in _RUNNERS else "ours"), name
    if path == _MODULE:
        return "module", path
    if path.startswith((_TORCH, "<")) or (path.startswith(_PYTHON) and "-packages/" not in path):
        return "torch", path
    return "user", shown_path(path)


def shown_path(path: str) -> str:
    """A path as everybody reads it: relative to the working directory, else to where modules are imported from."""
    file = Path(path)
    if not file.is_absolute():
        return file.as_posix()
    folders = [Path.cwd(), *sorted((Path(p) for p in sys.path if Path(p).is_absolute()), key=lambda p: -len(p.parts))]
    folder = next((f for f in folders if f != Path("/") and file.is_relative_to(f)), file.parent)
    return file.relative_to(folder).as_posix()
