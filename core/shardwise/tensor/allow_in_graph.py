"""Importing this module tells dynamo which functions become single calls of a graph, and which break it.

Loading dynamo takes half a second, so only a compilation imports this module.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from shardwise.private_torch.tracing import graph_calls

torch.compiler.allow_in_graph(graph_calls)  # type: ignore[no-untyped-call]

_REASON = (
    "torch.cond, torch.while_loop, scan and map with MeshTensors run outside of graphs, because torch cannot merge "
    "branches of such tensors. Compile without fullgraph=True. In place of torch.cond, compute both and choose with "
    "torch.where; in place of scan and map, loop over x.unbind()."
)


_OF_STEPS = (
    "the step of an optimizer of MeshTensors runs on their parts, which are taken outside of graphs. Torch itself ends "
    "a graph in each step. Compile without fullgraph=True."
)


@partial(torch.compiler.disable, reason=_OF_STEPS)
def before_step(hook: Callable[..., Any], *args: Any) -> Any:
    """Call the hook of an optimizer's step outside of the graph, so that only the step itself is compiled."""
    return hook(*args)


@partial(torch.compiler.disable, reason=_REASON)
def in_python(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function outside of the graph; with ``fullgraph=True`` torch raises an error with the reason."""
    return function(*args, **kwargs)
