"""Tells dynamo of the functions that become single calls of a graph, once, when it is first imported.

Loading dynamo takes half a second, so nothing but a compilation imports this.
"""

import torch

from shardwise.graph_calls import graph_calls

__all__: list[str] = []

torch.compiler.allow_in_graph(graph_calls)  # type: ignore[no-untyped-call]
