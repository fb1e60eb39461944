"""Rules for copying, slicing, joining and indexing: what they print, the traps, and programs on real ranks."""

import math

import pytest
import torch
from attrs import evolve
from described import empty, rows_of
from hypothesis import assume, given
from hypothesis import strategies as st

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.errors import DeviceMismatchError
from shardwise.testing import check_rule, mesh
from shardwise_tensor import (
    copying,
    creating,
    gathering,
    indexing,
    joining,
    masking,
    putting,
    rearranging,
    scattering,
    slicing,
)
from shardwise_tensor.creating import dense_strides
from shardwise_tensor.dtypes import commuting_with_cast

aten = torch.ops.aten
FAMILIES = (copying, creating, gathering, indexing, joining, masking, putting, rearranging, scattering, slicing)
RULES = tuple(rule for family in FAMILIES for rule in family.RULES)


def rows(op, *args, **kwargs):
    """The rows of a call as text, those with partial operands aside."""
    return [str(r) for r in rows_of(op, *args, **kwargs) if not any(isinstance(p, Partial) for p in r.inputs)]


def partials(op, *args, **kwargs):
    """The rows of a call with partial operands, by name."""
    return [r.name for r in rows_of(op, *args, **kwargs) if any(isinstance(p, Partial) for p in r.inputs)]


def ints(*shape):
    return empty(*shape, dtype=torch.int64)


def bools(*shape):
    return empty(*shape, dtype=torch.bool)


KINDS = ["sum", "avg", "max", "min", "product"]
UNMOVED = ["avg", "max", "min"]

# -- what rules say ----------------------------------------------------------------------------------------------

GOLDEN = [
    ((aten.clone.default, empty(4, 6)), ["shard ...2: [S(0)] -> [S(0)]", "shard ...1: [S(1)] -> [S(1)]"]),
    ((aten.slice.Tensor, empty(4, 6), 1, 0, 9), ["shard d0: [S(0)] -> [S(0)]", "shard d1: [S(1)] -> [S(1)]"]),
    ((aten.slice.Tensor, empty(4, 6), -1, 0, 5), ["shard d0: [S(0)] -> [S(0)]"]),
    ((aten.slice.Tensor, empty(4, 6), 0, 0, 4, 2), ["shard d1: [S(1)] -> [S(1)]"]),
    ((aten.select.int, empty(4, 6, 2), -2, 0), ["shard d0: [S(0)] -> [S(0)]", "shard d2: [S(2)] -> [S(1)]"]),
    ((aten.unbind.int, empty(2, 6)), ["shard d1: [S(1)] -> [S(0), S(0)]"]),
    ((aten.split.Tensor, empty(4, 6), 2), ["shard d1: [S(1)] -> [S(1), S(1)]"]),
    ((aten.select_backward.default, empty(6), [4, 6], 0, 1), ["shard d1: [S(0)] -> [S(1)]"]),
    ((aten.cat.default, [empty(4, 6), empty(2, 6)]), ["shard d1: [S(1), S(1)] -> [S(1)]"]),
    ((aten.cat.default, [empty(0), empty(2, 6)]), ["shard d1: [R, S(1)] -> [S(1)]"]),
    ((aten.stack.default, [empty(4), empty(4)], 0), ["shard d0: [S(0), S(0)] -> [S(1)]"]),
    ((aten.new_zeros.default, empty(4, 6), [6]), ["shard d0: [S(0)] -> [R]", "shard d1: [S(1)] -> [R]"]),
    ((aten.new_zeros.default, empty(4), [4]), ["shard d0: [S(0)] -> [S(0)]"]),
    ((aten.new_zeros.default, empty(4, 6), [4, 9]), ["shard d0: [S(0)] -> [R]", "shard d1: [S(1)] -> [R]"]),
    (
        (aten.new_zeros.default, empty(4, 6).to(torch.complex64), [4, 9]),
        ["shard d0: [S(0)] -> [S(0)]", "shard d1: [S(1)] -> [R]"],
    ),
    (
        (aten.copy_.default, empty(4, 6), empty(6)),
        ["shard d0: [S(0), R] -> [S(0)]", "shard d1: [S(1), S(0)] -> [S(1)]"],
    ),
    (
        (aten.copy_.default, empty(4, 6), empty(4, 1)),
        ["shard d0: [S(0), S(0)] -> [S(0)]", "shard d1: [S(1), R] -> [S(1)]"],
    ),
    (
        (aten.gather.default, empty(4, 6), 1, ints(4, 3)),
        ["shard d0: [S(0), S(0)] -> [S(0)]", "shard cut: [S(1), R] -> [P(sum)]", "shard picked: [R, S(1)] -> [S(1)]"],
    ),
    (
        (aten.index_select.default, empty(4, 6), 0, ints(3)),
        ["shard cut: [S(0), R] -> [P(sum)]", "shard d1: [S(1), R] -> [S(1)]", "shard picked: [R, S(0)] -> [S(0)]"],
    ),
    (
        (aten.index.Tensor, empty(4, 6, 5), [None, ints(3), ints(2, 1)]),
        [
            "shard d0: [S(0), -, R, R] -> [S(0)]",
            "shard cut1: [S(1), -, R, R] -> [P(sum)]",
            "shard cut2: [S(2), -, R, R] -> [P(sum)]",
            "shard b1: [R, -, S(0), R] -> [S(2)]",
            "shard b0: [R, -, R, S(0)] -> [S(1)]",
        ],
    ),
    (
        (aten.index.Tensor, empty(4, 6, 5), [ints(3), None, ints(3)]),
        [
            "shard cut0: [S(0), R, -, R] -> [P(sum)]",
            "shard d1: [S(1), R, -, R] -> [S(1)]",
            "shard cut2: [S(2), R, -, R] -> [P(sum)]",
            "shard b0: [R, S(0), -, S(0)] -> [S(0)]",
        ],
    ),
    ((aten.index.Tensor, empty(4, 6), [bools(4)]), []),
    (
        (aten.index_put_.default, empty(4, 6), [ints(3)], empty(6)),
        ["shard cut0: [S(0), R, R] -> [S(0)]", "shard d1: [S(1), R, S(0)] -> [S(1)]"],
    ),
    (
        (aten.index_put_.default, empty(4, 6), [bools(4)], empty(6)),
        ["shard d0: [S(0), S(0), R] -> [S(0)]", "shard d1: [S(1), R, S(0)] -> [S(1)]"],
    ),
    (
        (aten.scatter_add_.default, empty(4, 6), 1, ints(4, 3), empty(4, 3)),
        ["shard d0: [S(0), S(0), S(0)] -> [S(0)]", "shard cut: [S(1), R, R] -> [S(1)]"],
    ),
    (
        (aten.scatter.value, empty(4, 6), 1, ints(3, 6), 3.0),
        ["shard part0: [S(0), R] -> [S(0)]", "shard cut: [S(1), R] -> [S(1)]"],
    ),
    (
        (aten.masked_fill.Scalar, empty(4, 6), bools(4, 1), 0.0),
        ["shard d0: [S(0), S(0)] -> [S(0)]", "shard d1: [S(1), R] -> [S(1)]"],
    ),
    ((aten.bucketize.Tensor, empty(4), empty(3)), ["shard ...1: [S(0), R] -> [S(0)]"]),
    (
        (aten.searchsorted.Tensor, empty(4, 6), empty(4, 2)),
        ["shard d0: [S(0), S(0), -] -> [S(0)]", "shard d1: [R, S(1), -] -> [S(1)]"],
    ),
    ((aten._local_scalar_dense.default, empty(1)), []),
    ((aten.nonzero.default, empty(4, 6)), []),
]


@pytest.mark.parametrize(("call", "expected"), GOLDEN, ids=lambda v: str(v[0]) if isinstance(v, tuple) else "")
def test_rows(call, expected):
    *x, whole = rows(*call)
    assert x == expected
    assert whole.startswith("R: ")


# -- traps: partial tensors --------------------------------------------------------------------------------------


def test_a_fill_never_puts_its_value_into_a_partial_sum():
    assert partials(aten.fill_.Scalar, empty(4), 3) == [f"{k} -> {k}" for k in UNMOVED]
    assert partials(aten.fill_.Tensor, empty(4), empty()) == [
        *(f"{k}, {k} -> {k}" for k in KINDS),
        *(f"{k}, R -> {k}" for k in UNMOVED),
    ]


def test_zeros_are_zero_in_every_reduction():
    assert len(partials(aten.zero_.default, empty(4))) == len(KINDS)
    assert len(partials(aten.masked_fill.Scalar, empty(4), bools(4), 0.0)) == len(KINDS)
    # Another value stands on every rank, or on one.
    assert sorted(partials(aten.masked_fill.Scalar, empty(4), bools(4), 1.0)) == sorted(f"{k}, R -> {k}" for k in KINDS)


def test_what_only_takes_shape_from_a_partial_tensor_is_whole():
    for args in ((aten.zeros_like.default, empty(4)), (aten.new_ones.default, empty(4), [4])):
        assert partials(*args) == [f"{k} -> R" for k in KINDS]


@pytest.mark.parametrize(
    ("before", "after", "kinds"),
    [
        (torch.float32, torch.float32, KINDS),
        (torch.bfloat16, torch.float32, KINDS),
        (torch.float32, torch.bfloat16, ["max", "min"]),
        (torch.bfloat16, torch.float16, ["max", "min"]),
        (torch.float16, torch.bfloat16, ["max", "min"]),
        (torch.float32, torch.int64, []),
        (torch.float32, torch.bool, []),
        (torch.float32, torch.float8_e4m3fn, []),
        (torch.int64, torch.float32, ["max", "min"]),
        (torch.int32, torch.int64, ["max", "min"]),
        (torch.int64, torch.int32, []),
        (torch.uint8, torch.int8, []),
        (torch.int64, torch.bool, []),
        (torch.bool, torch.int64, ["max", "min"]),
        (torch.float32, torch.complex64, ["sum", "avg"]),
        (torch.float64, torch.complex64, []),
        (torch.complex64, torch.complex128, ["sum", "avg"]),
        (torch.complex64, torch.float32, []),
    ],
)
def test_a_cast_carries_only_what_it_cannot_change(before, after, kinds):
    assert list(commuting_with_cast(before, after)) == kinds


def test_a_partial_source_is_not_cast_on_the_way():
    assert partials(aten.copy_.default, empty(4, dtype=torch.bfloat16), empty(4)) == [
        "max, max -> max",
        "min, min -> min",
        *(f"{k}, R -> {k}" for k in UNMOVED),
    ]
    assert partials(aten.cat.default, [empty(4), empty(4, dtype=torch.bfloat16)]) == []


def test_duplicate_indices_have_no_order_so_pieces_of_several_values_could_mix():
    assert partials(aten.scatter.src, empty(4), 0, ints(4), empty(4)) == []
    assert partials(aten.index_put.default, empty(4), [ints(4)], empty(4)) == []
    assert partials(aten.index_copy.default, empty(4), 0, ints(4), empty(4)) == []


def test_a_maximum_without_the_old_values_is_not_taken_in_parts():
    call = (aten.scatter_reduce.two, empty(4), 0, ints(3), empty(3), "amax")
    assert "max, picked, picked -> max" in partials(*call)
    assert "max, picked, picked -> max" not in partials(*call, include_self=False)
    assert partials(*call[:-1], "mean") == []


def test_added_values_reach_a_partial_sum_once():
    listed = partials(aten.index_add.default, empty(4, 6), 0, ints(3), empty(3, 6))
    assert listed == ["sum, R, sum -> sum", "avg, R, avg -> avg", "avg, R, R -> avg", "sum, picked, picked -> sum"]


# -- traps: shapes -----------------------------------------------------------------------------------------------


def test_a_dim_that_the_index_covers_in_part_is_not_sharded_with_it():
    assert rows(aten.gather.default, empty(4, 6), 1, ints(3, 6))[0].startswith("shard cut")
    assert "[S(0), S(0)" not in str(rows(aten.scatter.value, empty(4, 6), 1, ints(1, 6), 3.0))
    assert "[S(0), S(0)" not in str(rows(aten.scatter_add.default, empty(4, 6), 1, ints(4, 6), empty(5, 6)))


def test_values_that_differ_from_one_picked_element_to_the_next_need_the_whole_mask():
    assert rows(aten.index_put.default, empty(4, 6), [bools(4)], empty(3, 6)) == ["R: [R, R, R] -> [R]"]


@pytest.mark.parametrize(
    ("size", "stride", "local", "expected"),
    [
        ((8, 6), (6, 1), (2, 6), (6, 1)),
        ((8, 6), (6, 1), (8, 3), (3, 1)),
        ((8, 6), (1, 8), (2, 6), (1, 2)),
        ((4, 6, 5), (6, 1, 24), (4, 2, 5), (2, 1, 8)),
        ((4, 1, 3), (3, 99, 1), (2, 1, 3), (3, 6, 1)),
        ((8, 6), (8, 1), (2, 6), None),
        ((8, 6), (0, 1), (2, 6), None),
    ],
)
def test_a_shard_keeps_the_memory_order_of_the_whole(size, stride, local, expected):
    assert dense_strides(size, stride, local) == expected


@st.composite
def indexed(draw):
    """A shape and where its indices are, with their shapes."""
    shape = draw(st.lists(st.integers(2, 5), min_size=1, max_size=4))
    block = draw(st.lists(st.integers(1, 4), max_size=2))
    shapes = st.integers(0, len(block)).map(lambda n: block[n:])
    draws = draw(st.lists(st.none() | shapes, min_size=1, max_size=len(shape)))
    return shape, draws


@given(indexed())
def test_the_dims_of_an_index_come_where_torch_puts_them(drawn):
    shape, where = drawn
    assume(any(at is not None for at in where))
    indices = [None if at is None else torch.zeros(at, dtype=torch.int64) for at in where]
    names = indexing.Indexing.of(len(shape), indices)
    block = torch.broadcast_tensors(*(i for i in indices if i is not None))[0].shape
    sizes = {**dict(zip(names.whole, shape, strict=True)), **dict(zip(names.block, block, strict=True))}
    assert [sizes[name] for name in names.result] == list(aten.index.Tensor(torch.zeros(shape), indices).shape)


# -- on real ranks -----------------------------------------------------------------------------------------------


def whole(*shape):
    return torch.arange(float(math.prod(shape))).reshape(shape) % 13 - 4


LAYOUTS = [
    ((4,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((2, 2), [Shard(1), Shard(1)]),
    ((2, 2), [Shard(0), Shard(1)]),
]


def differentiated(program):
    """Compare a program of a (5, 7) tensor, and its gradient, with one device under every layout."""
    for shape, layout in LAYOUTS:
        full = whole(5, 7).requires_grad_()
        x = sw.distribute_tensor(whole(5, 7), mesh(shape), layout).requires_grad_()
        y, expected = program(x, lambda t, m=shape: spread(t, m)), program(full, lambda t: t)
        torch.testing.assert_close(y.full_tensor(), expected)
        (y * y).sum().backward()
        (expected * expected).sum().backward()
        assert x.grad.placements == tuple(layout)
        torch.testing.assert_close(x.grad.full_tensor(), full.grad)


def spread(tensor, shape):
    return sw.distribute_tensor(tensor, mesh(shape), [Replicate()] * len(shape))


def slices():
    differentiated(lambda x, _: x[1:4] + x[:3].flip(0) * x[-1])
    differentiated(lambda x, _: x[:, ::2].sin() + x[:, 3:4])
    differentiated(lambda x, _: x.narrow(1, 2, 3) * x[..., 1].unsqueeze(1))


def joins():
    differentiated(lambda x, _: torch.cat([x, x.sin(), x[:2]]))
    differentiated(lambda x, _: math.prod(torch.stack([x, x * 2], 1).unbind(1)))
    differentiated(lambda x, _: torch.cat([p * i for i, p in enumerate(x.split([2, 5], 1))], 1))
    differentiated(lambda x, _: torch.cat(x.chunk(3)[::-1]))


def looks():
    rows, columns = torch.tensor([4, 0, 0, 3]), torch.tensor([6, 1, 1, 2])
    differentiated(lambda x, to: x[to(rows)])
    differentiated(lambda x, to: x[:, to(columns)])
    differentiated(lambda x, to: x[to(rows), to(columns)])
    differentiated(lambda x, to: x.index_select(1, to(columns)))
    differentiated(lambda x, to: x.gather(1, to(columns.expand(5, 4))))
    differentiated(lambda x, to: torch.take_along_dim(x, to(rows.unsqueeze(1)), 0))


def writes():
    rows = torch.tensor([4, 0, 3])
    differentiated(lambda x, to: x.clone().index_put_((to(rows),), to(torch.tensor(2.0))))
    differentiated(lambda x, to: x.index_add(0, to(rows), x[:3]))
    differentiated(lambda x, to: x.scatter_add(0, to(rows.unsqueeze(1).expand(3, 7)), x[:3]))
    differentiated(lambda x, _: x.masked_fill(x > 2, 1.5))
    differentiated(lambda x, _: torch.tril(x, 1) + x.triu(-1) * 2)
    differentiated(lambda x, _: x.roll(2, 1) + x.flip(1))


def writes_in_place():
    for shape, layout in LAYOUTS:
        x, expected = sw.distribute_tensor(whole(5, 7), mesh(shape), layout), whole(5, 7)
        for t, to in ((x, lambda v, m=shape: spread(v, m)), (expected, lambda v: v)):
            t[to(torch.tensor([4, 1]))] = 9.0
            t[t > 8] = -1.0
            t.masked_fill_(t < -3, 0.5).tril_(2)
            t.scatter_(1, to(torch.tensor([[2], [0], [6], [6], [1]])), 3.0)
            t.index_fill_(0, to(torch.tensor([2])), 7.0)
            t.copy_(to(whole(7)) + t)
        assert x.placements == tuple(layout)
        assert torch.equal(x.full_tensor(), expected)


def answers():
    for shape, layout in LAYOUTS:
        x = sw.distribute_tensor(whole(5, 7), mesh(shape), layout)
        changed = whole(5, 7)
        changed[-1, -1] += 1
        assert torch.equal(x, x.clone())
        assert not torch.equal(x, sw.distribute_tensor(changed, mesh(shape), layout))
        assert x[3, 4].item() == whole(5, 7)[3, 4].item()
        assert torch.equal(torch.nonzero(x > 5).full_tensor(), torch.nonzero(whole(5, 7) > 5))
        assert torch.equal(x[x > 5].full_tensor(), whole(5, 7)[whole(5, 7) > 5])
        assert x.new_zeros(3).placements == (Replicate(),) * len(shape)
        assert torch.zeros_like(x).placements == tuple(layout)


def partial_stays_partial():
    local = whole(5, 7) * (torch.distributed.get_rank() + 1)
    x = sw.MeshTensor.from_local(local, mesh((4,)), [Partial("sum")])
    expected = whole(5, 7) * 10
    for result, wanted in (
        (x.clone(), expected),
        (x[1:3], expected[1:3]),
        (torch.cat([x, x]), torch.cat([expected, expected])),
        (x.masked_fill(spread(expected > 0, (4,)), 0), expected.masked_fill(expected > 0, 0)),
        (x.to(torch.float64), expected.to(torch.float64)),
        (x.tril(), expected.tril()),
    ):
        assert result.placements == (Partial("sum"),)
        assert torch.equal(result.full_tensor(), wanted)
    assert x.to(torch.bfloat16).placements != (Partial("sum"),)
    assert torch.equal(x.to(torch.bfloat16).full_tensor(), expected.bfloat16())
    assert x.fill_(3).placements == (Partial("sum"),)
    assert torch.equal(x.full_tensor(), torch.full_like(expected, 3))


def other_devices():
    x = sw.distribute_tensor(whole(5, 7), mesh((4,)), [Shard(0)])
    for call in (x.to, lambda d: torch.zeros_like(x, device=d), lambda d: x.new_zeros(5, 7, device=d)):
        assert call("cpu").placements == (Shard(0),)
        on_meta = call("meta")
        assert on_meta.is_meta
        assert on_meta.shape == (5, 7)
        assert type(on_meta) is torch.Tensor
    with pytest.raises(DeviceMismatchError, match="mesh of cpu"):
        torch.ops.aten._to_copy.default(x, device=torch.device("cuda"))


def out_of_range():
    x = sw.distribute_tensor(whole(5, 7), mesh((4,)), [Shard(0)])
    for wrong in (
        lambda: x.gather(0, spread(torch.tensor([[5]]), (4,))),
        lambda: x.index_select(0, spread(torch.tensor([0, -1]), (4,))),
        lambda: x[spread(torch.tensor([0, 5]), (4,))],
        lambda: x.index_put((spread(torch.tensor([-6, 1]), (4,)),), spread(torch.tensor(1.0), (4,))),
        lambda: x.index_add(0, spread(torch.tensor([5]), (4,)), x[:1]),
        lambda: x.index_fill(0, spread(torch.tensor([5]), (4,)), 2),
    ):
        with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
            wrong()


def told_as_on_one_device():
    """Each call with an index that no rank has: over two mesh dims, so that no rank has the whole of either dim.

    All ranks are given an index out of range, so that all of them raise.
    """
    at, row, column = torch.tensor([0, 9]), torch.full((1, 6), 9), torch.full((8, 1), -9)
    calls = (
        lambda x, y: x[y(at)],
        lambda x, _: x[[0, -9]],
        lambda x, y: x[:, y(at)],
        lambda x, y: x[y(torch.tensor([0, 1])), y(torch.tensor([1, -7]))],
        lambda x, y: x[None][:, y(torch.tensor([0, 1])), y(torch.tensor([1, -7]))],
        lambda x, y: x[None][:, y(torch.tensor([0, 9])), y(torch.tensor([1, 1]))],
        lambda x, y: x.index_put((y(at),), y(torch.tensor(1.0))),
        lambda x, y: x.clone().__setitem__(y(at), 1.0),
        lambda x, y: x.index_select(0, y(at)),
        lambda x, y: x.index_select(1, y(at)),
        lambda x, y: x.gather(0, y(row)),
        lambda x, y: x.gather(1, y(column)),
        lambda x, y: x.scatter(0, y(row), 1.0),
        lambda x, y: x.scatter_add(0, y(row), y(torch.ones(1, 6))),
        lambda x, y: x.scatter_reduce(0, y(row), y(torch.ones(1, 6)), "amax"),
        lambda x, y: x.index_add(0, y(at), y(torch.ones(2, 6))),
        lambda x, y: x.index_copy(0, y(at), y(torch.ones(2, 6))),
        lambda x, y: x.index_fill(0, y(torch.tensor([-1, 9])), 1.0),
        lambda x, y: x.take(y(torch.tensor([99]))),
        lambda x, y: torch.nn.functional.nll_loss(x, y(torch.tensor([1, 9, 9, -100, 9, 9, 9, 9]))),
        lambda x, y: torch.nn.functional.embedding(y(at), x),
        lambda x, _: torch.searchsorted(x, 0.5),
    )
    placed = [sw.distribute_tensor(whole(8, 6), mesh((2, 2)), [Shard(n), Shard(1 - n)]) for n in (0, 1)]
    for number, call in enumerate(calls):
        with pytest.raises((IndexError, RuntimeError)) as expected:
            call(whole(8, 6), lambda index: index)
        for x in placed:
            with pytest.raises(expected.type) as found:
                call(x, lambda index: spread(index, (2, 2)))
            assert found.type is expected.type, number
            assert str(found.value) == str(expected.value), number


def told_by_a_rank_without_a_part():
    """Three rows or columns on four ranks: the last rank has none, and does not ask a kernel."""
    x, first, second = whole(2, 4, 3), torch.tensor([0, 1]), torch.tensor([0, 9])
    for on, places in (((4,), [Shard(1)]), ((4,), [Shard(2)]), ((2, 2), [Shard(2), Shard(2)])):
        grid = mesh(on)
        for indices in ((first, second), (second, first)):
            with pytest.raises(IndexError) as expected:
                x[:, indices[0], indices[1]]
            with pytest.raises(IndexError) as found:
                sw.distribute_tensor(x, grid, places)[:, indices[0], indices[1]]
            assert str(found.value) == str(expected.value), (places, indices)


@pytest.mark.parametrize(
    "program",
    [
        slices,
        joins,
        looks,
        writes,
        writes_in_place,
        answers,
        partial_stays_partial,
        other_devices,
        out_of_range,
        told_as_on_one_device,
        told_by_a_rank_without_a_part,
    ],
)
def test_on_ranks(pool, program):
    pool.run(program)


def classes_that_do_not_exist(layout, classes, num_classes):
    distributed = sw.distribute_tensor(torch.tensor(classes), mesh((4,)), layout)
    with pytest.raises(RuntimeError) as expected:
        torch.nn.functional.one_hot(torch.tensor(classes), num_classes)
    with pytest.raises(RuntimeError, match=str(expected.value)):
        torch.nn.functional.one_hot(distributed, num_classes)
    assert distributed.sum().item() == sum(classes)  # the ranks are in step


@pytest.mark.parametrize("layout", [[Replicate()], [Shard(0)]])
@pytest.mark.parametrize("classes", [[0, 1, 2, 3, 4, 0], [0, 1, 2, 0, 0, -1]])
def test_one_hot_refuses_classes_that_do_not_exist(pool, layout, classes):
    pool.run(classes_that_do_not_exist, layout, classes, 4)


def one_hot_of(layout, num_classes):
    classes = torch.tensor([[0, 1, 2], [3, 3, 0]])
    result = torch.nn.functional.one_hot(sw.distribute_tensor(classes, mesh((4,)), layout), num_classes)
    torch.testing.assert_close(result.full_tensor(), torch.nn.functional.one_hot(classes, num_classes))


@pytest.mark.parametrize("layout", [[Replicate()], [Shard(0)], [Shard(1)]])
@pytest.mark.parametrize("num_classes", [-1, 4, 6])
def test_one_hot_is_one_devices(pool, layout, num_classes):
    pool.run(one_hot_of, layout, num_classes)


def test_cat_writes_to_a_row_of_a_larger_tensor():
    """Torch's kernel takes it for contiguous, and finds nothing to write by its strides."""
    x, out = torch.arange(3.0).view(1, 1, 3), torch.empty_strided((1, 1, 3), (6, 6, 1)).fill_(9)
    assert torch.cat([x], 1, out=out).eq(9).all(), "torch is right now: cat.out needs no lowering"
    only = evolve(joining.CAT, ops=(aten.cat.out,))
    samples = [(([torch.randn(3, 1, 6)], 1), {"out": torch.empty(3, 1, 6)})]
    assert check_rule(only, samples, meshes=[(2, 2), (3, 2)]).cases


PICKS = {
    "rows": lambda x, index: torch.index_select(x, 0, index),
    "elements": lambda x, index: torch.gather(x, 0, index[:, None].expand(-1, 4)),
}


def picks_from_nothing(name, layout, index_layout):
    x, index = torch.ones(0, 4), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(RuntimeError) as expected:
        PICKS[name](x, index)
    placed = sw.distribute_tensor(x, mesh((4,)), layout)
    with pytest.raises(RuntimeError) as refusal:
        PICKS[name](placed, sw.distribute_tensor(index, mesh((4,)), index_layout))
    assert str(refusal.value).partition("\n")[0] == str(expected.value).partition("\n")[0]
    assert placed.sum().item() == 0


@pytest.mark.parametrize("index_layout", [[Replicate()], [Shard(0)]])
@pytest.mark.parametrize("layout", [[Replicate()], [Shard(0)], [Shard(1)]])
@pytest.mark.parametrize("name", PICKS)
def test_a_pick_from_nothing_is_refused_on_every_rank(pool, name, layout, index_layout):
    """Two ranks have an index, and two have none."""
    pool.run(picks_from_nothing, name, layout, index_layout)


def an_empty_index_of_bytes(layout):
    """Torch looks at no dtype of an index that picks nothing."""
    x, index = torch.randn(5, 4), torch.empty(0, 4, dtype=torch.uint8)
    placed = sw.distribute_tensor(x, mesh((4,)), layout).requires_grad_()
    for index_layout in ([Replicate()], [Shard(0)], [Shard(1)]):
        picked = torch.gather(placed, 0, sw.distribute_tensor(index, mesh((4,)), index_layout))
        assert torch.equal(picked.full_tensor(), torch.gather(x, 0, index))
        picked.sum().backward()
    assert not placed.grad.full_tensor().any()


@pytest.mark.parametrize("layout", [[Replicate()], [Shard(0)], [Shard(1)]])
def test_an_index_that_picks_nothing_has_any_dtype(pool, layout):
    pool.run(an_empty_index_of_bytes, layout)
