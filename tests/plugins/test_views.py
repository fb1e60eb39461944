"""Rules for views: what they print, the traps, and views of real tensors on real ranks."""

import math

import pytest
import torch
from described import call_of, empty, rows_of
from hypothesis import example, given
from hypothesis import strategies as st

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.errors import NoStrategyError, ViewError
from shardwise.kernel.placements import shard_dim, strided_shard
from shardwise.testing import mesh
from shardwise_views import axes, reinterpret, shapes, strided
from shardwise_views.regroup import regroup

aten = torch.ops.aten
RULES = (*shapes.RULES, *axes.RULES, *reinterpret.RULES, *strided.RULES)


def rows(op, *args, **kwargs):
    """The rows of a call as text, partial ones aside."""
    return [str(row) for row in rows_of(op, *args, **kwargs) if "P(" not in str(row)]


def kinds(op, *args, **kwargs):
    """The partial rows of a call, by name."""
    return [row.name for row in rows_of(op, *args, **kwargs) if "P(" in str(row)]


# -- what rules say ----------------------------------------------------------------------------------------------

GOLDEN = [
    ((8, 6), (48,), ["shard d0: [S(0)] -> [S(0)]", "shard d0.1: [S(1)] -> [_S(0, 8)]", "R: [R] -> [R]"]),
    ((48,), (8, 6), ["shard d0: [S(0)] -> [S(0)]", "shard d0.1: [_S(0, 8)] -> [S(1)]", "R: [R] -> [R]"]),
    (
        (5, 8),
        (5, 2, 4),
        [
            "shard d0: [S(0)] -> [S(0)]",
            "shard d1: [S(1)] -> [S(1)]",
            "shard d1.1: [_S(1, 2)] -> [S(2)]",
            "R: [R] -> [R]",
        ],
    ),
    ((4, 1, 6), (4, 6), ["shard d0: [S(0)] -> [S(0)]", "shard d2: [S(2)] -> [S(1)]", "R: [R] -> [R]"]),
    (
        (1, 6),
        (1, 2, 3),
        [
            "shard one0: [S(0)] -> [S(0)]",
            "shard d1: [S(1)] -> [S(1)]",
            "shard d1.1: [_S(1, 2)] -> [S(2)]",
            "R: [R] -> [R]",
        ],
    ),
    (
        (2, 3, 8),
        (6, 8),
        [
            "shard d0: [S(0)] -> [S(0)]",
            "shard d0.1: [S(1)] -> [_S(0, 2)]",
            "shard d2: [S(2)] -> [S(1)]",
            "R: [R] -> [R]",
        ],
    ),
    ((3, 4), (4, 3), ["R: [R] -> [R]"]),
    ((0, 6), (0, 2, 3), ["shard d0: [S(0)] -> [S(0)]", "shard d1: [S(1)] -> [R]", "R: [R] -> [R]"]),
]


@pytest.mark.parametrize(("before", "after", "expected"), GOLDEN)
def test_rows_of_view(before, after, expected):
    assert rows(aten.view.default, empty(*before), list(after)) == expected


def test_only_the_common_factor_of_unlike_dims_may_be_sharded():
    rule, call = call_of(aten.view.default, empty(6, 4), [4, 6])
    row = rule.rows(call)[0]
    assert str(row) == "shard d0: [S(0)] -> [S(0)]"
    assert row.divides == ((0, 0, 2),)


def test_a_dim_that_stays_as_it_is_may_be_sharded_unevenly():
    rule, call = call_of(aten.view.default, empty(5, 6), [5, 2, 3])
    assert [(row.name, row.divides) for row in rule.rows(call)][:2] == [("shard d0", ()), ("shard d1", ((0, 1, 2),))]


OTHERS = [
    (aten.permute.default, [empty(5, 8, 3), [2, 0, -2]], ["[S(0)] -> [S(1)]", "[S(1)] -> [S(2)]", "[S(2)] -> [S(0)]"]),
    (aten.transpose.int, [empty(5, 8, 3), 0, -1], ["[S(0)] -> [S(2)]", "[S(1)] -> [S(1)]", "[S(2)] -> [S(0)]"]),
    (aten.t.default, [empty(5, 8)], ["[S(0)] -> [S(1)]", "[S(1)] -> [S(0)]"]),
    (aten.expand.default, [empty(1, 5), [3, 4, -1]], ["[S(1)] -> [S(2)]"]),
    (aten.repeat.default, [empty(6, 5), [2, 3, 1]], ["[S(1)] -> [S(2)]"]),
    (aten.unsqueeze.default, [empty(6, 5), -2], ["[S(0)] -> [S(0)]", "[S(1)] -> [S(2)]"]),
    (aten.squeeze.default, [empty(1, 6, 1)], ["[S(1)] -> [S(0)]"]),
    (aten.squeeze.dim, [empty(1, 6, 1), 0], ["[S(1)] -> [S(0)]", "[S(2)] -> [S(1)]"]),
    (aten.diagonal.default, [empty(6, 5, 6), 0, 0, 2], ["[S(1)] -> [S(0)]"]),
    (aten.diagonal_backward.default, [empty(5, 6), [6, 5, 6], 0, 0, 2], ["[S(0)] -> [S(1)]"]),
    (aten.unfold.default, [empty(6, 5), 0, 2, 2], ["[S(1)] -> [S(1)]"]),
    (aten.view.dtype, [empty(6, 4), torch.int32], ["[S(0)] -> [S(0)]", "[S(1)] -> [S(1)]"]),
    (aten.view.dtype, [empty(6, 4), torch.int16], ["[S(0)] -> [S(0)]"]),
    (aten.as_strided.default, [empty(6, 10), [4, 6, 4], [2, 10, 1]], ["[S(0)] -> [S(1)]"]),
    (aten.as_strided.default, [empty(6, 4), [4, 3, 6], [1, 0, 4]], ["[S(0)] -> [S(2)]", "[S(1)] -> [S(0)]"]),
]


@pytest.mark.parametrize(("op", "args", "expected"), OTHERS)
def test_rows_of_other_views(op, args, expected):
    assert [row.partition(": ")[2] for row in rows(op, *args)] == [*expected, "[R] -> [R]"]


# -- regrouping is exactly right ---------------------------------------------------------------------------------


@st.composite
def shape_pairs(draw):
    """Two shapes of one number of elements: the same prime factors, grouped in two ways, with ones put in."""
    primes = draw(st.lists(st.sampled_from([2, 2, 3, 5]), min_size=1, max_size=5))

    def grouped():
        cuts = sorted(draw(st.sets(st.integers(1, len(primes)), max_size=3)) - {len(primes)})
        order = primes if draw(st.booleans()) else draw(st.permutations(primes))
        return tuple(math.prod(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True))

    ones = draw(st.integers(0, 1))
    return (*grouped(), *[1] * ones), (*[1] * ones, *grouped())


def placements_of(shape, parts):
    """The placements that cut a tensor into this many equal parts, plain and strided."""
    for dim, n in enumerate(shape):
        for factor in range(1, n + 1):
            if n % (factor * parts) == 0:
                yield strided_shard(dim, factor)


def parts_of(whole, placement, parts):
    return placement._split_tensor(whole, parts, with_padding=False)[0]


def legal(before, after, placement, parts):
    """The placements of the result of which the parts are the views of the operand's parts, by trying all."""
    whole = torch.arange(math.prod(before))
    shards = parts_of(whole.view(before), placement, parts)
    return [
        other
        for other in placements_of(after, parts)
        if all(
            torch.equal(shard.reshape(part.shape), part)
            for shard, part in zip(shards, parts_of(whole.view(after), other, parts), strict=True)
        )
    ]


@example(((2, 16), (4, 8)), 4)
@given(shape_pairs(), st.integers(2, 6))
def test_regroup_allows_exactly_what_needs_no_other_ranks_data(pair, parts):
    before, after = pair
    placement_after = {}
    for row in regroup(before, after).bind(call_of(aten.view.default, empty(*before), list(after))[1]).rows:
        (source,), (result,) = row.inputs, row.outputs
        if shard_dim(source) is not None and all(n % parts == 0 for _, _, n in row.divides):
            placement_after[source] = result
    for dim in range(len(before)):
        source = strided_shard(dim, 1)
        if source in placements_of(before, parts):
            expected = legal(before, after, source, parts)
            assert (placement_after.get(source) in expected) if expected else source not in placement_after
    for source, result in placement_after.items():
        if source in placements_of(before, parts) and result in placements_of(after, parts):
            assert result in legal(before, after, source, parts)


# -- traps -------------------------------------------------------------------------------------------------------


def test_every_reduction_passes_a_view():
    names = [name.partition(" ")[0] for name in kinds(aten.view.default, empty(4, 6), [24])]
    assert names == ["sum", "avg", "max", "min", "product"]


def test_products_and_extremes_do_not_go_by_real_and_imaginary_part():
    assert kinds(aten.view_as_real.default, empty(3, dtype=torch.complex64)) == ["sum -> sum", "avg -> avg"]
    assert kinds(aten.view_as_complex.default, empty(3, 2)) == ["sum -> sum", "avg -> avg"]


def test_nothing_partial_is_read_as_another_dtype():
    assert kinds(aten.view.dtype, empty(4), torch.int32) == []


def test_a_negated_maximum_is_a_minimum():
    assert "max -> min" in kinds(aten._neg_view.default, empty(4))
    assert "product -> product" not in kinds(aten._neg_view.default, empty(4))


def test_overlapping_windows_do_not_add_up_maxima():
    assert kinds(aten.unfold_backward.default, empty(3, 2), [4], 0, 2, 1) == ["sum -> sum", "avg -> avg"]


def test_a_dim_of_size_one_that_goes_or_grows_is_whole():
    assert ": [S(0)]" not in str(rows(aten.squeeze.dim, empty(1, 6), 0))
    assert ": [S(0)]" not in str(rows(aten.expand.default, empty(1, 6), [4, 6]))


@pytest.mark.parametrize("args", [([3, 3], [4, 2]), ([24], [1]), ([6, 4], [4, 1], 0), ([6, 4], [1, 6])])
def test_as_strided_of_another_geometry_or_with_an_offset_sees_the_whole_memory(args):
    # A lowering brings together what lies in parts; the whole row runs it, too.
    assert rows(aten.as_strided.default, empty(6, 4), *args)[:2] == [
        "shard d0: [S(0)] -> [R]",
        "shard d1: [S(1)] -> [R]",
    ]
    rule, call = call_of(aten.as_strided.default, empty(6, 4), *args)
    assert all(row.lowered and row.outputs == (Replicate(),) for row in rule.rows(call))


@pytest.mark.parametrize("args", [([25], [1]), ([2, 2], [1, 24]), ([1], [1], 24)])
def test_as_strided_has_no_row_that_leaves_the_tensor(args):
    assert rows(aten.as_strided.default, empty(6, 4), *args) == []
    assert rows(aten.as_strided.default, empty(12, 4)[::2], [24], [1]) == []


# -- on real ranks -----------------------------------------------------------------------------------------------


def whole(*shape):
    return torch.arange(float(math.prod(shape))).reshape(shape)


def squeeze_where_the_shard_has_size_one():
    for call in (lambda t: t.squeeze(), lambda t: t.squeeze(0), lambda t: t.squeeze((0, 1))):
        x = sw.distribute_tensor(whole(4, 1, 3), mesh((4,)), [Shard(0)])
        assert torch.equal(call(x).full_tensor(), call(whole(4, 1, 3)))
        assert call(x).placements == (Shard(0),)


def split_and_merge_heads():
    for shape, layout in (((4,), [Shard(1)]), ((2, 2), [Shard(0), Shard(1)]), ((2, 2), [Shard(1), Shard(1)])):
        full = whole(3, 8, 5).requires_grad_()
        x = sw.distribute_tensor(whole(3, 8, 5), mesh(shape), layout).requires_grad_()

        def program(t):
            split = t.transpose(1, 2).reshape(3, 5, 4, 2).permute(0, 2, 1, 3)
            return (split.transpose(1, 2).flatten(2) ** 2).unsqueeze(1).squeeze(1)

        y, expected = program(x), program(full)
        assert torch.equal(y.full_tensor(), expected)
        y.sum().backward()
        expected.sum().backward()
        assert x.grad.placements == tuple(layout)
        assert torch.equal(x.grad.full_tensor(), full.grad)


def write_through_views():
    x = sw.distribute_tensor(whole(4, 6), mesh((2, 2)), [Shard(0), Shard(1)])
    expected = whole(4, 6)
    for t in (x, expected):
        t.unsqueeze(0).transpose(1, 2).mul_(2)
        t.view(4, 2, 3).add_(1)
        t.as_strided((6, 4), (1, 6)).neg_()
    assert torch.equal(x.full_tensor(), expected)


def differentiate_writes_to_views():
    full = whole(4, 6).requires_grad_()
    x = sw.distribute_tensor(whole(4, 6), mesh((2, 2)), [Shard(0), Replicate()]).requires_grad_()
    for t in (x, full):
        y = t.sin()
        y.view(4, 2, 3).neg_()
        y.t()[2].neg_()
        y.unsqueeze(1).exp_()
        y.sum().backward()
    assert torch.allclose(x.grad.full_tensor(), full.grad)


def refuse_views_of_other_ranks_data():
    for layout, size in (([Shard(1)], (8, 3)), ([Shard(0)], (6, 4)), ([Shard(0)], (2, 2, 6))):
        x = sw.distribute_tensor(whole(4, 6), mesh((4,)), layout)
        with sw.sharing_views(), pytest.raises(ViewError, match="another rank"):
            x.view(size)
        assert x.redistribute(placements=[Replicate()]).view(size).shape == torch.Size(size)


def turn_tensors_themselves():
    """In-place views give the tensor itself new sizes, strides and placements, and leave its old parts alone."""
    full = whole(4, 6)
    x = sw.distribute_tensor(full, mesh((2, 2)), [Shard(0), Shard(1)])
    local = x.to_local()
    before = local.shape
    assert x.t_() is x
    x.unsqueeze_(1).transpose_(0, 2).squeeze_()
    assert (x.shape, x.stride(), x.placements) == (full.shape, (6, 1), (Shard(0), Shard(1)))
    assert torch.equal(x.full_tensor(), full)
    assert local.shape == before
    x.t_().mul_(2)
    assert torch.equal(x.full_tensor(), 2 * full.t())
    assert torch.equal(x.detach_().full_tensor(), 2 * full.t())


def differentiate_tensors_that_turned():
    full = whole(4, 6).requires_grad_()
    x = sw.distribute_tensor(whole(4, 6), mesh((4,)), [Shard(0)]).requires_grad_()
    for t in (x, full):
        y = t.sin()
        y.t_()
        y[1:3].t_().mul_(3)
        y.unsqueeze_(0)
        (y.squeeze_(0).cos() * y).sum().backward()
    assert torch.allclose(x.grad.full_tensor(), full.grad)


def see_the_memory():
    full = whole(5, 7)
    for layout in ([Shard(0)], [Shard(1)], [Replicate()], [Partial("sum")]):
        x = sw.distribute_tensor(full, mesh((4,)), layout)
        seen = x.as_strided((3, 4), (2, 5), 6)
        assert torch.equal(seen.full_tensor(), full.as_strided((3, 4), (2, 5), 6))
        part = x.clone()[1:4, 2:6]
        with pytest.raises(NoStrategyError):
            part.as_strided((2, 2), (1, 1), 0)
        written = full.clone()
        written.as_strided((3, 4), (2, 5), 6)[1].zero_()
        seen[1].zero_()
        assert torch.equal(x.full_tensor(), written)
        assert torch.equal(x.resize_(3, 4).full_tensor(), written.flatten()[:12].view(3, 4))


def refuse_an_offset_into_unknown_memory():
    """The rows of a tensor lie somewhere in it; counting from the start of the memory would leave them."""
    x = sw.distribute_tensor(whole(8, 6), mesh((4,)), [Shard(1)])
    rows = x.narrow(0, 2, 2)
    with pytest.raises(NoStrategyError, match="view"):
        rows.as_strided((2, 3), (6, 1), 0)
    assert torch.equal(rows.clone().as_strided((2, 3), (6, 1), 0).full_tensor(), whole(8, 6)[2:4, :3])


@pytest.mark.parametrize(
    "program",
    [
        squeeze_where_the_shard_has_size_one,
        split_and_merge_heads,
        write_through_views,
        differentiate_writes_to_views,
        refuse_views_of_other_ranks_data,
        turn_tensors_themselves,
        differentiate_tensors_that_turned,
        see_the_memory,
        refuse_an_offset_into_unknown_memory,
    ],
)
def test_on_ranks(pool, program):
    pool.run(program)
