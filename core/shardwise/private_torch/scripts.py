"""Calls of scripted and traced functions (``torch.jit``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch

from shardwise.private_torch.parts import find_part
from shardwise.private_torch.trees import tree_leaves

__all__ = ["guard_archives", "interpret_scripts"]

_jit: Any = torch.jit  # public names of it are not marked as exported

#: What a scripted module has, by name.
_TABLES = ("torch._C.ModuleDict", "torch._C.ParameterDict", "torch._C.BufferDict")

#: Whether a script that has run has a constant on a mesh.
_with_constant: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def interpret_scripts(cls: type) -> None:
    """Have a scripted function run op by op where it gets a ``cls``, or it or its module has one.

    From its second run on, torch fuses pointwise ops of a script on a card. The fused kernel reads the memory of its
    operands below the dispatcher, and a wrapper has none: it would read address 0, which ends all that the process may
    do there. Without optimisation each op goes through the dispatcher. What was optimised before, for plain tensors, is
    dropped first, since a script that has it runs it; a later call with plain tensors makes it again. No public
    function is asked before a script runs: its call takes no notice of ``__torch_function__``.
    """
    for name in ("torch.jit.ScriptFunction", "torch._C.ScriptMethod"):
        script: Any = find_part(name)
        if script is not None:
            script.__call__ = _op_by_op(script.__call__, cls)


def _op_by_op(call: Any, cls: type) -> Any:
    @wraps(call)
    def run(script: Any, /, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, cls) for leaf in tree_leaves((args, kwargs))) or _holds(script, cls):
            if hasattr(script, "_debug_flush_compilation_cache"):
                script._debug_flush_compilation_cache()
            with _jit.optimized_execution(False):
                return call(script, *args, **kwargs)
        return call(script, *args, **kwargs)

    return run


def _holds(script: Any, cls: type) -> bool:
    """Whether a script has a ``cls`` of its own: a constant that it was traced with, or a parameter or buffer of its
    module, which was placed before or after it was traced. Where torch does not tell what a module has, it may be one.
    """
    if script not in _with_constant:
        _with_constant[script] = any(isinstance(tensor, cls) for tensor in _read_in(script.inlined_graph, None))
    if _with_constant[script]:
        return True
    owner = getattr(script, "owner", None)
    if owner is None:
        return False
    tables: list[Any] = [find_part(name) for name in _TABLES]
    if None in tables:
        return True
    submodules, *tensors = tables
    modules = [owner]
    for module in modules:
        if any(isinstance(tensor, cls) for table in tensors for _, tensor in table(module).items()):
            return True
        modules += [submodule for _, submodule in submodules(module).items()]
    return False


def guard_archives(cls: type, refuse: Callable[[Any], Any]) -> None:
    """Call ``refuse(tensor)`` before torch writes a script that holds a ``cls`` to a file or a buffer.

    It copies the memory of each tensor below the dispatcher: that of a wrapper is at address 0, and the read ends the
    interpreter. No public function is asked before.
    """
    # The first is the base of traced modules, with methods of its own.
    for owner in ("torch.jit.ScriptModule", "torch.jit.RecursiveScriptModule", "torch.jit.ScriptFunction"):
        script: Any = find_part(owner)
        for name in _WRITE:
            if hasattr(script, name):
                setattr(script, name, _guarded(getattr(script, name), cls, refuse))


_WRITE = ("save", "save_to_buffer", "_save_for_lite_interpreter", "_save_to_buffer_for_lite_interpreter")


def _guarded(write: Any, cls: type, refuse: Callable[[Any], Any]) -> Any:
    @wraps(write)
    def run(script: Any, /, *args: Any, **kwargs: Any) -> Any:
        for tensor in _held_by(script):
            if isinstance(tensor, cls):
                refuse(tensor)
        return write(script, *args, **kwargs)

    return run


def _held_by(script: Any) -> Iterator[Any]:
    """The tensors of a script: parameters, buffers, attributes that it reads, and constants of its graph."""
    if isinstance(script, torch.nn.Module):
        yield from script.parameters()
        yield from script.buffers()
        for module in script.modules():
            yield from _read_in(getattr(module, "graph", None), module)
    else:
        yield from _read_in(script.graph, None)


def _read_in(graph: Any, module: Any) -> Iterator[Any]:
    for node in graph.nodes() if graph is not None else ():
        for block in node.blocks():
            yield from _read_in(block, module)
        if node.kind() == "prim::GetAttr":
            yield getattr(module, node.s("name"), None)
        elif node.kind() == "prim::Constant" and "value" in node.attributeNames() and node.kindOf("value") == "t":
            yield node.t("value")
