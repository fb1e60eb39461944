"""Rules for reductions: what they print, the traps, and reductions of real tensors on real ranks."""

import math
from itertools import product

import pytest
import torch
from attrs import evolve
from described import empty, rows_of

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.kernel.placements import show_all
from shardwise.rule.authoring import einop, rule_from
from shardwise.rule.lowering import LocalCall
from shardwise.testing import RuleRefuted, check_rule, mesh
from shardwise_reduce import along, extremes, largest, moments, norms, positions, scans, sums

aten = torch.ops.aten
MODULES = (sums, extremes, moments, norms, positions, along, scans, largest)
RULES = {op: rule for module in MODULES for rule in module.RULES for op in rule.ops}
F32, BF16, I32, I64, BOOL = torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.bool


def rows(op, *args, **kwargs):
    """The rows of a call; ``*`` marks those that run a lowering."""
    return [f"{show_all(r.inputs)} -> {show_all(r.outputs)}{'*' * r.lowered}" for r in rows_of(op, *args, **kwargs)]


def kinds(op, *args, **kwargs):
    """The kinds of partial operand that a call takes."""
    inputs = (row.inputs[0] for row in rows_of(op, *args, **kwargs))
    return [p.reduce_op for p in inputs if isinstance(p, Partial)]


# -- what rules say ----------------------------------------------------------------------------------------------


def test_rows_of_sum():
    assert rows(aten.sum.dim_IntList, empty(4, 5, 6), [-2]) == [
        "[S(0)] -> [S(0)]",
        "[S(1)] -> [P(sum)]",
        "[S(2)] -> [S(1)]",
        "[P(sum)] -> [P(sum)]",
        "[P(avg)] -> [P(avg)]",
        "[R] -> [R]",
    ]


def test_kept_dims_keep_their_place():
    assert rows(aten.amax.default, empty(4, 5, 6), [0, 1], True) == [
        "[S(0)] -> [P(max)]*",
        "[S(1)] -> [P(max)]*",
        "[S(2)] -> [S(2)]",
        "[P(max)] -> [P(max)]",
        "[R] -> [R]",
    ]


def test_no_dims_are_all_dims():
    everything = ["[S(0)] -> [P(sum)]*", "[S(1)] -> [P(sum)]*"]
    for dims in (None, []):
        assert rows(aten.mean.dim, empty(4, 5), dims)[:2] == everything
    assert rows(aten.mean.default, empty(4, 5))[:2] == everything


def test_no_dims_of_any_are_none():
    assert rows(aten.any.dims, empty(4, 5), [])[:2] == ["[S(0)] -> [S(0)]", "[S(1)] -> [S(1)]"]
    assert rows(aten.any.dims, empty(4, 5), None)[:2] == ["[S(0)] -> [P(max)]", "[S(1)] -> [P(max)]"]


def test_rows_of_both_extremes():
    assert rows(aten.aminmax.default, empty(4, 5), dim=1) == [
        "[S(0)] -> [S(0), S(0)]",
        "[S(1)] -> [P(min), P(max)]*",
        "[R] -> [R, R]",
    ]


def test_rows_of_variance():
    assert rows(aten.var_mean.correction, empty(4, 5), [0], correction=1) == [
        "[S(0)] -> [R, R]*",
        "[S(1)] -> [S(0), S(0)]",
        "[R] -> [R, R]",
    ]


def test_rows_of_sort_and_max():
    assert rows(aten.sort.default, empty(4, 5), 1) == ["[S(0)] -> [S(0), S(0)]", "[R] -> [R, R]"]
    assert rows(aten.max.dim, empty(4, 5), 1) == ["[S(0)] -> [S(0), S(0)]", "[S(1)] -> [R, R]*", "[R] -> [R, R]"]
    assert rows(aten.argmax.default, empty(4, 5)) == ["[R] -> [R]"]


@pytest.mark.parametrize(
    "op", [aten.cumsum.default, aten.cumprod.default, aten.cummax.default, aten.logcumsumexp.default]
)
def test_a_scan_keeps_its_shards(op):
    assert rows(op, torch.ones(5, 7), 1)[1].startswith("[S(1)] -> [S(1)")
    assert rows_of(op, torch.ones(5, 7), 1)[1].lowered


def test_topk_of_few_sends_candidates_and_of_many_the_whole():
    assert rows(aten.topk.default, torch.ones(5, 9), 2, 1)[1] == "[S(1)] -> [R, R]*"
    assert len(rows(aten.topk.default, torch.ones(5, 9), 3, 1)) == 2
    assert len(rows(aten.topk.default, torch.ones(5, 9), 2, 1, True, False)) == 2


def test_out_lies_as_the_result():
    listed = rows(aten.sum.IntList_out, empty(4, 5), [1], out=empty(4))
    assert listed[:2] == ["[S(0), S(0)] -> [S(0)]", "[S(1), P(sum)] -> [P(sum)]"]


# -- traps: what may stay partial --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "options", "expected"),
    [
        (F32, {}, ["sum", "avg"]),
        (BF16, {"dtype": F32}, ["sum", "avg"]),
        (I64, {}, ["sum"]),
        # Pieces of an int32 wrap round, their sum in int64 does not.
        (I32, {}, []),
        (BOOL, {}, []),
        # A cast to integers cuts off: not linear.
        (F32, {"dtype": I64}, []),
    ],
)
def test_kinds_that_a_sum_takes(dtype, options, expected):
    assert kinds(aten.sum.default, empty(4, dtype=dtype), **options) == expected


def test_kinds_that_others_take():
    x = empty(4, 5)
    assert kinds(aten.prod.default, x) == ["product"]
    assert kinds(aten.amin.default, x) == ["min"]
    assert kinds(aten.cumsum.default, x, 0) == ["sum", "avg"]
    assert kinds(aten.cumsum.default, empty(4, dtype=I64), 0) == ["sum"]
    for op in (aten.nansum.default, aten.count_nonzero.default, aten.linalg_vector_norm.default, aten.var.correction):
        assert kinds(op, x) == []


def test_a_maximum_of_numbers_says_nothing_of_their_truth():
    assert kinds(aten.any.default, empty(4)) == []
    assert kinds(aten.any.default, empty(4, dtype=BOOL)) == ["max"]
    assert kinds(aten.all.default, empty(4, dtype=BOOL)) == ["min"]


# -- traps: what must be global ----------------------------------------------------------------------------------


def judged(op, *args, **kwargs):
    """The oracle's count of cases over all rows and meshes; raises when one is wrong."""
    rule = RULES[op]
    only = evolve(rule, ops=(op,))
    return check_rule(only, [(args, kwargs)]).cases


def test_a_mean_of_means_over_uneven_shards_is_refused():
    def local_mean(local: LocalCall, x, *args, **kwargs):
        return x.mean() / local.spec("self").num_shards if x.numel() else x.new_zeros(())

    wrong = rule_from(aten.mean.default, lowering=local_mean)(
        lambda: einop("n -> ()", reduce={"n": "sum"}, lowered=["n"])
    )
    check_rule(wrong, [((torch.arange(8.0),), {})], meshes=[(4,)])
    with pytest.raises(RuleRefuted, match="shard n"):
        check_rule(wrong, [((torch.arange(5.0),), {})])
    assert judged(aten.mean.default, torch.arange(5.0))


def test_a_variance_far_from_zero_keeps_its_digits():
    assert judged(aten.var.correction, torch.arange(9.0) + 1e5, [0], correction=1)


def test_empty_shards_change_no_extreme():
    for x in (torch.tensor([-3.0, -2.0]), torch.tensor([-3, -2]), torch.tensor([False, False])):
        assert judged(aten.amax.default, x, [0])
        assert judged(aten.amin.default, x, [0])
    assert judged(aten.linalg_vector_norm.default, torch.tensor([3.0, 4.0]), -math.inf, [0])
    assert judged(aten.logsumexp.default, torch.tensor([-800.0, -900.0]), [0])


def test_the_first_of_equals_wins_over_shards():
    assert judged(aten.argmax.default, torch.tensor([1, 3, 3, 3, 2, 3, 1, 0, 3]), 0)
    assert judged(aten.argmin.default, torch.tensor([2.0, math.nan, 1.0, math.nan, 0.0]), 0)


# -- on real ranks -----------------------------------------------------------------------------------------------

LAYOUTS = [
    ((4,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [Shard(1), Shard(1)]),
    ((2, 2), [Replicate(), Shard(0)]),
]


def values(*shape):
    return torch.linspace(-2, 3, math.prod(shape)).reshape(shape).sin()


def differentiable():
    programs = [
        lambda t: t.sum(0),
        lambda t: t.mean(),
        lambda t: t.mean(1, keepdim=True),
        lambda t: t.var(0),
        lambda t: t.std(),
        lambda t: t.t().var(1, unbiased=False),
        lambda t: t.norm(),
        lambda t: torch.linalg.vector_norm(t, 3, dim=1),
        lambda t: torch.linalg.vector_norm(t, math.inf),
        lambda t: t.logsumexp(1),
        lambda t: t.amax(0),
        lambda t: t.max(),
        lambda t: t.max(1).values,
        lambda t: t.cumsum(1),
        lambda t: t.sort(0).values,
    ]
    for shape, layout in LAYOUTS:
        for at, program in enumerate(programs):
            full = values(5, 7).requires_grad_()
            x = sw.distribute_tensor(values(5, 7), mesh(shape), layout).requires_grad_()
            result, expected = program(x), program(full)
            torch.testing.assert_close(result.full_tensor(), expected, msg=f"program {at} on {layout}")
            (result * result).sum().backward()
            (expected * expected).sum().backward()
            torch.testing.assert_close(x.grad.full_tensor(), full.grad, msg=f"gradient {at} on {layout}")
            assert x.grad.placements == tuple(layout)


def answers():
    programs = [
        lambda t: (t > 0).any(0),
        lambda t: (t > -9).all(),
        lambda t: (t > 0).sum(),
        lambda t: t.argmax(0),
        lambda t: t.argmin(1, keepdim=True),
        lambda t: t.min(0).indices,
        lambda t: (t > 0).count_nonzero(),
        lambda t: torch.aminmax(t)[1],
        lambda t: t.topk(2, 1).values,
        lambda t: t.median(),
        lambda t: t.prod(0),
        lambda t: t.bfloat16().mean(0),
    ]
    for shape, layout in LAYOUTS:
        for at, program in enumerate(programs):
            x = sw.distribute_tensor(values(5, 7), mesh(shape), layout)
            result, expected = program(x).full_tensor(), program(values(5, 7))
            # The shares of a mean in bf16 are rounded before they are added up.
            loose = {"atol": 2e-2, "rtol": 0} if expected.dtype == BF16 else {}
            torch.testing.assert_close(result, expected, **loose, msg=f"program {at} on {layout}")


def written_out():
    x = sw.distribute_tensor(values(5, 7), mesh((4,)), [Shard(0)])
    out = sw.zeros((7,), device_mesh=mesh((4,)), placements=[Replicate()])
    assert torch.var(x, [0], out=out) is out
    torch.testing.assert_close(out.full_tensor(), values(5, 7).var(0))
    kept = sw.zeros((5,), device_mesh=mesh((4,)), placements=[Shard(0)])
    torch.sum(x, [1], out=kept)
    torch.testing.assert_close(kept.full_tensor(), values(5, 7).sum(1))


@pytest.mark.parametrize("program", [differentiable, answers, written_out])
def test_on_ranks(pool, program):
    pool.run(program)


# -- nothing to reduce -------------------------------------------------------------------------------------------

OF_NOTHING = {
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "amax": lambda x: x.amax(0),
    "amin": lambda x: x.amin(-1),
    "max of a dim": lambda x: x.max(0).values,
    "min of a dim": lambda x: x.min(-1).indices,
    "argmax": lambda x: x.argmax(0),
    "aminmax": lambda x: x.aminmax()[0],
    "negative norm": lambda x: torch.linalg.vector_norm(x, -1),
    "infinite norm": lambda x: torch.linalg.vector_norm(x, math.inf),
    "infinite norm of a dim": lambda x: torch.linalg.vector_norm(x, math.inf, dim=-1),
    "lowest norm of the first dim": lambda x: torch.linalg.vector_norm(x, -math.inf, dim=0),
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(),
    "std": lambda x: x.std(0),
    "logsumexp": lambda x: x.logsumexp(0),
    "any": lambda x: x.any(),
}


def answers_for_nothing(shape):
    def of(x, op):
        try:
            result = op(x)
        except (IndexError, RuntimeError):
            return "refused"
        return result.full_tensor() if isinstance(result, sw.MeshTensor) else result

    device_mesh = mesh((torch.distributed.get_world_size(),))
    for placement, dtype in product((Shard(0), Shard(len(shape) - 1)), (torch.float32, torch.bool)):
        for name, op in OF_NOTHING.items():
            plain = torch.zeros(shape, dtype=dtype)
            found, expected = of(sw.distribute_tensor(plain, device_mesh, [placement]), op), of(plain, op)
            if isinstance(found, str) or isinstance(expected, str):
                assert found is expected, (name, found, expected)
            else:
                torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,)])
def test_what_torch_refuses_to_make_of_nothing_is_refused(two_ranks, shape):
    two_ranks.run(answers_for_nothing, shape)


# -- numbers near the largest of their dtype ---------------------------------------------------------------------

NEAR_THE_LARGEST = {
    (torch.float16, "mean"): lambda x: x.mean(0),
    (torch.float16, "variance"): lambda x: x.var(0),
    (torch.bfloat16, "variance"): lambda x: x.var(0),
    (torch.bfloat16, "variance and mean"): lambda x: torch.var_mean(x, 0)[1],
    (torch.float32, "variance and mean"): lambda x: torch.var_mean(x, 0)[1],
    (torch.float16, "pooled"): lambda x: torch.nn.functional.avg_pool2d(x[None, None], 4),
    (torch.bfloat16, "pooled"): lambda x: torch.nn.functional.avg_pool2d(x[None, None] / 16, 4),
}


def averages_of_large_numbers():
    device_mesh = mesh((torch.distributed.get_world_size(),))
    for (dtype, name), op in NEAR_THE_LARGEST.items():
        plain = torch.full((8, 4), 0.9 * torch.finfo(dtype).max, dtype=dtype)
        expected = op(plain)
        assert expected.isfinite().all(), name
        for dim in (0, 1):
            found = op(sw.distribute_tensor(plain, device_mesh, [Shard(dim)])).full_tensor()
            torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")


def test_averages_do_not_overflow_where_torch_has_numbers(two_ranks):
    two_ranks.run(averages_of_large_numbers)


# -- an empty list of dims -----------------------------------------------------------------------------------------


OF_NO_DIMS = {
    "sum": lambda x: x.sum([], keepdim=True),
    "mean": lambda x: x.mean([], keepdim=True),
    "amax": lambda x: x.amax([], keepdim=True),
    "std": lambda x: x.std([], correction=0, keepdim=True),
    "norm": lambda x: torch.linalg.vector_norm(x, 2, [], keepdim=True),
    "any": lambda x: torch.any(x, []),
    "all": lambda x: torch.all(x, [], keepdim=True),
}


def reduced_over_no_dims():
    """Most ops read the list as all dims, also where every dim has one element."""
    for shape, places in (((1, 1), 0), ((1, 1), 1), ((1, 3), 0), ((3, 2), 0)):
        whole = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
        for name, call in OF_NO_DIMS.items():
            found = call(sw.distribute_tensor(whole, mesh((2,)), [Shard(places)]))
            assert tuple(found.to_local().shape) == found._spec.local_shape(), name
            torch.testing.assert_close(found.full_tensor(), call(whole), msg=name)


def test_an_empty_list_of_dims_is_what_the_op_says(two_ranks):
    two_ranks.run(reduced_over_no_dims)
