"""Rules for embeddings: what they say, the traps, and look-ups and their gradients on real ranks."""

import pytest
import torch
from described import rows_of

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.discovery.process import default_registry
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import show_all
from shardwise.kernel.schema import OpSchema
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.strategies import propagated
from shardwise.rule.authoring import rule
from shardwise.testing import mesh
from shardwise.testing.oracle import check_rule
from shardwise.testing.report import RuleRefuted

aten = torch.ops.aten
INDICES = torch.empty(4, 5, dtype=torch.int64, device="meta")


def empty(*shape):
    return torch.empty(shape, device="meta")


def rows(op, *args):
    """The legal placements of a call, without their names."""
    return [f"{show_all(row.inputs)} -> {show_all(row.outputs)}" for row in rows_of(op, *args)]


# -- what rules say ----------------------------------------------------------------------------------------------


def test_rows_of_a_look_up():
    kinds = ("sum", "avg", "max", "min", "product")
    assert set(rows(aten.embedding.default, empty(10, 6), INDICES)) == {
        "[S(0), R] -> [P(sum)]",
        "[S(1), R] -> [S(2)]",
        "[R, S(0)] -> [S(0)]",
        "[R, S(1)] -> [S(1)]",
        *(f"[P({kind}), R] -> [P({kind})]" for kind in kinds),
        "[R, R] -> [R]",
    }


def test_rows_of_the_gradient():
    listed = rows(aten.embedding_dense_backward.default, empty(4, 5, 6), INDICES, 10, -1, False)
    assert {
        "[S(0), S(0)] -> [P(sum)]",
        "[S(1), S(1)] -> [P(sum)]",
        "[S(2), R] -> [S(1)]",
        "[P(sum), R] -> [P(sum)]",
        "[P(avg), R] -> [P(avg)]",
        "[R, R] -> [R]",
    } <= set(listed)


# -- traps -------------------------------------------------------------------------------------------------------


def test_a_gradient_scaled_by_frequency_needs_all_indices():
    listed = rows(aten.embedding_dense_backward.default, empty(4, 5, 6), INDICES, 10, -1, True)
    assert "[S(2), R] -> [S(1)]" in listed
    assert not [row for row in listed if ", R]" not in row]


def test_the_gradient_of_a_replicated_table_is_not_sharded_to_be_gathered_again():
    on = AbstractMesh((4,))
    whole = [TensorSpec(on, [Replicate()], TensorMeta.of(x)) for x in (empty(4, 5, 6), INDICES)]
    schema = OpSchema.of(aten.embedding_dense_backward.default, *whole, 10, -1, False)
    output = propagated(default_registry(), schema).output_spec
    assert output.placements == (Replicate(),)


def without_a_mask(local, weight, indices, *rest):
    """Looks an index that another rank owns up in its own rows."""
    return local.call.op(weight, indices % len(weight), *rest)


def test_the_oracle_tells_an_unmasked_look_up():
    unmasked = rule(
        aten.embedding.default,
        "row column, n -> n column",
        reduce={"row": "sum"},
        lowering={"row": without_a_mask},
    )
    with pytest.raises(RuleRefuted, match="shard row"):
        check_rule(unmasked, [((torch.randn(12, 3), torch.tensor([0, 5, 7, 2])), {})])


# -- on real ranks -----------------------------------------------------------------------------------------------


def table_and_indices():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(10, 6, generator=generator), torch.tensor(
        [[1, 9, 1], [0, 7, 2], [2, 2, 9], [5, 0, 3], [8, 8, 1]]
    )


def look_up_and_train(place_table, place_indices, shape, options):
    """One look-up and its gradient on a mesh, against one device."""
    table, indices = table_and_indices()
    on = mesh(shape)
    plain = table.clone().requires_grad_()
    expected = torch.nn.functional.embedding(indices, plain, **options)
    weights = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    (expected * weights).sum().backward()
    weight = sw.distribute_tensor(table, on, place_table).requires_grad_()
    result = torch.nn.functional.embedding(sw.distribute_tensor(indices, on, place_indices), weight, **options)
    (result * sw.distribute_tensor(weights, on, [Replicate()] * on.ndim)).sum().backward()
    torch.testing.assert_close(result.full_tensor(), expected)
    torch.testing.assert_close(weight.grad.full_tensor(), plain.grad)
    assert weight.grad.placements == tuple(place_table)


ROW, COLUMN, R = Shard(0), Shard(1), Replicate()
LAYOUTS = {
    "by row": ([ROW], [R], (4,)),
    "by column": ([COLUMN], [R], (4,)),
    "batch": ([R], [Shard(0)], (4,)),
    "by row and batch alike": ([ROW], [Shard(0)], (4,)),
    "batch x row": ([R, ROW], [Shard(0), R], (2, 2)),
    "row x row": ([ROW, ROW], [R, R], (2, 2)),
    "column x row": ([COLUMN, ROW], [R, Shard(1)], (2, 2)),
}


@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 2}, {"scale_grad_by_freq": True}], ids=["plain", "padding", "freq"]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_look_up_and_its_gradient(pool, layout, options):
    pool.run(look_up_and_train, *LAYOUTS[layout], options)


def row_sharded_look_up_stays_partial():
    table, indices = table_and_indices()
    weight = sw.distribute_tensor(table, mesh((4,)), [Shard(0)])
    result = torch.nn.functional.embedding(sw.distribute_tensor(indices, mesh((4,)), [Replicate()]), weight)
    assert result.placements == (Partial("sum"),)


def test_a_row_sharded_look_up_moves_no_table(pool):
    pool.run(row_sharded_look_up_stays_partial)


def an_index_out_of_range():
    table, _ = table_and_indices()
    on = mesh((4,))
    weight = sw.distribute_tensor(table, on, [Shard(0)])
    for wrong in (10, -1):
        indices = sw.distribute_tensor(torch.tensor([0, wrong]), on, [Replicate()])
        with pytest.raises((IndexError, RuntimeError)):
            torch.nn.functional.embedding(indices, weight)
        for mode in ("sum", "mean", "max"):
            bags = indices[None]
            with pytest.raises(RuntimeError, match=f"found idx to be {wrong}"):
                torch.nn.functional.embedding_bag(bags, weight, mode=mode)


def test_an_index_out_of_range_is_refused_on_every_rank(pool):
    pool.run(an_index_out_of_range)


def limited_norms():
    table, indices = table_and_indices()
    on = mesh((4,))
    for placement in (Shard(0), Replicate()):
        plain, weight = table.clone(), sw.distribute_tensor(table, on, [placement])
        expected = torch.nn.functional.embedding(indices, plain, max_norm=1.0)
        result = torch.nn.functional.embedding(sw.distribute_tensor(indices, on, [Replicate()]), weight, max_norm=1.0)
        torch.testing.assert_close(result.full_tensor(), expected)
        torch.testing.assert_close(weight.full_tensor(), plain)


def test_norms_are_limited_in_place_by_the_rank_that_has_the_row(pool):
    pool.run(limited_norms)
