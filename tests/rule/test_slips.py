# ruff: noqa: ARG005  # functions of a rule have the arguments of its op, used or not
"""Slips of an author: refused where the rule is made, or at the first call, with the rule's line. None is silent."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.errors import NoStrategyError, RuleError
from shardwise.rule import Flow, OpStrategy, Row, Rows, Shard, einop, full_mesh_rule, like, linear, rule, rule_from
from shardwise.testing import mesh

aten = torch.ops.aten
MM = (aten.mm.default, "m k, k n -> m n")
K = {"reduce": {"k": "sum"}}

MAKING = {
    "no notation": (lambda: rule(MM[0], None), "it is None"),
    "a number for a notation": (lambda: rule(MM[0], 3), "it is an int"),
    "a list for a notation": (lambda: rule(MM[0], ["m k", "k n"]), "it is a list"),
    "an empty mapping": (lambda: rule(aten.add.Tensor, {}), "it names no operand"),
    "a name twice": (lambda: rule(aten.add.Tensor, {"self": "...", "self other": "..."}), "it names 'self' twice"),
    "a number for an operand": (lambda: rule(aten.add.Tensor, {"self other": 3}), "3 in it is an int"),
    "a name for reduce": (lambda: rule(*MM, reduce="k"), 'as in reduce={"k": "sum"}'),
    "a list for reduce": (lambda: rule(*MM, reduce=["k"]), 'as in reduce={"k": "sum"}'),
    "a number for replicate": (lambda: rule(*MM, replicate=3), 'as in replicate=["k"]'),
    "reduced and whole": (lambda: rule(*MM, **K, replicate="k"), "'k' is in reduce= and in replicate="),
    "numbers for partial": (lambda: rule(*MM, **K, partial=[3]), 'as in partial=["sum, R -> sum"]'),
    "a number for a fact": (lambda: rule(*MM, **K, linear=3), "not the name of an operand"),
    "a number in a fact": (lambda: linear(3), "not the name of an operand"),
    "a lowering that is no function": (lambda: rule(*MM, **K, lowering=3), "lowering=3: it is an int"),
    "local_args that are no function": (lambda: rule(*MM, **K, local_args={}), "it is a dict"),
    "work that is a number": (lambda: rule(*MM, **K, work=-3), "it is an int"),
    "results that are no function": (lambda: rule_from(MM[0], results=3), "it is an int"),
    "a meta that is no function": (lambda: rule_from(MM[0], meta=torch.empty(2)), "Pass a function"),
    "replaces a number": (lambda: rule(*MM, **K, replaces=3), "Name one plugin"),
    "replaces nothing": (lambda: rule_from(MM[0], replaces=""), "Name one plugin"),
    "replaces a list": (lambda: full_mesh_rule(MM[0], replaces=["acme"]), "Name one plugin"),
    "an op by its name": (lambda: rule("aten::mm", MM[1]), "'aten::mm' is not one op overload"),
    "static numbers": (lambda: rule_from(MM[0], static=3), 'as in static=["k"]'),
    "decorates a number": (lambda: rule_from(MM[0])(3), "what it decorates is an int"),
    "decorates nothing": (lambda: full_mesh_rule(MM[0])(None), "what it decorates is None"),
    "arguments without a name": (lambda: rule_from(MM[0])(lambda *given: like(given[0])), "has no name"),
    "like of a number": (lambda: like(3), "not a tensor of the call"),
}


@pytest.mark.parametrize("slip", MAKING)
def test_a_rule_that_cannot_be_made_says_why(slip):
    make, said = MAKING[slip]
    with pytest.raises(RuleError) as refusal:
        make()
    assert said in str(refusal.value)


def test_one_name_stands_for_a_list_of_one():
    one, several = (
        rule(*MM, replicate="k", partial="sum, R -> sum"),
        rule(*MM, replicate=["k"], partial=["sum, R -> sum"]),
    )
    assert one.partial == several.partial
    assert one.describe.__self__ == several.describe.__self__
    assert rule_from(aten.cumsum.default, static="dim")(lambda self, dim: like(self)).static == {"dim"}


def test_a_slip_in_an_option_hints_at_the_nearest():
    with pytest.raises(TypeError, match=r"'partail' is not .*; the nearest is partial"):
        rule(*MM, **K, partail=["sum, R -> sum"])


def _raises(*_):
    raise ValueError("a mistake of mine")


def from_function(function, **options):
    return rule_from(aten.relu.default, **options)(function)


CALLING = {
    "its function raises": (from_function(lambda self: _raises()), "its function raised ValueError: a mistake of mine"),
    "it returns nothing": (from_function(lambda self: None), "its function returned None"),
    "it returns a notation": (from_function(lambda self: "... -> ..."), "its function returned a str"),
    "it returns a list": (from_function(lambda self: [Row((Shard(0),), (Shard(0),))]), "its function returned a list"),
    "it returns a class": (from_function(lambda self: Flow), "its function returned the class Flow"),
    "it wants more arguments": (from_function(lambda self, a, b: like(self)), "missing 2 required positional"),
    "it wants another name": (
        from_function(lambda self, *, other: like(self, whole=other)),
        "missing 1 required keyword-only",
    ),
    "a dim that is not there": (from_function(lambda self: like(self, whole=2)), "not the number of one of its dims"),
    "a name for a dim": (from_function(lambda self: like(self, whole=["d0"])), "not the number of one of its dims"),
    "rows as text": (from_function(lambda self: Rows(["S(0) -> S(0)"])), "'S(0) -> S(0)' is a str"),
    "a row of too many": (from_function(lambda self: Rows([Row([Shard(0)] * 2, [Shard(0)])])), "2 placements for 1 op"),
    "a row of no result": (from_function(lambda self: Rows([Row([Shard(0)], [])])), "0 placements for 1 result"),
    "a row of text": (from_function(lambda self: Rows([Row(["S(0)"], [Shard(0)])])), "'S(0)', a str, for a placement"),
    "a row of another dim": (from_function(lambda self: Rows([Row([Shard(5)], [Shard(5)])])), "shards dim 5"),
    "a row of a placement": (from_function(lambda self: Rows([Row(Shard(0), Shard(0))])), "its function raised Type"),
    "an einop of another op": (from_function(lambda self: einop("a, b -> a b")), "it has 2 operands and"),
    "results raise": (from_function(like, results=_raises), "its results= raised ValueError"),
    "results are nothing": (from_function(like, results=lambda call, device: [3]), "its results= returned (an int)"),
    "meta returns nothing": (from_function(like, meta=lambda self: None), "its meta= returned 0 tensors for 1"),
    "local_args are a list": (rule(aten.relu.default, "a b -> a b", local_args=lambda call: []), "returned a list"),
    "local_args raise": (
        rule(aten.relu.default, "a b -> a b", local_args=_raises),
        "its local_args= raised ValueError",
    ),
    "a full mesh of nothing": (full_mesh_rule(aten.relu.default)(lambda mesh, schema: None), "function returned None"),
    "a full mesh that raises": (full_mesh_rule(aten.relu.default)(_raises), "its function raised ValueError"),
    "a lowering of a list": (
        rule(aten.relu.default, "a b -> a b", lowering=lambda call, x: [x]),
        "a list for a tensor",
    ),
    "a lowering of a number": (
        rule(aten.relu.default, "a b -> a b", lowering=lambda call, x: 3),
        "an int for a tensor",
    ),
    "a lowering of another shape": (
        rule(aten.relu.default, "a b -> a b", lowering=lambda call, x: x.new_zeros(7, 5)),
        "a tensor of shape (7, 5) for",
    ),
}


def relu_by(own_rule):
    x = sw.distribute_tensor(torch.randn(8, 6), mesh((dist.get_world_size(),)), [sw.Shard(0)])
    with sw.override(own_rule):
        return torch.relu(x)


def refusal_of(slip):
    try:
        relu_by(CALLING[slip][0])
    except RuleError as error:
        return str(error), error.fields, type(error.__cause__).__name__
    raise AssertionError(slip)


@pytest.mark.parametrize("slip", CALLING)
def test_a_rule_that_breaks_at_a_call_says_what_it_did(ranks, slip):
    for text, fields, _ in ranks.run(refusal_of, slip):
        assert CALLING[slip][1] in text
        assert "aten.relu.default" in text or "notation" in fields or "keep dim" in text


def test_an_error_of_a_rule_can_be_read_by_programs(ranks):
    for text, fields, cause in ranks.run(refusal_of, "its function raises"):
        assert fields == {"op": "aten.relu.default", "source": CALLING["its function raises"][0].source}
        assert fields["source"] in text
        assert cause == "ValueError"


def notes_of_a_lowering():
    try:
        relu_by(rule(aten.relu.default, "a b -> a b", lowering=_raises))
    except ValueError as error:
        return str(error), error.__notes__
    raise AssertionError


def test_what_a_lowering_raises_stays_as_it_is_with_a_note(ranks):
    for text, notes in ranks.run(notes_of_a_lowering):
        assert text == "a mistake of mine"
        assert notes[0].startswith("It was raised in the lowering of aten.relu.default, of the rule at ")


def no_strategies():
    with pytest.raises(NoStrategyError, match="no row for this call"):
        relu_by(from_function(lambda self: Rows([])))
    with pytest.raises(NoStrategyError, match="0 strategies"):
        relu_by(full_mesh_rule(aten.relu.default)(lambda mesh, schema: OpStrategy(())))


def test_no_rows_for_a_call_are_no_strategy(ranks):
    ranks.run(no_strategies)


def test_lists_do_for_tuples():
    assert Row([Shard(0)], [Shard(0)]) == Row((Shard(0),), (Shard(0),))


def test_a_rule_shows_its_op_and_its_notation():
    assert repr(rule(*MM, **K)) == "<Rule aten.mm.default: m k, k n -> m n>"
    assert "FullMeshRule aten.mm.default" in repr(full_mesh_rule(MM[0])(_raises))
