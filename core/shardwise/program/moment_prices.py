"""Prices of the bytes that a rank holds at each moment of a step, in the costs of its problem.

A limit on the memory of a step holds at every moment. With a price on the bytes of each, an assignment costs the more
the more it holds where that is scarce. The price of an operand that is moved is in the cost of its move: for as long as
the call runs it is there twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, field

from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.program.cost_graph import FORBIDDEN, Costs
from shardwise.program.step_graph import Places, Sink
from shardwise.program.step_moments import ALIVE, ALWAYS, BEYOND, ENDED, RUNNING, Part, StepMoments

if TYPE_CHECKING:
    from shardwise.program.step_problem import Assignment
    from shardwise.program.step_slices import CallSlice, Layouts

__all__ = ["PRICE_BITS", "MomentPrices"]

PRICE_BITS = 40
"""Prices are whole numbers of this part of a nanosecond, so that sums are the same on every machine."""


@define(eq=False)
class MomentPrices:
    """What the parts of a step cost, at a price per byte and kind of life of each call and tensor.

    Costs by states are arrays as :class:`MeshDimProblem` has them; None where nothing has a price.
    """

    moments: StepMoments
    #: By kind of life and number of a call or tensor.
    by_life: Sequence[Sequence[int]]
    _known: dict[Any, Costs] = field(factory=dict, init=False)

    def cost(self, parts: Iterable[Part]) -> int:
        """Nanoseconds of some parts, each rounded down."""
        return sum((nbytes * self.by_life[life][number]) >> PRICE_BITS for life, number, nbytes in parts)

    def of_call(self, assignment: Assignment, place: int) -> int:
        """Nanoseconds for what a call holds while it runs, and for what it makes."""
        return self.cost(self.moments.of_call(assignment, place))

    def of_leaf(self, t: int, layout: Places) -> int:
        """Nanoseconds for an input or a parameter."""
        return self.cost(self.moments.of_leaf(t, layout))

    # -- by states -----------------------------------------------------------------------------------------------

    def operand(self, place: int, i: int, sources: Layouts, call: CallSlice) -> Costs | None:
        """What it costs that an operand is there twice where it is moved, by its source and by the row of the call."""
        t = self.moments.problem.graph.calls[place].operands[i]
        assert t is not None
        targets = call.layouts(i, made=False)
        views = {view: self._made(view, call) for view in self.moments.views(place, i)}
        prices = self._prices((RUNNING, place), *((ALIVE, view) for view in views))
        of = self.moments.of_operand

        def cost(source: Places, r: int) -> int:
            made = {view: layouts.each[r] for view, layouts in views.items()}
            return self.cost(of(place, i, source, targets.each[r], made))

        key = (prices, self._meta(t), sources, targets, *((self._meta(v), made) for v, made in views.items()))
        return self._once(key, prices, lambda: [[cost(a, r) for r in range(len(targets.each))] for a in sources.each])

    def result(self, place: int, t: int, made: Layouts, rests: Layouts | None) -> Costs | None:
        """What it costs to hold a result, by how it is made and by where it rests; without that, as it is made."""
        prices = self._prices((RUNNING, place), (ALIVE, t))
        of = self.moments.of_result
        if t in self.moments.problem.graph.viewed:
            return None
        key = (prices, self._meta(t), made, rests)
        if rests is None:
            return self._once(key, prices, lambda: [self.cost(of(place, t, a, a)) for a in made.each])
        return self._once(key, prices, lambda: [[self.cost(of(place, t, a, b)) for b in rests.each] for a in made.each])

    def gradient(self, t: int, sink: Sink, rests: Layouts, targets: Layouts) -> Costs | None:
        """What it costs to keep a gradient, by where the tensor rests and by where its parameter lies."""
        prices = self._prices((ENDED, t), (BEYOND, t))
        of = self.moments.of_gradient
        key = (prices, self._meta(t), rests, targets, sink is self.moments.gradients(t)[0])
        return self._once(
            key, prices, lambda: [[self.cost(of(t, sink, a, b)) for b in targets.each] for a in rests.each]
        )

    def leaf(self, t: int, layouts: Layouts) -> Costs | None:
        """What it costs to hold a parameter, by where it lies."""
        prices = self._prices((ALWAYS, t))
        memory = self.moments.problem.memory
        assert memory is not None
        key = (prices, self._meta(t), layouts, t in memory.parameters)
        return self._once(key, prices, lambda: [self.of_leaf(t, at) for at in layouts.each])

    def _prices(self, *lives: tuple[int, int]) -> tuple[int, ...]:
        return tuple(self.by_life[life][number] for life, number in lives)

    def _meta(self, t: int) -> TensorMeta:
        return self.moments.problem.graph.tensors[t].spec.tensor_meta

    def _made(self, view: int, call: CallSlice) -> Layouts:
        maker = self.moments.problem.maker(view)
        assert maker is not None, "a view is made by a call"
        return call.layouts(maker[1], made=True)

    def _once(self, key: Any, prices: tuple[int, ...], costs: Callable[[], Any]) -> Costs | None:
        """Equal tables are one object: the solvers then do their work once."""
        if not any(prices):
            return None
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = np.minimum(np.array(costs(), dtype=object), FORBIDDEN).astype(np.int64)
        return known
