"""The graphs that the ranks compile send the same: torch merges equal calls, also two collectives of one operand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes

import shardwise as sw
from shardwise import MeshTensor, Partial, Replicate, Shard
from shardwise.private_torch.tracing import outside_modes
from shardwise.testing import mesh


def values(*shape, dtype=torch.float64):
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=dtype).reshape(shape).sin()


def under(tensor, placement):
    return tensor.redistribute(placements=[placement]) if isinstance(tensor, MeshTensor) else tensor


def reduced(tensor):
    return under(tensor, Replicate())


def partial(tensor):
    return under(tensor, Partial())


def resolved(x):
    y, z = x.clone(), 2 * x
    return reduced(y.relu_()) * reduced(z.relu_())


PROGRAMS = {
    "a whole tensor": lambda x, y: reduced(x) * reduced(x + y) * reduced(x - 2 * y),
    "subtracted": lambda x, y: reduced(x) * reduced(y - x) * reduced(torch.rsub(x, y)),
    "in place": lambda x, y: reduced(x) * reduced(x.clone().add_(y)) * reduced(x.clone().sub_(3)),
    "numbers": lambda x, _: reduced(x + 3) * reduced(x + 5) * reduced(3 - x),
    "masked by numbers": lambda x, y: reduced(x.masked_fill(y > 0, 3.0)) * reduced(x.masked_fill(y > 0, 5.0)),
    "masked": lambda x, y: reduced(x.masked_fill(y > 0, y[0, 0])) * reduced(x.masked_fill(y > 0, y[1, 1])),
    "made partial": lambda _, y: reduced(partial(y)) * reduced(partial(2 * y)),
    "reduced, then made partial": lambda x, _: resolved(x),
    "bias": lambda x, y: reduced(torch.addmm(y[0], x, y.t() @ y)) * reduced(torch.addmm(y[1], x, y.t() @ y)),
}


def compiled_alike(name):
    """On one device, and compiled on two ranks by torch's partitioner, after inductor's passes over the joint graph."""
    torch._dynamo.reset()
    program, x, y = PROGRAMS[name], values(4, 4), values(4, 4).cos()
    expected_x, expected_y = x.clone().requires_grad_(), y.clone().requires_grad_()
    expected = program(expected_x, expected_y)
    expected.square().sum().backward()
    line = mesh((dist.get_world_size(),))
    wide = sw.distribute_tensor(x, line, [Shard(1)]).requires_grad_()
    whole = sw.distribute_tensor(y, line, [Replicate()]).requires_grad_()

    def partition(joint, inputs, **options):
        joint_graph_passes(joint)
        return min_cut_rematerialization_partition(joint, inputs, **options)

    collectives = []

    def alike(graph, _):
        # A rank that sends less than another would wait for it for ever.
        sent = [str(n.target) for n in graph.graph.nodes if "c10d" in str(n.target)]
        of_ranks = [None] * dist.get_world_size()
        with outside_modes():
            dist.all_gather_object(of_ranks, sent)
        assert of_ranks == [sent] * dist.get_world_size()
        collectives.extend(sent)
        return make_boxed_func(graph.forward)

    def whole_program(wide, whole):
        return program(wide @ eye, whole)  # x as a partial sum

    eye = sw.distribute_tensor(torch.eye(4, dtype=torch.float64), line, [Shard(0)])
    backend = aot_autograd(fw_compiler=alike, decompositions=select_decomp_table(), partition_fn=partition)
    result = torch.compile(whole_program, backend=backend, fullgraph=True)(wide, whole)
    torch.testing.assert_close(result.full_tensor(), expected)
    result.square().sum().backward()
    assert collectives
    for found, wanted in ((wide, expected_x), (whole, expected_y)):
        if wanted.grad is not None:
            torch.testing.assert_close(found.grad.full_tensor(), wanted.grad)


@pytest.mark.parametrize("name", PROGRAMS)
def test_ranks_compile_the_same_collectives(two_ranks, name):
    two_ranks.run(compiled_alike, name)
