"""Which tensor dynamo takes for an input of a graph, where the one that a program uses stands for another."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.private_torch.imports import when_imported
from shardwise.private_torch.parts import find_part, missing_parts, refuse

__all__ = ["compile_instead"]

_PARTS = ("torch._dynamo.variables.builder.VariableBuilder.wrap_tensor", "torch._dynamo.source.AttrSource")


def compile_instead(cls: type, attribute: str) -> None:
    """Have dynamo compile what an attribute of a tensor of this class holds, in place of the tensor.

    Dynamo would make the tensor itself an input of the graph, and autograd would bring the gradient there. No public
    function says what a tensor of a class is for dynamo. Where torch lacks a part that this needs, compiled code that
    uses such a tensor raises :class:`TorchPartError`.
    """
    when_imported("torch._dynamo.variables.builder", lambda module: _compile_instead(module, cls, attribute))


def _compile_instead(module: Any, cls: Any, attribute: str) -> None:
    for missing in missing_parts(_PARTS):

        def refused(*_: Any) -> Any:
            refuse(missing, "compile code that uses a parameter from before distribute_module")  # noqa: B023

        cls.__tensor_unflatten__ = staticmethod(refused)
        return
    builder: Any = module.VariableBuilder
    wrap = builder.wrap_tensor
    attribute_of: Any = find_part("torch._dynamo.source.AttrSource")

    def wrap_tensor(self: Any, value: torch.Tensor) -> Any:
        if type(value) is not cls:
            return wrap(self, value)
        return builder(self.tx, attribute_of(self.get_source(), attribute))(getattr(value, attribute))

    builder.wrap_tensor = wrap_tensor
