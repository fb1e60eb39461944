"""Explanations: the planner's own choice, the cheapest of all, and the collectives that ranks really issue."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise.cli.call_text import find_op
from shardwise.comm import events
from shardwise.discovery.process import default_registry, use_registry
from shardwise.errors import CallError, MeshMismatchError, NoRuleError
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import REPLICATE, parse_placement, partial, shard
from shardwise.kernel.precedence import Origin
from shardwise.kernel.registry import Registrar, Registry
from shardwise.kernel.schema import OpStrategy, PlacementStrategy
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.chooser import Chooser
from shardwise.planning.problem import exhaustive
from shardwise.planning.results import schema_metas
from shardwise.planning.strategies import cheapest, make_call, problems
from shardwise.rule.authoring import full_mesh_rule, rule
from shardwise.testing.meshes import mesh as worker_mesh
from shardwise.tools.explain import explain, explain_call

aten = torch.ops.aten


def spec(mesh, shape, words, dtype=torch.float32):
    placements = [parse_placement(word) for word in words.split()]
    return TensorSpec(mesh, placements, TensorMeta.contiguous(shape, dtype))


@st.composite
def specs(draw, mesh, shape):
    kinds = st.sampled_from([REPLICATE, partial("sum"), *map(shard, range(len(shape)))])
    draws = draw(st.lists(kinds, min_size=mesh.ndim, max_size=mesh.ndim))
    return TensorSpec(mesh, draws, TensorMeta.contiguous(shape, torch.float32))


CALLS = {
    aten.mm.default: ((12, 5), (5, 64)),
    aten.add.Tensor: ((6, 1, 8), (7, 8)),
    aten.addmm.default: ((9,), (8, 5), (5, 9)),
}


@settings(max_examples=40, deadline=None)
@given(st.data())
@pytest.mark.parametrize("op", CALLS, ids=str)
def test_what_is_taken_is_the_planners_choice_and_the_cheapest(op, data):
    mesh = data.draw(st.sampled_from([(4,), (2, 2), (2, 3), (2, 2, 2)]).map(AbstractMesh))
    explanation = explain(op, *(data.draw(specs(mesh, shape)) for shape in CALLS[op]))
    (decision,) = explanation.decisions
    entry = default_registry().lookup(op)
    call = make_call(entry.rule, explanation.schema, schema_metas(explanation.schema))
    assert [decision.chosen] == cheapest(entry.rule, explanation.schema, call)
    costs = [c.strategy.cost for c in decision.ranked]
    assert costs == sorted(costs)
    assert decision.ranked[0].reason == ""
    assert all(c.reason for c in decision.ranked[1:])
    paid = sum(r.path.cost for r in explanation.redistributions)
    assert paid == pytest.approx(decision.chosen.cost, rel=1e-9, abs=0)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_list_is_what_exhaustive_search_finds(data):
    mesh = data.draw(st.sampled_from([(4,), (2, 2), (3, 2)]).map(AbstractMesh))
    op = data.draw(st.sampled_from(list(CALLS)))
    explanation = explain_call(op, [data.draw(specs(mesh, shape)) for shape in CALLS[op]], {}, limit=None)
    (decision,) = explanation.decisions
    rule_ = explanation.entry.rule
    (problem,) = problems(
        rule_, explanation.schema, make_call(rule_, explanation.schema, schema_metas(explanation.schema))
    )
    every = {choice: strategy.cost for choice, strategy in exhaustive(problem)}
    ranked = list(Chooser(problem).ranked())
    assert len(ranked) == len(set(ranked)) == decision.legal == len(decision.ranked)
    assert set(ranked) == set(every)
    assert [every[choice] for choice in ranked] == pytest.approx(sorted(every.values()), rel=1e-9, abs=0)
    refused = sum(e.count for e in decision.exclusions if e.mesh_dim is None)
    kept = 1
    for m in range(mesh.ndim):
        kept *= len(problem.rows) - sum(e.count for e in decision.exclusions if e.mesh_dim == m)
    assert decision.counted
    assert decision.legal + refused == kept
    assert decision.combinations == len(problem.rows) ** mesh.ndim


def test_what_is_printed_of_an_explanation_is_the_call_and_the_choice_in_a_line():
    mesh = AbstractMesh((2, 2))
    text = repr(explain(aten.mm.default, spec(mesh, (8, 4), "S(0) R"), spec(mesh, (4, 6), "R P(sum)")))
    assert text == (
        "<Explanation of aten.mm.default(self=f32[8,4] [S(0), R], mat2=f32[4,6] [R, P(sum)]) on mesh 2x2: "
        "shard m | R, sum -> sum; 0 collectives>"
    )


def test_losers_say_what_they_cost_more_and_for_what():
    mesh = AbstractMesh((2, 2))
    (decision,) = explain(aten.mm.default, spec(mesh, (8, 16), "S(0) R"), spec(mesh, (16, 32), "R S(1)")).decisions
    reasons = {c.strategy.names: c.reason for c in decision.ranked}
    assert reasons["shard m", "shard n"] == ""
    assert reasons["shard m", "R"].endswith("µs for mat2")
    assert reasons["R", "R"].endswith("µs for self, mat2")
    dropped = {(e.mesh_dim, e.rows) for e in decision.exclusions}
    assert (0, ("sum, R -> sum", "avg, R -> avg")) in dropped


def test_a_tie_is_explained_by_the_order_of_the_rows():
    mesh = AbstractMesh((4,))
    twice = rule(aten.mm.default, "m k, k n -> m n", replicate=["k"], partial=["avg, R -> avg", "R, avg -> avg"])
    registrar, registry = Registrar(Origin("ties")), Registry()
    registrar.add(twice)
    registry.accept(registrar)
    with use_registry(registry):
        (decision,) = explain(aten.mm.default, spec(mesh, (8, 8), "R"), spec(mesh, (8, 8), "R")).decisions
    by_rows = {c.strategy.names: c.reason for c in decision.ranked}
    assert by_rows["R",] == ""
    (decision,) = explain(aten.mm.default, spec(mesh, (8, 8), "S(1)"), spec(mesh, (8, 8), "S(1)")).decisions
    tied = [c for c in decision.ranked[1:] if c.strategy.cost == decision.chosen.cost]
    assert all(c.reason == "same cost, later in the rule's order" for c in tied)


def test_combinations_that_do_not_go_together_are_counted_with_their_reason():
    mesh = AbstractMesh((2, 2))
    (decision,) = explain(aten.add.Tensor, spec(mesh, (8, 4), "P(max) R"), spec(mesh, (8, 4), "R R")).decisions
    (mixed,) = [e for e in decision.exclusions if e.mesh_dim is None]
    assert "do not commute" in mixed.reason
    assert mixed.count > 0
    uneven = explain(aten.view.default, spec(mesh, (3, 12), "R R"), [3, 6, 2]).decisions[0]
    reasons = {e.reason for e in uneven.exclusions}
    assert "dim 1 of self would be in 4 pieces, and 6 does not divide by 4" in reasons


def test_positions_of_lists_are_explained_one_by_one():
    mesh = AbstractMesh((2,))
    a, b = spec(mesh, (8,), "S(0)"), spec(mesh, (4,), "R")
    explanation = explain(aten._foreach_add.List, [a, a, b], [a.with_placements([REPLICATE])] * 2 + [b])
    assert [d.positions for d in explanation.decisions] == [(0, 1), (2,)]
    assert [d.operands for d in explanation.decisions] == [("self", "other")] * 2
    assert [r.operand for r in explanation.redistributions] == ["other[0]", "other[1]"]
    assert [r.placements for r in explanation.results] == [(shard(0),), (shard(0),), (REPLICATE,)]


def test_a_rule_of_the_full_mesh_is_explained():
    @full_mesh_rule(aten.clone.default)
    def stay(mesh, schema):
        x = schema.specs[0]
        whole = x.with_placements([REPLICATE] * mesh.ndim)
        return OpStrategy((PlacementStrategy((whole,), (whole,), (1e-4,)), PlacementStrategy((x,), (x,), (0.0,))))

    registrar, registry = Registrar(Origin("full")), Registry()
    registrar.add(stay)
    registry.accept(registrar)
    x = spec(AbstractMesh((2, 2)), (4, 4), "S(0) R")
    with use_registry(registry):
        (decision,) = explain(aten.clone.default, x).decisions
    assert decision.chosen.input_specs == (x,)
    assert [c.reason for c in decision.ranked] == ["", "+100.0 µs for self"]


def test_many_mesh_dims_take_little_time_and_say_how_many_there_are():
    mesh = AbstractMesh((2,) * 5)
    x = spec(mesh, (64, 64), "S(0) S(1) P(sum) R R")
    (decision,) = explain_call(aten.mm.default, (x, x), {}, limit=20).decisions
    assert len(decision.ranked) == 20
    assert decision.combinations == 8**5
    assert decision.legal > 1000


def test_other_rules_for_the_op_are_named():
    undo = default_registry().override(rule(aten.mm.default, "m k, k n -> m n", replicate=["k"]))
    try:
        x = spec(AbstractMesh((2,)), (4, 4), "R")
        explanation = explain(aten.mm.default, x, x)
    finally:
        undo()
    assert explanation.entry.origin.plugin == "override"
    assert [e.origin.plugin for e in explanation.others] == ["shardwise-matmul"]


# -- refusals --------------------------------------------------------------------------------------------------------


def test_what_the_call_would_raise_is_raised():
    mesh = AbstractMesh((4,))
    x = spec(mesh, (8, 8), "R")
    with pytest.raises(NoRuleError), use_registry(Registry()):
        explain(aten.mm.default, x, x)
    with pytest.raises(MeshMismatchError):
        explain(aten.mm.default, x, spec(AbstractMesh((2,)), (8, 8), "R"))


@pytest.mark.parametrize(
    ("args", "kwargs", "found"),
    [
        ((), {}, "'self', 'mat2' must be given"),
        ((1, 2, 3), {}, "3 positional arguments are given and it takes 2"),
        ((1, 2), {"beta": 1}, "it has no argument 'beta'"),
        ((1, 2), {}, "no argument is a tensor that lies on a mesh"),
    ],
)
def test_a_call_that_the_schema_does_not_allow(args, kwargs, found):
    with pytest.raises(CallError, match=found) as caught:
        explain(aten.mm.default, *args, **kwargs)
    assert "Tensor self, Tensor mat2" in str(caught.value)


def test_a_call_that_torch_refuses():
    mesh = AbstractMesh((2,))
    with pytest.raises(CallError, match=r"torch refuses it: .*same reduction dim"):
        explain(aten.mm.default, spec(mesh, (8, 8), "R"), spec(mesh, (4, 4), "R"))


def test_an_op_that_torch_takes_apart_names_its_parts():
    mesh = AbstractMesh((2,))
    with pytest.raises(CallError, match=r"runs it as aten\._unsafe_view\.default, aten\.mul\.Tensor"):
        explain(aten.kron.default, spec(mesh, (8, 4), "R"), spec(mesh, (6, 4), "R"))


@pytest.mark.slow
@pytest.mark.sample
def test_no_process_group_is_needed_and_import_shardwise_does_not_load_it():
    code = (
        "import sys, shardwise as sw; assert 'shardwise.tools.explain' not in sys.modules;"
        "import torch.distributed as dist; sw.explain; assert not dist.is_initialized()"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- what ranks really issue -----------------------------------------------------------------------------------------

# Names, because functions that hold ops cannot be sent to workers.
ISSUED = [
    ("mm.default", [((8, 16), "S(0) R"), ((16, 32), "S(1) S(0)")]),
    ("mm.default", [((7, 5), "S(0) S(1)"), ((5, 9), "P(sum) S(1)")]),
    ("mm.default", [((8, 16), "P(avg) S(1)"), ((16, 4), "S(0) P(sum)")]),
    ("add.Tensor", [((8, 4), "S(0) S(1)"), ((8, 4), "S(1) S(0)")]),
    ("add.Tensor", [((8, 4), "P(max) P(max)"), ((8, 4), "S(1) S(0)")]),
    ("addmm.default", [((6,), "S(0) R"), ((8, 4), "R P(sum)"), ((4, 6), "S(0) S(0)")]),
    ("add_.Tensor", [((9, 4), "R S(1)"), ((9, 4), "S(0) S(0)")]),
    ("cat.default", [[((4, 3), "S(0) S(1)"), ((2, 3), "S(0) R")]]),
    ("_foreach_mul.List", [[((8,), "S(0) R"), ((4,), "R R")], [((8,), "R S(0)"), ((4,), "P(sum) S(0)")]]),
    # The rest have lowerings that communicate.
    ("var.correction", [((8, 6), "S(0) S(1)"), [0, 1]]),
    ("linalg_vector_norm.default", [((8, 6), "S(0) S(1)")]),
    ("argmax.default", [((8, 6), "S(0) S(1)"), 0]),
    ("logsumexp.default", [((8, 6), "S(0) S(1)"), [0]]),
]


def is_tensor(value):
    return isinstance(value, tuple)


def each(value, make):
    """``make(shape, placements)`` for each tensor that is described in an argument; the rest as it is."""
    if isinstance(value, list) and all(map(is_tensor, value)):
        return [make(*v) for v in value]
    return make(*value) if is_tensor(value) else value


def issued(number):
    """What one call issues on this rank, and what its explanation says of it."""
    name, args = ISSUED[number]
    op, device_mesh = find_op(name, (), {}), worker_mesh((2, 2))

    def distributed(shape, words):
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        return sw.distribute_tensor(whole, device_mesh, [parse_placement(w) for w in words.split()])

    operands = [each(arg, distributed) for arg in args]
    explanation = sw.explain(op, *operands)
    op(*operands)  # with the agreements of a first call
    operands = [each(arg, distributed) for arg in args]  # what was moved for the first call would be there
    seen = []
    with events.observe(seen.append):
        op(*operands)
    assert explanation.lowering is None or explanation.lowering.complete
    expected = [(c.kind, c.mesh_dims, c.ranks, c.nbytes) for c in explanation.collectives]
    return [(e.kind, e.mesh_dims, e.group_size, e.nbytes) for e in seen], expected


@pytest.mark.parametrize("number", range(len(ISSUED)), ids=lambda n: f"{n}-{ISSUED[n][0]}")
def test_the_collectives_are_those_that_ranks_issue(pool, number):
    seen, expected = pool.run(issued, number)[0]
    assert seen == expected
    assert seen, "a sample that communicates nothing shows nothing"
    name, args = ISSUED[number]
    on_paper = explain(
        find_op(name, (), {}), *(each(a, lambda shape, words: spec(AbstractMesh((2, 2)), shape, words)) for a in args)
    )
    assert [(c.kind, c.mesh_dims, c.ranks, c.nbytes) for c in on_paper.collectives] == seen


def all_kinds_of_communication():
    """A rule whose lowering communicates in every way that there is, explained and run."""

    def talk(local, x):
        x = local.comm.all_reduce(x, "sum", (0, 1)) + local.comm.all_gather(x, 1)[0]
        x = x + local.comm.all_to_all([x] * 2, 0)[1] + local.comm.shift(x, 1)
        return x + torch.rand(x.shape)

    op = find_op("aten.neg.default", (), {})
    talking = rule(op, "m n -> m n", lowering={("*", "R"): talk})
    undo = default_registry().override(talking)
    try:
        x = sw.distribute_tensor(torch.ones(8, 6), worker_mesh((2, 2)), [shard(0), shard(1)])
        op(x)
        before = torch.get_rng_state()
        explanation = explain(op, x)
        assert torch.equal(before, torch.get_rng_state())
        seen = []
        with events.observe(seen.append):
            op(x)
    finally:
        undo()
    return [(e.kind, e.mesh_dims, e.group_size, e.nbytes) for e in seen], [
        (c.kind, c.mesh_dims, c.ranks, c.nbytes) for c in explanation.collectives
    ]


def test_every_way_of_communicating_in_a_lowering_is_told(pool):
    seen, heard = pool.run(all_kinds_of_communication)[0]
    assert heard == seen
    kinds = ["all_reduce", "all_gather", "all_to_all", "all_to_all", "all_to_all", "shift"]
    assert [kind for kind, *_ in seen] == kinds


def test_a_lowering_that_data_decides_is_told_as_such():
    mesh = AbstractMesh((2,))
    explanation = explain(aten.equal.default, spec(mesh, (4,), "S(0)"), spec(mesh, (4,), "S(0)"))
    assert explanation.lowering is not None
    assert not explanation.lowering.complete


def test_an_op_without_a_rule_is_explained_by_the_calls_that_it_runs_as():
    four, registry = AbstractMesh((4,)), Registry()
    a, b = spec(four, (8, 4), "S(0)"), spec(four, (8, 4), "R")
    registrar = Registrar(Origin("some"))
    for op in (aten.mul.Tensor, aten.add.Tensor):
        registrar._by_op[op] = default_registry().lookup(op)
    registry.accept(registrar)
    with use_registry(registry):
        explanation = explain(aten.addcmul.default, a, b, b)
        with pytest.raises(NoRuleError, match=r"no rule for aten\.div\.Tensor"):
            explain(aten.addcdiv.default, a, b, b)
    assert explanation.entry.rule.text == "decomposed into aten.mul.Tensor, aten.add.Tensor (torch's decomposition)"
    assert [str(part.schema.op) for part in explanation.parts] == [
        "aten.mul.Tensor",
        "aten.mul.Tensor",
        "aten.add.Tensor",
    ]
    assert explanation.results == explanation.parts[-1].results
    assert explanation.results[0].placements == (shard(0),)
    assert explanation.collectives == []
