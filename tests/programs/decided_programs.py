"""Run a random program by random decisions: any plan that the planner may make gives the numbers of one device."""

from __future__ import annotations

import random
import warnings
from functools import partial

import torch
from attrs import evolve
from torch import nn

import shardwise as sw
from shardwise import Partial, Replicate
from shardwise.errors import NoPlanError, NoStrategyError, PlacementError
from shardwise.program.cost_graph import FORBIDDEN
from shardwise.program.step_problem import StepProblem
from shardwise.steps import step_decision
from shardwise.steps.costs import WorkCosts
from shardwise.steps.solving import with_decisions
from shardwise.testing import mesh
from shardwise.testing.programs import check_program, shrink
from shardwise.testing.programs.machine import reference
from shardwise.testing.programs.program import Move
from shardwise.testing.programs.replay import replay

TRIES = 6  # changes per call


def check_decided(pool, program, seed, *, small=True):
    """Run a program by the decisions of a seed and raise with the smallest one that differs from one device."""
    run = partial(replay_decided, seed=seed)
    program = with_ends(program)
    verdict = check_program(program, pool, run)
    if verdict.wrong:
        if small:
            program = shrink(program, lambda p: bool(check_program(p, pool, run).wrong))
            verdict = check_program(program, pool, run)
        raise AssertionError(f"{verdict.wrong}\n\n{program}")
    return verdict


def with_ends(program):
    """A program with a use of each of its values: a plan leaves calls that nobody needs as they are."""
    after, _ = reference(program)
    names = [name for line in program.lines for name in line.names if any(name in a.values for a in after)]
    first, whole = 1 + max(names), (Replicate(),) * len(program.mesh_shape)
    ends = [Move(first + n, name, whole) for n, name in enumerate(dict.fromkeys(names))]
    ended = evolve(program, lines=(*program.lines, *ends))
    try:
        reference(ended)
    except RuntimeError:  # torch refuses to use one of several views once another was written
        return program
    return ended


def replay_decided(program, watched, *, seed):
    """Record the program on this rank, decide for it by chance, and run it by the decisions."""
    m = mesh(program.mesh_shape)
    parameter = nn.Parameter(sw.zeros((1,), device_mesh=m, placements=[Replicate()] * m.ndim))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    decide, step_decision.decide_step = step_decision.decide_step, partial(decided_by_chance, seed=seed)
    try:
        with sw.learn() as learned_here:
            replay(program, [()] * len(program.lines))
            parameter.grad = torch.zeros_like(parameter)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # where there is no plan, the program goes on as before
                optimizer.step()
            learned_here.freeze()
            return replay(program, watched)
    finally:
        step_decision.decide_step = decide


def decided_by_chance(graph, limit=None, earlier=None, *, seed):  # as what it stands for
    """In place of :func:`shardwise.steps.step_decision.decide_step`: some legal assignment, far from the best."""
    chance = random.Random(seed)  # noqa: S311  # no secret
    costs = WorkCosts(graph)
    problem = StepProblem(graph, costs)
    recorded = problem.as_recorded()
    is_plan = recorded.cost < FORBIDDEN and not problem.has_lost
    found = recorded if is_plan else problem.as_replicated()
    if found.cost >= FORBIDDEN:
        raise NoPlanError(asked="decide by chance", found="no start is legal", do="Draw another program.")
    makers = {t: place for place, call in enumerate(graph.calls) for t in call.results if t is not None}
    for _ in range(TRIES * len(graph.calls)):
        other = found.copy()
        touched = _rested(problem, other, makers, chance) if chance.random() < 0.35 else set()
        touched |= _with_rows(problem, other, chance)
        if touched and _is_legal(problem, other, touched):
            found = other
    found.cost = problem.cost(found)
    assert found.cost < FORBIDDEN
    solved = with_decisions(problem, costs, recorded, found)
    return step_decision.Learned(solved.decisions, None, solved.seconds, len(graph.calls), solved.torn, 0.0)


def _rested(problem, assignment, makers, chance):
    """Let one tensor rest where some use wants it. Returns the calls that see it; none if it may not rest there."""
    if not assignment.rests:
        return set()
    tensor = chance.choice(sorted(assignment.rests))
    uses, made = problem.graph.uses.get(tensor, ()), problem.made(assignment, tensor)
    rests = chance.choice([made, *(problem.used(assignment, place, i) for place, i in uses)])
    if any(isinstance(there, Partial) and there != here for there, here in zip(rests, made, strict=True)):
        return set()  # partial only where it is made so
    assignment.rests[tensor] = rests
    return {place for place, _ in uses} | ({makers[tensor]} if tensor in makers else set())


def _with_rows(problem, assignment, chance):
    """Let one call take other rows, on one mesh dim or on all. Returns the calls that see a change."""
    place = chance.randrange(len(assignment.rows))
    legal = problem.choices[place].legal
    for m in range(len(legal)) if chance.random() < 0.5 else [chance.randrange(len(legal))]:
        assignment.rows[place][m] = chance.choice(legal[m])
    touched = {place}
    for t in problem.graph.calls[place].results:
        if t is None:
            continue
        if t in assignment.rests and chance.random() < 0.7:
            assignment.rests[t] = problem.made(assignment, t)
        touched |= {user for user, _ in problem.graph.uses.get(t, ())}
    return touched


def _is_legal(problem, assignment, places):
    try:
        return all(problem.cost_of_call(assignment, place) < FORBIDDEN for place in places)
    except (NoStrategyError, PlacementError):  # rows that may not stand side by side
        return False
