"""Rules in DTensor's classic styles, judged by the oracle and run on real ranks."""

import random
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

import shardwise as sw
from shardwise.discovery.process import default_registry
from shardwise.errors import NoStrategyError, RuleError
from shardwise.hookspecs import Registrar
from shardwise.kernel.precedence import Origin
from shardwise.planning.strategies import propagated, strategies_of
from shardwise.rule import AbstractMesh, OpSchema, TensorMeta, TensorSpec, show_all
from shardwise.testing import RuleRefuted, check_rule, mesh
from shardwise_dtensor import OutputSharding, register_op_strategy, register_prop_rule, rules_of, torch_private

CLASSIC = str(Path(__file__).with_name("classic_rules.py"))
GRID = AbstractMesh((2, 2))


def made(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def samples(classic):
    x, w = made(8, 6), made(6, 10, seed=1)
    return {
        classic.project: [(x, w), (made(5, 7), made(7, 3, seed=1))],
        classic.squash: [(x, 0.5), (made(5, 7), 1.0)],
        classic.blend: [(x, made(8, 6, seed=2)), (made(5, 7), made(5, 7, seed=2))],
        classic.narrow: [(x, 0), (x, -1), (made(5, 7), 1)],
        classic.pieces: [(x,), (made(5, 7),)],
        classic.grow_: [([x, made(5, 7)], torch.tensor(3.0))],
        classic.outer: [(made(8), made(5, seed=1)), (made(3), made(7, seed=1))],
        classic.wrong_sum: [(x,)],
        classic.wrong_follow: [(x,)],
        classic.wrong_rule: [(x,)],
    }


def rule_of(classic, op):
    return next(rule for rule in rules_of(classic) if op in rule.ops)


def spec(tensor, *placements, on=GRID):
    return TensorSpec(on, placements, TensorMeta.of(tensor))


# -- judged ----------------------------------------------------------------------------------------------------------


def test_the_oracle_accepts_right_ones(classic):
    for op in classic.RIGHT:
        report = check_rule(rule_of(classic, op), [(args, {}) for args in samples(classic)[op]], cases=60)
        assert report.cases >= 9, op
        assert not report.unsampled


@pytest.mark.parametrize(
    ("name", "placed"),
    [("wrong_sum", "[S(1)] -> [R]"), ("wrong_follow", "[P("), ("wrong_rule", "[S(1)] -> [S(1)]")],
)
def test_the_oracle_refutes_wrong_ones(classic, name, placed):
    op = getattr(classic, name)
    with pytest.raises(RuleRefuted) as refuted:
        check_rule(rule_of(classic, op), [(args, {}) for args in samples(classic)[op]], meshes=[(4,)])
    assert placed in refuted.value.placements
    assert "classic_rules.py" in refuted.value.source


# -- run -------------------------------------------------------------------------------------------------------------


def everything(load, shape, seed):
    """Every op with operands in random places by these rules, against one device."""
    classic = load(CLASSIC)
    on, rng = mesh(shape), random.Random(seed)
    undo = default_registry().override(*rules_of(classic))
    calls = [
        (classic.project, (made(8, 6), made(6, 10, seed=1))),
        (classic.squash, (made(5, 7), 0.5)),
        (classic.blend, (made(8, 6), made(8, 6, seed=2))),
        (classic.narrow, (made(5, 7), 1)),
        (classic.narrow, (made(7, 7), 0)),
        (classic.pieces, (made(5, 7),)),
        (classic.outer, (made(8), made(5, seed=1))),
    ]
    try:
        for op, args in calls:
            expected = op(*args)
            for _ in range(4):
                found = op(*(place(a, on, rng) for a in args))
                compare(found, expected)
        xs, by = [made(8, 6), made(5, 7)], torch.tensor(3.0)
        given = [place(x, on, rng, strided=False) for x in xs]
        before = [x.placements for x in given]
        classic.grow_(given, place(by, on, rng))
        compare(given, [x * by for x in xs])
        assert before == [x.placements for x in given]
    finally:
        undo()


def place(value, on, rng, strided=True):
    if not isinstance(value, torch.Tensor):
        return value
    kinds = [sw.Replicate(), *map(sw.Shard, range(value.ndim))]
    if strided:
        kinds += [StridedShard(dim, split_factor=2) for dim in range(value.ndim) if value.shape[dim] % 2 == 0]
    return sw.distribute_tensor(value, on, [rng.choice(kinds) for _ in range(on.ndim)])


def compare(found, expected):
    several = expected if isinstance(expected, (tuple, list)) else [expected]
    for f, e in zip(found if isinstance(found, (tuple, list)) else [found], several, strict=True):
        torch.testing.assert_close(f.full_tensor(), e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_they_run_on_four_ranks_as_on_one_device(pool, loader, shape):
    pool.run(everything, loader, shape, 11)


# -- asked -----------------------------------------------------------------------------------------------------------


def test_their_strategies_are_listed_with_costs(classic):
    undo = default_registry().override(*rules_of(classic))
    try:
        x, w = spec(made(8, 6), sw.Shard(0), sw.Replicate()), spec(made(6, 10), sw.Replicate(), sw.Shard(1))
        schema = OpSchema.of(classic.project, x, w)
        listed = strategies_of(default_registry(), schema).strategies
        assert len(listed) == 16
        assert [s.cost for s in listed] == sorted(s.cost for s in listed)
        assert listed[0].cost == 0.0
        assert show_all(listed[0].output_specs[0].placements) == "[S(0), S(1)]"
        answer = propagated(default_registry(), schema)
        assert not answer.needs_redistribute
        assert answer.output_spec.shape == (8, 10)
    finally:
        undo()


def test_a_suggestion_is_where_the_operands_are_moved(classic):
    both = [spec(made(8), sw.Shard(0), on=AbstractMesh((4,))), spec(made(5), sw.Shard(0), on=AbstractMesh((4,)))]
    (only,) = rule_of(classic, classic.outer).strategies(both[0].mesh, OpSchema.of(classic.outer, *both)).strategies
    assert all(s.is_replicated for s in (*only.input_specs, *only.output_specs))
    assert only.cost > 0


def test_each_list_position_chooses_for_itself(classic):
    xs = (spec(made(8, 6), sw.Shard(0), sw.Shard(1)), spec(made(5, 7), sw.Replicate(), sw.Shard(0)))
    schema = OpSchema.of(classic.grow_, xs, spec(torch.tensor(1.0), sw.Replicate(), sw.Replicate()))
    (only,) = rule_of(classic, classic.grow_).strategies(GRID, schema).strategies
    assert only.input_specs[:2] == xs


# -- collected -------------------------------------------------------------------------------------------------------


def test_rules_are_values_that_a_hook_hands_over(classic):
    rules = rules_of(classic)
    assert len(rules) == 10
    assert not any(op in default_registry() for rule in rules for op in rule.ops)
    registrar = Registrar(Origin("bridge"))
    registrar.add(*rules)
    assert {entry.op for entry in registrar.entries} >= set(classic.RIGHT)
    assert "classic op strategy project_strategy" in str(rules[0])
    with pytest.raises(RuleError, match=r"no decorator of shardwise_dtensor was used"):
        rules_of(pytest)


def test_a_module_that_is_loaded_again_has_each_rule_once(tmp_path):
    text = """
import torch
from shardwise_dtensor import register_prop_rule

@register_prop_rule(torch.ops.aten.neg.default)
def same(op_schema):
    return op_schema
"""
    space = {"__name__": "again"}
    for _ in range(2):
        exec(compile(text, "again.py", "exec"), space)
    (only,) = rules_of(space)
    assert only.source == "again.py:5"


def test_functions_of_other_arities_are_refused():
    with pytest.raises(RuleError, match=r"takes 3 arguments"):
        register_op_strategy(torch.ops.aten.neg.default)(lambda a, b, c: None)


# -- answers that are none -------------------------------------------------------------------------------------------


def asked(decorator, function, *operands, op=torch.ops.aten.neg.default, **options):
    """What a rule made of a function answers for operands on a grid."""
    space = {"decorator": decorator, "function": function, "op": op, "options": options}
    exec("decorator(op, **options)(function)", space)
    (rule,) = rules_of(space)
    return rule.strategies(GRID, OpSchema.of(op, *operands, static=rule.static)).strategies


WHOLE = spec(made(8, 6), sw.Replicate(), sw.Replicate())


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (lambda s: None, RuleError, "it is a NoneType"),
        (lambda s: 1 / 0, NoStrategyError, "raises ZeroDivisionError"),
        (lambda s: torch_private.OpStrategy([]), NoStrategyError, "no strategy that can be run"),
    ],
)
def test_strategies_that_are_none(function, error, words):
    with pytest.raises(error, match=words):
        asked(register_op_strategy, function, WHOLE)


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (lambda s: OutputSharding(None), NoStrategyError, "neither an output nor a suggestion"),
        (lambda s: OutputSharding(None, s), NoStrategyError, "no output for its own suggestion"),
        (lambda s: OutputSharding(None, [], "not so"), NoStrategyError, "not so"),
        (lambda s: OutputSharding(None, failed_reason="not so"), NoStrategyError, "not so"),
        (lambda s: OutputSharding((s.args_schema[0],) * 2), RuleError, "specs for 2 results of 1"),
    ],
)
def test_propagations_that_are_none(function, error, words):
    with pytest.raises(error, match=words):
        asked(register_prop_rule, function, WHOLE)


def with_another(placement):
    """The operand stays as it lies, or lies at ``placement`` along the first mesh dim."""

    def rule(op_schema):
        there = op_schema.args_schema[0].strategies[0].output_spec
        other = torch_private.DTensorSpec(there.mesh, (placement, sw.Replicate()), there.tensor_meta)
        return torch_private.OpStrategy([torch_private.OpSpec(s, [s], [[0.0]]) for s in (there, other)])

    return rule


def test_placements_that_shardwise_does_not_have_are_dropped():
    masked = pytest.importorskip("torch.distributed.tensor._ops._embedding_ops")._MaskPartial
    (only,) = asked(register_op_strategy, with_another(masked("sum", offset_shape=torch.Size([8]))), WHOLE)
    assert only.input_specs == (WHOLE,)


def test_strided_shards_are_kept():
    _, strided = asked(register_op_strategy, with_another(StridedShard(0, split_factor=2)), WHOLE)
    assert [show_all(s.placements) for s in strided.input_specs] == ["[_S(0, 2), R]"]


def test_what_an_op_writes_is_not_moved():
    def rule(op_schema):
        there = op_schema.args_schema[0].strategies[0].output_spec
        split = torch_private.DTensorSpec(there.mesh, (sw.Shard(0), sw.Replicate()), there.tensor_meta)
        return torch_private.OpStrategy([torch_private.OpSpec(s, [s], [[0.0]]) for s in (split, there)])

    (only,) = asked(register_op_strategy, rule, WHOLE, op=torch.ops.aten.neg_.default)
    assert only.input_specs == (WHOLE,)


def test_values_that_do_not_key_a_plan_cannot_be_read():
    def rule(op_schema):
        assert op_schema.args_schema[1] > 0

    op = torch.ops.aten.leaky_relu.default
    with pytest.raises(RuleError, match=r"static=\('negative_slope',\)"):
        asked(register_op_strategy, rule, WHOLE, 0.1, op=op)


def test_local_values_are_a_case_for_local_args():
    def rule(op_schema):
        x, size = op_schema.args_schema
        local = torch_private.OpSchema(op_schema.op, (x, [4, 6]), {})
        return OutputSharding(x, local, needs_redistribute=True, use_val_from_redistribute_schema=size != [4, 6])

    with pytest.raises(RuleError, match=r"local_args="):
        asked(register_prop_rule, rule, WHOLE, (8, 6), op=torch.ops.aten.view.default)
