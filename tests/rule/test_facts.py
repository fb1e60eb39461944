"""Facts by operand name: the rows that they become, and what is refused."""

import pytest
import torch

from shardwise.errors import NotationError, RuleArgumentError, RuleError
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import REPLICATE, partial
from shardwise.kernel.signature import Call, signature
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.rule import LocalCall, affine, decreasing, einop, like, linear, monotone, moves, rule, rule_from
from shardwise.rule.flow import Flow
from shardwise.testing import RuleRefuted, check_rule

aten = torch.ops.aten


def meta(*shape):
    return TensorMeta.contiguous(shape, torch.float32)


X = meta(4)


def call(op, *values, outputs=(X,)):
    names = [a.name for a in signature(op).args]
    return Call(op, dict.fromkeys(names) | dict(zip(names, values, strict=False)), outputs)


def texts(facts, bound):
    return list(facts.rows(bound))


# -- rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "rows"),
    [
        (linear("self"), ["sum, R -> sum", "avg, R -> avg"]),
        (linear("self", "other"), ["sum, R -> sum", "R, sum -> sum", "avg, R -> avg", "R, avg -> avg"]),
        (linear("self other"), ["sum, sum -> sum", "avg, avg -> avg"]),
        (affine("other"), ["R, avg -> avg"]),
        (monotone("self"), ["max, R -> max", "min, R -> min"]),
        (decreasing("other"), ["R, max -> min", "R, min -> max"]),
        (moves("self"), [f"{kind}, R -> {kind}" for kind in ("sum", "avg", "max", "min", "product")]),
        (linear("self other") + affine("self"), ["sum, sum -> sum", "avg, avg -> avg", "avg, R -> avg"]),
    ],
    ids=str,
)
def test_each_word_becomes_rows_by_reduction_and_then_in_the_order_written(facts, rows):
    assert texts(facts, call(aten.add.Tensor, X, X)) == rows


def test_keywords_stand_in_the_order_in_which_they_are_written():
    rows = Flow([("d",)], [("d",)], monotone="self", linear="self").bind(call(aten.neg.default, X)).rows
    assert [row.name for row in rows] == [
        "shard d",
        "sum -> sum",
        "avg -> avg",
        "max -> max",
        "min -> min",
        "R",
    ]


def test_rows_that_only_the_lowering_has_are_listed_with_the_further_rows():
    made = rule(
        aten.addmm.default,
        "m n, m k, k n -> m n",
        reduce={"k": "sum"},
        partial=["sum, k, k -> sum"],
        lowering={("k", "sum, k, k -> sum", "R, sum, R -> sum", linear("self mat1")): len},
    )
    assert made.partial == ("sum, k, k -> sum", "R, sum, R -> sum (lowering)", "linear in self with mat1 (lowering)")


def test_facts_among_partial_rows_keep_the_order_of_the_list():
    flow = like(X, partial=[linear("other"), "product, product -> product", affine("self")])
    names = [row.name for row in flow.bind(call(aten.mul.Tensor, X, X)).rows]
    assert names[1:-1] == ["R, sum -> sum", "R, avg -> avg", "product, product -> product", "avg, R -> avg"]


def test_the_elements_of_a_list_are_partial_together():
    bound = call(aten.cat.default, (X, X, X, X))
    assert texts(linear("tensors"), bound) == ["sum, ... -> sum", "avg, ... -> avg"]


def test_results_that_do_not_depend_on_the_operand_are_whole():
    bound = call(aten.native_layer_norm.default, X, (4,), X, X, outputs=(X, X, X))
    assert texts(linear("bias", results=[0]), bound)[0] == "R, R, sum -> sum, R, R"


def test_an_operand_that_is_not_given_drops_out():
    flow = rule(aten.linear.default, "... k, n k, n -> ... n", replicate=["k"], linear="input bias")
    whole = meta(2, 2)
    rows = flow.rows(call(aten.linear.default, whole, whole, None, outputs=(whole,)))
    assert "sum, R, R -> sum: [P(sum), R, -] -> [P(sum)]" in map(str, rows)


def test_a_number_in_place_of_a_tensor_takes_part_in_no_fact():
    assert texts(linear("self other") + affine("self"), call(aten.add.Tensor, X, 2.0)) == ["avg, R -> avg"]


def test_one_operand_may_have_a_name_per_op():
    own_rule = rule([aten.dot.default, aten.vdot.default], "k, k -> ()", reduce={"k": "sum"}, linear="tensor|other")
    for op in own_rule.ops:
        assert "R, sum -> sum" in [row.name for row in own_rule.rows(call(op, X, X, outputs=(meta(),)))]


def test_einop_takes_facts_too():
    flow = einop("... -> ...", moves="self")(call(aten.clone.default, X))
    assert len(flow.bind(call(aten.clone.default, X)).rows) == 1 + 5 + 1


def test_a_rule_says_its_facts():
    own_rule = rule(
        aten.mm.default, "m k, k n -> m n", reduce={"k": "sum"}, linear=("self", "mat2"), affine="self mat2"
    )
    assert own_rule.partial == ("linear in self, linear in mat2, affine in self with mat2",)


# -- refused -----------------------------------------------------------------------------------------------------


def test_a_name_that_no_operand_has_is_refused_when_the_rule_is_made():
    with pytest.raises(
        RuleArgumentError, match=r"linear in grad_ouput.*no operand 'grad_ouput'.*'grad_output', 'output'"
    ):
        rule(aten.sigmoid_backward.default, "..., ... -> ...", linear="grad_ouput")
    with pytest.raises(RuleArgumentError, match="no operand 'dim'"):
        rule(aten.glu_backward.default, "..., ... -> ...", linear="dim")


def test_a_name_that_no_operand_has_is_refused_when_a_flow_is_bound():
    with pytest.raises(RuleArgumentError, match="no operand 'selv'"):
        like(X, linear="selv").bind(call(aten.neg.default, X))


def test_a_word_that_is_not_a_fact_is_refused():
    with pytest.raises(TypeError, match="'lowered' is not a fact or another option of a rule"):
        rule(aten.neg.default, "... -> ...", lowered=["d"])


def test_the_oracle_refutes_a_fact_that_does_not_hold():
    with pytest.raises(RuleRefuted, match="sum, sum -> sum"):
        check_rule(rule(aten.mul.Tensor, "..., ... -> ...", linear="self other"))


# -- lowerings attached to rows ----------------------------------------------------------------------------------


def run(local, *args):
    return local.call.op(*args)


def lowered(made, bound):
    return [row.name for row in made.rows(bound) if row.lowered]


def test_a_lowering_runs_the_rows_that_it_is_attached_to():
    bound = call(aten.mm.default, meta(2, 2), meta(2, 2), outputs=(meta(2, 2),))

    def attached(lowering):
        return lowered(rule(aten.mm.default, "m k, k n -> m n", reduce={"k": "sum"}, lowering=lowering), bound)

    assert attached({"k": run}) == ["shard k"]
    assert attached(run) == attached({"*": run}) == ["shard m", "shard k", "shard n"]
    assert attached({("*", "R"): run}) == ["shard m", "shard k", "shard n", "R"]
    assert attached({"R": run}) == ["R"]


def test_a_row_that_a_lowering_is_attached_to_need_not_be_written_twice():
    bound = call(aten.add.Tensor, X, X)
    own_rule = rule(
        aten.add.Tensor, "..., ... -> ...", lowering={("R, sum -> sum", linear("self")): run}, affine="other"
    )
    assert [(row.name, row.lowered) for row in own_rule.rows(bound)] == [
        ("shard ...1", False),
        ("R, avg -> avg", False),
        ("R, sum -> sum", True),
        ("sum, R -> sum", True),
        ("avg, R -> avg", True),
        ("R", False),
    ]


def test_two_functions_on_the_rows_of_one_rule_are_refused():
    with pytest.raises(RuleError, match="the mapping has 2 functions"):
        rule(aten.mm.default, "m k, k n -> m n", replicate=["k"], lowering={"m": run, "n": len})


def test_a_lowering_attached_to_no_row_is_refused():
    with pytest.raises(NotationError, match="lowering= names the row 'q', which the rule does not have"):
        rule(aten.mm.default, "m k, k n -> m n", replicate=["k"], lowering={"q": run})


# -- what counts once --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operand", "at", "counts"),
    [
        (None, (0, 1), True),
        (None, (1, 0), False),
        (["R", "R"], (1, 1), False),
        ([partial("sum"), "R"], (1, 1), True),
    ],
)
def test_a_whole_value_counts_on_the_first_rank_along_each_mesh_dim_that_sums(operand, at, counts):
    mesh = AbstractMesh((2, 2))
    spec = TensorSpec(mesh, (partial("sum"), REPLICATE), X)
    other = operand and TensorSpec(mesh, tuple(REPLICATE if p == "R" else p for p in operand), X)
    local = LocalCall(call(aten.add.Tensor, X, X), (spec, other), (spec,), at, None)
    assert local.counts(spec, other) is counts
    assert local.counts(spec, other, kind="product")


def test_rules_by_function_name_the_rows_of_their_lowering():
    @rule_from(aten.neg.default, lowering=run)
    def made(x):
        return like(x, linear="self", lowered=linear("self"))

    assert lowered(made, call(aten.neg.default, X)) == ["sum -> sum", "avg -> avg"]
