"""Random programs: they are data that prints as it was made, their judge rejects what is wrong, shrinking is sound."""

from __future__ import annotations

import math
import random
import sys

import pytest
import torch

from shardwise import Partial, Replicate, Shard
from shardwise.discovery.process import default_registry
from shardwise.errors import RankFailedError
from shardwise.kernel.placements import StridedShard
from shardwise.rule.authoring import rule
from shardwise.testing.programs import (
    Assign,
    Call,
    Catalogue,
    Copy,
    Leaf,
    Move,
    Program,
    Value,
    check_program,
    draw,
    drawn,
    leaf,
    replay,
)
from shardwise.testing.programs import shrink as shrunk

aten = torch.ops.aten
OPS = [aten.mm.default, aten.tanh.default, aten.add_.Tensor, aten.sum.dim_IntList, aten.sort.default]
NAMES = {
    "_StridedShard": StridedShard,
    **{f.__name__: f for f in (Assign, Call, Copy, Leaf, Move, Partial, Program, Replicate, Shard, Value, drawn, leaf)},
    "torch": torch,
    "nan": float("nan"),
    "inf": float("inf"),
}


def rng(seed):
    return random.Random(seed)  # noqa: S311  # chance, no secret


@pytest.fixture(scope="module")
def catalogue():
    catalogue = Catalogue()
    catalogue.add([default_registry().lookup(op).rule for op in OPS], samples={})
    return catalogue


def test_one_seed_gives_one_program(catalogue):
    programs = [str(draw(catalogue, rng(seed), (2, 2))) for seed in (1, 1, 2)]
    assert programs[0] == programs[1] != programs[2]


@pytest.mark.parametrize("seed", range(4))
def test_a_printed_program_is_the_program(catalogue, seed):
    program = draw(catalogue, rng(seed), (2, 2))
    copy = eval(str(program), NAMES)  # noqa: S307  # the text under test
    assert str(copy) == str(program)
    for one, other in zip(copy.lines, program.lines, strict=True):
        if isinstance(one, Leaf):
            torch.testing.assert_close(one.value, other.value, rtol=0, atol=0, equal_nan=True)
            assert one.value.stride() == other.value.stride() or one.value.numel() < 2


def test_later_calls_take_what_earlier_ones_made(catalogue):
    programs = [draw(catalogue, rng(seed), (4,)) for seed in range(20)]
    calls = [call for program in programs for call in program.calls]
    chained = sum(
        any(
            set(earlier.names).intersection(call.operands) for earlier in program.lines if not isinstance(earlier, Leaf)
        )
        for program in programs
        for call in program.calls
    )
    assert chained > len(calls) / 3
    assert any(program.backward for program in programs)
    assert {Move, Copy, Assign} <= {type(line) for program in programs for line in program.lines}


# -- the judge -------------------------------------------------------------------------------------------------------

MATRIX = drawn(0, (6, 5), torch.float32, (Replicate(),))
TANH = Program(
    (4,), (MATRIX, Call((1,), "aten.tanh.default", (Value(0),)), Call((2,), "aten.neg.default", (Value(1),)))
)


def plant(notation, options):
    """Put a wrong rule above the installed ones, on a worker, until :func:`uproot`."""
    # This module is sent by value, so it keeps nothing from one run to the next.
    sys.modules["__main__"].uproot = default_registry().override(rule(aten.tanh.default, notation, **options))


def plant_crash():
    plant("... -> ...", {"lowering": lambda _, x: x.no_such_thing()})


def uproot():
    # A pool that started anew after a crash has no planted rule.
    getattr(sys.modules["__main__"], "uproot", lambda: None)()


def test_a_wrong_number_is_found_and_named(pool):
    # tanh of a sum is not the sum of the tanhs.
    pool.run(plant, "... -> ...", {"partial": ["sum -> sum"]})
    partials = Program((4,), (drawn(0, (6, 5), torch.float32, (Partial(),)), *TANH.lines[1:]))
    try:
        verdict = check_program(partials, pool)
        assert verdict.at == 1
        assert "of 30 elements differ" in verdict.wrong
        # What is left is the call that is wrong.
        small = shrunk(partials, lambda p: check_program(p, pool).at == len(p.lines) - 1 == 1, 12)
        assert [call.op for call in small.calls] == ["aten.tanh.default"]
    finally:
        pool.run(uproot)
    assert not check_program(partials, pool).wrong


def test_a_right_program_is_counted(pool):
    counts = check_program(TANH, pool).counts
    assert counts == {"call ran": 2, "values compared": 3}


def test_what_all_ranks_refuse_is_counted_and_what_needs_it_is_left_out(pool):
    # The functional form has no rule: torch's meta device does not take it.
    options = {"weight_decay": 0.1, "momentum": 0.9, "lr": 0.01, "dampening": 0.0}
    options |= {"nesterov": True, "maximize": False, "is_first_step": False}
    refused = Call((1, 4, 5), "aten._fused_sgd.default", ([Value(0)], [Value(0)], [Value(0)]), options)
    needs_it, other = Call((2,), "aten.abs.default", (Value(1),)), Call((3,), "aten.tanh.default", (Value(0),))
    program = Program((4,), (MATRIX, refused, needs_it, other))
    counts = check_program(program, pool).counts
    assert (counts["call refused (NoRuleError)"], counts["call left"], counts["call ran"]) == (1, 1, 1)


def test_what_rounding_blows_up_is_not_wrong(pool):
    # The sum of the pieces is a little more or less than the whole number that one device has.
    whole = torch.arange(1.0, 7.0).mul(0.1).mul(10).reshape(6)
    lines = (
        Leaf(0, whole, (Shard(0),)),
        Call((1,), "aten.softmax.int", (Value(0), 0)),
        Call((2,), "aten.sum.default", (Value(1),)),
        Call((3,), "aten.floor.default", (Value(2),)),
        Call((4,), "aten.add.Tensor", (Value(3), Value(0))),
    )
    assert not check_program(Program((4,), lines), pool).wrong


def test_a_matrix_without_full_rank_has_any_pivots_once_its_parts_are_added(pool):
    """The rows are orthogonal to one vector up to the rounding of a sum, which the ranks add in their own order."""
    lines = (
        drawn(0, (1, 3), torch.float64, (Partial(),)),
        drawn(1, (4, 3), torch.float64, (Replicate(),)),
        Call((2,), "aten.linalg_cross.default", (Value(0), Value(1)), {"dim": 1}),
        Call((3, 4, 5), "aten.linalg_lu.default", (Value(2),), {"pivot": True}),
    )
    verdict = check_program(Program((4,), lines), pool)
    assert not verdict.wrong, verdict.wrong
    assert verdict.counts["unsteady"] == 1


def test_an_op_without_a_derivative_is_refused_in_a_backward_pass(pool):
    """Of empty operands the kernel returns another operand itself, which on one device has its gradient."""
    op = "aten._fake_quantize_learnable_per_tensor_affine_backward.default"
    whole = (Replicate(),)
    lines = (
        *(drawn(n, (0, 3), torch.float32, whole) for n in (0, 1)),
        *(leaf(n, [3.0], torch.float32, whole, (1,)) for n in (2, 3)),
        Call((4,), "aten.special_shifted_chebyshev_polynomial_w.n_scalar", (Value(0), -1.5)),
        Call((5, 6, 7), op, (Value(4), Value(1), Value(2), Value(3), -8, 7, 1.0)),
    )
    verdict = check_program(Program((4,), lines, backward=((6, whole), (7, whole)), grad=True), pool)
    assert not verdict.wrong, verdict.wrong
    assert any(what.startswith("backward refused (no derivative") for what in verdict.counts), verdict.counts


def test_one_of_several_views_is_compared_after_a_write_to_it(pool):
    """With its gradient torch would not let it be read any more, on one device either."""
    lines = (
        drawn(0, (8, 6), torch.float32, (Replicate(),)),
        Call((1, 2, 3, 4, 5, 6), "aten.unbind.int", (Value(0), -1)),
        Call((7,), "aten.logical_not_.default", (Value(5),)),
    )
    verdict = check_program(Program((4,), lines, grad=True), pool)
    assert not verdict.wrong, verdict.wrong
    assert verdict.counts["call ran"] == 2


def test_a_kernel_that_rounds_more_than_the_ranks_do_is_no_reference(pool):
    """Torch's batch norm of bfloat16 on a CPU rounds within; over a sharded batch ours is what float64 gives."""
    near = torch.tensor([1.0859, 1.0859, 1.0859, 1.1172, 1.0938, 1.0859, 1.1094, 1.1094]).to(torch.bfloat16)[:, None]
    norm = "aten._native_batch_norm_legit.no_stats"
    lines = (Leaf(0, near, (Shard(0),)), Call((1, 2, 3), norm, (Value(0), None, None, True, 0.1, 1e-5)))
    exact = torch.nn.functional.batch_norm(near.double(), None, None, training=True)
    alone = torch.nn.functional.batch_norm(near, None, None, training=True)
    assert not torch.allclose(alone.double(), exact, rtol=0, atol=0.1)
    verdict = check_program(Program((4,), lines), pool)
    assert not verdict.wrong, verdict.wrong
    assert verdict.counts["unsteady"] == 1


@pytest.mark.parametrize("kind", ["sum", "avg"])
def test_partial_leaves_have_exactly_their_value(pool, kind):
    # What compares bits, or jumps, says so of a value that the parts only nearly have.
    lines = (
        drawn(0, (5, 7), torch.float32, (Partial(kind), Partial(kind))),
        Call((1,), "aten.hash_tensor.default", (Value(0),)),
        Call((2,), "aten.view.dtype", (Value(0), torch.int32)),
        Call((3,), "aten.mul.Scalar", (Value(0), 1000.0)),
        Call((4,), "aten.frac.default", (Value(3),)),
    )
    verdict = check_program(Program((2, 2), lines), pool)
    assert not verdict.wrong, verdict.wrong
    assert not verdict.counts["unsteady"]


def test_parts_of_both_signs_meet_an_infinite_factor(pool):
    """A product reduces them first; of a convolution, NaN may stand for an infinity (docs/rules.md)."""
    window = {"bias": None, "stride": [1], "padding": [0], "dilation": [1], "transposed": False}
    window |= {"output_padding": [0], "groups": 1}
    for op, shape, of_parts, named, infinities in (
        ("aten.mul.Tensor", (4, 3), (4, 3), {}, 0),
        ("aten.mm.default", (3, 4), (4, 3), {}, 0),
        ("aten.convolution.default", (4, 3, 1), (1, 3, 4), window, 1),
    ):
        factors = torch.ones(shape)
        factors[0] = math.inf
        lines = (drawn(0, of_parts, torch.float32, (Partial(),)), Leaf(1, factors, (Replicate(),)))
        times = Call((2,), op, (Value(0), Value(1)), named)
        verdict = check_program(Program((4,), (*lines, times, Call((3,), "aten.exp.default", (Value(2),)))), pool)
        assert not verdict.wrong, verdict.wrong
        assert verdict.counts["infinities"] == infinities


def test_what_a_failed_solver_leaves_is_not_compared(pool):
    # A is singular: one device has infinities, and the parts of a pending operand infinities of either sign.
    singular = torch.tensor([[6.0, -0.0, 0.0]] * 3, dtype=torch.float64)
    lines = (
        Leaf(0, singular, (Replicate(),)),
        drawn(1, (3, 3), torch.float64, (Partial("avg"),)),
        Call(
            (2, 3, 4, 5), "aten._linalg_solve_ex.default", (Value(0), Value(1)), {"left": True, "check_errors": False}
        ),
        Call((6,), "aten.neg.default", (Value(2),)),
        Call((7,), "aten.neg.default", (Value(5),)),
    )
    verdict = check_program(Program((4,), lines), pool)
    assert not verdict.wrong, verdict.wrong
    # Compared are the two leaves, the pivots and what the solver says, which is an operand of the last line.
    assert verdict.counts["values compared"] == 5


def test_gradients_are_compared(pool):
    program = Program((4,), TANH.lines, backward=((2, (Shard(0),)),), grad=True)
    assert check_program(program, pool).counts["gradients compared"] == 1


def test_a_crash_on_every_rank_is_wrong_and_names_its_line(pool):
    pool.run(plant_crash)
    try:
        verdict = check_program(Program((4,), (drawn(0, (6, 5), torch.float32, (Shard(0),)), *TANH.lines[1:])), pool)
        assert verdict.at == 1
        assert "no_such_thing" in verdict.wrong
    finally:
        pool.run(uproot)


def test_a_move_of_a_tensor_with_gaps_has_none(pool):
    """One device clones there, and a clone has no gaps; ops that read strides must see the same."""
    gapped = torch.arange(60.0).reshape(6, 10)[:, :5]
    lines = (
        Leaf(0, gapped, (Shard(0),)),
        Move(1, 0, (Replicate(),)),
        Call((2,), "aten.as_strided.default", (Value(1), (6, 5), (5, 1))),
    )
    verdict = check_program(Program((4,), lines), pool)
    assert not verdict.wrong
    assert verdict.counts["call ran"] == 1


def test_a_failed_rank_is_no_failed_line(monkeypatch):
    """The pool starts anew after it: the ranks are not in step any more."""

    def fail(_, line):
        raise RankFailedError(asked=f"run {line}", found="rank 1 raised", do="Correct it.", rank=1)

    monkeypatch.setattr(replay._Replay, "_run", fail)
    with pytest.raises(RankFailedError):
        replay._Replay(TANH, None).line(TANH.lines[0], ())


def test_shrinking_keeps_what_is_wrong():
    lines = (
        drawn(0, (5, 7), torch.float32, (Shard(0), Partial())),
        Call((1,), "aten.tanh.default", (Value(0),)),
        Move(2, 1, (Replicate(), Shard(1))),
        Call((3,), "aten.abs.default", (Value(2),)),
        Call((4,), "aten.neg.default", (Value(3),)),
    )
    small = shrunk(Program((2, 2), lines), lambda p: any(call.op == "aten.abs.default" for call in p.calls))
    assert [call.op for call in small.calls] == ["aten.abs.default"]
    (only,) = (line for line in small.lines if isinstance(line, Leaf))
    assert (small.mesh_shape, only.placements) == ((4,), (Replicate(),))
