"""Flows: named dims in, rows out."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import NotationError, RuleError
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import REPLICATE, partial, shard
from shardwise.kernel.rule import Row
from shardwise.kernel.signature import Call, signature
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.rule import flow as flow_module
from shardwise.rule.flow import Flow, split_row

aten = torch.ops.aten


def meta(*shape):
    return TensorMeta.contiguous(shape, torch.float32)


def call(op, *operands, outputs):
    names = [a.name for a in signature(op).tensor_args if not a.is_out]
    return Call(
        op, dict.fromkeys(a.name for a in signature(op).args) | dict(zip(names, operands, strict=False)), outputs
    )


def mm(m, k, n):
    return call(aten.mm.default, meta(m, k), meta(k, n), outputs=(meta(m, n),))


def shown(flow, bound):
    return [str(row) for row in flow.bind(bound).rows]


MM = Flow([("m", "k"), ("k", "n")], [("m", "n")], reduce={"k": "sum"})


# -- golden ------------------------------------------------------------------------------------------------------


def test_each_name_gives_a_row_and_the_whole_row_comes_last():
    assert shown(MM, mm(4, 6, 8)) == [
        "shard m: [S(0), R] -> [S(0)]",
        "shard k: [S(1), S(0)] -> [P(sum)]",
        "shard n: [R, S(1)] -> [S(1)]",
        "R: [R, R] -> [R]",
    ]


def test_a_name_to_replicate_gives_no_row():
    flow = Flow([("m", "k"), ("k", "n")], [("m", "n")], replicate=["k"])
    assert shown(flow, mm(4, 6, 8)) == [
        "shard m: [S(0), R] -> [S(0)]",
        "shard n: [R, S(1)] -> [S(1)]",
        "R: [R, R] -> [R]",
    ]


def test_a_reduced_name_may_leave_the_whole_value():
    flow = Flow([("a",)], [()], reduce={"a": "R"}, lowered="*")
    (row, whole) = flow.bind(call(aten.sum.default, meta(4), outputs=(meta(),))).rows
    assert (str(row), row.lowered, whole.lowered) == ("shard a: [S(0)] -> [R]", True, False)


def test_explicit_rows_come_before_the_whole_row_and_a_star_is_each_kind():
    flow = Flow([("a", "b")], [("b", "a")], partial=["* -> *"])
    assert shown(flow, call(aten.t.default, meta(2, 3), outputs=(meta(3, 2),))) == [
        "shard a: [S(0)] -> [S(1)]",
        "shard b: [S(1)] -> [S(0)]",
        "sum -> sum: [P(sum)] -> [P(sum)]",
        "avg -> avg: [P(avg)] -> [P(avg)]",
        "max -> max: [P(max)] -> [P(max)]",
        "min -> min: [P(min)] -> [P(min)]",
        "product -> product: [P(product)] -> [P(product)]",
        "R: [R] -> [R]",
    ]


def test_an_explicit_row_may_mix_dims_and_kinds():
    flow = Flow([("m", "k"), ("k", "n")], [("m", "n")], replicate=["k"], partial=["k, k -> sum"])
    assert shown(flow, mm(4, 6, 8))[2] == "k, k -> sum: [S(1), S(0)] -> [P(sum)]"


def test_broadcast_operands_stay_whole():
    flow = Flow([("a", "b"), ("a", "b")], [("a", "b")])
    bound = call(aten.add.Tensor, meta(4, 1), meta(1, 5), outputs=(meta(4, 5),))
    assert shown(flow, bound) == [
        "shard a: [S(0), R] -> [S(0)]",
        "shard b: [R, S(1)] -> [S(1)]",
        "R: [R, R] -> [R]",
    ]


def test_the_leading_factor_of_a_compound_dim_is_sharded_and_must_divide():
    flow = Flow([((("h", 4), ("d", 3)),)], [("h", "d")])
    rows = flow.bind(call(aten.view.default, meta(12), outputs=(meta(4, 3),))).rows
    assert [str(r) for r in rows] == ["shard h: [S(0)] -> [S(0)]", "R: [R] -> [R]"]
    assert rows[0].divides == ((0, 0, 4),)


def test_merging_into_a_compound_dim_must_divide_too():
    flow = Flow([("h", "d")], [((("h", 4), ("d", 3)),)])
    rows = flow.bind(call(aten.view.default, meta(4, 3), outputs=(meta(12),))).rows
    assert [str(r) for r in rows] == ["shard h: [S(0)] -> [S(0)]", "R: [R] -> [R]"]
    assert rows[0].divides == ((0, 0, 4),)


def test_factors_of_size_one_do_not_bury_a_name():
    flow = Flow([((("one", 1), ("h", 4)),)], [("one", "h")])
    rows = shown(flow, call(aten.view.default, meta(4), outputs=(meta(1, 4),)))
    assert "shard h: [S(0)] -> [S(1)]" in rows


def test_nonempty_names_are_passed_on():
    flow = Flow([("a",)], [()], reduce={"a": "max"}, nonempty=["a"])
    assert flow.bind(call(aten.amax.default, meta(4), outputs=(meta(),))).rows[0].nonempty == ((0, 0),)


def test_lowered_rows_are_those_named_but_never_the_whole_one():
    some = Flow([("m", "k"), ("k", "n")], [("m", "n")], reduce={"k": "sum"}, lowered={"k"}).bind(mm(2, 3, 4))
    assert [r.lowered for r in some.rows] == [False, True, False, False]
    every = Flow([("m", "k"), ("k", "n")], [("m", "n")], reduce={"k": "sum"}, lowered="*").bind(mm(2, 3, 4))
    assert [r.lowered for r in every.rows] == [True, True, True, False]


def test_out_tensors_lie_as_the_results():
    bound = Call(aten.exp.out, {"self": meta(4), "out": meta(4)}, (meta(4),))
    assert shown(Flow([("a",)], [("a",)]), bound) == ["shard a: [S(0), S(0)] -> [S(0)]", "R: [R, R] -> [R]"]


def test_an_absent_operand_has_no_placement():
    bound = call(aten.clamp.Tensor, meta(4), None, meta(4), outputs=(meta(4),))
    flow = Flow([("a",), ("a",), ("a",)], [("a",)])
    assert shown(flow, bound) == ["shard a: [S(0), -, S(0)] -> [S(0)]", "R: [R, -, R] -> [R]"]


def test_one_description_serves_all_operands_and_results():
    bound = Call(aten.cat.default, {"tensors": (meta(2, 4), meta(3, 4)), "dim": 0}, (meta(5, 4),))
    assert shown(Flow([(None, "b")], [(None, "b")]), bound) == [
        "shard b: [S(1), S(1)] -> [S(1)]",
        "R: [R, R] -> [R]",
    ]


def test_equal_rows_are_listed_once_at_their_first_place():
    flow = Flow([("a",)], [("a",)], partial=["sum -> sum", "* -> *"])
    rows = shown(flow, call(aten.neg.default, meta(4), outputs=(meta(4),)))
    assert rows[1] == "sum -> sum: [P(sum)] -> [P(sum)]"
    assert len(rows) == len(set(rows)) == 7


# -- laws --------------------------------------------------------------------------------------------------------

SIZES = st.sampled_from([0, 1, 1, 2, 3, 5, 8])


@st.composite
def broadcast_pairs(draw):
    shape = draw(st.lists(SIZES, max_size=3))
    pair = []
    for _ in range(2):
        kept = shape[draw(st.integers(0, len(shape))) :]
        pair.append(tuple(draw(st.sampled_from([n, 1])) for n in kept))
    return pair


@given(broadcast_pairs(), st.integers(1, 4))
def test_local_shapes_broadcast_to_the_local_result(pair, size):
    result = torch.broadcast_shapes(*pair)
    names = [f"d{i}" for i in range(len(result))]
    flow = Flow([names[len(names) - len(s) :] for s in pair], [names])
    mesh = AbstractMesh((size,))
    for row in flow.bind(call(aten.add.Tensor, meta(*pair[0]), meta(*pair[1]), outputs=(meta(*result),))).rows:
        inputs = [TensorSpec(mesh, (p,), meta(*s)) for p, s in zip(row.inputs, pair, strict=True)]
        output = TensorSpec(mesh, row.outputs, meta(*result))
        for at in mesh.coordinates():
            assert torch.broadcast_shapes(*(s.local_shape(at) for s in inputs)) == output.local_shape(at)


@given(st.tuples(SIZES, SIZES, SIZES), st.integers(1, 4))
def test_the_dims_of_a_name_are_split_alike(sizes, parts):
    m, k, n = sizes
    mesh = AbstractMesh((parts,))
    for row in MM.bind(mm(m, k, n)).rows:
        left = TensorSpec(mesh, (row.inputs[0],), meta(m, k))
        right = TensorSpec(mesh, (row.inputs[1],), meta(k, n))
        for at in mesh.coordinates():
            assert left.local_shape(at)[1] == right.local_shape(at)[0]


# -- what it refuses ---------------------------------------------------------------------------------------------


def test_a_flow_that_does_not_fit_the_call_is_refused():
    with pytest.raises(RuleError, match="describes 3 operands and the call has 2"):
        Flow([("m", "k")] * 3, [("m", "n")]).bind(mm(2, 3, 4))
    with pytest.raises(RuleError, match="names 1 dim of operand 1, which has 2"):
        Flow([("m", "k"), ("k",)], [("m", "k")]).bind(mm(2, 3, 4))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("sum, R", "it has no '->'"),
        ("sum -> sum", "one side has 1 entry and the call has 2 tensors there"),
        ("sum, R, R -> sum", "one side has 3 entries and the call has 2 tensors there"),
        ("n, R -> sum", "'n' is neither R, nor a reduction, nor a dim of that tensor"),
        ("mean, R -> sum", "'mean' is neither R, nor a reduction, nor a dim of that tensor"),
    ],
)
def test_a_malformed_row_says_what_is_wrong(text, found):
    with pytest.raises(NotationError) as refused:
        Flow([("m", "k"), ("k", "n")], [("m", "n")], replicate=["k"], partial=[text]).bind(mm(2, 3, 4))
    assert refused.value.found == found


def test_the_last_entry_of_a_row_may_repeat():
    bound = Call(aten.cat.default, {"tensors": (meta(2),) * 3, "dim": 0}, (meta(6),))
    flow = Flow([(None,)], [(None,)], partial=["sum, ... -> sum"])
    assert shown(flow, bound)[0] == "sum, ... -> sum: [P(sum), P(sum), P(sum)] -> [P(sum)]"
    assert split_row("sum, ... -> sum") == (["sum", "..."], ["sum"])
    assert split_row("->") == ([], [])


def test_a_row_prints_its_placements():
    row = Row((shard(0), None, partial("max")), (REPLICATE,))
    assert str(row) == "row: [S(0), -, P(max)] -> [R]"


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([1, 2, 6, 8]), min_size=2, max_size=2),
    st.lists(st.sampled_from([1, 2, 6, 8]), min_size=6, max_size=6),
)
def test_cached_rows_are_the_rows_of_the_call(factors, sizes):
    """Calls of one flow differ in which dims are broadcast and in what factors divide, and in nothing else."""
    flows = [
        Flow([("a", "b"), ("a", "b")], [("a", "b")], partial=["sum, sum -> sum"]),
        Flow([("a", (("b", factors[0]), ("c", factors[1]))), (None, "b")], [("a", "b", "c")], reduce={"b": "sum"}),
    ]
    for flow, outputs in zip(flows, ((4, 4), (4, 4, 4)), strict=True):
        asked = call(aten.add.Tensor, meta(*sizes[:2]), meta(*sizes[2:4]), outputs=(meta(*outputs),))
        # Earlier examples fill the cache: the sizes are few.
        cached = flow.bind(asked).rows
        with mock.patch.dict(flow_module._bound, clear=True):
            assert flow.bind(asked).rows == cached
