"""What a rank holds at each call of a step: what is alive there, and what the call needs while it runs.

A tensor is alive from the call that makes it to the last one that uses it, in the layout in which it rests. While a
call runs there are also the operands that were moved for it, beside the originals, and its results before they are
moved. Parameters and the optimizer's states are alive all the time, a gradient from where it is made to the end. So are
the result of the step and the gradient that its backward pass starts from, which the last call of forward takes and
makes.

All of it is said in *parts*: so many bytes, and how long they are held. What is held at a time is a sum of parts. So is
what it costs at a price (:mod:`shardwise.program.moment_prices`): the two count the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from shardwise.program.step_graph import Places, Sink

if TYPE_CHECKING:
    from shardwise.program.step_problem import Assignment, StepProblem

__all__ = ["ALIVE", "ALWAYS", "BEYOND", "ENDED", "LIVES", "RUNNING", "Part", "StepMoments"]

Bytes = NDArray[np.int64]

RUNNING, ALIVE, ENDED, BEYOND, ALWAYS = LIVES = range(5)
"""How long bytes are held: while a call runs; from the call that makes a tensor to the last one that uses it, or to the
end of the step; from behind that last one to the end; all the time.
"""

Part: TypeAlias = tuple[int, int, int]
"""One of these, the number of its call or tensor, and bytes."""


@define(eq=False)
class StepMoments:
    """The calls of a step as moments, and its end; each has the bytes that a rank holds then."""

    problem: StepProblem
    #: By kind of life and number of a call or tensor, the first moment and the one behind the last.
    _spans: list[list[tuple[int, int]]] = field(init=False)
    #: By call and operand, the views of it.
    _views: dict[tuple[int, int], list[int]] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        graph = self.problem.graph
        end, last = len(graph.calls) + 1, self._last_uses()
        first = [0] * len(graph.tensors)
        for place, call in enumerate(graph.calls):
            for t in call.results:
                if t is not None:
                    first[t] = place
        alive = [(at, last.get(t, at) + 1) for t, at in enumerate(first)]
        self._spans = [[] for _ in LIVES]
        self._spans[RUNNING] = [(place, place + 1) for place in range(len(graph.calls))]
        self._spans[ALIVE] = alive
        self._spans[ENDED] = [(at, end) for at in first]
        # A view has the memory of its root, which is alive until then.
        self._spans[BEYOND] = [(max(alive[t][1], alive[node.root][1]), end) for t, node in enumerate(graph.tensors)]
        self._spans[ALWAYS] = [(0, end)] * len(graph.tensors)
        for t, operand in graph.viewed.items():
            self._views.setdefault(operand, []).append(t)

    def _last_uses(self) -> dict[int, int]:
        """By tensor, the last call that uses it, or a view of it."""
        graph, found = self.problem.graph, dict[int, int]()
        for t, uses in graph.uses.items():
            last = max(place for place, _ in uses)
            for one in graph.sharing(t):
                found[one] = max(last, found.get(one, last))
        forward = [call for call in graph.calls if call.phase == "forward"]
        ends = (*forward[-1].operands, *forward[-1].results) if len(forward) < len(graph.calls) and forward else ()
        found.update({one: len(graph.calls) for t in ends if t is not None for one in graph.sharing(t)})
        return found

    # -- parts ---------------------------------------------------------------------------------------------------

    def of_call(self, assignment: Assignment, place: int) -> Iterator[Part]:
        """The parts of a call's operands and results."""
        problem = self.problem
        call = problem.graph.calls[place]
        for i, t in enumerate(call.operands):
            if t is not None:
                src, dst = problem.rests(assignment, t), problem.used(assignment, place, i)
                made = {view: problem.made(assignment, view) for view in self.views(place, i)}
                yield from self.of_operand(place, i, src, dst, made)
        for t in call.results:
            if t is not None:
                rests = problem.rests(assignment, t)
                yield from self.of_result(place, t, problem.made(assignment, t), rests)
                for sink in self.gradients(t):
                    yield from self.of_gradient(t, sink, rests, problem.target(assignment, sink))

    def of_operand(self, place: int, i: int, src: Places, dst: Places, views: dict[int, Places]) -> Iterator[Part]:
        """An operand that is moved is there twice; ``views`` of the copy, as they are made, keep it alive."""
        t = self.problem.graph.calls[place].operands[i]
        if t is None or src == dst:
            return
        yield RUNNING, place, self._bytes(t, dst)
        for view, made in views.items():
            yield ALIVE, view, self._bytes(view, made)

    def of_result(self, place: int, t: int, made: Places, rests: Places) -> Iterator[Part]:
        """A result that is moved is there twice. A view has the memory of its operand."""
        if t in self.problem.graph.viewed:
            return
        if made != rests:
            yield RUNNING, place, self._bytes(t, made)
        yield ALIVE, t, self._bytes(t, rests)

    def of_gradient(self, t: int, sink: Sink, rests: Places, target: Places) -> Iterator[Part]:
        """A gradient stays to the end: where it is made, or moved to its parameter."""
        if target != rests:
            yield ENDED, t, self._bytes(t, target)
        elif sink is self.gradients(t)[0]:  # several parameters with one gradient share its memory
            yield BEYOND, t, self._bytes(t, rests)

    def of_leaf(self, t: int, layout: Places) -> Iterator[Part]:
        """What no call makes: an input, or a parameter with the optimizer's states."""
        node, memory = self.problem.graph.tensors[t], self.problem.memory
        assert memory is not None
        if node.maker is None and node.root == t and t in self.problem.graph.uses:
            times = memory.state - 1 if t in memory.parameters else 1
            yield ALWAYS, t, int(self._bytes(t, layout) * times)

    def views(self, place: int, i: int) -> list[int]:
        """The results of a call that are views of an operand."""
        return self._views.get((place, i), [])

    def gradients(self, t: int) -> list[Sink]:
        """The parameters whose gradient a tensor is, as sinks."""
        return [sink for sink in self.problem.graph.ends.get(t, ()) if sink.leaf is not None and not sink.stays]

    def _bytes(self, t: int, layout: Places) -> int:
        memory = self.problem.memory
        assert memory is not None
        return memory.local(t, layout)

    # -- moments -------------------------------------------------------------------------------------------------

    def held(self, assignment: Assignment) -> Bytes:
        """By moment, the bytes that a rank holds: while each call runs, and at the end."""
        parts = [part for t in self._leaves for part in self.of_leaf(t, self.problem.rests(assignment, t))]
        changes = self.changes(parts) + self._changes_of_calls(assignment)
        held: Bytes = np.cumsum(changes)[:-1]
        return held

    def _changes_of_calls(self, assignment: Assignment) -> Bytes:
        if self.problem.fold is not None:
            return self.problem.fold.changes(assignment)
        places = range(len(self.problem.graph.calls))
        return self.changes(part for place in places for part in self.of_call(assignment, place))

    @cached_property
    def _leaves(self) -> list[int]:
        return [t for t in range(len(self.problem.graph.tensors)) if self.is_leaf(t)]

    def is_leaf(self, t: int) -> bool:
        """Whether no call makes a tensor."""
        return self.problem.graph.tensors[t].maker is None

    def held_by(self, parts: Iterable[Part]) -> Bytes:
        """By moment, the bytes of some parts."""
        held: Bytes = np.cumsum(self.changes(parts))[:-1]
        return held

    def changes(self, parts: Iterable[Part]) -> Bytes:
        """By moment, and behind the last one, the bytes of parts that are held from then on, less what no longer is."""
        changes = np.zeros(len(self.problem.graph.calls) + 2, np.int64)
        for life, number, nbytes in parts:
            start, stop = self._spans[life][number]
            changes[start] += nbytes
            changes[stop] -= nbytes
        return changes

    @cached_property
    def span_arrays(self) -> list[tuple[Bytes, Bytes]]:
        """By kind of life, the first moments of all calls or tensors, and those behind the last ones."""
        arrays = [np.array(spans, np.int64).reshape(-1, 2) for spans in self._spans]
        return [(spans[:, 0], spans[:, 1]) for spans in arrays]

    def over_lives(self, each: Sequence[int]) -> list[list[int]]:
        """By kind of life and number of a call or tensor, the sum over its moments of what each moment has."""
        upto = [0, *accumulate(each)]
        return [[upto[stop] - upto[start] for start, stop in spans] for spans in self._spans]

    def running_bytes(self, assignment: Assignment, place: int) -> int:
        """The bytes of a call's operands, as they rest and as they are moved, and of its results."""
        graph = self.problem.graph
        roots = {graph.tensors[t].root for t in graph.calls[place].operands if t is not None}
        found = sum(self._bytes(t, self.problem.rests(assignment, t)) for t in roots)
        return found + sum(nbytes for life, _, nbytes in self.of_call(assignment, place) if life in (RUNNING, ALIVE))

    def peak(self, assignment: Assignment) -> int:
        """The most bytes that a rank holds at a time."""
        return self.peak_and_place(assignment)[0]

    def peak_and_place(self, assignment: Assignment) -> tuple[int, int | None]:
        """The most bytes that a rank holds at a time, and the call that then runs; None at the end of the step."""
        held = self.held(assignment)
        place = int(held.argmax())
        return int(held[place]), place if place < len(held) - 1 else None
