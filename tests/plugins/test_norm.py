"""Rules for normalisation: what they print, the traps of statistics over shards, and layers on real ranks."""

import pytest
import torch
from attrs import evolve
from described import empty, rows_of, takes_partial
from torch.nn import functional

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import show_all
from shardwise.kernel.schema import OpSchema, RuntimeSchemaInfo
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.results import output_metas
from shardwise.planning.strategies import make_call, problems
from shardwise.rule.authoring import einop, rule_from
from shardwise.testing import RuleRefuted, check_rule, mesh
from shardwise_norm import batch, cudnn, group, layer

aten = torch.ops.aten
RULES = {op: rule for m in (batch, cudnn, group, layer) for rule in m.RULES for op in rule.ops}


def rows(op, *args):
    """The rows of a call, partial ones aside; ``*`` marks those that run a lowering."""
    plain = [row for row in rows_of(op, *args) if not takes_partial(row)]
    return [f"{show_all(r.inputs)} -> {show_all(r.outputs)}{'*' * r.lowered}" for r in plain]


def kinds(op, *args):
    """The names of the rows with a partial operand."""
    return [row.name for row in rows_of(op, *args) if takes_partial(row)]


W = empty(6)

# -- what rules say ----------------------------------------------------------------------------------------------


def test_rows_of_layer_norm():
    assert rows(aten.native_layer_norm.default, empty(4, 5, 6), [6], W, W, 1e-5) == [
        "[S(0), R, R] -> [S(0), S(0), S(0)]",
        "[S(1), R, R] -> [S(1), S(1), S(1)]",
        "[R, R, R] -> [R, R, R]",
    ]


def test_rows_of_the_backward_of_layer_norm():
    args = (empty(4, 6), empty(4, 6), [6], empty(4, 1), empty(4, 1), W, W, [True, True, True])
    assert rows(aten.native_layer_norm_backward.default, *args) == [
        "[S(0), S(0), S(0), S(0), R, R] -> [S(0), P(sum), P(sum)]",
        "[R, R, R, R, R, R] -> [R, R, R]",
    ]
    assert kinds(aten.native_layer_norm_backward.default, *args) == [
        "sum, R, ... -> sum, ...",
        "avg, R, ... -> avg, ...",
    ]


def test_a_gradient_that_is_not_wanted_is_absent():
    args = (empty(4, 6), empty(4, 6), [6], empty(4, 1), empty(4, 1), None, None, [True, False, False])
    on = AbstractMesh((2,))
    specs = [TensorSpec(on, [Replicate()], TensorMeta.of(a)) if isinstance(a, torch.Tensor) else a for a in args]
    schema = OpSchema.of(aten.native_layer_norm_backward.default, *specs)
    metas = output_metas(schema.op, schema.values)
    assert metas[1] is metas[2] is None
    assert RULES[schema.op].rows(make_call(RULES[schema.op], schema, metas))


def test_rows_of_group_norm():
    args = (empty(4, 6, 5), W, W, 4, 6, 5, 3, 1e-5)
    assert rows(aten.native_group_norm.default, *args) == [
        "[S(0), R, R] -> [S(0), S(0), S(0)]",
        "[S(1), S(0), S(0)] -> [S(1), S(1), S(1)]",
        "[R, R, R] -> [R, R, R]",
    ]
    by_group = rows_of(aten.native_group_norm.default, *args)[1]
    assert set(by_group.divides) == {(0, 1, 3), (1, 0, 3), (2, 0, 3)}


def test_one_group_keeps_its_channels_together():
    assert rows(aten.native_group_norm.default, empty(4, 6, 5), W, W, 4, 6, 5, 1, 1e-5) == [
        "[S(0), R, R] -> [S(0), S(0), S(0)]",
        "[R, R, R] -> [R, R, R]",
    ]


def test_rows_of_batch_norm_in_training():
    assert rows(aten.native_batch_norm.default, empty(4, 6, 5), W, W, None, None, True, 0.1, 1e-5) == [
        "[S(0), R, R, -, -] -> [S(0), R, R]*",
        "[S(1), S(0), S(0), -, -] -> [S(1), S(0), S(0)]",
        "[S(1), S(0), S(0), -, -] -> [S(1), S(0), S(0)]*",
        "[S(2), R, R, -, -] -> [S(2), R, R]*",
        "[R, R, R, -, -] -> [R, R, R]",
    ]


def test_rows_of_batch_norm_in_inference():
    listed = rows(aten.native_batch_norm.default, empty(4, 6), W, W, W, W, False, 0.1, 1e-5)
    plain = [
        "[S(0), R, R, R, R] -> [S(0), R, R]",
        "[S(1), S(0), S(0), S(0), S(0)] -> [S(1), R, R]",
        "[R, R, R, R, R] -> [R, R, R]",
    ]
    assert [row for row in listed if not row.endswith("*")] == plain
    # Where a shard is empty, and where the running statistics lie otherwise.
    assert {f"{plain[0]}*", f"{plain[1]}*", "[S(0), R, R, S(0), S(0)] -> [S(0), R, R]*"} <= set(listed)


def test_running_statistics_stay_where_they_are():
    """They are written though the schema does not say so: an update of a moved copy would be lost."""
    on, op = AbstractMesh((2,)), aten.native_batch_norm.default
    x, stats = (TensorMeta.contiguous(shape, torch.float32) for shape in ((4, 6), (6,)))
    whole = TensorSpec(on, [Replicate()], stats)
    args = (TensorSpec(on, [Shard(1)], x), None, None, whole, whole, True, 0.1, 1e-5)
    rule = RULES[op]
    schema = OpSchema(op, args, RuntimeSchemaInfo.of(op, rule.static, rule.writes))
    call = make_call(rule, schema, output_metas(op, schema.values))
    (problem,) = problems(rule, schema, call)
    assert [problem.rows[i].name for i in problem.candidates(0)] == [
        "shard b0",
        "shard c, statistics apart",
        "R",
    ]


def test_every_row_of_cudnn_batch_norm_makes_its_own_reserve():
    listed = rows(aten.cudnn_batch_norm.default, empty(4, 6), W, W, None, None, True, 0.1, 1e-5)
    assert listed
    assert all(row.endswith("*") for row in listed)


# -- traps -------------------------------------------------------------------------------------------------------


def test_local_statistics_are_refused():
    wrong = rule_from(aten._native_batch_norm_legit.no_stats)(
        lambda: einop("n c, R, R -> n c, R, R", partial=["n, R, R -> n, R, R"], replicate=["n", "c"])
    )
    with pytest.raises(RuleRefuted, match="n, R, R"):
        check_rule(wrong, [((torch.randn(8, 3), None, None, True, 0.1, 1e-5), {})])


# On four ranks five rows are uneven shards and an empty one, seven are uneven shards, two are even and empty ones.
@pytest.mark.parametrize("length", [pytest.param(2, marks=[pytest.mark.slow, pytest.mark.sample]), 5, 7])
def test_statistics_of_uneven_and_empty_shards_are_those_of_all(length):
    only = evolve(batch.FORWARD, ops=(aten._native_batch_norm_legit.no_stats,))
    sample = ((torch.randn(length, 3) + 50, None, None, True, 0.1, 1e-5), {})
    assert check_rule(only, [sample]).cases


# -- on real ranks -----------------------------------------------------------------------------------------------

LAYOUTS = [
    ((4,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [Shard(0), Shard(0)]),
    ((4,), [Replicate()]),
]


def numbers(*shape):
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator)


def compare(norm, x, size):
    """A normalisation and all its gradients against one device, with whole parameters."""
    for shape, layout in LAYOUTS:
        whole = [Replicate()] * len(shape)
        full = [numbers(*x), 1 + numbers(size), numbers(size)]
        parts = [sw.distribute_tensor(t, mesh(shape), layout if i == 0 else whole) for i, t in enumerate(full)]
        for t in (*full, *parts):
            t.requires_grad_()
        result, expected = norm(*parts), norm(*full)
        torch.testing.assert_close(result.full_tensor(), expected)
        result.sin().sum().backward()
        expected.sin().sum().backward()
        for part, one in zip(parts, full, strict=True):
            if one.grad is None:
                assert part.grad is None
                continue
            torch.testing.assert_close(part.grad.full_tensor(), one.grad, atol=1e-5, rtol=1e-4)
            assert part.grad.placements == part.placements


def layer_norms():
    compare(lambda x, w, b: functional.layer_norm(x, (6,), w, b), (5, 7, 6), 6)
    compare(lambda x, w, _: functional.layer_norm(x, (6,), w), (5, 7, 6), 6)
    compare(lambda x, *_: functional.layer_norm(x, (7, 6)), (5, 7, 6), 6)


def rms_norms():
    compare(lambda x, w, _: functional.rms_norm(x, (6,), w), (5, 7, 6), 6)
    compare(lambda x, *_: functional.rms_norm(x, (6,)), (5, 7, 6), 6)


def group_norms():
    compare(lambda x, w, b: functional.group_norm(x, 2, w, b), (5, 8, 3, 2), 8)
    compare(lambda x, w, b: functional.group_norm(x, 4, w, b), (6, 8, 3), 8)


def batch_norms_without_running_statistics():
    compare(lambda x, w, b: functional.batch_norm(x, None, None, w, b, training=True), (5, 8, 3, 2), 8)
    compare(lambda x, w, b: functional.batch_norm(x, None, None, w, b, training=True), (7, 6), 6)
    compare(lambda x, *_: functional.instance_norm(x), (4, 8, 3, 2), 8)


def train_with_running_statistics():
    """Three steps of a BatchNorm module, then inference; the statistics lie whole, or with the channels."""
    for shape, layout in LAYOUTS:
        for stats in ([Replicate()] * len(shape), [Shard(0) if p == Shard(1) else Replicate() for p in layout]):
            one, ours = torch.nn.BatchNorm2d(8), torch.nn.BatchNorm2d(8)
            sw.distribute_module(ours, mesh(shape), dict.fromkeys(("weight", "bias", "running_*"), stats))
            for step in range(3):
                full = numbers(5, 8, 3, 2) * (step + 1) + step
                x = sw.distribute_tensor(full, mesh(shape), layout)
                result, expected = ours(x), one(full)
                torch.testing.assert_close(result.full_tensor(), expected)
                (result * result).sum().backward()
                (expected * expected).sum().backward()
            for name in ("running_mean", "running_var"):
                held = getattr(ours, name)
                assert held.placements == tuple(stats)
                torch.testing.assert_close(held.full_tensor(), getattr(one, name))
            torch.testing.assert_close(ours.weight.grad.full_tensor(), one.weight.grad, atol=1e-3, rtol=1e-4)
            compare_inference(ours.eval(), one.eval(), shape, layout)


def compare_inference(ours, one, shape, layout):
    full = numbers(5, 8, 3, 2).requires_grad_()
    x = sw.distribute_tensor(numbers(5, 8, 3, 2), mesh(shape), layout).requires_grad_()
    result, expected = ours(x), one(full)
    torch.testing.assert_close(result.full_tensor(), expected)
    result.sin().sum().backward()
    expected.sin().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), full.grad)


@pytest.mark.parametrize(
    "program",
    [layer_norms, rms_norms, group_norms, batch_norms_without_running_statistics, train_with_running_statistics],
)
def test_on_ranks(pool, program):
    pool.run(program)


def test_an_infinite_inverse_deviation_meets_the_numbers_that_it_meets_in_torch():
    """The weight's gradient is a sum times infinity, not a sum of terms times infinity, which is NaN."""
    x, gradient, ones = torch.randn(4, 3, 5), torch.randn(4, 3, 5), torch.ones(3)
    inverse = torch.tensor([1.0, float("inf"), 2.0])
    sample = (gradient, x, ones, ones, ones, torch.zeros(3), inverse, True, 1e-5, [True, True, True])
    only = evolve(batch.backward, ops=batch.backward.ops[:1])
    assert check_rule(only, [(sample, {})], meshes=[(4,)]).cases
