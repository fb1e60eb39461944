"""The graphs that the ranks compile send the same: torch merges equal calls, also two collectives of one operand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from compiled_programs import graphs

import shardwise as sw
from shardwise import MeshTensor, Partial, Replicate, Shard
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


def equals_one_device_when_compiled(name):
    """On one device, and compiled on two ranks."""
    torch._dynamo.reset()
    program, x, y = PROGRAMS[name], values(4, 4), values(4, 4).cos()
    expected_x, expected_y = x.clone().requires_grad_(), y.clone().requires_grad_()
    expected = program(expected_x, expected_y)
    expected.square().sum().backward()
    line = mesh((dist.get_world_size(),))
    wide = sw.distribute_tensor(x, line, [Shard(1)]).requires_grad_()
    whole = sw.distribute_tensor(y, line, [Replicate()]).requires_grad_()

    collectives = []

    def whole_program(wide, whole):
        return program(wide @ eye, whole)  # x as a partial sum

    eye = sw.distribute_tensor(torch.eye(4, dtype=torch.float64), line, [Shard(0)])
    result = torch.compile(whole_program, backend=graphs(compare=True, collectives=collectives), fullgraph=True)(
        wide, whole
    )
    torch.testing.assert_close(result.full_tensor(), expected)
    result.square().sum().backward()
    assert collectives
    for found, wanted in ((wide, expected_x), (whole, expected_y)):
        if wanted.grad is not None:
            torch.testing.assert_close(found.grad.full_tensor(), wanted.grad)


SAMPLE = [pytest.mark.slow, pytest.mark.sample]
OF_THE_SAMPLE = "subtracted", "numbers", "masked by numbers", "made partial"


@pytest.mark.parametrize("name", [pytest.param(n, marks=SAMPLE if n in OF_THE_SAMPLE else ()) for n in PROGRAMS])
def test_ranks_compile_the_same_collectives(two_ranks, name):
    two_ranks.run(equals_one_device_when_compiled, name)


def gathered_rows(x, y):
    return reduced(x) * reduced(y)


def gathered_once_more(x, _):
    return reduced(x) * reduced(2 * x), reduced(x), x


def gathered_and_returned(x, _):
    return reduced(x).exp(), reduced(x).sin(), x.detach()


def exchanged(x, y):
    return under(x, Shard(1)).exp() * under(y, Shard(1)), under(x, Shard(1)).sin()


def exchanged_for_the_gradient(x, y):
    return torch.clamp_max(x, under(y, Shard(1)))


ROWS = [gathered_rows, gathered_once_more, gathered_and_returned, exchanged, exchanged_for_the_gradient]


@pytest.mark.parametrize("program", ROWS)
def test_a_rank_without_rows_sends_what_the_others_send(two_ranks, program):
    two_ranks.run(row_of_one_rank, program)


def row_of_one_rank(program):
    """One row is on the first rank. What another rank sends to fill its piece up is no constant, or it sent one for all
    tensors without rows.
    """
    torch._dynamo.reset()
    collectives = []
    x, y = values(1, 4), values(1, 4).cos()
    line = mesh((dist.get_world_size(),))
    spread = [sw.distribute_tensor(t, line, [Shard(0)]).requires_grad_() for t in (x, y)]
    results = torch.compile(program, backend=graphs(compare=True, collectives=collectives), fullgraph=True)(*spread)
    whole = [t.clone().requires_grad_() for t in (x, y)]
    expected = program(*whole)
    for found, wanted in zip(*((r if isinstance(r, tuple) else (r,)) for r in (results, expected)), strict=True):
        torch.testing.assert_close(found.full_tensor(), wanted)
        if wanted.requires_grad:
            found.sum().backward(retain_graph=True)
            wanted.sum().backward(retain_graph=True)
    for found, wanted in zip(spread, whole, strict=True):
        assert (found.grad is None) == (wanted.grad is None)
        if wanted.grad is not None:
            torch.testing.assert_close(found.grad.full_tensor(), wanted.grad)
    assert sum("all_gather" in sent or "all_to_all" in sent for sent in collectives) >= 2
