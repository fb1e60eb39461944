"""Plans of a GPT's step against the clock: what the cost model says of them, and how long they take on four gloo ranks.

Run it with ``python tests/benchmarks/bench_plan_times.py [--random 10] [--rounds 7] [--calls 3] [--json FILE]`` on an
idle machine. It measures the machine first, as ``shardwise calibrate`` does, and keeps the figures to itself. The plans
are the solver's with all parameters free, the best ones with the placements of each recipe in ``plans``, op by op with
these placements, and random legal ones: some decisions of one of the others are changed. Each is timed in turns, from
barrier to barrier: forward, backward and the clipped norm, without the optimizer's step, which no plan decides on. The
losses of each are compared with one device's, and its collectives with those that were predicted.
"""

import gc
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import torch
import torch.distributed as dist
from attrs import frozen
from bench_step import RANKS, tp_mesh
from gpt import batch, clip, gpt_settings, loss_of, written_out
from measuring import console, line, options, report
from recipes import GPT, recipes
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.testing import assert_close

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.comm.events import observe
from shardwise.engine.decided import use_decisions
from shardwise.kernel.tags import DEPTH, call_digest
from shardwise.program.cost_graph import FORBIDDEN, NANOSECONDS
from shardwise.program.decisions import Decisions
from shardwise.program.step_problem import StepProblem
from shardwise.program.step_solution import solve_step
from shardwise.steps.costs import WorkCosts
from shardwise.steps.recording import Recording
from shardwise.steps.sent import sent_by
from shardwise.steps.solving import with_decisions
from shardwise.tensor.names import tag_by_name
from shardwise.tools.calibrate import calibrate

RHO, WITHIN = 0.9, 1.05
SOLVER = "solver"
#: How many kinds of calls a random plan changes. Few changes are hard to tell apart, and many are far from any plan.
CHANGES = (1, 2, 4, 8, 16)


@frozen
class Plan:
    """A plan by name: where parameters lie, the decisions (None: op by op), and what is predicted."""

    name: str
    places: dict[str, tuple]
    decisions: Decisions | None
    predicted: float
    collectives: int


# -- plans -------------------------------------------------------------------------------------------------------


def layouts():
    """The placements of the recipes for this mesh, and of nothing: by name, a function from a parameter's name."""
    known = {name: partial(_of_recipe, file) for name, file in recipes(GPT, ["tp"]).items()}
    return {**known, "whole": lambda _name: (Replicate(),)}


def _of_recipe(file, name):
    known = file.placements_of(name)
    return (Replicate(),) if known is None else known[1]


class Planner:
    """Makes plans of one recorded step. Every rank makes the same ones."""

    def __init__(self, settings, mesh):
        self.settings, self.mesh = settings, mesh
        self.plans, self.starts = [], []

    def make(self, count):
        """The solver's plan, those of the recipes, op by op, and random ones."""
        for name, of in layouts().items():
            problem, costs = self._recorded(of)
            recorded = problem.as_recorded()
            sent = sum(sent_by(problem, recorded, costs).values())
            places = self._places(problem, recorded)
            if recorded.cost < FORBIDDEN:  # else it moves what no plan may move, and has no cost
                self.plans.append(Plan(f"{name}, op by op", places, None, recorded.cost / NANOSECONDS, sent))
            if name == "whole":
                continue
            problem.pinned = problem.free
            starts = [recorded] if recorded.cost < FORBIDDEN else [problem.as_replicated()]
            self._add(f"{name}, planned", problem, costs, solve_step(problem, starts))
        # The last one has nothing placed. From there the solver begins, and from the others.
        starts = [recorded, *(self._placed(problem, recorded, plan.places) for plan in self.plans)]
        self._add(SOLVER, problem, costs, solve_step(problem, starts, exchanges=True))
        self._add_random(problem, costs, count)
        return self.plans

    def _recorded(self, of):
        use_decisions(None)
        run, _ = step_of(self.settings, self.mesh, of)
        recording = Recording()
        with recording.running():
            run()
        graph = recording.graph()
        leaves = {sink.leaf for sink in graph.sinks if sink.leaf is not None}
        costs = WorkCosts(graph)
        return StepProblem(graph, costs, frozenset(t for t in leaves if graph.tensors[t].name)), costs

    def _places(self, problem, assignment):
        return {problem.graph.tensors[t].name: assignment.rests[t] for t in sorted(problem.free)}

    def _placed(self, problem, assignment, places):
        new = assignment.copy()
        new.rests.update({t: places[problem.graph.tensors[t].name] for t in problem.free})
        new.cost = problem.cost(new)
        return new

    def _add(self, name, problem, costs, assignment):
        solved = with_decisions(problem, costs, assignment, assignment)
        if solved.torn:
            return False
        sent = sum(sent_by(problem, solved.best, costs).values())
        places = self._places(problem, solved.best)
        self.plans.append(Plan(name, places, solved.decisions, solved.seconds, sent))
        self.starts.append(solved.best)
        return True

    def _add_random(self, problem, costs, count):
        """Change decisions about a few kinds of calls, the same for all layers, and keep what is legal."""
        rng = random.Random(0)  # noqa: S311  # chance, no secret
        tags = problem.graph.tags(DEPTH)
        kinds = {}
        for place, call in enumerate(problem.graph.calls):
            of = [None if t is None else tags[t] for t in call.operands]
            kinds.setdefault(call_digest(call.schema, of, sizes=True), []).append(place)
        made = tried = 0
        solved = self.starts[-1]
        while made < count and tried < 200 * count:
            tried += 1
            changes = CHANGES[made % len(CHANGES)]
            new = solved.copy()
            for places in rng.sample(list(kinds.values()), changes):
                self._change(problem, new, places, rng)
            if rng.random() < 0.5:
                self._move_parameters(problem, new, rng)
            new.cost = problem.cost(new)
            if new.cost < FORBIDDEN and not new.is_same(solved):
                made += self._add(f"random {made + 1}, {changes} changes", problem, costs, new)

    def _change(self, problem, assignment, places, rng):
        choices = problem.choices[places[0]]
        rows = [rng.choice(choices.legal[0])]
        rest = rng.random()
        for place in places:
            if problem.choices[place] is choices and choices.allows(rows):
                assignment.rows[place] = list(rows)
                for t in problem.graph.calls[place].results:
                    if t in problem.resting:
                        made = problem.made(assignment, t)
                        assignment.rests[t] = (Replicate(),) if rest < 0.5 else made

    def _move_parameters(self, problem, assignment, rng):
        """Move a parameter, the same in all layers."""
        by_kind = {}
        for t in sorted(problem.free):
            by_kind.setdefault(problem.graph.describe(t), []).append(t)
        of = rng.choice(list(by_kind.values()))
        dims = range(problem.graph.tensors[of[0]].spec.ndim)
        place = rng.choice([Replicate(), *map(Shard, dims)])
        assignment.rests.update(dict.fromkeys(of, (place,)))


# -- steps -------------------------------------------------------------------------------------------------------


def step_of(settings, mesh, of) -> tuple[Callable[[], torch.Tensor], torch.nn.Module]:
    """Forward, backward and the clipped norm of a model whose parameters lie as ``of(name)`` says."""
    model = written_out(settings)
    places = {name: of(name) for name, _ in model.named_parameters()}
    sw.distribute_module(model, mesh, places, src_data_rank=None)
    whole = [Replicate()] * mesh.ndim
    ids, targets = (sw.distribute_tensor(t, mesh, whole, src_data_rank=None) for t in batch(settings))

    def step():
        model.zero_grad()
        loss = loss_of(model, ids, targets)
        loss.backward()
        clip(model)
        return loss.detach()

    return step, model


class Runner:
    """Runs the steps of plans. Only one plan's decisions are in force at a time."""

    def __init__(self, settings, mesh, plans):
        self.steps = {}
        for plan in plans:
            use_decisions(plan.decisions)
            self.steps[plan.name] = step_of(settings, mesh, plan.places.__getitem__)

    def switch(self, plan):
        """Take up a plan and run its step until nothing is new."""
        use_decisions(plan.decisions)
        step, model = self.steps[plan.name]
        for tensor in [*model.parameters(), *model.buffers()]:
            if plan.decisions is not None:
                tag_by_name(tensor, plan.decisions.depth)
        for _ in range(3):
            step()
        return step

    def check(self, plan, expected):
        """Its losses are one device's; gives the number of collectives of a step."""
        step, sent = self.switch(plan), []
        with observe(sent.append):
            loss = step()
        assert_close(loss.full_tensor(), expected, rtol=1e-4, atol=1e-4, msg=lambda text: f"{plan.name}: {text}")
        return len(sent)

    def seconds(self, plan, calls):
        step = self.switch(plan)
        gc.collect()
        gc.disable()
        try:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                step()
                dist.barrier()
            return (time.perf_counter() - start) / calls
        finally:
            gc.enable()


def _rank(rank, folder, settings, count, rounds, calls, largest):  # as spawn hands them over
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["SHARDWISE_LINKS"] = "off"
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    mesh = tp_mesh()
    calibration = calibrate(mesh, save=False, largest=largest)
    plans = Planner(settings, mesh).make(count)
    expected = loss_of(written_out(settings), *batch(settings))
    runner = Runner(settings, mesh, plans)
    sent = {plan.name: runner.check(plan, expected) for plan in plans}
    times = {plan.name: [] for plan in plans}
    turns = [plan for _ in range(rounds) for plan in plans]
    bar = Console(stderr=True)
    for plan in track(turns, "timing", console=bar, disable=rank != 0 or not bar.is_terminal):
        times[plan.name].append(runner.seconds(plan, calls))
    if rank == 0:
        rows = [
            {
                "plan": plan.name,
                "predicted": plan.predicted,
                "measured": statistics.median(times[plan.name]),
                "collectives predicted": plan.collectives,
                "collectives": sent[plan.name],
            }
            for plan in plans
        ]
        Path(folder, "rows.json").write_text(json.dumps({"rows": rows, "links": str(calibration.links)}))
    dist.barrier()
    dist.destroy_process_group()


# -- results -----------------------------------------------------------------------------------------------------


def spearman(a, b):
    """Spearman's rank correlation; equal values share the mean of their ranks."""

    def ranks(values):
        return [sum(w < v for w in values) + (sum(w == v for w in values) - 1) / 2 for v in values]

    return statistics.correlation(ranks(a), ranks(b))


def show(rows):
    table = Table("plan", title=f"A step on four gloo ranks, torch {torch.__version__}")
    for heading in ("predicted ms", "measured ms", "measured of predicted", "collectives", "predicted"):
        table.add_column(heading, justify="right")
    for r in sorted(rows, key=lambda r: r["predicted"]):
        times = f"{r['predicted'] * 1e3:,.1f}", f"{r['measured'] * 1e3:,.1f}", f"{r['measured'] / r['predicted']:.2f}"
        table.add_row(r["plan"], *times, str(r["collectives"]), str(r["collectives predicted"]))
    console().print(table)


@click.command()
@options(calls=3)
@click.option("--random", "count", default=10, show_default=True, help="Random plans.")
@click.option("--layers", default=4, show_default=True)
@click.option("--width", default=128, show_default=True)
@click.option("--context", default=64, show_default=True)
@click.option("--batch", "sequences", default=4, show_default=True)
@click.option("--largest", default=None, type=int, help="Bytes of the largest tensor of the calibration.")
def main(rounds, calls, json_file, count, layers, width, context, sequences, largest):
    """Print predicted and measured times, how well their orders agree, and the solver's plan beside the fastest."""
    settings = gpt_settings(width, context, sequences, layers)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (folder, settings, count, rounds, calls, largest), nprocs=RANKS)
        answer = json.loads(Path(folder, "rows.json").read_text())
    rows = answer["rows"]
    show(rows)
    rho = spearman([r["predicted"] for r in rows], [r["measured"] for r in rows])
    fastest = min(r["measured"] for r in rows)
    behind = next(r["measured"] for r in rows if r["plan"] == SOLVER) / fastest
    work = f"{len(rows)} plans of a GPT training step, {layers} layers, four gloo processes"
    lines = [
        line(f"order of predicted and measured times, {work}", f"Spearman's rho ≥ {RHO}", f"{rho:.3f}", met=rho >= RHO),
        line(f"solver's plan over the fastest, {work}", f"≤ {WITHIN}", f"{behind:.2f}", met=behind <= WITHIN),
    ]
    report(rows, lines, json_file, settings=settings.as_json(), links=answer["links"])


if __name__ == "__main__":
    main()
