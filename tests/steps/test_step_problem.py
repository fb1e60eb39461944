"""The problem of a step: it says what a recorded step sends, and its solution is the best of all assignments."""

import random
from collections import Counter
from fractions import Fraction
from itertools import product

import pytest
import torch
from fake_meshes import fake_mesh
from test_training import MLP, TENSOR, Transformer, floats, ids
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.comm.events import observe
from shardwise.engine.decided import in_force, use_decisions
from shardwise.engine.shared_moves import keeping_moves
from shardwise.errors import MemoryPlanError
from shardwise.kernel import dispatcher
from shardwise.kernel.placements import show_all
from shardwise.planning.cost import KINDS
from shardwise.program import joint_bound, step_limit, step_solution
from shardwise.program.amounts import size_text
from shardwise.program.cost_graph import FORBIDDEN
from shardwise.program.least_memory import LeastMemory
from shardwise.program.moment_prices import PRICE_BITS, MomentPrices
from shardwise.program.step_bound import step_bound
from shardwise.program.step_factors import StepFactors
from shardwise.program.step_limit import PricedSearch
from shardwise.program.step_memory import StepMemory
from shardwise.program.step_problem import StepProblem
from shardwise.program.step_repair import Repair
from shardwise.program.step_solution import MeshDimProblem, exchanged, solve_step
from shardwise.steps.costs import WorkCosts
from shardwise.steps.recording import Recording
from shardwise.steps.sent import sent_by
from shardwise.steps.step_decision import decide_step
from shardwise.tools.explain import explain
from shardwise.tools.rehearse import RankWatch


def observed(run):
    """The collectives of a run, by kind, mesh dims and bytes."""
    sent = Counter()

    def saw(event):
        sent[event.kind, event.mesh_dims, event.nbytes] += 1

    with observe(saw):
        run()
    return sent


def predicted(problem, assignment, costs):
    sent = Counter()
    for one, times in sent_by(problem, assignment, costs).items():
        sent[one.kind, one.mesh_dims, one.nbytes] += times
    return sent


def recorded(run):
    """What a run sends, and its problem with its costs of calls."""
    recording = Recording()
    with recording.running():
        sent = observed(run)
    graph = recording.graph()
    costs = WorkCosts(graph)
    return sent, StepProblem(graph, costs), costs, recording


def step_of(model, x, target):
    def run():
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()

    return run


CASES = {
    "an mlp on (4,)": ((4,), MLP, {"up.*": [Shard(0)], "down.weight": [Shard(1)]}, [Replicate()], (8, 6), 5),
    "an mlp on 2x2": ((2, 2), MLP, {"up.*": {"tp": Shard(0)}}, [Shard(0), Replicate()], (8, 6), 5),
    "a transformer on (4,)": (
        (4,),
        Transformer,
        {k: list(v.values()) for k, v in TENSOR.items()},
        [Replicate()],
        None,
        12,
    ),
    "a transformer on 2x2": ((2, 2), Transformer, TENSOR, [Shard(0), Replicate()], None, 12),
}


def step_in(mesh, case):
    _, make, partition, data, shape, classes = CASES[case]
    model = make().double()
    sw.distribute_module(model, mesh, partition, src_data_rank=None)
    x = ids(classes, 4, 6) if shape is None else floats(*shape)
    target = ids(classes, 4, 6) if shape is None else ids(classes, shape[0])
    x, target = (sw.distribute_tensor(t, mesh, data, src_data_rank=None) for t in (x, target))
    return step_of(model, x, target)


SAMPLE = [pytest.mark.slow, pytest.mark.sample]
EVERYDAY = ("an mlp on 2x2", "a transformer on (4,)")
SOME_CASES = [pytest.param(case, marks=() if case in EVERYDAY else SAMPLE) for case in CASES]
SOME_SEEDS = [0, *(pytest.param(seed, marks=SAMPLE) for seed in range(1, 4))]


@pytest.mark.parametrize("case", SOME_CASES)
def test_the_recorded_choices_send_what_was_sent(case):
    with fake_mesh(*CASES[case][0]) as mesh:
        with keeping_moves(0):  # a problem counts each move, as if nothing had been moved before
            sent, problem, costs, _ = recorded(step_in(mesh, case))
        assert predicted(problem, problem.as_recorded(), costs) == sent


@pytest.mark.parametrize("case", SOME_CASES)
def test_a_step_by_decisions_sends_what_was_predicted(case):
    with fake_mesh(*CASES[case][0]) as mesh:
        step = step_in(mesh, case)
        _, problem, costs, recording = recorded(step)
        best = solve_step(problem, [problem.as_recorded()])
        learned = decide_step(problem.graph)
        recording.tag_leaves(learned.decisions.depth)
        use_decisions(learned.decisions)
        sent = observed(step)
        assert learned.torn == 0
        assert sent == predicted(problem, best, costs)


def collectives_of(moves):
    return Counter((s.kind, s.mesh_dims, s.held) for move in moves for s in move.steps if s.kind in KINDS and s.held)


def test_moves_of_results_are_told_to_observers_and_explained():
    case = "a transformer on (4,)"
    with fake_mesh(*CASES[case][0]) as mesh:
        step = step_in(mesh, case)
        _, problem, costs, recording = recorded(step)
        best = solve_step(problem, [problem.as_recorded()])
        learned = decide_step(problem.graph)
        recording.tag_leaves(learned.decisions.depth)
        use_decisions(learned.decisions)
        plans, watch = [], RankWatch(lambda _phase, _ops: None)
        with dispatcher.observe(plans.append), watch.installed(), watch.watching():
            step()
        moves = [move for plan in plans for move in plan.after or () if move is not None]
        foreseen = Counter()
        for one, times in sent_by(problem, best, costs).items():
            if one.purpose == "rests":
                foreseen[one.kind, one.mesh_dims, one.nbytes] += times
        assert collectives_of(moves) == foreseen
        assert foreseen
        by_op = Counter()
        for use, times in watch.counts.items():
            if use.op.endswith(", its result"):
                by_op[use.kind, use.mesh_dims] += times
        assert by_op == Counter([(kind, dims) for kind, dims, _ in foreseen.elements()])
        before = in_force.known, in_force.unknown
        explained = 0
        for plan in plans:
            schema = plan.schema
            if plan.after is None:
                continue
            args, kwargs = schema.signature.unbind(list(schema.values))
            explanation = explain(schema.op, *args, **kwargs)
            assert [r and r.placements for r in explanation.results] == [r and r.placements for r in plan.outs]
            (decision,) = explanation.decisions
            assert decision.chosen.names == plan.names
            assert all(one.reason for one in decision.ranked[1:])
            (move,) = [move for move in plan.after if move is not None]
            (moved,) = explanation.after
            assert (moved.source.placements, moved.path.steps) == (move.made.placements, move.steps)
            assert move.reason == f"result rests as {show_all(plan.outs[0].placements)} by the plan"
            assert [c.purpose for c in explanation.collectives].count(move.reason) == len(collectives_of([move]))
            explained += 1
        assert explained
        assert (in_force.known, in_force.unknown) == before


def test_two_recordings_give_the_same_decisions():
    fingerprints = []
    for _ in range(2):
        with fake_mesh(2, 2) as mesh:
            _, problem, _, _ = recorded(step_in(mesh, "a transformer on 2x2"))
            fingerprints.append(decide_step(problem.graph).decisions.fingerprint)
    assert fingerprints[0] == fingerprints[1]


def test_a_call_without_one_of_its_results_has_all_its_rows():
    """The backward pass of the first layer makes no gradient of the program's input."""
    with fake_mesh(2, 2) as mesh:
        model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4))
        sw.distribute_module(model, mesh, src_data_rank=None)
        x = sw.distribute_tensor(torch.ones(4, 8), mesh, [Shard(0)] * 2, src_data_rank=None)
        _, problem, _, _ = recorded(lambda: model(x).sum().backward())
        absent = [place for place, call in enumerate(problem.graph.calls) if None in call.results]
        assert absent
        assert all(len(of) > 1 for place in absent for of in problem.choices[place].legal)


# -- brute force -------------------------------------------------------------------------------------------------


def chain(mesh, seed):
    """A few calls with a tensor that is used twice, on tensors of odd sizes and layouts."""
    generator = torch.Generator().manual_seed(seed)
    placements = [Replicate(), Shard(0), Shard(1)]

    def tensor(*shape):
        at = [placements[int(torch.randint(3, (), generator=generator))] for _ in range(mesh.ndim)]
        return sw.distribute_tensor(torch.ones(*shape), mesh, at, src_data_rank=None)

    x, w, v = tensor(6, 8), tensor(8, 4), tensor(4, 8)

    def run():
        hidden = x @ w
        (torch.relu(hidden) @ v).redistribute(placements=x.placements)
        hidden.sum(0).redistribute(placements=[Replicate()] * mesh.ndim)

    return run


def every_assignment(problem):
    """All rows of all calls and all layouts of tensors that rest."""
    start = problem.as_recorded()
    shape = tuple(problem.graph.mesh.shape)
    per_call = []
    for choices in problem.choices:
        combinations = product(*(choices.legal[m] for m in range(len(shape))))
        per_call.append([list(rows) for rows in combinations if choices.allows(rows)])
    layouts = {}
    for t in sorted(problem.resting):
        ndim = problem.graph.tensors[t].spec.ndim
        one = [Replicate(), *(Shard(d) for d in range(ndim)), *([] if t in problem.free else [sw.Partial()])]
        layouts[t] = list(product(one, repeat=len(shape)))
    for rows in product(*per_call):
        for rests in product(*layouts.values()):
            candidate = start.copy()
            candidate.rows = [list(r) for r in rows]
            candidate.rests = dict(zip(layouts, rests, strict=True))
            yield candidate


@pytest.mark.parametrize("seed", SOME_SEEDS)
def test_the_solution_is_the_best_of_all_assignments_and_so_is_the_bound(seed):
    with fake_mesh(4) as mesh:
        _, problem, costs, _ = recorded(chain(mesh, seed))
        best = solve_step(problem, [problem.as_recorded()])
        assert best.cost == min(problem.cost(candidate) for candidate in every_assignment(problem))
        for reference in (best, problem.as_recorded()):
            assert step_bound(problem, reference, work_of(problem, costs)) == best.cost


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_a_mesh_dim_is_solved_again_only_if_another_one_has_changed(shape, monkeypatch):
    solved = []
    improved = MeshDimProblem.improved

    def watched(self):
        better = improved(self)
        solved.append((self.m, better.cost < self.held.cost))
        return better

    monkeypatch.setattr(MeshDimProblem, "improved", watched)
    with fake_mesh(*shape) as mesh:
        problem = recorded(chain(mesh, 0))[1]
        solve_step(problem, [problem.as_recorded()])
    last = max(i for i, (_, better) in enumerate(solved) if better)
    assert solved[last + 1 :] == [(1 - solved[last][0], False)] * (len(shape) - 1)


@pytest.mark.parametrize("seed", SOME_SEEDS)
def test_no_change_on_one_mesh_dim_improves_the_solution(seed):
    with fake_mesh(2, 2) as mesh:
        _, problem, _, _ = recorded(chain(mesh, seed))
        best = solve_step(problem, [problem.as_recorded()])
        for m in range(2):
            for place, choices in enumerate(problem.choices):
                for r in choices.legal[m]:
                    changed = best.copy()
                    changed.rows[place][m] = r
                    assert not choices.allows(changed.rows[place]) or problem.cost(changed) >= best.cost


# -- bounds --------------------------------------------------------------------------------------------------------


def work_of(problem, costs):
    return lambda place, rows: costs.at_least(problem.graph.calls[place], problem.choices[place], rows) * 1e9


def some_assignments(problem, count, seed):
    """Random legal rows, with every tensor where its row leaves it or whole."""
    draw = random.Random(seed)  # noqa: S311  # no secret
    while count:
        candidate = problem.as_replicated()
        for rows, choices in zip(candidate.rows, problem.choices, strict=True):
            new = [draw.choice(of) for of in choices.legal]
            rows[:] = new if choices.allows(new) else rows
        for t in problem.resting:
            if draw.random() < 0.5 and t not in problem.free:
                candidate.rests[t] = problem.made(candidate, t)
        candidate.cost = problem.cost(candidate)
        if candidate.cost < FORBIDDEN:
            count -= 1
            yield candidate


@pytest.mark.parametrize("shape", [(2, 2), pytest.param((2, 3, 4), marks=SAMPLE)])
@pytest.mark.parametrize("seed", SOME_SEEDS)
def test_no_assignment_is_below_the_bound(seed, shape):
    with fake_mesh(*shape) as mesh:
        _, problem, costs, _ = recorded(chain(mesh, seed))
        some = list(some_assignments(problem, 12, seed))
        best = solve_step(problem, [problem.as_replicated(), *some])
        least = min(best.cost, *(one.cost for one in some))
        bounds = [step_bound(problem, one, work_of(problem, costs)) for one in (best, *some)]
        assert max(bounds) <= least
        assert bounds[0] > 0.99 * least


def pair(mesh, seed):
    """Two calls, few enough to go through all assignments on two mesh dims."""
    generator = torch.Generator().manual_seed(seed)
    places = [Replicate(), Shard(0), Shard(1)]
    x, w = (
        sw.distribute_tensor(
            torch.ones(*shape),
            mesh,
            [places[int(torch.randint(3, (), generator=generator))] for _ in range(mesh.ndim)],
            src_data_rank=None,
        )
        for shape in ((600, 800), (800, 400))
    )
    return lambda: torch.relu(x @ w).redistribute(placements=[Shard(0)] * mesh.ndim)


@pytest.mark.parametrize("seed", SOME_SEEDS)
def test_the_bound_on_two_mesh_dims_is_close_to_the_best_of_all_assignments(seed):
    with fake_mesh(2, 3) as mesh:
        _, problem, costs, _ = recorded(pair(mesh, seed))
        least = min(problem.cost(candidate) for candidate in every_assignment(problem))
        best = solve_step(problem, [problem.as_recorded(), problem.as_replicated()])
        assert least <= best.cost
        for reference in (best, problem.as_replicated()):
            assert 0.9999 * least < step_bound(problem, reference, work_of(problem, costs)) <= least


@pytest.mark.parametrize("seed", SOME_SEEDS)
def test_parts_by_mesh_dim_bound_what_is_too_large_for_joint_tables(seed, monkeypatch):
    monkeypatch.setattr(joint_bound, "_MOST_ENTRIES", 0)
    with fake_mesh(2, 3) as mesh:
        _, problem, costs, _ = recorded(pair(mesh, seed))
        least = min(problem.cost(candidate) for candidate in every_assignment(problem))
        best = solve_step(problem, [problem.as_recorded(), problem.as_replicated()])
        assert 0.9 * least < step_bound(problem, best, work_of(problem, costs)) <= least


@pytest.mark.parametrize("shape", [(2, 2), pytest.param((2, 3, 4), marks=SAMPLE)])
@pytest.mark.parametrize("price", [0, 1000])
@pytest.mark.parametrize("seed", SOME_SEEDS)
def test_close_costs_of_moves_are_those_of_the_searches_but_for_some_nanoseconds(seed, price, shape):
    with fake_mesh(*shape) as mesh:
        _, problem, costs, _ = recorded(chain(mesh, seed))
        problem = StepProblem(
            problem.graph, costs, memory=StepMemory(problem.graph, Fraction(4)), price=Fraction(price)
        )
        best = solve_step(problem, [problem.as_recorded(), problem.as_replicated()])
        moves = {
            factor: close
            for factor in StepFactors(problem, best, work_of(problem, costs)).uses
            if (close := factor.close())
        }
        assert moves
        draw = random.Random(seed)  # noqa: S311  # no secret
        for factor, (table, is_whole) in moves.items():
            assert is_whole, "no call of this program makes a strided shard"
            for _ in range(8):
                kinds = tuple(draw.randrange(n) for n in table.shape)
                exact = factor.exact(kinds)
                low = min(table[kinds], FORBIDDEN)
                assert low <= exact <= low * (1 + 1e-6) + 4 or exact == FORBIDDEN == low


# -- free parameters and memory ------------------------------------------------------------------------------------


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return (x * self.weight).sum()


def with_free_weight(mesh, price=0):
    """The problem of a step whose only parameter may lie anywhere."""
    model = Scale()
    sw.distribute_module(model, mesh, src_data_rank=None)
    x = sw.distribute_tensor(torch.ones(8), mesh, [Shard(0)] * mesh.ndim, src_data_rank=None)

    _, problem, costs, _ = recorded(lambda: model(x).backward())
    (weight,) = {sink.leaf for sink in problem.graph.sinks if sink.leaf is not None}
    memory = StepMemory(problem.graph, Fraction(4))
    assert memory.kept_bytes(weight, (Replicate(),) * mesh.ndim) == 4 * 8 * 4
    assert memory.kept_bytes(weight, (Shard(0),) * mesh.ndim) == 4 * 2 * 4
    return StepProblem(problem.graph, costs, frozenset([weight]), memory, Fraction(price)), weight


@pytest.mark.parametrize("price", [0, 10, 10_000])
def test_a_free_parameter_lies_where_it_is_best_of_all_assignments(price):
    with fake_mesh(4) as mesh:
        problem, weight = with_free_weight(mesh, price)
        best = solve_step(problem, [problem.as_recorded()])
        assert best.cost == min(problem.cost(candidate) for candidate in every_assignment(problem))
        assert price == 0 or best.rests[weight] == (Shard(0),)


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@pytest.mark.parametrize("price", [0, 10, 10_000])
def test_no_priced_assignment_is_below_the_bound(price, shape):
    with fake_mesh(*shape) as mesh:
        problem, _ = with_free_weight(mesh, price)
        best = solve_step(problem, [problem.as_replicated(), *some_assignments(problem, 8, 0)])
        bound = step_bound(problem, best, work_of(problem, problem.call_costs))
        assert bound == best.cost if len(shape) == 1 else 0 < bound <= best.cost


def test_a_free_parameter_has_its_gradient_where_it_lies():
    with fake_mesh(4) as mesh:
        problem, weight = with_free_weight(mesh, 10_000)
        best = solve_step(problem, [problem.as_recorded()])
        (sink,) = (sink for sink in problem.graph.sinks if sink.leaf == weight)
        assert problem.target(best, sink) == best.rests[weight] == (Shard(0),) != sink.placements


def test_exchanged_mesh_dims_are_found():
    """Each mesh dim is at its best where it is, and both would be better exchanged."""
    with fake_mesh(2, 4) as mesh:
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False))
        sw.distribute_module(
            model, mesh, {"0.weight": {"dp": Shard(0)}, "2.weight": {"dp": Shard(1)}}, src_data_rank=None
        )
        x = sw.distribute_tensor(torch.ones(8, 64), mesh, [Replicate(), Replicate()], src_data_rank=None)
        _, problem, costs, _ = recorded(lambda: model(x).sum().backward())
        weights = frozenset(sink.leaf for sink in problem.graph.sinks if sink.leaf is not None)
        free = StepProblem(problem.graph, costs, weights)
        for start in (free.as_recorded(), solve_step(free, [free.as_recorded()])):
            turned = exchanged(free, start, 0, 1)
            assert turned.cost == free.cost(turned)
            for weight in weights:
                assert turned.rests[weight] == start.rests[weight][::-1]
            assert exchanged(free, turned, 0, 1).is_same(start)
        with_exchanges = solve_step(free, [free.as_recorded()], exchanges=True)
        assert with_exchanges.cost <= solve_step(free, [free.as_recorded()]).cost


# -- what a call holds while it runs -------------------------------------------------------------------------------


def with_memory(mesh, make, seed):
    """The problem of a step with its memory, and the starts and the work that its search takes."""
    _, problem, costs, _ = recorded(make(mesh, seed))
    problem = StepProblem(problem.graph, costs, frozenset(), StepMemory(problem.graph, Fraction(4)))
    return problem, [problem.as_recorded(), problem.as_replicated()], work_of(problem, costs)


def costs_within(problem):
    """By limit on the bytes of a rank, the least cost of all assignments that keep it."""
    every = sorted(
        (problem.moments.peak(one), cost)
        for one in every_assignment(problem)
        if (cost := problem.cost(one)) < FORBIDDEN
    )
    least = {}
    for peak, cost in every:
        if cost < min(least.values(), default=FORBIDDEN):
            least[peak] = cost
    return least


def forked(mesh, seed):
    """A tensor that is summed along both dims and added up: two ways that meet again."""
    generator = torch.Generator().manual_seed(seed)
    places = [Replicate(), Shard(0), Shard(1)]

    def tensor(*shape):
        at = [places[int(torch.randint(3, (), generator=generator))] for _ in range(mesh.ndim)]
        return sw.distribute_tensor(torch.ones(*shape), mesh, at, src_data_rank=None)

    x, w, end = tensor(12, 8), tensor(8, 8), tensor(8, 12)
    return lambda: ((x @ w).t() + x.t()).redistribute(placements=end.placements)


LIMITED = [
    pytest.param(make, shape, seed, marks=SAMPLE if seed not in seeds else ())
    for make, shape, seeds in ((chain, (4,), (0, 2)), (pair, (2, 3), (3,)), (forked, (4,), (0,)))
    for seed in range(8)
]


@pytest.mark.parametrize(("make", "shape", "seed"), LIMITED)
def test_where_any_assignment_keeps_a_limit_one_is_found_and_none_is_below_the_bound(make, shape, seed):
    with fake_mesh(*shape) as mesh:
        problem, starts, work = with_memory(mesh, make, seed)
        within = costs_within(problem)
        for limit, least in within.items():
            search = PricedSearch(problem, starts)
            best = search.best(limit)
            assert problem.moments.peak(best) <= limit
            assert best.cost == problem.cost(best)
            assert search.bound(limit, work) <= least <= best.cost <= 1.25 * least
        assert best.cost == least  # the last limit is none
        assert LeastMemory(problem, starts[0]).found().nbytes <= min(within)
        search = PricedSearch(problem, starts)
        with pytest.raises(MemoryPlanError, match="of it in"):
            search.best(min(within) - 1)


@pytest.mark.parametrize(("make", "shape", "seed"), LIMITED)
def test_single_changes_find_the_least_that_any_assignment_holds(make, shape, seed):
    with fake_mesh(*shape) as mesh:
        problem, starts, _ = with_memory(mesh, make, seed)
        limit, least = min(costs_within(problem).items())
        found = [Repair(problem, limit, start, 100_000).run() for start in starts]
        assert [problem.moments.peak(one) for one in found] == [limit] * len(starts)
        assert [problem.cost(one) for one in found] == [one.cost for one in found]
        assert min(one.cost for one in found) <= 1.25 * least
        assert all(one.is_same(again) for one, again in zip(starts, with_memory(mesh, make, seed)[1], strict=True))


def test_a_repair_without_trials_changes_nothing():
    with fake_mesh(4) as mesh:
        problem, starts, _ = with_memory(mesh, chain, 0)
        repair = Repair(problem, 1, starts[0], 0)
        assert repair.run().is_same(starts[0])
        assert repair.spent == 0


def test_where_nothing_is_kept_for_later_the_error_says_so():
    with fake_mesh(4) as mesh:
        problem, starts, _ = with_memory(mesh, chain, 0)
        with pytest.raises(
            MemoryPlanError, match=r"of it in aten\.\w+.*\. Nothing is kept for later\. Use a larger mesh"
        ):
            PricedSearch(problem, starts).best(1)


def test_a_limit_that_nothing_can_keep_is_refused_without_a_search(monkeypatch):
    with fake_mesh(4) as mesh:
        problem, starts, _ = with_memory(mesh, chain, 0)
        least = LeastMemory(problem, starts[0]).found()
        monkeypatch.setattr(step_limit, "solve_step", lambda *_, **__: pytest.fail("it was searched for"))
        with pytest.raises(
            MemoryPlanError, match=f"every plan holds at least {size_text(least.nbytes)} at a time, .* of it in"
        ):
            PricedSearch(problem, starts).best(least.nbytes - 1)


def changed(problem, start, count):
    """Assignments that differ from one by a few rows, as far as they are legal."""
    draw = random.Random(0)  # noqa: S311  # no secret
    current = start
    for _ in range(count):
        new = current.copy()
        place = draw.randrange(len(problem.choices))
        rows = [draw.choice(of) for of in problem.choices[place].legal]
        new.rows[place] = rows if problem.choices[place].allows(rows) else new.rows[place]
        new.cost = problem.cost(new)
        current = new if new.cost < FORBIDDEN else current
    return current


@pytest.mark.parametrize("frees", [False, True])
@pytest.mark.parametrize("case", SOME_CASES)
def test_what_prices_count_is_what_is_held(case, frees):
    """With a price on each moment, an assignment costs the price of all that it holds, move by move."""
    with fake_mesh(*CASES[case][0]) as mesh:
        _, problem, costs, _ = recorded(step_in(mesh, case))
        free = frozenset(sink.leaf for sink in problem.graph.sinks if sink.leaf is not None and frees)
        problem = StepProblem(problem.graph, costs, free, StepMemory(problem.graph, Fraction(4)))
        draw = random.Random(0)  # noqa: S311  # no secret
        each = [draw.randrange(1 << PRICE_BITS) * draw.choice((0, 1, 1000)) for _ in range(len(problem.choices) + 1)]
        prices = MomentPrices(problem.moments, problem.moments.over_lives(each))
        start = problem.as_recorded()
        rest_alike = [t for t in range(len(problem.graph.tensors)) if problem.moments.is_leaf(t) and t not in free]
        alike = sum(prices.of_leaf(t, problem.rests(start, t)) for t in rest_alike)
        least = LeastMemory(problem, start).found().nbytes
        for one in (start, changed(problem, start, 30), solve_step(problem, [start])):
            assert least <= problem.moments.peak(one)
            held = sum(int(n) * price for n, price in zip(problem.moments.held(one), each, strict=True))
            priced = one.copy()
            problem.prices = prices
            priced.cost = problem.cost(one)
            better = MeshDimProblem(problem, priced, 0).improved()
            assert better.cost == problem.cost(better) <= priced.cost
            problem.prices = None
            parts = 20 * len(problem.choices)  # each is rounded down
            assert 0 <= held / 2**PRICE_BITS - alike - (priced.cost - one.cost) < parts


def test_gradients_are_held_to_the_end_though_they_are_views():
    with fake_mesh(4) as mesh:
        _, problem, costs, _ = recorded(step_in(mesh, "an mlp on (4,)"))
        graph = problem.graph
        problem = StepProblem(graph, costs, frozenset(), StepMemory(graph, Fraction(4)))
        start = problem.as_recorded()
        leaves = sorted(sink.leaf for sink in graph.sinks if sink.leaf is not None)
        assert len(leaves) == 4
        assert any(sink.tensor in graph.viewed for sink in graph.sinks)
        parameters = [problem.memory.local(t, problem.rests(start, t)) for t in leaves]
        inputs = {t for t in graph.uses if problem.moments.is_leaf(t) and graph.tensors[t].root == t} - {*leaves}
        others = sum(problem.memory.local(t, problem.rests(start, t)) for t in inputs)
        kept = [
            t for t in graph.calls[9].operands + graph.calls[9].results if t is not None
        ]  # the loss and its gradient
        ends = sum(problem.memory.local(t, problem.rests(start, t)) for t in kept)
        assert problem.moments.held(start)[-1] == 4 * sum(parameters) + others + ends


def test_a_moved_operand_has_a_price_for_the_call_that_it_is_moved_for():
    with fake_mesh(4) as mesh:
        problem, starts, _ = with_memory(mesh, chain, 0)
        moments, whole = problem.moments, starts[1]
        each = [0] * (len(problem.choices) + 1)
        each[0] = 1 << PRICE_BITS
        prices = MomentPrices(moments, moments.over_lives(each))
        call = problem.graph.calls[0]
        moved = [i for i, t in enumerate(call.operands) if problem.used(whole, 0, i) != problem.rests(whole, t)]
        assert moved
        bytes_of_copies = sum(problem.memory.local(call.operands[i], problem.used(whole, 0, i)) for i in moved)
        made = sum(problem.memory.local(t, problem.rests(whole, t)) for t in call.results)
        assert prices.of_call(whole, 0) == bytes_of_copies + made
        assert prices.of_call(whole, 1) == 0


# -- costs that are searched for when a solution has them --------------------------------------------------------------


@pytest.mark.parametrize("seed", SOME_SEEDS)
def test_a_solution_is_the_same_where_only_its_own_moves_are_searched_for(seed, monkeypatch):
    with fake_mesh(2, 2, 2) as mesh:
        found, searched = [], []
        for most in (3, 2):
            monkeypatch.setattr(step_solution, "_SEARCHED", most)
            _, problem, _, _ = recorded(chain(mesh, seed))
            starts = [problem.as_recorded(), problem.as_replicated()]
            best = solve_step(problem, starts)
            assert best.cost == problem.cost(best)
            found.append(best.cost)
            searched.append(len(problem._moves))
        assert found[0] == found[1]
        assert searched[1] < searched[0]


@pytest.mark.parametrize("seed", SOME_SEEDS)
def test_no_move_costs_less_than_is_known_without_a_search(seed):
    with fake_mesh(2, 4, 2) as mesh:
        _, problem, _, _ = recorded(chain(mesh, seed))
        layouts = list(product([Replicate(), Shard(0), Shard(1), sw.Partial()], repeat=3))
        draw = random.Random(seed)  # noqa: S311  # no secret
        for t in sorted(problem.resting):
            for _ in range(60):
                src, dst = draw.choice(layouts), draw.choice(layouts)
                least, is_exact = problem.least_move(t, src, dst)
                cost = problem.move(t, src, dst)
                assert least == cost if is_exact else least <= cost
                assert problem.least_move(t, src, dst) == (cost, True)
