"""The shelf ``private_torch.compiling``: a thread that compiles is told from one that runs what was compiled."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch

from shardwise.private_torch.compiling import _COMPILERS, compiling_frame


def test_dynamo_is_seen_at_work_and_its_graph_is_not():
    seen = []

    def backend(graph, _):
        seen.append(compiling_frame(sys._getframe()) is not None)
        return lambda *args: (seen.append(compiling_frame(sys._getframe()) is not None), graph(*args))[1]

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert seen == [True, False]


@pytest.mark.parametrize(("file", "function"), sorted(_COMPILERS), ids=lambda text: Path(text).name)
def test_the_functions_of_compilers_are_there(file, function):
    tree = ast.parse(Path(file).read_text())
    assert function in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
