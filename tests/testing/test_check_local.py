"""``check_local`` accepts what is right under every layout, and rejects what is planted."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.errors import ArgumentError, LocalGradientError, LocalPlacementError, LocalResultError
from shardwise.testing import LocalRefuted, check_local

R, S0, S1, SUM, AVG = Replicate(), Shard(0), Shard(1), Partial(), Partial("avg")
X, W = torch.randn(7, 6), torch.randn(6, 5)


def product(x, w):
    return torch.tanh(x @ w)


# What a product of matrices may do on one mesh dim: the algebra of every combination is that of one device.
ROWS = [(S0, R, S0), (R, S1, S1), (S1, S0, SUM), (SUM, R, SUM), (R, SUM, SUM), (AVG, R, AVG), (R, AVG, AVG), (R, R, R)]


@settings(max_examples=60)
@given(st.lists(st.sampled_from(ROWS), min_size=1, max_size=3), st.integers(0, 1000), st.data())
def test_every_combination_of_rows_has_the_gradients_of_one_device(rows, seed, data):
    sizes = [data.draw(st.integers(1, 3)) for _ in rows]
    x, w, y = (list(placements) for placements in zip(*rows, strict=True))
    report = check_local(torch.matmul, inputs=(x, w), outputs=y, args=(X, W), mesh=sizes, seed=seed)
    assert (report.results, report.gradients) == (1, 2)


SAME = st.sampled_from([(S0, R, S0, R), (R, R, R, R), (R, S1, S1, R), (R, R, R, R)])


@settings(max_examples=40)
@given(st.lists(SAME, min_size=1, max_size=3), st.integers(0, 1000))
def test_different_work_beside_the_same_work(rows, seed):
    """One result is sharded and one is replicated, of a weight that is whole along these mesh dims."""
    x, w, y, z = (list(placements) for placements in zip(*rows, strict=True))
    if any(p != R for p in w):  # the second result would not be whole
        z = [SUM if p != R else R for p in w]

    def both(x, w):
        return torch.tanh(x @ w), (w * w).sum()

    check_local(both, inputs=(x, w), outputs=(y, z), args=(X, W), mesh=[2] * len(rows), seed=seed)


# -- planted ---------------------------------------------------------------------------------------------------------


class WrongGradient(torch.autograd.Function):
    """Divides by the rows that it sees, which are fewer on a rank."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 / grad.shape[0]


def squares_beside(x, w):
    return x @ w, (x * x).sum()


PLANTED = {
    "a sum claimed as whole": (squares_beside, ([S0], R), ([S0], R), "result 1", [(SUM,)]),
    "a sum claimed as an average": (lambda x, w: (x @ w).sum(0), ([S0], R), [AVG], "result 0", [(SUM,)]),
    "an average of uneven parts": (lambda x, w: (x @ w).mean(0), ([S0], R), [AVG], "result 0", []),
    "a sum of what is whole": (product, (R, R), [SUM], "result 0", [(R,)]),
    "another dim": (product, ([S0], R), [S1], "result 0", [(S0,)]),
    "a partial sum into tanh": (product, ([SUM], R), [SUM], "result 0", []),
    "an inner dim claimed as whole": (lambda x, w: (x @ w, w), ([S1], [S0]), ([SUM], [S1]), "result 1", [(S0,)]),
    "a gradient": (lambda x, w: WrongGradient.apply(x) + 0 * w.sum(), ([S0], R), [S0], "the gradient of x", []),
    "a normalisation by the part": (lambda x, w: x / x.norm() + 0 * w.sum(), ([S0], R), [S0], "result 0", []),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_rejected(name):
    function, inputs, outputs, what, fitting = PLANTED[name]
    with pytest.raises(LocalRefuted) as refuted:
        check_local(function, inputs=inputs, outputs=outputs, args=(X, W), mesh=(2,))
    assert refuted.value.what == what
    for layout in fitting:
        assert layout in refuted.value.fitting
    assert bool(fitting) == bool(refuted.value.fitting)
    if fitting:
        assert "say so in outputs=" in str(refuted.value)


def test_a_sum_claimed_as_whole_is_refused_before_it_runs():
    with pytest.raises(LocalPlacementError, match="different parts of x"):
        check_local(lambda x: x.sum(), inputs=([S0],), outputs=R, args=(X,), mesh=(2,))


def test_what_cannot_be_judged_is_said():
    with pytest.raises(LocalGradientError, match="a part of a max"):
        check_local(torch.neg, inputs=(R,), outputs=[Partial("max")], args=(X,), mesh=(2,))
    with pytest.raises(LocalPlacementError, match="Say how they lie here"):
        check_local(sw.local(product, outputs=[S0]), args=(X, W), mesh=(2,))
    with pytest.raises(LocalPlacementError, match="WorkerPool"):
        check_local(sw.local(product, outputs=[R], communicates=0), inputs=([S1], [S0]), args=(X, W), mesh=(2,))
    with pytest.raises(LocalRefuted, match=r"the rank at \(0,\) raises RuntimeError") as refuted:
        check_local(product, inputs=([S1], R), outputs=[S0], args=(X, W), mesh=(2,))
    assert isinstance(refuted.value.__cause__, RuntimeError)
    with pytest.raises(LocalResultError, match="a tensor, and outputs= has no placements"):
        check_local(product, inputs=([S0], R), outputs=None, args=(X, W), mesh=(2,))
    with pytest.raises(LocalRefuted, match="returns 1, and one device 7"):
        check_local(lambda x: tuple(x[: 7 if len(x) > 4 else 1]), inputs=([S0],), outputs=SUM, args=(X,), mesh=(7,))


def test_numbers_keywords_and_another_function_for_one_device():
    def local_norm(x, *, eps, more):
        return (x * x).sum() + eps * 0, {"count": 3, "x": x + more["shift"]}

    def whole_norm(x, *, eps, more):
        return (x * x).sum(), {"count": 3, "x": x + more["shift"]}

    report = check_local(
        local_norm,
        inputs={"x": {"tp": S0}},
        outputs=({"tp": SUM}, (None, {"tp": S0})),
        args=(X,),
        kwargs={"eps": 1.0, "more": {"shift": 2.0}},
        names=("dp", "tp"),
        whole=whole_norm,
    )
    assert str(report) == "local_norm on 4 simulated ranks: 2 results and 1 gradient are those of one device"


@pytest.mark.parametrize("mesh", [2, "2", (), (0,), (2, -1), (2.0,), {"dp": 0}])
def test_a_mesh_without_ranks_judges_nothing_and_is_refused(mesh):
    with pytest.raises(ArgumentError, match="sizes above 0"):
        check_local(lambda x: x + 1, inputs=([S0],), outputs=[S0], args=(X,), mesh=mesh)


def test_a_mesh_may_say_the_names_of_its_dims():
    report = check_local(lambda x: x + 1, inputs={"x": {"tp": S0}}, outputs={"tp": S0}, args=(X,), mesh={"tp": 3})
    assert str(report) == "<lambda> on 3 simulated ranks: 1 result and 1 gradient are those of one device"


def test_it_starts_no_process(monkeypatch):
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", lambda self: pytest.fail(f"started {self}"))
    check_local(sw.local(product, inputs=([S0, R], R), outputs=[S0, R]), args=(X, W))
