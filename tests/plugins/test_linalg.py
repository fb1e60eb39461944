"""Rules for linear algebra: what they print, the traps, and torch.linalg on real ranks."""

import pytest
import torch
from described import empty, rows_of
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import forward_ad

import shardwise as sw
from shardwise import Shard
from shardwise.testing import mesh
from shardwise_linalg import distances, factors, least_squares, solvers, spectra

aten = torch.ops.aten
RULES = (*factors.RULES, *spectra.RULES, *solvers.RULES, *least_squares.RULES, *distances.RULES)


def rows(op, *args, **kwargs):
    """The rows of a call as text, without their names; partial ones aside."""
    return [str(row).partition(": ")[2] for row in rows_of(op, *args, **kwargs) if "P(" not in str(row)]


# -- what rules say ----------------------------------------------------------------------------------------------

GOLDEN = [
    (aten._linalg_svd.default, [empty(8, 4, 3)], ["[S(0)] -> [S(0), S(0), S(0)]"]),
    (aten._linalg_svd.default, [empty(8, 4, 3), False, False], ["[S(0)] -> [R, S(0), R]"]),
    (
        aten.linalg_lu_factor_ex.default,
        [empty(2, 8, 4, 3)],
        ["[S(0)] -> [S(0), S(0), S(0)]", "[S(1)] -> [S(1), S(1), S(1)]"],
    ),
    (
        aten._linalg_solve_ex.default,
        [empty(8, 3, 3), empty(8, 3, 5)],
        ["[S(0), S(0)] -> [S(0), S(0), S(0), S(0)]", "[R, S(2)] -> [S(2), R, R, R]"],
    ),
    # The factors are those of the one matrix that all right-hand sides share.
    (
        aten._linalg_solve_ex.default,
        [empty(3, 3), empty(8, 3, 1)],
        ["[R, S(0)] -> [S(0), R, R, R]", "[R, S(2)] -> [S(2), R, R, R]"],
    ),
    (aten._linalg_solve_ex.default, [empty(8, 3, 3), empty(8, 3)], ["[S(0), S(0)] -> [S(0), S(0), S(0), S(0)]"]),
    (
        aten._cdist_forward.default,
        [empty(8, 3), empty(5, 3), 2.0, None],
        ["[S(0), R] -> [S(0)]", "[R, S(0)] -> [S(1)]"],
    ),
    (aten.linalg_cross.default, [empty(8, 3), empty(8, 3)], ["[S(0), S(0)] -> [S(0)]"]),
]


@pytest.mark.parametrize(("op", "args", "expected"), GOLDEN)
def test_rows(op, args, expected):
    listed = rows(op, *args)
    assert listed[:-1] == expected
    assert "S(" not in listed[-1]


@pytest.mark.parametrize(
    "op", [aten.linalg_cholesky_ex, aten.linalg_lu_factor_ex, aten.linalg_ldl_factor_ex, aten.linalg_inv_ex]
)
def test_what_raises_for_one_matrix_sees_all_of_them(op):
    assert len(rows(op.default, empty(8, 3, 3), check_errors=True)) == 1
    assert len(rows(op.default, empty(8, 3, 3))) == 2


def test_least_squares_whose_shapes_depend_on_ranks_of_matrices_are_whole():
    assert len(rows(aten.linalg_lstsq.default, empty(8, 4, 3), empty(8, 4, 2), driver="gelsd")) == 1
    assert len(rows(aten.linalg_lstsq.default, empty(8, 3, 4), empty(8, 3, 2), driver="gelsd")) == 3


def least_squares_of(batch, m, n, columns, driver):
    torch.manual_seed(0)
    a, b = torch.randn(*batch, m, n), torch.randn(*batch, m, columns)
    return a, b, aten.linalg_lstsq.default(a, b, driver=driver)


@given(
    batch=st.lists(st.integers(0, 3), max_size=2),
    m=st.integers(1, 4),
    n=st.integers(1, 4),
    columns=st.integers(1, 3),
    driver=st.sampled_from([None, "gels", "gelsy", "gelsd", "gelss"]),
)
def test_metas_of_least_squares_are_those_of_the_kernel(batch, m, n, columns, driver):
    a, b, expected = least_squares_of(batch, m, n, columns, driver)
    try:
        metas = least_squares._on_meta(a.to("meta"), b.to("meta"), driver=driver)
    except NotImplementedError:
        assert driver in ("gelsd", "gelss")
        assert m > n
        return
    assert [(x.shape, x.dtype) for x in metas] == [(x.shape, x.dtype) for x in expected]


# -- on real ranks -----------------------------------------------------------------------------------------------


def whole(*shape, seed=0):
    torch.manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64)


def errors_of_one_matrix():
    """What every rank raises when a matrix of the last one cannot be done."""
    bad = whole(8, 3, 3)
    bad = bad + bad.mT + 10 * torch.eye(3, dtype=torch.float64)
    bad[7] = float("nan")
    outcomes = []
    for op in (torch.linalg.eigvalsh, torch.linalg.svdvals, torch.linalg.cholesky):
        x = sw.distribute_tensor(bad, mesh((4,)), [Shard(0)])
        try:
            op(x)
        except RuntimeError as error:
            outcomes.append(f"{type(error).__name__}: {error}")
        else:
            outcomes.append("nothing")
    return outcomes


def test_all_ranks_raise_for_a_matrix_of_one(pool):
    bad = torch.full((1, 3, 3), float("nan"), dtype=torch.float64)
    alone = []
    for op in (torch.linalg.eigvalsh, torch.linalg.svdvals, torch.linalg.cholesky):
        try:
            op(bad)
        except RuntimeError:
            alone.append(True)
        else:
            alone.append(False)
    for answer in pool.run(errors_of_one_matrix):
        assert [text != "nothing" for text in answer] == alone
    assert "that the rank at (3,) of the mesh holds" in pool.run(errors_of_one_matrix)[0][0]


def gradients(whole_a, whole_b, place):
    a, b = (place(x).requires_grad_() for x in (whole_a, whole_b))
    spread = a @ a.mT + place(4 * torch.eye(3, dtype=torch.float64).expand(len(whole_a), 3, 3))
    solution = torch.linalg.solve(spread, b)
    values = torch.linalg.eigvalsh(spread)
    (solution.sum() + torch.linalg.slogdet(spread)[1].sum() + values.pow(2).sum()).backward()
    return a.grad, b.grad


def differentiate(placements):
    a, b = whole(5, 3, 3), whole(5, 3, 2, seed=1)
    expected = gradients(a, b, torch.clone)
    computed = gradients(a, b, lambda x: sw.distribute_tensor(x, mesh((4,)), placements))
    for ours, theirs in zip(computed, expected, strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)
    return [x.placements for x in computed]


def test_gradients_of_a_batch_stay_where_it_is(pool):
    assert pool.run(differentiate, [Shard(0)])[0] == [(Shard(0),), (Shard(0),)]


# Of matrices that lie in memory with gaps, or one behind the other by the element.
IN_MEMORY = {
    "rows with gaps": ((6, 2, 6), 0, lambda x: x[:, 0]),
    "batch between rows": ((3, 4, 3), 1, lambda x: x.transpose(0, 1)),
    "columns": ((6, 6), 0, lambda x: x.t()),
    "one matrix on a rank": ((4, 3, 3), 0, lambda x: x),
}
FROM_FACTORS = {"slogdet": lambda x: torch.linalg.slogdet(x)[1], "det": torch.linalg.det}


def derivatives_from_factors(name):
    """Gradients and tangents of determinants, which torch computes from the factors of the matrix or of its transpose,
    by whether the matrix is contiguous.
    """
    shape, dim, pick = IN_MEMORY[name]
    values, direction = whole(*shape), whole(*shape, seed=1)
    for of in FROM_FACTORS.values():
        answers = []
        for place in (torch.clone, lambda x: sw.distribute_tensor(x, mesh((4,)), [Shard(dim)])):
            x = pick(place(values)).detach().requires_grad_()
            of(x).sum().backward()
            with forward_ad.dual_level():
                tangent = forward_ad.unpack_dual(of(forward_ad.make_dual(x.detach(), pick(place(direction))))).tangent
            answers.append((x.grad, tangent))
        (grad, tangent), (ours, our_tangent) = answers
        torch.testing.assert_close(ours.full_tensor(), grad)
        torch.testing.assert_close(our_tangent.full_tensor(), tangent)


@pytest.mark.parametrize("name", IN_MEMORY)
def test_derivatives_of_determinants_know_how_the_matrix_lies(pool, name):
    pool.run(derivatives_from_factors, name)


def distances_of_many_rows():
    """Near rows: the way by a product is less exact, and shards must take it where the whole does."""
    x = whole(30, 3)
    y = x + 1e-9
    expected = torch.cdist(x, y)
    result = torch.cdist(sw.distribute_tensor(x, mesh((4,)), [Shard(0)]), sw.distribute_tensor(y, mesh((4,))))
    return result.placements, torch.equal(result.full_tensor() > 0, expected > 0)


def test_shards_take_the_way_of_the_whole(pool):
    assert pool.run(distances_of_many_rows)[0] == ((Shard(0),), True)


# -- errors on one rank ------------------------------------------------------------------------------------------


def fails_at(*places):
    """An eigenvalue problem over a 2x2 mesh that has no solution on the ranks at some places."""
    grid = mesh((2, 2), ("dp", "tp"))
    whole = torch.eye(3).repeat(8, 1, 1)
    for i, j in places:
        whole[4 * i + 2 * j] = float("nan")
    with pytest.raises(torch.linalg.LinAlgError) as raised:
        torch.linalg.eigh(sw.distribute_tensor(whole, grid, [Shard(0), Shard(0)]))
    return str(raised.value)


@pytest.mark.parametrize("places", [[(1, 0)], [(1, 1), (0, 1)]], ids=str)
def test_an_error_on_one_rank_names_it_on_the_others(pool, places):
    others = [text for text in pool.run(fails_at, *places) if "batch element that" in text]
    assert len(others) == 4 - len(places)
    assert all(f"the rank at {min(places)} of the mesh holds" in text for text in others)
