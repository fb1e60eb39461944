"""The best assignment that keeps a limit on memory.

A rank holds what it keeps for later, and at each call what that needs while it runs. A price per byte is raised until
what is kept leaves enough of the limit. Where it does, and a call still holds too much while it runs, the *room* of a
call is narrowed: what it holds beyond costs more than anything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

from attrs import define, field, frozen

from shardwise.errors import MemoryPlanError
from shardwise.program.amounts import size_text
from shardwise.program.cost_graph import FORBIDDEN
from shardwise.program.replay import DEEPEST, replayed
from shardwise.program.short_solution import ShortProblem
from shardwise.program.step_bound import WorkTable, step_bound
from shardwise.program.step_memory import StepMemory
from shardwise.program.step_moments import StepMoments
from shardwise.program.step_problem import Assignment, StepProblem
from shardwise.program.step_solution import solve_step

__all__ = ["PricedSearch"]

_FIRST_PRICE = Fraction(1, 32)  # of the cost of a step per byte that it keeps
_RAISES = 12  # of the price, by _RAISE each
_RAISE = 8
_HALVINGS = 4  # of the interval between a price that is too low and one that is enough
_NARROWINGS = 6  # of the room of a call, each to half of it or less
_SEVERAL = 3  # mesh dims up to which a step is bounded at two prices
_SPARE = 256  # of the limit, this part
_FEWER = 2  # numbers of layers, until what a run by decisions does fits as well
_LEAST_ROOM = 8  # of the limit, this part: while less is left beside what is kept, a higher price comes first
_PARTS = 256  # of what is FORBIDDEN: forty doublings of the room in every call are still far less
_NAMED = 6  # tensors that an error names


@frozen(eq=False)
class _Tried:
    """What was found at a price and with a room: nanoseconds without both, the most bytes that a rank holds at a time,
    and what the call holds while it runs that it then is at.
    """

    price: Fraction
    room: int | None
    found: Assignment
    nbytes: int
    running: int


@define(eq=False)
class PricedSearch:
    """The search for the best assignment under limits, one after the other. What was found at a price is kept."""

    problem: StepProblem
    starts: Sequence[Assignment]
    #: Starts that keep little; for prices at which nothing else does.
    lean: Callable[[], Assignment] | None = None
    #: The same step with fewer layers, on which prices are tried; the best assignment is improved on the whole one.
    short: ShortProblem | None = None
    _tried: list[_Tried] = field(factory=list)
    _done: list[_Tried] = field(factory=list)
    _moments: StepMoments = field(init=False)
    _room: int | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._moments = StepMoments(self.problem)

    def best(self, limit: int | None = None) -> Assignment:
        """The cheapest assignment found in which a rank holds at most ``limit`` bytes at any time.

        Raises :class:`MemoryPlanError` where none is found.
        """
        if limit is not None:
            self._room = min(self._room or limit, limit)  # what alone exceeds the limit is in no plan
        if not self._tried:
            self._try(Fraction(0), self.starts, exchanges=bool(self.problem.free - self.problem.pinned))
        if limit is None:
            return self._improved(self._tried[0], None).found
        if not self._within(limit):
            self._raise_price(limit)
        for _ in range(_HALVINGS):
            low, high = self._around(limit)
            if low is None:
                break
            if low.price == high.price:
                self._room = math.isqrt((low.room or limit) * (high.room or limit))
                self._try(high.price, [low.found])
            else:
                self._room = high.room
                self._try(Fraction((float(low.price or high.price / 16) * float(high.price)) ** 0.5), [low.found])
        self._mix(limit)
        return self._improved(min(self._within(limit), key=lambda tried: tried.found.cost), limit).found

    def _mix(self, limit: int) -> None:
        """Try what holds too much in as many layers as the limit allows, and what holds less in the others.

        A little is left, for what a rehearsal holds and is not counted.
        """
        low, high = self._around(limit)
        if self.short is None or low is None:
            return
        step, most = self.short.step, limit - limit // _SPARE
        fits, too_many = 0, step.count
        while too_many - fits > 1:
            layers = (fits + too_many) // 2
            mixed = self._as_tried(high.price, step.mixed(low.found, high.found, layers))
            fits, too_many = (fits, layers) if mixed.nbytes > most else (layers, too_many)
        each = max(1, (low.nbytes - high.nbytes) // step.count)
        for _ in range(_FEWER):
            # Calls that look the same do the same, so that more layers than these may hold too much.
            followed = replayed(self.problem, step.mixed(low.found, high.found, fits), DEEPEST, tries=0)
            mixed = high if followed is None else self._as_tried(high.price, followed)
            if mixed is not high and mixed.nbytes <= most and mixed.found.cost < high.found.cost:
                self._tried.append(mixed)
                self._done.append(mixed)
                return
            fits -= max(1, -(-(mixed.nbytes - most) // each))
            if fits <= 0:
                return

    def peak(self, assignment: Assignment) -> int:
        """The most bytes that a rank holds at a time."""
        return self._moments.peak(assignment)

    def _improved(self, tried: _Tried, limit: int | None) -> _Tried:
        """The best of a shortened step, improved on the whole one, where that keeps the limit."""
        if self.short is None or tried in self._done:
            return tried
        self._room = tried.room
        better = self._solved_at(tried.price, lambda starts: solve_step(self.problem, starts), [tried.found])
        keeps = limit is None or better.nbytes <= limit
        best = better if keeps and better.found.cost < tried.found.cost else tried
        self._tried[self._tried.index(tried)] = best
        self._done.append(best)
        return best

    def bound(self, limit: int | None, work: WorkTable) -> int:
        """Nanoseconds that no assignment undercuts in which a rank holds at most ``limit`` bytes at any time.

        With a price on each byte less than the limit is worth nothing: the bound of the priced problem, less the price
        of all bytes of the limit, is a bound. The bytes are those of one moment, the end of forward or of backward.
        """
        if limit is None or not any(one.nbytes > limit for one in self._tried):
            return self._bound_at(min(self._tried, key=lambda one: one.price), limit or 0, work)
        low, high = self._around(limit)
        # On many mesh dims a bound takes minutes, and the two prices are close to each other.
        several = low is not None and self.problem.graph.mesh.ndim <= _SEVERAL
        return max(self._bound_at(one, limit, work) for one in ((low, high) if several else (high,)) if one is not None)

    def _bound_at(self, tried: _Tried, limit: int, work: WorkTable) -> int:
        problem, memory = self.problem, self.problem.memory
        assert memory is not None
        problem.price = tried.price
        try:
            each: list[tuple[int, int, StepMemory, Assignment]] = []
            for problem.memory in (memory.after_forward(), memory.after_backward()):
                priced = tried.found.copy()
                priced.cost = problem.cost(priced)
                each.append((-problem.nbytes(priced), len(each), problem.memory, priced))
            _, _, problem.memory, priced = min(each)
            return step_bound(problem, priced, work) - math.ceil(tried.price * limit)
        finally:
            problem.price, problem.memory = Fraction(0), memory

    def _within(self, limit: int) -> list[_Tried]:
        return [tried for tried in self._tried if tried.nbytes <= limit]

    def _around(self, limit: int) -> tuple[_Tried | None, _Tried]:
        """What was tried at the highest price that is too low, and at the lowest above it that is enough. Of equal
        prices the one with less room is the higher one.
        """

        def height(tried: _Tried) -> tuple[Fraction, int]:
            return tried.price, -(tried.room or 0)

        low = max((t for t in self._tried if t.nbytes > limit), key=height, default=None)
        high = [t for t in self._within(limit) if low is None or height(t) > height(low)]
        return low, min(high or self._within(limit), key=height)

    def _raise_price(self, limit: int) -> None:
        last = self._narrowed(max(self._tried, key=lambda tried: tried.price), limit)
        highest = Fraction(FORBIDDEN, 64 * max(last.nbytes, 1))
        price = last.price * _RAISE or Fraction(max(last.found.cost, 1), max(last.nbytes, 1)) * _FIRST_PRICE
        for _ in range(_RAISES):
            if last.nbytes <= limit:
                return
            price = min(price, highest)
            last = self._narrowed(self._try(price, [last.found]), limit)
            if last.nbytes > limit and price == highest and self.lean is not None:
                last = self._narrowed(self._try(price, [self.lean()]), limit, at_last=True)
            if price == highest:
                break
            price *= _RAISE
        if last.nbytes > limit:
            raise self._too_little(limit)

    def _narrowed(self, tried: _Tried, limit: int, *, at_last: bool = False) -> _Tried:
        """What is found with less room for a call, where what is kept leaves some: until that is enough."""
        assert self._room is not None
        for _ in range(_NARROWINGS):
            left = limit - (tried.nbytes - tried.running)
            if tried.nbytes <= limit or left < (1 if at_last else limit // _LEAST_ROOM):
                break
            self._room = max(1, min(left, self._room // 2))
            tried = self._try(tried.price, [tried.found])
        return tried

    def _try(self, price: Fraction, starts: Sequence[Assignment], *, exchanges: bool = False) -> _Tried:
        def solved(priced: Sequence[Assignment]) -> Assignment:
            found = None if self.short is None else self.short.solved(priced, exchanges=exchanges)
            return solve_step(self.problem, priced, exchanges=exchanges) if found is None else found

        self._tried.append(self._solved_at(price, solved, starts))
        return self._tried[-1]

    def _solved_at(
        self, price: Fraction, solved: Callable[[Sequence[Assignment]], Assignment], starts: Sequence[Assignment]
    ) -> _Tried:
        problem = self.problem
        problem.price, problem.room = price, self._room
        problem.over_room = FORBIDDEN // (_PARTS * max(1, len(problem.graph.calls)))
        try:
            priced = [start.copy() for start in starts]
            for start in priced:
                start.cost = problem.cost(start)
            found = solved(priced)
        finally:
            problem.price, problem.room = Fraction(0), None
        return self._as_tried(price, found.copy())

    def _as_tried(self, price: Fraction, found: Assignment) -> _Tried:
        problem = self.problem
        found.cost = problem.cost(found)
        nbytes, at = self._moments.peak_and_place(found)
        running = 0 if at is None else problem.running_bytes(at, found.rows[at])
        return _Tried(price, self._room, found, nbytes, running)

    def _too_little(self, limit: int) -> MemoryPlanError:
        problem, least = self.problem, min(self._tried, key=lambda tried: tried.nbytes)
        assert problem.memory is not None
        sizes: dict[str, int] = {}
        for t in problem.memory.kept:
            what = problem.graph.describe(t)
            sizes[what] = sizes.get(what, 0) + problem.memory.kept_bytes(t, problem.rests(least.found, t))
        most = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))[:_NAMED]
        _, at = self._moments.peak_and_place(least.found)
        filled = ", ".join(f"{what} ({size_text(nbytes)})" for what, nbytes in most)
        while_running = "" if at is None else f", {size_text(least.running)} of it in {problem.graph.calls[at]}"
        return MemoryPlanError(
            asked=f"plan a step in which a rank holds {size_text(limit)}",
            found=f"the least that was found is {size_text(least.nbytes)} at a time{while_running}."
            + (f" It is filled by {filled}" if filled else " Nothing is kept for later"),
            do="Use a larger mesh or a smaller batch, or wrap layers in torch.utils.checkpoint, which keeps their "
            "inputs alone.",
            limit=limit,
        )
