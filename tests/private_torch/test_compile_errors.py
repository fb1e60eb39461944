"""The shelf ``private_torch.compile_errors``: which error comes out of a compiled function."""

from __future__ import annotations

import pytest
import torch

import shardwise as sw
from shardwise.errors import ArgumentError, LayoutError, LocalPlacementError, PlacementError, ShardingError
from shardwise.kernel.placements import check_placements
from shardwise.testing import mesh

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


def test_an_error_in_the_middle_of_dynamo_keeps_its_own_words(monkeypatch):
    """As where a thread that watches the other ranks ends a trace by the error of one of them."""

    def interrupted(self):
        raise LayoutError(asked="trace", found="another rank has failed", do="Stop.")

    monkeypatch.setattr(torch._dynamo.symbolic_convert.InstructionTranslatorBase, "run", interrupted)
    with pytest.raises(LayoutError) as caught:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert str(caught.value) == "trace: another rank has failed. Stop."
    assert type(caught.value.__cause__) is torch._dynamo.exc.InternalTorchDynamoError


def refused_where_it_is_traced():
    """Python code of shardwise that dynamo traces refuses what it refuses without a compiler, each time."""
    x = sw.distribute_tensor(torch.ones(4, 4), mesh((2,)), [sw.Shard(0)])
    local = sw.local(torch.sin, inputs=[sw.Shard(1)], outputs=sw.Shard(0), move=False)
    apply = torch.compile(lambda x, asks: x.apply_(abs) if asks else x + 1, backend="eager", fullgraph=True)
    for _ in range(2):
        with pytest.raises(LayoutError, match="call a Python function for each element"):
            apply(x, True)
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    assert torch.equal(apply(x, False).full_tensor(), torch.full((4, 4), 2.0))
    assert counters["unique_graphs"] == before + 1, "what was refused is compiled for other arguments"
    array = torch.compile(lambda x: (x + 1).numpy(), backend="eager")(x)  # a break in the graph
    assert array.tolist() == torch.full((4, 4), 2.0).tolist()
    for error, ask in (
        (LayoutError, lambda x: x.apply_(abs)),
        (LayoutError, lambda x: x.map_(x, max)),
        (LayoutError, lambda x: x.__dlpack__()),
        (LocalPlacementError, local),
        (ArgumentError, lambda x: sw.zeros("a", device_mesh=x.device_mesh)),
    ):
        if error is ArgumentError and torch.__version__ < "2.12":
            continue  # torch puts no mesh into a graph
        with pytest.raises(ShardingError) as expected:
            ask(x)
        with pytest.raises(error) as caught:
            torch.compile(ask, backend="eager", fullgraph=True)(x)
        assert str(caught.value) == str(expected.value)


def test_what_traced_code_refuses_comes_out(two_ranks):
    two_ranks.run(refused_where_it_is_traced)
