"""Importing this module tells dynamo which functions become single calls of a graph.

Loading dynamo takes half a second, so only a compilation imports this module.
"""

from __future__ import annotations

import torch

from shardwise.private_torch.tracing import graph_calls

torch.compiler.allow_in_graph(graph_calls)  # type: ignore[no-untyped-call]
