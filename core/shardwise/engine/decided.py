"""Calls that were decided about for the whole step: their strategy, and where their results rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
from attrs import define, field

from shardwise.comm.events import because, observers
from shardwise.comm.packing import Run
from shardwise.comm.redistribute import runner
from shardwise.errors import ShardingError
from shardwise.kernel.dispatcher import drop_plans
from shardwise.kernel.placements import Placement, check_placements, is_strided, show_all
from shardwise.kernel.plan import ResultMove
from shardwise.kernel.rule import AnyRule, Rule
from shardwise.kernel.schema import OpSchema, PlacementStrategy
from shardwise.kernel.signature import Call
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tags import Tag, tag_of_result
from shardwise.planning.in_factors import in_factors
from shardwise.planning.path import shortest_path
from shardwise.planning.strategies import stated
from shardwise.private_torch.dispatch import leaf_to_accumulate
from shardwise.program.decisions import Decision, Decisions
from shardwise.program.step_graph import Places
from shardwise.program.step_rows import as_placements, flat_rows, in_whole

__all__ = ["InForce", "decided", "in_force", "look_up", "resting", "result_moves", "tagged", "use_decisions"]


#: What is raised where a tensor cannot lie as decided.
_NO_LAYOUT = (ShardingError, ValueError, ArithmeticError)

#: Unknown calls that are kept. A program whose shapes never end has ever more of them.
_MOST_NOTED = 10_000


@define
class InForce:
    """The decisions that plans are made by, if any, and how many calls they knew and did not know.

    ``unknown_calls`` are the latter. ``placements`` says, by name, where a module that is distributed has its
    parameters and buffers, whatever the program says: only rehearsals of a plan that chose them have it.
    ``is_written`` says that a plan file has them, so what they send is explicit.
    ``learner`` is called with decisions of an earlier run that fit, while this one learns.
    """

    decisions: Decisions | None = None
    placements: Callable[[str], Places | None] | None = None
    is_written: bool = False
    known: int = 0
    unknown: int = 0
    unknown_calls: set[OpSchema] = field(factory=set)
    learner: Callable[[Decisions], None] | None = None

    @property
    def now(self) -> tuple[Decisions | None, Callable[[str], Places | None] | None, bool]:
        """What :func:`use_decisions` takes to bring this back."""
        return self.decisions, self.placements, self.is_written


in_force = InForce()


def use_decisions(
    decisions: Decisions | None,
    placements: Callable[[str], Places | None] | None = None,
    is_written: bool = False,
) -> None:
    """Make plans by decisions from now on, or by none. Every rank must call this at the same point of the program."""
    in_force.decisions, in_force.placements, in_force.is_written = decisions, placements, is_written
    in_force.known = in_force.unknown = 0
    in_force.unknown_calls.clear()
    drop_plans()


def _tags(schema: OpSchema) -> list[Tag | None]:
    return [None if spec is None else spec.tag for spec in schema.specs]


def decided(rule: AnyRule, schema: OpSchema, call: Call) -> tuple[PlacementStrategy, Decision] | None:
    """:func:`look_up` for a plan: counts the calls that the decisions know, and those that they do not."""
    decisions = in_force.decisions
    if decisions is None or not _may_be_decided(rule, schema, decisions):
        return None
    decision, strategy = _found(rule, schema, call, decisions)
    if decision is None or strategy is None:
        if _is_of_the_step(schema) and (decision is not None or not decisions.leaves(schema, _tags(schema))):
            in_force.unknown += 1
            if len(in_force.unknown_calls) < _MOST_NOTED:
                in_force.unknown_calls.add(schema)
        return None
    in_force.known += 1
    return strategy, decision


def _is_of_the_step(schema: OpSchema) -> bool:
    """Whether a call is one that a step could be planned with. One without a tag among its operands is outside: it
    makes an input, for example. A view costs nothing where it is: autograd makes one of each gradient that waits.
    """
    return not schema.is_view and any(tag is not None for tag in _tags(schema))


def look_up(rule: AnyRule, schema: OpSchema, call: Call) -> tuple[PlacementStrategy, Decision] | None:
    """The strategy that was decided on for a call; None if there is none, or if it is not legal for this call."""
    decisions = in_force.decisions
    if decisions is None or not _may_be_decided(rule, schema, decisions):
        return None
    decision, strategy = _found(rule, schema, call, decisions)
    return None if decision is None or strategy is None else (strategy, decision)


def _may_be_decided(rule: AnyRule, schema: OpSchema, decisions: Decisions) -> TypeGuard[Rule]:
    is_open = isinstance(rule, Rule) and not rule.zip_lists and not schema.is_symbolic
    # The copy that autograd makes of a gradient lies as the gradient, which has the layout of its leaf.
    is_open = is_open and (schema.is_view or leaf_to_accumulate() is None)
    return is_open and tuple(schema.mesh.shape) == decisions.mesh_shape


def _found(
    rule: Rule, schema: OpSchema, call: Call, decisions: Decisions
) -> tuple[Decision | None, PlacementStrategy | None]:
    layouts = tuple(None if spec is None else in_whole(spec.placements, spec.mesh_shape) for spec in schema.specs)
    decision = decisions.find(schema, _tags(schema), layouts)
    strategy = None if decision is None else _strategy(rule, schema, call, decision)
    if decision is not None and strategy is None and is_strided(_all_placements(decision.outputs)):
        # The factors of a strided result come from the operands as they are after their moves.
        moved = _as_used(schema, decision)
        strategy = None if moved is None else _strategy(rule, moved, call, decision)
    return decision, strategy


def _all_placements(layouts: Sequence[Places | None]) -> list[Placement]:
    return [p for places in layouts if places is not None for p in places]


def _as_used(schema: OpSchema, decision: Decision) -> OpSchema | None:
    """The call with its operands moved as decided; None where one must stay where it is, or cannot lie so: with other
    sizes than it had, the pieces of a strided shard need not be alike.
    """
    if len(decision.inputs) != len(schema.specs):
        return None
    try:
        specs = [
            None if spec is None or places is None else spec.with_placements(as_placements(places, spec.mesh_shape))
            for spec, places in zip(schema.specs, decision.inputs, strict=True)
        ]
    except _NO_LAYOUT:
        return None
    stays = (*schema.written, *schema.fixed)
    return schema.with_specs(specs) if all(specs[i] == schema.specs[i] for i in stays) else None


def _strategy(rule: Rule, schema: OpSchema, call: Call, decision: Decision) -> PlacementStrategy | None:
    (whole,) = stated(rule, schema, call)
    if len(decision.inputs) != len(whole.specs) or len(decision.outputs) != len(whole.outputs):
        return None
    problem = in_factors(whole)
    rows = list(flat_rows(problem))
    choice: list[int] = []
    for m in range(len(problem.mesh_shape)):
        inputs = tuple(None if places is None else places[m] for places in decision.inputs)
        outputs = [None if places is None else places[m] for places in decision.outputs]
        fitting = (r for r, row in rows if row.inputs == inputs and _agrees(row.outputs, outputs, problem.outputs))
        r = next(fitting, None)
        if r is None:
            return None
        choice.append(r)
        if problem.conflict(tuple(choice)) is not None or not problem.keeps_written(r):
            return None
    for i in (*problem.written, *problem.fixed):
        spec = problem.specs[i]
        if spec is not None and spec.placements != problem.target(tuple(choice), i):
            return None
    # Their costs were part of the decision; a plan does not need them again.
    try:
        strategy = problem.strategy(tuple(choice), [0.0] * len(problem.specs))
    except _NO_LAYOUT:
        return None
    return strategy if _may_rest(strategy, decision) else None


def _may_rest(strategy: PlacementStrategy, decision: Decision) -> bool:
    """Whether the results have layouts in which to rest: with other sizes they may have none, and anybody may have
    written a file of decisions.
    """
    try:
        for spec, places in zip(strategy.output_specs, decision.rests, strict=True):
            if spec is not None and places is not None:
                at = as_placements(places, spec.mesh_shape)
                check_placements(at, len(spec.mesh_shape), spec.ndim)
                _resting_at(spec, at)
    except _NO_LAYOUT:
        return False
    return True


def _agrees(row: Sequence[Any], decided_on: Sequence[Any], metas: Sequence[Any]) -> bool:
    """Whether a row makes the results as decided. A decision has nothing of results that are not used as tensors."""
    return all(b is None or a == b or meta is None for a, b, meta in zip(row, decided_on, metas, strict=True))


def tagged(rule: AnyRule, schema: OpSchema, results: Sequence[TensorSpec | None]) -> Sequence[TensorSpec | None]:
    """The specs of results with the tags by which later calls are known. What no decision is about makes inputs."""
    decisions = in_force.decisions
    is_open = isinstance(rule, Rule) and not rule.zip_lists and not schema.is_symbolic
    if decisions is None or not is_open or any(r.reseats for r in schema.signature.results):
        return results
    tags = _tags(schema)
    # What an op writes and returns is the operand itself, and no wrapper takes a new spec.
    return [
        spec if spec is None or operand is not None else spec.with_tag(tag_of_result(schema, tags, i, decisions.depth))
        for i, (spec, operand) in enumerate(zip(results, schema.returned(len(results)), strict=True))
    ]


def resting(results: Sequence[TensorSpec | None], decision: Decision) -> Sequence[TensorSpec | None]:
    """The specs in which results rest."""
    return [
        spec if spec is None or places is None else _resting_at(spec, as_placements(places, spec.mesh_shape))
        for spec, places in zip(results, decision.rests, strict=True)
    ]


def _resting_at(spec: TensorSpec, placements: Places) -> TensorSpec:
    return spec if placements == spec.placements else spec.with_placements(placements)


def then_moved(
    run: Callable[..., Any], made: Sequence[TensorSpec | None], rests: Sequence[TensorSpec | None]
) -> Callable[..., Any]:
    """A local call whose tensor results are redistributed."""
    moves = [
        None if a is None or b is None or a is b else partial(_move_result, runner(a, b), _reason(b))
        for a, b in zip(made, rests, strict=True)
    ]
    return partial(_run_and_move, run, moves) if any(moves) else run


def result_moves(
    made: Sequence[TensorSpec | None], rests: Sequence[TensorSpec | None]
) -> tuple[ResultMove | None, ...] | None:
    """:attr:`Plan.after` of a call whose results rest elsewhere than they are made."""
    moves = tuple(
        None if a is None or b is None or a is b else ResultMove(a, b, shortest_path(a, b).steps, _reason(b))
        for a, b in zip(made, rests, strict=True)
    )
    return moves if any(moves) else None


def _reason(rests: TensorSpec) -> str:
    return f"result rests as {show_all(rests.placements)} by the plan"


def _move_result(run: Run, reason: str, local: torch.Tensor) -> torch.Tensor:
    if not observers:
        return run(local)
    with because(reason):
        return run(local)


def _run_and_move(run: Callable[..., Any], moves: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    out = run(*args, **kwargs)
    rest = iter(moves)

    def moved(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return (
                type(value)([moved(part) for part in value])
                if type(value) in (tuple, list)
                else tuple(map(moved, value))
            )
        if not isinstance(value, torch.Tensor) and value is not None:
            return value
        move = next(rest, None)
        return value if move is None or value is None else move(value)

    return moved(out)
