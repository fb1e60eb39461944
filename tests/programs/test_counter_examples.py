"""Programs that once went wrong, as random programs found them: one test each, smallest form."""

from __future__ import annotations

import torch

from shardwise import Partial, Replicate, Shard
from shardwise.testing.programs import Call, Leaf, Move, Program, Value, check_program, drawn


def counts(pool, program):
    verdict = check_program(program, pool)
    assert not verdict.wrong, verdict.wrong
    return verdict.counts


def test_nothing_flows_back_through_a_comparison_in_place(pool):
    # Autograd's formula makes plain zeros, which came to a leaf and to a redistribution as they were.
    program = Program(
        (4,),
        (
            drawn(0, (5, 7), torch.float32, (Replicate(),)),
            Move(1, 0, (Shard(0),)),
            drawn(2, (7,), torch.float32, (Replicate(),)),
            Call((3,), "aten.gt_.Tensor", (Value(1), Value(2))),
        ),
        backward=((3, (Shard(1),)),),
        grad=True,
    )
    assert counts(pool, program)["gradients compared"] == 2


def test_the_functional_form_of_a_fused_optimizer_step_is_refused(pool):
    # It had a rule and no metas of its results: torch's meta device does not take it.
    tensors = [drawn(i, (5, 7), torch.float32, (Shard(0),)) for i in range(3)]
    options = {
        "weight_decay": 0.1,
        "momentum": 0.9,
        "lr": 0.01,
        "dampening": 0.0,
        "nesterov": True,
        "maximize": False,
        "is_first_step": False,
    }
    call = Call((3, 4, 5), "aten._fused_sgd.default", ([Value(0)], [Value(1)], [Value(2)]), options)
    assert counts(pool, Program((4,), (*tensors, call)))["call refused (NoRuleError)"] == 1


def test_averages_of_integers_are_reduced_from_the_last_mesh_dim_to_the_first(pool):
    # Over the first mesh dim alone they do not come out even, and what is cut off is lost.
    leaf = Leaf(0, torch.arange(-15, 15).reshape(5, 6), (Partial("avg"), Partial("avg")))
    program = Program((2, 2), (leaf, Move(1, 0, (Shard(0), Replicate())), Move(2, 0, (Replicate(), Partial("avg")))))
    assert counts(pool, program)["values compared"] == 3


def test_a_gradient_of_zeros_that_torch_adds_by_itself(pool):
    # sgn has a gradient that holds no memory; to add it to another, torch asks what comes out on the meta device.
    program = Program(
        (4,),
        (drawn(0, (5, 7), torch.float32, (Replicate(),)), Call((1,), "aten.sgn.default", (Value(0),))),
        backward=((0, (Shard(0),)), (1, (Shard(1),))),
        grad=True,
    )
    assert counts(pool, program)["gradients compared"] == 1


def test_the_bag_of_each_index_is_what_the_forward_told(pool):
    # The offsets, which the kernel does not read then, were taken instead.
    program = Program(
        (4,),
        (
            drawn(0, (4, 6), torch.float32, (Replicate(),)),
            drawn(1, (8, 6), torch.float32, (Shard(0),)),
            Leaf(2, torch.tensor([3, 4, 1, 1, 5, 2, 0, 3, 0]), (Replicate(),)),
            Leaf(3, torch.tensor([6, 6, 6, 6]), (Replicate(),)),
            Leaf(4, torch.tensor([0, 0, 2, 2, 2, 2, 3, 3, 3]), (Replicate(),)),
            Call(
                (5,),
                "aten._embedding_bag_per_sample_weights_backward.default",
                (Value(0), Value(1), Value(2), Value(3), Value(4), 0, -1),
            ),
        ),
    )
    assert counts(pool, program)["call ran"] == 1


def test_a_tensor_that_cannot_be_viewed_is_copied(pool):
    # Torch's meta function refuses what its kernels copy.
    turned = torch.arange(120.0).view(4, 6, 5).transpose(0, 1)
    program = Program(
        (4,),
        (
            Leaf(0, turned, (Shard(2),)),
            Call((1,), "aten.view_copy.default", (Value(0), (4, 6, 5))),
            drawn(2, (4, 30), torch.float32, (Replicate(),)),
            Call((3,), "aten.view_copy.out", (Value(0), (4, 30)), {"out": Value(2)}),
        ),
    )
    assert counts(pool, program)["call ran"] == 2


def test_one_partial_tensor_may_be_both_running_statistics(pool):
    # Each was reduced by itself, and written back over the other.
    program = Program(
        (4,),
        (
            drawn(0, (4, 6, 5), torch.float32, (Shard(0),)),
            Leaf(1, torch.linspace(0.5, 1, 6), (Partial("sum"),)),
            Call(
                (2, 3, 4),
                "aten.native_batch_norm.default",
                (Value(0), None, None, Value(1), Value(1), True, 0.1, 1e-5),
            ),
        ),
    )
    assert counts(pool, program)["call ran"] == 1


def test_pivots_that_do_not_lie_in_order_are_read_in_order(pool):
    # Of a batch dim of one element torch's kernel reads the stride, which of a shard is not what it takes it for.
    pivots = torch.empty_strided((2, 3, 3), (9, 1, 3), dtype=torch.int32).copy_(torch.arange(1, 4, dtype=torch.int32))
    program = Program(
        (4,),
        (
            drawn(0, (2, 3, 3, 3), torch.float64, (Shard(1),)),
            Leaf(1, pivots, (Replicate(),)),
            drawn(2, (3, 3, 2), torch.float64, (Replicate(),)),
            Call(
                (3,), "aten.linalg_lu_solve.default", (Value(0), Value(1), Value(2)), {"left": True, "adjoint": False}
            ),
        ),
    )
    assert counts(pool, program)["call ran"] == 1
