"""The planner: exact under the cost model, deterministic, and respectful of what an op writes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import InPlaceError, ListLengthError, NoStrategyError
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import REPLICATE, partial, shard
from shardwise.kernel.precedence import Origin
from shardwise.kernel.reductions import REDUCE_OPS
from shardwise.kernel.registry import Registrar, Registry
from shardwise.kernel.rule import Row, Rule
from shardwise.kernel.schema import OpSchema, TupleStrategy
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.problem import Problem, exhaustive
from shardwise.planning.results import schema_metas
from shardwise.planning.strategies import choose, make_call, problems, propagate, propagated, strategies, strategies_of
from shardwise.rule.authoring import rule, rule_from
from shardwise.rule.flow import Flow

aten = torch.ops.aten

MM = rule(
    aten.mm.default,
    "m k, k n -> m n",
    reduce={"k": "sum"},
    partial=["sum, R -> sum", "R, sum -> sum", "avg, R -> avg", "R, avg -> avg"],
)
ADD = rule(
    [aten.add.Tensor, aten.add_.Tensor, aten.add.out],
    "..., ... -> ...",
    partial=["sum, sum -> sum", "avg, R -> avg", "max, R -> max"],
)
ADDMM = rule(aten.addmm.default, "m n, m k, k n -> m n", replicate=["k"], partial=["sum, k, k -> sum"])
FOREACH = rule(aten._foreach_add_.List, {"self other": "..."}, zip_lists=True)


@rule_from(aten.view.default)
def split_rule(x, size):
    """Only a view that cuts the last dim in two."""
    lead = [f"d{i}" for i in range(x.ndim - 1)]
    pair = (("h", size[-2]), ("w", size[-1]))
    return Flow([(*lead, pair)], [(*lead, "h", "w")])


def placements(ndim: int):
    shards = [shard(d) for d in range(ndim)]
    return st.sampled_from([REPLICATE, partial("sum"), partial("max"), *shards])


def fits(kinds: set[str]) -> bool:
    return len(kinds) < 2 or kinds <= {"sum", "avg"}


@st.composite
def specs(draw, mesh: AbstractMesh, shape: tuple[int, ...]):
    draws = draw(
        st.lists(placements(len(shape)), min_size=mesh.ndim, max_size=mesh.ndim).filter(
            lambda ps: fits({p.reduce_op for p in ps if p.is_partial()})
        )
    )
    return TensorSpec(mesh, draws, TensorMeta.contiguous(shape, torch.float32))


meshes = st.sampled_from([(4,), (2, 2), (2, 3), (2, 1, 2), (2, 2, 2)]).map(AbstractMesh)


def problem(rule_: Rule, schema: OpSchema) -> Problem:
    (own_problem,) = problems(rule_, schema, make_call(rule_, schema, schema_metas(schema)))
    return own_problem


def best_by_exhaustion(found: Problem):
    return min((strategy.cost, choice) for choice, strategy in exhaustive(found))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_choice_for_a_product_equals_exhaustive_search(data):
    mesh = data.draw(meshes)
    m, k, n = (data.draw(st.sampled_from([1, 5, 64, 1000, 4096])) for _ in range(3))
    schema = OpSchema.of(aten.mm.default, data.draw(specs(mesh, (m, k))), data.draw(specs(mesh, (k, n))))
    own_problem = problem(MM, schema)
    choice, strategy = choose(own_problem)
    cost, first = best_by_exhaustion(own_problem)
    assert strategy.cost == pytest.approx(cost, rel=1e-9, abs=0)
    assert choice == first


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_choice_for_a_broadcast_sum_equals_exhaustive_search(data):
    mesh = data.draw(meshes)
    schema = OpSchema.of(aten.add.Tensor, data.draw(specs(mesh, (6, 1, 8))), data.draw(specs(mesh, (7, 8))))
    own_problem = problem(ADD, schema)
    choice, strategy = choose(own_problem)
    cost, first = best_by_exhaustion(own_problem)
    assert strategy.cost == pytest.approx(cost, rel=1e-9, abs=0)
    assert choice == first


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_the_choice_for_a_biased_product_equals_exhaustive_search(data):
    mesh = data.draw(st.sampled_from([(4,), (2, 2)]).map(AbstractMesh))
    drawn = [data.draw(specs(mesh, shape)) for shape in [(9,), (8, 5), (5, 9)]]
    schema = OpSchema.of(aten.addmm.default, *drawn)
    own_problem = problem(ADDMM, schema)
    choice, strategy = choose(own_problem)
    cost, first = best_by_exhaustion(own_problem)
    assert strategy.cost == pytest.approx(cost, rel=1e-9, abs=0)
    assert choice == first


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_choice_among_any_rows_equals_exhaustive_search(data):
    """Also where rows that leave the operand as it is differ in their results, exclude each other or may not write."""
    mesh = data.draw(meshes)
    x = data.draw(specs(mesh, (6, 8)))
    lies = st.sampled_from([*dict.fromkeys(x.placements)]) | placements(2)
    row = st.builds(
        lambda before, after, divides: Row((before,), (after,), "row", divides=divides),
        lies,
        placements(2),
        st.sampled_from([(), (), ((0, 0, 6),), ((0, 1, 2),)]),
    )
    rows = tuple(data.draw(st.lists(row, min_size=1, max_size=6, unique_by=lambda r: (r.inputs, r.outputs))))
    written = data.draw(st.booleans())
    schema = OpSchema.of(aten.clone.default, x)
    own_problem = Problem(
        schema, rows, (x,), (x.tensor_meta,), (0,) if written else (), ((0, 0),) if written else (), mesh.shape
    )
    try:
        expected = best_by_exhaustion(own_problem)
    except (ValueError, InPlaceError):  # no choice is legal
        with pytest.raises(NoStrategyError):
            choose(own_problem)
        return
    choice, strategy = choose(own_problem)
    assert strategy.cost == pytest.approx(expected[0], rel=1e-9, abs=0)
    assert choice == expected[1]


def spec(mesh_shape, shape, *ps):
    return TensorSpec(AbstractMesh(mesh_shape), ps, TensorMeta.contiguous(shape, torch.float32))


def test_operands_that_fit_a_row_stay_where_they_are():
    schema = OpSchema.of(
        aten.mm.default, spec((2, 2), (8, 4), shard(0), shard(1)), spec((2, 2), (4, 6), REPLICATE, shard(0))
    )
    _, strategy = choose(problem(MM, schema))
    assert strategy.cost == 0
    assert strategy.input_specs == schema.specs
    assert strategy.output_specs[0].placements == (shard(0), partial("sum"))


def test_a_tie_goes_to_the_row_listed_first():
    first = Row((REPLICATE,), (REPLICATE,), "first")
    second = Row((REPLICATE,), (shard(0),), "second")
    schema = OpSchema.of(aten.clone.default, spec((2, 2), (4,), REPLICATE, REPLICATE))
    for rows, name in (((first, second), "first"), ((second, first), "second")):
        own_problem = Problem(schema, rows, schema.specs, (schema.specs[0].tensor_meta,), (), (), (2, 2))
        assert choose(own_problem)[1].names == (name, name)


def test_the_written_operand_never_moves():
    mine, other = spec((4,), (8, 4), shard(0)), spec((4,), (8, 4), shard(1))
    _, strategy = choose(problem(ADD, OpSchema.of(aten.add_.Tensor, mine, other)))
    assert strategy.input_specs == (mine, mine)


def test_an_in_place_op_that_cannot_keep_its_operand_is_refused():
    mine, other = spec((4,), (8, 1), shard(1)), spec((4,), (8, 4), REPLICATE)
    partials = spec((4,), (8, 4), partial("product"))
    schema = OpSchema.of(aten.add_.Tensor, partials, other)
    with pytest.raises(InPlaceError, match=r"self = f32\[8,4\] \[P\(product\)\]"):
        choose(problem(ADD, schema))
    del mine


def test_an_out_tensor_keeps_its_placements():
    x, out = spec((4,), (8, 4), REPLICATE), spec((4,), (8, 4), shard(1))
    _, strategy = choose(problem(ADD, OpSchema.of(aten.add.out, x, x, out=out)))
    assert [s.placements for s in strategy.input_specs] == [(shard(1),)] * 3


def test_a_compound_dim_is_sharded_only_when_its_leading_factor_divides():
    own_problem = problem(
        split_rule, OpSchema.of(aten.view.default, spec((2, 2), (3, 8), shard(1), shard(1)), [3, 4, 2])
    )
    assert choose(own_problem)[1].output_specs[0].placements == (shard(1), shard(1))


def registry_of(*rules: Rule) -> Registry:
    registry, registrar = Registry(), Registrar(Origin("test"))
    registrar.add(*rules)
    registry.accept(registrar)
    return registry


def test_propagate_names_the_schema_to_redistribute_to():
    schema = OpSchema.of(aten.mm.default, spec((4,), (8, 4), shard(0)), spec((4,), (4, 6), shard(0)))
    answer = propagated(registry_of(MM), schema)
    assert answer.needs_redistribute
    assert answer.redistribute_schema.specs[1].placements != schema.specs[1].placements or (
        answer.redistribute_schema.specs[0].placements != schema.specs[0].placements
    )
    settled = propagated(registry_of(MM), answer.redistribute_schema)
    assert not settled.needs_redistribute
    assert settled.output_spec is answer.output_spec


def test_strategies_are_listed_cheapest_first():
    schema = OpSchema.of(
        aten.mm.default, spec((2, 2), (8, 4), shard(0), REPLICATE), spec((2, 2), (4, 6), REPLICATE, shard(1))
    )
    listed = strategies_of(registry_of(MM), schema)
    costs = [s.cost for s in listed.strategies]
    assert costs == sorted(costs)
    assert costs[0] == 0
    assert len(listed.strategies) >= 25
    assert listed.shape == (8, 6)
    assert listed.mesh_shape == (2, 2)


def test_zipped_lists_choose_per_position():
    a, b = spec((4,), (8, 4), shard(0)), spec((4,), (3,), REPLICATE)
    schema = OpSchema.of(aten._foreach_add_.List, [a, b], [b.with_meta(a.tensor_meta), b])
    answer = propagate(FOREACH, schema, ())
    assert answer.redistribute_schema.specs == (a, b, a, b)
    assert isinstance(strategies(FOREACH, schema, ()), TupleStrategy)


def test_lists_of_unequal_length_are_refused():
    a = spec((4,), (8, 4), shard(0))
    with pytest.raises(ListLengthError, match="self: 1, other: 2"):
        propagate(FOREACH, OpSchema.of(aten._foreach_add_.List, [a], [a, a]), ())


def test_reductions_that_do_not_commute_are_never_mixed():
    x = spec((2, 2), (8, 4), partial("sum"), REPLICATE)
    for _, strategy in exhaustive(problem(ADD, OpSchema.of(aten.add.Tensor, x, x))):
        kinds = [set(s.reductions.values()) for s in (*strategy.input_specs, *strategy.output_specs)]
        assert all(fits(k) for k in kinds)
    assert set(REDUCE_OPS) >= {"sum", "max"}


def test_a_shard_is_not_made_partial_to_put_a_collective_off():
    schema = OpSchema.of(aten.add.Tensor, spec((4,), (8, 8), shard(0)), spec((4,), (8, 8), shard(1)))
    _, strategy = choose(problem(ADD, schema))
    assert not strategy.output_specs[0].reductions


def test_no_rank_is_empty_where_a_row_needs_every_rank_to_hold_something():
    """7 over 2 ranks is 4 and 3, and 4 over 3 ranks is 2, 2 and 0: the first piece has the empty shard."""
    row = Row((shard(0),), (shard(0),), "d", nonempty=((0, 0),))
    for size, fits_both in ((7, False), (6, True)):
        x = spec((2, 3), (size,), REPLICATE, REPLICATE)
        schema = OpSchema.of(aten.clone.default, x)
        own_problem = Problem(schema, (row,), (x,), (x.tensor_meta,), (), (), (2, 3))
        assert (own_problem.conflict((0, 0)) is None) is fits_both
