"""Tells dynamo of the functions that become single calls of a graph, once, when it is first imported.

Loading dynamo takes half a second, so nothing but a compilation imports this.
"""

from __future__ import annotations

import torch

from shardwise.private_torch.tracing import graph_calls

torch.compiler.allow_in_graph(graph_calls)  # type: ignore[no-untyped-call]
