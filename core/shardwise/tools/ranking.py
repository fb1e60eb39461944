"""The choices of one call: every legal strategy with its cost, cheapest first, and why the others lost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from attrs import evolve, frozen

from shardwise.kernel.rule import FullMeshRule
from shardwise.kernel.schema import OpSchema, PlacementStrategy
from shardwise.planning.chooser import Chooser
from shardwise.planning.exclusion import Exclusion, count_choices
from shardwise.planning.problem import Problem, no_choice
from shardwise.planning.strategies import cheapest, listed, make_call

__all__ = ["Decision", "RankedStrategy", "as_decided", "decisions_of", "full_mesh_decision", "result_names"]


@frozen
class RankedStrategy:
    """One legal strategy; ``reason`` says why it lost, and is empty for the one that is chosen."""

    strategy: PlacementStrategy
    reason: str


@frozen
class Decision:
    """One choice: for a call, or for those positions of its tensor lists that have the same specs.

    ``operands`` and ``results`` name the specs of the strategies. ``ranked`` are cheapest first, the first is chosen;
    one that was decided on for the whole step comes first. ``legal`` is the number of all legal ones and
    ``combinations`` that of all combinations of rows; ``counted`` is false where ``legal`` is a lower bound.
    """

    positions: tuple[int, ...]
    operands: tuple[str, ...]
    results: tuple[str, ...]
    ranked: tuple[RankedStrategy, ...]
    legal: int
    combinations: int
    counted: bool
    exclusions: tuple[Exclusion, ...]

    @property
    def chosen(self) -> PlacementStrategy:
        """The cheapest strategy, or the one that was decided on for the whole step."""
        return self.ranked[0].strategy


def decisions_of(per_position: Sequence[Problem], limit: int | None) -> list[Decision]:
    """One decision for each different problem; list positions with the same problem share one."""
    positions: dict[int, list[int]] = {}
    for i, problem in enumerate(per_position):
        positions.setdefault(id(problem), []).append(i)
    decisions = []
    for at in positions.values():
        problem = per_position[at[0]]
        chooser = Chooser(problem)
        ranked = [problem.strategy(choice, chooser.costs(choice)) for choice in islice(chooser.ranked(), limit)]
        if not ranked:
            raise no_choice(problem)
        names = problem.operand_names
        candidates = [RankedStrategy(s, _why_lost(s, ranked[0], names) if i else "") for i, s in enumerate(ranked)]
        counts = count_choices(problem)
        decisions.append(
            Decision(
                tuple(at),
                names,
                result_names(len(problem.outputs)),
                tuple(candidates),
                max(counts.legal, len(ranked)),
                counts.combinations,
                counts.complete,
                counts.exclusions,
            )
        )
    return decisions


def full_mesh_decision(rule: FullMeshRule, schema: OpSchema, limit: int | None) -> Decision:
    """The decision of a rule that lists its strategies itself."""
    call = make_call(rule, schema, ())
    (chosen,) = cheapest(rule, schema, call)
    every: Sequence[PlacementStrategy] = listed(rule, schema).strategies
    legal = [s for s in every if all(s.input_specs[i] is schema.specs[i] for i in schema.written)]
    names = schema.operand_names
    ranked = sorted(legal, key=lambda s: s.cost)[:limit]
    candidates = [RankedStrategy(s, _why_lost(s, chosen, names) if i else "") for i, s in enumerate(ranked)]
    dropped = len(every) - len(legal)
    written = ", ".join(names[i] for i in schema.written)
    excluded = (Exclusion(f"{written} would have to move, but the op writes it", None, (), dropped),) if dropped else ()
    results = result_names(len(chosen.output_specs))
    return Decision((0,), names, results, tuple(candidates), len(legal), len(every), True, excluded)


def result_names(count: int) -> tuple[str, ...]:
    """What the results of a call are called."""
    return ("result",) if count == 1 else tuple(f"result {i}" for i in range(count))


def _why_lost(strategy: PlacementStrategy, chosen: PlacementStrategy, names: Sequence[str]) -> str:
    """One sentence: how much more it costs and for which operand, or what decided a tie."""
    more = strategy.cost - chosen.cost
    if not more:
        return "same cost, later in the rule's order"
    if more == float("inf"):
        i = strategy.redistribute_cost.index(more)
        return f"{names[i]} cannot be reduced in its dtype"
    extra_costs = [a - b for a, b in zip(strategy.redistribute_cost, chosen.redistribute_cost, strict=True)]
    moved = [name for name, extra in zip(names, extra_costs, strict=True) if extra > more * 1e-3]
    microseconds = more * 1e6
    amount = f"{microseconds:,.1f} µs" if microseconds >= 0.05 else "<0.1 µs"  # noqa: PLR2004  # what one decimal shows
    return f"+{amount} for {', '.join(moved)}"


def as_decided(decision: Decision, strategy: PlacementStrategy) -> Decision:
    """A decision with the strategy first that was decided on for the whole step."""

    def layouts(one: PlacementStrategy) -> list[Any]:
        return [None if s is None else s.placements for s in (*one.input_specs, *one.output_specs)]

    chosen = next((one.strategy for one in decision.ranked if layouts(one.strategy) == layouts(strategy)), strategy)
    rest = [RankedStrategy(one.strategy, _NOT_DECIDED) for one in decision.ranked if one.strategy is not chosen]
    return evolve(decision, ranked=(RankedStrategy(chosen, ""), *rest))


_NOT_DECIDED = "the plan for the whole step has another"
