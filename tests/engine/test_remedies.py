"""What the error of a policy says to write is what makes the program run."""

from __future__ import annotations

import re

import torch
from torch import nn

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.engine.decided import use_decisions
from shardwise.errors import CommunicationError
from shardwise.testing import mesh

aten, R = torch.ops.aten, Replicate()
LINE = re.compile(r"(\w+) = \1\.redistribute\(placements=(\[.*?\])\)(?: and | before the call, or allow it\.)")


def until_it_runs(op, **arguments):
    """Do what each error says, and call the op again; gives what was written."""
    written = []
    with sw.communication("forbid"):
        for _ in range(len(arguments) + 1):
            try:
                op(**arguments)
            except CommunicationError as error:
                lines = LINE.findall(error.do)
            else:
                return written
            for name, placements in lines:
                there = eval(placements, {"Shard": Shard, "Replicate": Replicate, "Partial": Partial})  # noqa: S307
                arguments[name] = arguments[name].redistribute(placements=there)
                written.append(name)
    raise AssertionError(written)


def on_four(shape, *placements):
    on = mesh((2, 2), ("dp", "tp"))
    return sw.distribute_tensor(torch.rand(*shape), on, [R, R]).redistribute(placements=list(placements))


def of_lowerings():
    """Whichever operand is whole: the rule may shard it again, and its lowering sends the same."""
    channels = {"running_mean": on_four((6,), R, R), "running_var": on_four((6,), Shard(0), R)}
    both = {"weight": on_four((6,), Partial(), Shard(0)), "bias": on_four((6,), Partial(), Partial())}
    rows = on_four((8, 6), Shard(1), Partial())
    rates = {"training": False, "momentum": 0.1, "eps": 1e-5}
    assert until_it_runs(aten.native_batch_norm.default, input=rows, **both, **channels, **rates)
    # One operand is enough here, and it is the one that is named.
    assert until_it_runs(aten._softmax.default, self=on_four((8, 6), R, Shard(1)), dim=1, half_to_float=False) == [
        "self"
    ]
    rows, classes = on_four((8, 6), R, Shard(1)), on_four((8,), R, R).long()
    loss = {"target": classes, "weight": None, "reduction": 1, "ignore_index": -100}
    assert until_it_runs(aten.nll_loss_forward.default, self=rows, **loss)


def test_what_to_do_about_a_lowering_is_tried_out(pool):
    pool.run(of_lowerings)


def of_written_operands():
    total = on_four((8, 6), R, Partial()) * 1
    with sw.communication("forbid"):
        try:
            total.exp_()
        except CommunicationError as error:
            there = error.do
    assert (
        there == "Write self = self.redistribute(placements=[Replicate(), Replicate()]) before the call, or allow it."
    )
    total = total.redistribute(placements=[R, R])
    with sw.communication("forbid"):
        total.exp_()


def test_a_written_operand_is_brought_to_where_it_is_written(pool):
    pool.run(of_written_operands)


class TwoHalves(nn.Module):
    """Of which a plan moves results: a sum over the ranks is added up once, where it is made."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x):
        for _ in range(2):
            x = x + self.down(self.up(x).relu())
        return (x * x).sum()


ROWS_AND_COLUMNS = {"up.weight": [Shard(0)], "down.weight": [Shard(1)]}


def halves(on, plan=ROWS_AND_COLUMNS):
    model = sw.distribute_module(TwoHalves(), on, plan, src_data_rank=None)
    return model, (sw.distribute_tensor(torch.ones(32, 64), on, [R], src_data_rank=None),)


def by_the_plan(path):
    model, inputs = halves(mesh((2,), ("tp",)), path)
    try:
        with sw.communication("forbid"):
            model(*inputs).backward()
    finally:
        use_decisions(None)


def test_a_result_that_a_plan_file_moves_is_explicit(two_ranks, tmp_path):
    planned = sw.plan(halves, (2,), ("tp",), fixed=("parameters",), name="halves")
    moved = [one for one, *_ in planned.decisions.exact.values() if one.moves_results and one.inputs == one.sources]
    assert moved, "no call sends nothing itself and moves its result"
    planned.save(tmp_path / "halves.plan")
    two_ranks.run(by_the_plan, str(tmp_path / "halves.plan"))


def as_it_was_learned():
    model, inputs = halves(mesh((2,), ("tp",)))
    optimizer = torch.optim.SGD(model.parameters())
    learning = sw.learn()
    try:
        for _ in range(3):
            optimizer.zero_grad()
            model(*inputs).backward()
            optimizer.step()
        try:
            with sw.communication("forbid"):
                model(*inputs)
        except CommunicationError as error:
            assert error.operand == "its result"  # noqa: PT017
            assert "learned to move this result: allow it" in error.do  # noqa: PT017
        else:
            raise AssertionError("nothing was learned that sends something")
    finally:
        learning.close()


def test_what_to_do_about_a_result_that_was_learned_is_no_redistribute(two_ranks):
    two_ranks.run(as_it_was_learned)
