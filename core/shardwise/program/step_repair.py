"""Changes of one or two choices of a step that bring what a rank holds below a limit, and then the cost down.

Prices on bytes find assignments that hold little where many layers bear the price together. The last bytes of a single
call are another matter: between two neighbours in price there may be none that any price finds. So the best that prices
have found is changed, one choice and then two of neighbours at a time, for as long as less exceeds the limit, or as
much, at a lower cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product
from typing import Any, TypeAlias

import numpy as np
from attrs import define, field

from shardwise.kernel.placements import Partial, Placement
from shardwise.kernel.tags import call_digest
from shardwise.program.cost_graph import FORBIDDEN
from shardwise.program.replay import DEEPEST
from shardwise.program.step_moments import Bytes
from shardwise.program.step_problem import Assignment, StepProblem
from shardwise.program.step_rows import placed

__all__ = ["Repair"]

_MOST_OPTIONS = 300  # of a choice; of one with more, those that differ on one mesh dim

#: A call by its index, or a tensor that rests behind all of them.
Variable: TypeAlias = int
#: Variables that look the same and are the same now: they change together, as a run by decisions does it.
Choice: TypeAlias = tuple[Variable, ...]
#: Whether it is illegal, bytes beyond the limit over all moments, nanoseconds.
Rank: TypeAlias = tuple[bool, int, int]


@define(eq=False)
class Repair:
    """An assignment that is changed. ``trials`` are the calls that may still be looked at, each under a change."""

    problem: StepProblem
    limit: int
    current: Assignment
    trials: int
    #: Trials that were made.
    spent: int = field(default=0, init=False)
    _held: Bytes = field(init=False)
    _cost: int = field(init=False)
    _known: dict[Any, Any] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.current = self.current.copy()
        self._held = self.problem.moments.held(self.current)
        self._cost = self.current.cost = self.problem.cost(self.current)

    def run(self) -> Assignment:
        """What no change of one choice, or of two neighbours, improves, as far as trials last."""
        self._descend(together=True)
        if self._rank(self._held, self._cost)[1]:
            self._descend(together=False)
        self.current.cost = self._cost
        return self.current

    def _descend(self, *, together: bool) -> None:
        while self.spent < self.trials:
            improved = [self._improve([u]) for u in self._choices(together=together)]
            if any(improved):
                continue
            choices = self._choices(together=together)
            of = {v: u for u in choices for v in u}
            pairs = {(u, of[v]): None for u in choices for w in u for v in self._neighbours(w) if v in of and u < of[v]}
            if not any(self._improve(pair) for pair in pairs):
                break

    def _rank(self, held: Bytes, cost: int) -> Rank:
        return cost >= FORBIDDEN, int(np.maximum(held - self.limit, 0).sum()), cost

    def _choices(self, *, together: bool) -> list[Choice]:
        """Those of which a change may help: all of them, or those that hold something while too much is held, the
        most first.
        """
        groups: dict[Any, list[Variable]] = {}
        for v in (*range(self._calls), *self._tensors):
            groups.setdefault(self._looks(v) if together else v, []).append(v)
        choices = [tuple(group) for group in groups.values()]
        over = self._held > self.limit
        if not over.any():
            return choices
        then = [(-int(self._share([u])[0][over].max()), u) for u in choices]
        return [u for nbytes, u in sorted(then) if nbytes]

    # -- variables -----------------------------------------------------------------------------------------------

    @cached_property
    def _calls(self) -> int:
        return len(self.problem.graph.calls)

    @cached_property
    def _resting(self) -> list[int]:
        return sorted(self.problem.resting)

    @property
    def _tensors(self) -> range:
        return range(self._calls, self._calls + len(self._resting))

    @cached_property
    def _tags(self) -> list[Any]:
        return list(self.problem.graph.tags(DEEPEST))

    def _tensor(self, v: Variable) -> int | None:
        """The tensor that rests; None for a call."""
        return None if v < self._calls else self._resting[v - self._calls]

    def _looks(self, v: Variable) -> Any:
        """What tells a variable from others in a run by decisions, with what it is now."""
        problem, t = self.problem, self._tensor(v)
        if t is not None:
            return self._tags[t], problem.graph.tensors[t].spec.tensor_meta, self.current.rests[t]
        call = problem.graph.calls[v]
        sources = tuple(None if t is None else problem.rests(self.current, t) for t in call.operands)
        return self._digest(v), id(problem.choices[v]), sources, tuple(self.current.rows[v])

    def _digest(self, place: int) -> int:
        known = self._known.get(("digest", place))
        if known is None:
            call = self.problem.graph.calls[place]
            tags = [None if t is None else self._tags[t] for t in call.operands]
            known = self._known["digest", place] = call_digest(call.schema, tags, sizes=True)
        result: int = known
        return result

    def _touched(self, v: Variable) -> frozenset[int]:
        """The calls whose costs and bytes a variable is part of."""
        known = self._known.get(("touched", v))
        if known is None:
            graph, t = self.problem.graph, self._tensor(v)
            made = [t for t in (graph.calls[v].results if t is None else (t,)) if t is not None]
            of = {place for t in made for place, _ in graph.uses.get(t, ())}
            makers = [self.problem.maker(t) for t in made]
            if t is not None:  # the gradient of a parameter lies as that
                makers += [self.problem.maker(sink.tensor) for sink in graph.sinks if sink.leaf == t]
            of.update(maker[0] for maker in makers if maker is not None)
            known = self._known["touched", v] = frozenset(of)
        result: frozenset[int] = known
        return result

    def _neighbours(self, v: Variable) -> list[Variable]:
        """The variables that share a cost with one."""
        found = set(self._touched(v))
        if v < self._calls:
            call = self.problem.graph.calls[v]
            tensors = {t: self._calls + k for k, t in enumerate(self._resting)}
            found.update(tensors[t] for t in (*call.operands, *call.results) if t in tensors)
            makers = [self.problem.maker(t) for t in call.operands if t is not None]
            found.update(maker[0] for maker in makers if maker is not None)
        return sorted(found - {v})

    # -- changes -------------------------------------------------------------------------------------------------

    def _improve(self, choices: Sequence[Choice]) -> bool:
        """Take the best of all changes of some choices, if it is better than what is."""
        if self.spent >= self.trials:
            return False
        before = [self._get(u[0]) for u in choices]
        held, cost = self._share(choices)
        rest_held, rest_cost = self._held - held, self._cost - cost
        best, rank = before, self._rank(self._held, self._cost)
        for changed in product(*(list(self._options(u[0])) for u in choices)):
            self._set(choices, changed)
            held, cost = self._share(choices)
            new = self._rank(rest_held + held, rest_cost + cost)
            if new < rank:
                best, rank = list(changed), new
            if self.spent >= self.trials:
                break
        self._set(choices, best)
        held, cost = self._share(choices)
        self._held, self._cost = rest_held + held, rest_cost + cost
        return best is not before

    def _share(self, choices: Sequence[Choice]) -> tuple[Bytes, int]:
        """What is held by, and what is the cost of, the calls and leaves that some choices are part of."""
        problem, moments = self.problem, self.problem.moments
        variables = [v for u in choices for v in u]
        places = sorted(
            {place for v in variables for place in self._touched(v)} | {v for v in variables if v < self._calls}
        )
        self.spent += len(places)
        parts = [part for place in places for part in moments.of_call(self.current, place)]
        tensors = [t for v in variables if (t := self._tensor(v)) is not None]
        parts += [part for t in tensors for part in moments.of_leaf(t, self.current.rests[t])]
        return moments.held_by(parts), sum(problem.cost_of_call(self.current, place) for place in places)

    def _get(self, v: Variable) -> Any:
        t = self._tensor(v)
        return self.current.rows[v] if t is None else self.current.rests[t]

    def _set(self, choices: Sequence[Choice], values: Sequence[Any]) -> None:
        for u, value in zip(choices, values, strict=True):
            for v in u:
                t = self._tensor(v)
                if t is None:
                    self.current.rows[v] = list(value)
                else:
                    self.current.rests[t] = value

    # -- what may be chosen --------------------------------------------------------------------------------------

    def _options(self, v: Variable) -> Iterator[Any]:
        """The rows of a call, or the layouts of a tensor."""
        t = self._tensor(v)
        if t is not None:
            yield from _combinations(self.current.rests[t], [self._places(t, m) for m in self._dims])
            return
        choices, held = self.problem.choices[v], self.problem.held_rows.get(v)
        legal = choices.legal if held is None else [sorted(of) for of in held]
        yield from (rows for rows in _combinations(self.current.rows[v], legal) if choices.allows(rows))

    @property
    def _dims(self) -> range:
        return range(self.problem.graph.mesh.ndim)

    def _places(self, t: int, m: int) -> Sequence[Placement]:
        """Where a tensor may rest on a mesh dim."""
        problem = self.problem
        at = self.current.rests[t]
        if t in problem.pinned or m in problem.held_rests.get(t, ()):
            return (at[m],)
        if t in problem.free:
            return problem.slices.places(t, at, m)
        known = self._known.get(("places", t, m))
        if known is None:
            known = self._known["places", t, m] = self._resting_places(t, m)
        result: Sequence[Placement] = known
        return result

    def _resting_places(self, t: int, m: int) -> tuple[Placement, ...]:
        """As the rows of its maker leave it, or as those of its uses, and its sinks, want it; partial only as made."""
        problem = self.problem
        maker = problem.maker(t)
        assert maker is not None, "inputs stay where they are"
        made = [placed(problem.choices[maker[0]].rows[r].outputs[maker[1]]) for r in problem.choices[maker[0]].legal[m]]
        wanted = [sink.placements[m] for sink in problem.graph.ends.get(t, ())]
        for user, i in problem.graph.uses.get(t, ()):
            wanted += [placed(problem.choices[user].rows[r].inputs[i]) for r in problem.choices[user].legal[m]]
        for leaf, _ in problem.free_leaves(t):
            wanted += problem.slices.places(leaf, self.current.rests[leaf], m)
        return tuple(dict.fromkeys([*made, *(p for p in wanted if not isinstance(p, Partial) or p in made)]))


def _combinations(now: Sequence[Any], each: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """All combinations, or where they are many those that differ on one mesh dim."""
    if math.prod(map(len, each)) <= _MOST_OPTIONS:
        yield from product(*each)
        return
    for m, of in enumerate(each):
        yield from ((*now[:m], one, *now[m + 1 :]) for one in of)
