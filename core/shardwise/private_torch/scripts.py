"""Calls of scripted and traced functions (``torch.jit``)."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from shardwise.private_torch.parts import find_part
from shardwise.private_torch.trees import tree_leaves

__all__ = ["interpret_scripts"]

_jit: Any = torch.jit  # public names of it are not marked as exported

#: What a scripted module has, by name.
_TABLES = ("torch._C.ModuleDict", "torch._C.ParameterDict", "torch._C.BufferDict")


def interpret_scripts(cls: type) -> None:
    """Have a scripted function run op by op where it gets a ``cls``, or its module has one.

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
    """Whether the module of a method has a parameter or buffer that is a ``cls``: it was placed before or after it was
    traced. Where torch does not tell what a module has, it may be one.
    """
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
