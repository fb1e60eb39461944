"""Parts of two plans of a step of many layers, one that holds too much and one that holds less than it may.

At the price at which both are best, some things are worth their bytes in the one and not in the other: that a gathered
weight is kept for the backward pass, say. Often these are several things in each layer, and the limit has room for some
of them. So the choices in which the two plans differ are split into parts that share no cost, and the cheapest set of
parts that keeps the limit is taken, each in all layers alike.

Example: of two plans the first keeps two gathered weights a layer, 80 MiB of 64 and 16, and holds 5 MiB a layer too
much. Taking the smaller part alone from the second one is enough.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import compress, product
from typing import TypeAlias

from attrs import define, field

from shardwise.program.step_layers import StepLayers
from shardwise.program.step_problem import Assignment, StepProblem

__all__ = ["PartExchange"]

_MOST_GROUPS = 10  # of which all sets are looked at; what is left over is one more
_MOST_TRIED = 8  # sets that are counted exactly

#: A call by its index, or a tensor that rests behind all of them.
Variable: TypeAlias = int


@define(eq=False)
class PartExchange:
    """The parts in which ``then`` differs from ``first``, which holds more."""

    problem: StepProblem
    layers: StepLayers
    first: Assignment
    then: Assignment
    _names: dict[int, Hashable] = field(factory=dict, init=False)

    def within(self, limit: int) -> Iterator[Assignment]:
        """Assignments with parts of both that hold at most so much, the cheapest first."""
        problem = self.problem
        held = problem.moments.held(self.first)
        at, cost = int(held.argmax()), problem.cost(self.first)
        groups = self._groups()
        alone = [self._with([group]) for group in groups]
        dearer = [problem.cost(one) - cost for one in alone]
        saved = [int(held[at] - problem.moments.held(one)[at]) for one in alone]
        over = int(held[at]) - limit
        every = (list(compress(range(len(groups)), taken)) for taken in product((False, True), repeat=len(groups)))
        sets = sorted((sum(dearer[g] for g in of), of) for of in every if sum(saved[g] for g in of) >= over)
        for _, of in sets[:_MOST_TRIED]:
            found = self._with([groups[g] for g in of])
            if problem.moments.peak(found) <= limit:
                yield found

    def _with(self, groups: list[list[Variable]]) -> Assignment:
        new = self.first.copy()
        count = len(self.problem.graph.calls)
        for v in (v for group in groups for v in group):
            if v < count:
                new.rows[v] = list(self.then.rows[v])
            else:
                new.rests[v - count] = self.then.rests[v - count]
        new.cost = self.problem.cost(new)
        return new

    def _groups(self) -> list[list[Variable]]:
        """The variables of parts that look the same, together; the largest groups first."""
        groups: dict[Hashable, list[Variable]] = {}
        for part in self._parts():
            groups.setdefault(frozenset(map(self._looks, part)), []).extend(part)
        ranked = sorted(groups.values(), key=lambda group: (-len(group), group))
        few, rest = ranked[:_MOST_GROUPS], ranked[_MOST_GROUPS:]
        return [*few, [v for group in rest for v in group]] if rest else few

    def _parts(self) -> list[list[Variable]]:
        """The connected pieces of the variables that differ."""
        first, then, count = self.first, self.then, len(self.problem.graph.calls)
        differ = {place for place in range(count) if first.rows[place] != then.rows[place]}
        differ |= {count + t for t, at in first.rests.items() if then.rests[t] != at}
        neighbours: dict[Variable, list[Variable]] = {v: [] for v in differ}
        for u, v in self._pairs():
            if u in differ and v in differ:
                neighbours[u].append(v)
                neighbours[v].append(u)
        parts = []
        for v in sorted(differ):
            if v in differ:
                differ.remove(v)
                part = [v]
                for u in part:
                    new = [w for w in neighbours[u] if w in differ]
                    differ.difference_update(new)
                    part += dict.fromkeys(new)
                parts.append(sorted(part))
        return parts

    def _pairs(self) -> Iterator[tuple[Variable, Variable]]:
        """The variables that share a cost, or bytes."""
        problem, count = self.problem, len(self.problem.graph.calls)

        def variable(t: int) -> Variable | None:
            maker = problem.maker(t)
            return count + t if t in problem.resting else None if maker is None else maker[0]

        for place, call in enumerate(problem.graph.calls):
            for t in (*call.operands, *call.results):
                v = None if t is None else variable(t)
                if v is not None and v != place:
                    yield place, v
        for sink in problem.graph.sinks:
            u = variable(sink.tensor)
            if u is not None and sink.leaf in problem.free and sink.leaf is not None:
                yield u, count + sink.leaf

    def _looks(self, v: Variable) -> Hashable:
        """What a variable is called in its layer, the same in all of them."""
        graph, count = self.problem.graph, len(self.problem.graph.calls)
        if v < count:
            return self._name(v)
        maker = self.problem.maker(v - count)
        return (
            ("leaf", self.layers.in_any(graph.tensors[v - count].name))
            if maker is None
            else (self._name(maker[0]), maker[1])
        )

    def _name(self, place: int) -> Hashable:
        """The op, phase and module of a call, and how many such calls come before it in its layer."""
        if not self._names:
            times: dict[Hashable, int] = {}
            for p, call in enumerate(self.problem.graph.calls):
                name = call.schema.op, call.phase, self.layers.in_any(call.module)
                of = self.layers.of_call.get(p, (None,))[0], name
                times[of] = times.get(of, 0) + 1
                self._names[p] = name, times[of]
        return self._names[place]
