"""Functions that are one call of a compiled graph."""

from __future__ import annotations

import sys

import pytest
import torch

import shardwise as sw
from shardwise.errors import TracingError
from shardwise.tensor.traceable import traceable
from shardwise.testing import WorkerPool, mesh


def test_a_function_that_is_defined_after_the_first_compilation():
    import shardwise.tensor.allow_in_graph  # noqa: F401  # as the first compilation does

    @traceable
    def untraceable(x: torch.Tensor) -> torch.Tensor:
        return x + (sys._getframe().f_lineno > 0)

    compiled = torch.compile(lambda x: untraceable(x) * 2, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 4.0))


def imported_late():
    """The modules of ``sw.local`` and ``sw.rand`` are imported where a program first names them."""
    two = mesh((2,))
    place = torch.compile(lambda x: sw.distribute_tensor(x, two, [sw.Shard(0)]), backend="eager", fullgraph=True)
    x = place(torch.ones(8, 6))
    assert "shardwise.tensor.allow_in_graph" in sys.modules
    assert "shardwise.tensor.local_function" not in sys.modules
    twice = sw.local(lambda part: part * 2, inputs=([sw.Shard(0)],), outputs=[sw.Shard(0)])
    compiled = torch.compile(lambda x: twice(x).sum(), backend="aot_eager", fullgraph=True)
    assert compiled(x).item() == 96
    odd = sw.distribute_tensor(torch.ones(7, 6), two, [sw.Shard(0)])
    with pytest.raises(TracingError, match="Say the global shapes"):
        compiled(odd)


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.13", reason="dynamo cannot compare the classes of placements yet")
def test_modules_that_are_imported_after_the_first_compilation():
    with WorkerPool(2, start_method="spawn") as ranks:
        ranks.run(imported_late, timeout=120)
