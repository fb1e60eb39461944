"""The shelf ``private_torch.compile_errors``: which error comes out of a compiled function."""

from __future__ import annotations

import pytest
import torch

import shardwise as sw
from shardwise.errors import LayoutError, PlacementError
from shardwise.kernel.placements import check_placements

sw.MeshTensor  # noqa: B018  # loading it has errors of shardwise come out as they are


@torch.compiler.disable
def place():
    check_placements([sw.Shard(7)], 1, 2)


def test_an_error_that_a_program_handles_is_not_what_its_compiled_call_meets():
    compiled = torch.compile(lambda x: x @ torch.ones(7, 7), backend="eager", fullgraph=True)
    try:
        place()
    except PlacementError:
        with pytest.raises(torch._dynamo.exc.TorchRuntimeError):
            compiled(torch.ones(3, 4))
    else:
        pytest.fail("nothing was handled")


def test_an_error_behind_one_that_torch_makes_comes_out():
    def refuse(graph, inputs):
        raise LayoutError(asked="compile", found="nothing", do="Stop.")

    with pytest.raises(LayoutError, match="Stop") as caught:
        torch.compile(lambda x: x + 1, backend=refuse)(torch.ones(2))
    assert type(caught.value.__cause__) is torch._dynamo.exc.BackendCompilerFailed
