"""Simulated ranks: collectives without a process group, and the mistakes that would hang a real mesh."""

import threading

import pytest
import torch

from shardwise.errors import RankDisagreementError
from shardwise.kernel.mesh import coordinates
from shardwise.testing.simulated import RankError, SilentComm, run_ranks


def numbered(at):
    """A tensor that tells its rank."""
    return torch.tensor([10.0 * at[0] + at[1]])


def test_ranks_are_in_row_major_order():
    assert coordinates((2, 3)) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert list(run_ranks((2, 3), lambda at, _: at).values()) == coordinates((2, 3))


@pytest.mark.parametrize(
    ("kind", "mesh_dims", "expected"),
    [
        ("sum", (0,), {(0, 0): 10.0, (1, 2): 14.0}),
        ("max", (1,), {(0, 0): 2.0, (1, 2): 12.0}),
        ("avg", (0, 1), {(0, 0): 6.0, (1, 2): 6.0}),
        ("sum", (), {(0, 0): 0.0, (1, 2): 12.0}),
    ],
)
def test_all_reduce(kind, mesh_dims, expected):
    answers = run_ranks((2, 3), lambda at, comm: comm.all_reduce(numbered(at), kind, mesh_dims).item())
    assert {at: answers[at] for at in expected} == expected


def test_all_gather_takes_different_shapes():
    answers = run_ranks((2, 3), lambda at, comm: comm.all_gather(torch.full((at[1],), float(at[0])), 1))
    assert [t.tolist() for t in answers[1, 0]] == [[], [1.0], [1.0, 1.0]]


def test_all_to_all_sends_piece_i_to_rank_i():
    answers = run_ranks((3,), lambda at, comm: comm.all_to_all([torch.tensor([at[0], i]) for i in range(3)], 0))
    assert [t.tolist() for t in answers[1,]] == [[0, 1], [1, 1], [2, 1]]


@pytest.mark.parametrize(("by", "expected"), [(1, [2, 0, 1]), (-1, [1, 2, 0]), (4, [2, 0, 1])])
def test_shift_wraps_round(by, expected):
    answers = run_ranks((3,), lambda at, comm: comm.shift(torch.tensor(at[0]), 0, by).item())
    assert list(answers.values()) == expected


def test_shifts_that_are_started_bring_any_shape():
    def work(at, comm):
        here, before = at[0], (at[0] - 1) % 3
        first = comm.start_shift(torch.full((here,), here), 0, 1, (before,))
        second = comm.start_shift(torch.tensor(here), 0, -1)
        return second.wait().item(), first.wait().tolist(), first.wait().tolist()

    assert run_ranks((3,), work) == {(0,): (1, [2, 2], [2, 2]), (1,): (2, [], []), (2,): (0, [1], [1])}


def test_several_mesh_dims_make_one_line_in_the_order_given():
    answers = run_ranks((2, 3), lambda at, comm: comm.shift(numbered(at), (0, 1)).item())
    assert [answers[at] for at in coordinates((2, 3))] == [12.0, 0.0, 1.0, 2.0, 10.0, 11.0]
    answers = run_ranks((2, 3), lambda at, comm: [int(t) for t in comm.all_gather(numbered(at), (1, 0))])
    assert answers[0, 2] == [0, 10, 1, 11, 2, 12]
    sent = lambda at: [torch.full((i,), at[0]) for i in range(4)]
    answers = run_ranks((2, 2), lambda at, comm: comm.all_to_all(sent(at), (0, 1), [(2 * at[0] + at[1],)] * 4))
    assert [t.tolist() for t in answers[1, 0]] == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_collectives_follow_each_other_and_leave_their_inputs():
    def work(at, comm):
        mine = numbered(at)
        total = comm.all_reduce(comm.all_reduce(mine, "sum", (0,)), "sum", (1,))
        total += 1
        return mine.item(), total.item()

    assert run_ranks((2, 3), work)[1, 2] == (12.0, 37.0)


def test_the_groups_of_a_collective_may_have_different_shapes():
    answers = run_ranks((2, 2), lambda at, comm: comm.all_reduce(torch.ones(2 - at[1]), "sum", (0,)).tolist())
    assert answers == {(0, 0): [2.0, 2.0], (0, 1): [2.0], (1, 0): [2.0, 2.0], (1, 1): [2.0]}


def test_groups_may_communicate_more_or_less():
    def work(at, comm):
        x = numbered(at)
        for _ in range(at[1]):  # column 0 does nothing, column 2 communicates twice
            x = comm.all_reduce(x, "sum", (0,))
        return comm.all_reduce(x, "sum", (1,)).item()

    assert run_ranks((2, 3), work) == {at: 10.0 * at[0] + 12 + 28 for at in coordinates((2, 3))}


def test_groups_that_wait_for_each_other_disagree():
    def work(at, comm):
        for mesh_dim in (0, 1) if at in ((0, 0), (1, 1)) else (1, 0):
            comm.all_reduce(numbered(at), "sum", (mesh_dim,))

    with pytest.raises(RankDisagreementError, match=r"rank \(0, 0\) asks for all_reduce.*rank \(1, 0\)"):
        run_ranks((2, 2), work)


def test_all_ranks_draw_the_same_numbers_as_one_device():
    torch.manual_seed(3)
    expected = torch.rand(2).tolist()
    torch.manual_seed(3)
    answers = run_ranks((3,), lambda _, comm: [*torch.rand(1), *comm.all_gather(torch.rand(1), 0)[2]])
    assert all([float(x) for x in numbers] == expected for numbers in answers.values())


# -- mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "work",
    [
        lambda at, comm: comm.all_reduce(torch.ones(1), "sum", (0,)) if at[0] else None,
        lambda at, comm: comm.all_reduce(torch.ones(1), "sum" if at[0] else "max", (0,)),
        lambda at, comm: comm.all_reduce(torch.ones(1), "sum", (at[1],)),
        lambda at, comm: comm.all_reduce(torch.ones(1 + at[0]), "sum", (0,)),
        lambda at, comm: comm.shift(torch.ones(1, dtype=torch.float64 if at[0] else torch.float32), 0),
        lambda at, comm: comm.all_gather(torch.ones(1), 0) if at[0] else comm.shift(torch.ones(1), 0),
    ],
    ids=["some ranks only", "kinds", "mesh dims", "shapes in a group", "dtypes in a group", "collectives"],
)
def test_ranks_that_disagree_are_an_error_instead_of_a_hang(work):
    before = threading.active_count()
    with pytest.raises(RankDisagreementError, match="asks for"):
        run_ranks((2, 2), work)
    assert threading.active_count() == before


def changes_what_it_sends(at, comm):
    sent = torch.ones(2)
    coming = comm.start_shift(sent, 0)
    sent += 1
    return coming.wait()


@pytest.mark.parametrize(
    ("work", "found"),
    [
        (lambda _, comm: comm.start_shift(torch.ones(1), 0) and None, "never waited for"),
        (changes_what_it_sends, "changed before it was waited for"),
        (lambda at, comm: comm.shift(torch.ones(at[0]), 0), r"of shape \(1,\) and \(0,\) is expected"),
        (lambda _, comm: comm.start_shift(torch.ones(2), 0, 1, (3,)).wait(), r"\(2,\) and \(3,\) is expected"),
        (lambda _, comm: comm.all_to_all([torch.ones(1)] * 2, 0, [(1,), (2,)]), "is expected"),
    ],
    ids=["not waited for", "changed meanwhile", "unlike shapes", "wrong shape", "wrong shapes"],
)
def test_shifts_that_would_go_wrong_on_real_ranks_are_an_error(work, found):
    with pytest.raises(RankError, match=found) as refused:
        run_ranks((2,), work)
    assert isinstance(refused.value.__cause__, RankDisagreementError)


def test_what_a_rank_raises_names_the_rank_and_ends_the_others():
    def work(at, comm):
        comm.all_reduce(torch.ones(1), "sum", (0,))
        return 1 / (at[0] - 1)

    before = threading.active_count()
    with pytest.raises(RankError, match=r"rank \(1,\) raised ZeroDivisionError") as refused:
        run_ranks((3,), work)
    assert isinstance(refused.value.__cause__, ZeroDivisionError)
    assert threading.active_count() == before


def test_a_silent_handle_refuses_to_communicate():
    with pytest.raises(RankDisagreementError, match="only a lowering may communicate"):
        SilentComm().all_reduce(torch.ones(1), "sum", (0,))
