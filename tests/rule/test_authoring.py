"""Rules: what making one checks, what it prints, and the rows of typical calls."""

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import NotationError, RuleArgumentError, RuleError
from shardwise.kernel.placements import REPLICATE, shard
from shardwise.kernel.rule import Row, Rows, by_type
from shardwise.kernel.signature import ByType, Call, signature
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.rule.authoring import einop, full_mesh_rule, like, rule, rule_from
from shardwise.rule.flow import Flow

aten = torch.ops.aten


def meta(*shape):
    return TensorMeta.contiguous(shape, torch.float32)


def call(made, op, *args, outputs, **kwargs):
    """A call as the planner shows it to a rule."""
    shown = by_type(made, signature(op).bind(args, kwargs), op)
    return Call(op, shown, tuple(outputs))


def rows(made, op, *args, outputs, **kwargs):
    return [str(row) for row in made.rows(call(made, op, *args, outputs=outputs, **kwargs))]


MM = rule(aten.mm.default, "m k, k n -> m n", reduce={"k": "sum"}, partial=["sum, R -> sum", "R, sum -> sum"])
ADD = rule([aten.add.Tensor, aten.add_.Tensor, aten.add.out], "..., ... -> ...", partial=["sum, sum -> sum"])
FUSED = rule(
    aten._fused_sgd_.default,
    {"self grads momentum_buffer_list": "...", "grad_scale found_inf": "R"},
    zip_lists=True,
)


@rule_from(aten.slice.Tensor)
def SLICE(x, dim=0, start=None, end=None, step=1):
    """Every dim may stay sharded except one that the slice really cuts."""
    whole = (start or 0) == 0 and (end is None or end >= x.shape[dim]) and step == 1
    return like(x, whole=() if whole else {dim}, partial=["sum -> sum"])


# -- golden: what rules print ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (MM, "aten.mm.default: m k, k n -> m n"),
        (ADD, "aten.add.Tensor, aten.add_.Tensor, aten.add.out: ..., ... -> ..."),
        (
            FUSED,
            "aten._fused_sgd_.default: self grads momentum_buffer_list: ..., grad_scale found_inf: R -> ...",
        ),
        (SLICE, "aten.slice.Tensor: Every dim may stay sharded except one that the slice really cuts."),
    ],
)
def test_a_rule_prints_as_it_reads(made, text):
    assert str(made) == text


def test_the_rows_of_a_matmul():
    assert rows(MM, aten.mm.default, meta(4, 6), meta(6, 8), outputs=[meta(4, 8)]) == [
        "shard m: [S(0), R] -> [S(0)]",
        "shard k: [S(1), S(0)] -> [P(sum)]",
        "shard n: [R, S(1)] -> [S(1)]",
        "sum, R -> sum: [P(sum), R] -> [P(sum)]",
        "R, sum -> sum: [R, P(sum)] -> [P(sum)]",
        "R: [R, R] -> [R]",
    ]


def test_the_rows_of_a_broadcast_sum():
    assert rows(ADD, aten.add.Tensor, meta(5, 4, 6), meta(4, 1), outputs=[meta(5, 4, 6)]) == [
        "shard ...3: [S(0), R] -> [S(0)]",
        "shard ...2: [S(1), S(0)] -> [S(1)]",
        "shard ...1: [S(2), R] -> [S(2)]",
        "sum, sum -> sum: [P(sum), P(sum)] -> [P(sum)]",
        "R: [R, R] -> [R]",
    ]


def test_the_rows_of_a_rule_by_function():
    whole = rows(SLICE, aten.slice.Tensor, meta(4, 6), 0, 0, 4, outputs=[meta(4, 6)])
    assert whole[:2] == ["shard d0: [S(0)] -> [S(0)]", "shard d1: [S(1)] -> [S(1)]"]
    assert rows(SLICE, aten.slice.Tensor, meta(4, 6), 0, 1, 4, outputs=[meta(3, 6)]) == [
        "shard d1: [S(1)] -> [S(1)]",
        "sum -> sum: [P(sum)] -> [P(sum)]",
        "R: [R] -> [R]",
    ]


def test_the_rows_of_one_position_of_zipped_lists():
    op = aten._fused_sgd_.default
    values = dict.fromkeys(a.name for a in signature(op).args)
    lists = {"self": (meta(4, 6),), "grads": (meta(4, 6),), "momentum_buffer_list": ()}
    part = Call(op, values | lists | {"found_inf": meta()}, ()).position(0)
    assert [str(row) for row in FUSED.rows(part)] == [
        "shard ...2: [S(0), S(0), -, -, R] -> []",
        "shard ...1: [S(1), S(1), -, -, R] -> []",
        "R: [R, R, -, -, R] -> []",
    ]


def test_a_named_operand_with_fewer_dims_is_aligned_to_the_right():
    own_rule = rule(aten.addmm.default, {"self": "m n", "mat1": "m k", "mat2": "k n", "->": "m n"}, replicate=["k"])
    listed = rows(own_rule, aten.addmm.default, meta(8), meta(4, 6), meta(6, 8), outputs=[meta(4, 8)])
    assert listed[:2] == ["shard n: [S(0), R, S(1)] -> [S(1)]", "shard m: [R, S(0), R] -> [S(0)]"]


def test_a_compound_dim_takes_its_size_from_the_other_tensors():
    own_rule = rule(aten.view.default, "(h d) -> h d")
    (heads, _) = own_rule.rows(call(own_rule, aten.view.default, meta(12), [4, 3], outputs=[meta(4, 3)]))
    assert (str(heads), heads.divides) == ("shard h: [S(0)] -> [S(0)]", ((0, 0, 4),))


def test_the_source_is_the_line_of_the_rule():
    lines, first = inspect.getsourcelines(inspect.getmodule(test_the_source_is_the_line_of_the_rule))
    assert first == 0
    at = int(MM.source.rpartition(":")[2])
    assert "rule(" in lines[at - 1]
    assert MM.source.startswith(__file__)


# -- the calls that a rule's function sees -----------------------------------------------------------------------


def test_a_function_takes_arguments_by_position_keyword_only_ones_by_name_and_the_call():
    seen = {}

    @rule_from(aten.sum.dim_IntList)
    def reduces(x, over, keep, dtype, call):
        seen.update(x=x, over=over, keep=keep, dtype=dtype, outputs=call.outputs)
        return Rows((Row((REPLICATE,), (REPLICATE,), "R"),))

    listed = rows(reduces, aten.sum.dim_IntList, meta(4, 6), [0], True, dtype=torch.float64, outputs=[meta(1, 6)])
    assert listed == ["R: [R] -> [R]"]
    assert seen == {"x": meta(4, 6), "over": [0], "keep": True, "dtype": torch.float64, "outputs": (meta(1, 6),)}


def test_a_value_keyed_by_type_is_readable_only_when_static():
    def scaled(x, factor):
        return like(x, partial=["max -> max"] if factor > 0 else [])

    hidden, static = rule_from(aten.mul.Scalar)(scaled), rule_from(aten.mul.Scalar, static=["other"])(scaled)
    with pytest.raises(RuleError, match="Declare it: static="):
        rows(hidden, aten.mul.Scalar, meta(4), 2.0, outputs=[meta(4)])
    assert rows(static, aten.mul.Scalar, meta(4), 2.0, outputs=[meta(4)])[1] == "max -> max: [P(max)] -> [P(max)]"
    assert len(rows(static, aten.mul.Scalar, meta(4), -2.0, outputs=[meta(4)])) == 2


def test_by_type_hides_values_but_not_their_absence():
    own_rule = rule(aten.clamp.default, "... -> ...")
    shown = by_type(own_rule, [meta(4), 0.5, None], aten.clamp.default)
    assert shown == {"self": meta(4), "min": ByType("min", float), "max": None}


def test_einop_describes_one_call():
    @rule_from(aten.sum.dim_IntList)
    def column_sums(x):
        return einop("a b -> b" if x.ndim == 2 else "a -> ", reduce={"a": "sum"})

    assert rows(column_sums, aten.sum.dim_IntList, meta(4, 6), [0], outputs=[meta(6)]) == [
        "shard a: [S(0)] -> [P(sum)]",
        "shard b: [S(1)] -> [S(0)]",
        "R: [R] -> [R]",
    ]


@given(st.lists(st.integers(0, 5), max_size=4), st.sets(st.integers(-4, 3)))
def test_like_shards_every_dim_but_the_whole_ones(shape, whole):
    whole = {d for d in whole if -len(shape) <= d < len(shape)}
    flow = like(meta(*shape), whole=whole)
    kept = {d % len(shape) for d in whole}
    assert flow.inputs == flow.outputs
    assert [label is None for label in flow.inputs[0]] == [d in kept for d in range(len(shape))]


# -- what making a rule refuses ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ops", "notation", "options", "found"),
    [
        (aten.mm.default, "m k, k n -> m n", {}, "'k' of the inputs is missing in an output"),
        (aten.mm.default, "m k, k n -> m n", {"reduce": {"k": "mean"}}, "'mean' is not a reduction"),
        (
            aten.mm.default,
            "m k, k n -> m n",
            {"reduce": {"k": "sum", "z": "sum"}},
            "reduce= names 'z', which no input has",
        ),
        (aten.mm.default, "m k, k n -> m n z", {"replicate": ["k"]}, "the output dim 'z' is in no input"),
        (aten.relu.default, "a, b -> a b", {}, "it has 2 inputs, the op 1 tensor argument: 'self'"),
        (aten.relu.default, "a -> a, a", {}, "it has 2 outputs and the op has 1 tensor result"),
        (
            aten.relu.default,
            "a -> a",
            {"partial": ["sum, R -> sum"]},
            "the row 'sum, R -> sum' has 2 entries on one side where the notation has 1",
        ),
        (
            aten.relu.default,
            "a -> a",
            {"partial": ["mean -> mean"]},
            "the row 'mean -> mean' has 'mean', which is neither a placement nor a dim",
        ),
        (aten.relu.default, "a -> a", {"partial": ["sum"]}, "it has no '->'"),
    ],
)
def test_a_notation_that_does_not_fit_is_refused(ops, notation, options, found):
    with pytest.raises(NotationError) as refused:
        rule(ops, notation, **options)
    assert refused.value.found == found


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: rule(aten.mm.default, {"self": "m k", "mat3": "k n", "->": "m n"}), "mat3"),
        (lambda: rule(aten.mm.default, {"self": "m k", "->": "m k"}), "mat2"),
        (lambda: rule(aten.relu.default, "... -> ...", static=["alpha"]), "alpha"),
        (lambda: rule(aten.relu.default, "... -> ...", static=["self"]), "self"),
        (lambda: rule_from(aten.relu.default, static=["beta"]), "beta"),
    ],
)
def test_an_argument_that_the_op_lacks_is_refused(make, argument):
    with pytest.raises(RuleArgumentError) as refused:
        make()
    assert refused.value.argument == argument


@pytest.mark.parametrize("ops", [[], ["aten.mm.default"], aten.mm])
def test_something_that_is_no_op_is_refused(ops):
    with pytest.raises((RuleError, TypeError)):
        rule(ops, "... -> ...")


def test_a_rule_that_does_not_fit_a_call_says_so():
    own_rule = rule(aten.relu.default, "a b -> a b")
    with pytest.raises(RuleError, match=r"writes 'a b' for a tensor of 3 dims: f32\[2,3,4\]"):
        rows(own_rule, aten.relu.default, meta(2, 3, 4), outputs=[meta(2, 3, 4)])


def test_a_compound_dim_that_does_not_follow_is_refused():
    own_rule = rule(aten.view.default, "(h d) -> h d")
    with pytest.raises(RuleError, match="does not follow from"):
        rows(own_rule, aten.view.default, meta(13), [4, 3], outputs=[meta(4, 3)])


def test_making_a_rule_does_not_register_it():
    own_rule = full_mesh_rule(aten.mm.default)(lambda *_: None)
    assert str(own_rule) == "aten.mm.default: function of the full mesh"
    assert (own_rule.zip_lists, own_rule.static) == (False, frozenset())


def test_a_flow_of_a_function_is_bound_to_the_call():
    own_rule = rule_from(aten.t.default)(lambda **_: Flow([("a", "b")], [("b", "a")]))
    first = own_rule.rows(call(own_rule, aten.t.default, meta(2, 3), outputs=[meta(3, 2)]))[0]
    assert first == Row((shard(0),), (shard(1),), "shard a")


def test_a_mapping_describes_one_operand_per_name():
    with pytest.raises(NotationError, match="it is 2 operands"):
        rule(aten._foreach_add.List, {"self other": "...", "->": "R, R"}, zip_lists=True)


def test_a_row_that_asks_something_of_an_absent_operand_alone_is_no_row():
    """Without the bias `R, R, sum -> sum` would count the product once per rank."""
    partials = ["R, R, sum -> sum", "R, sum, sum -> sum"]
    own_rule = rule(aten.linear.default, "b k, n k, n -> b n", replicate=["k"], partial=partials)
    x, weight, bias = meta(4, 3), meta(5, 3), meta(5)

    def names(*operands):
        return [row.partition(":")[0] for row in rows(own_rule, aten.linear.default, *operands, outputs=[meta(4, 5)])]

    assert names(x, weight, bias) == ["shard b", "shard n", *partials, "R"]
    assert names(x, weight) == ["shard b", "shard n", "R, sum, sum -> sum", "R"]
