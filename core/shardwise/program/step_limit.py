"""The best assignment that keeps a limit on memory.

A rank holds what it keeps for later, and at each call what that needs while it runs. A limit below what every plan
holds (:mod:`shardwise.program.least_memory`) is refused at once. Else a price per byte that is kept is raised until the
limit is kept, or until what is kept leaves enough of it and a call holds too much while it runs. Then each moment of
the step gets a price of its own (:mod:`shardwise.program.moment_search`), and what is left over the limit is brought
below it choice by choice (:mod:`shardwise.program.step_repair`). Of two plans around the limit the parts in which they
differ are exchanged (:mod:`shardwise.program.part_exchange`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial

import numpy as np
from attrs import define, evolve, field, frozen

from shardwise.errors import MemoryPlanError
from shardwise.program.amounts import size_text
from shardwise.program.cost_graph import FORBIDDEN
from shardwise.program.least_memory import Least, LeastMemory
from shardwise.program.moment_prices import MomentPrices
from shardwise.program.moment_search import MomentSearch
from shardwise.program.part_exchange import PartExchange
from shardwise.program.replay import DEEPEST, replayed
from shardwise.program.short_solution import ShortProblem
from shardwise.program.step_bound import WorkTable, step_bound
from shardwise.program.step_memory import StepMemory
from shardwise.program.step_moments import StepMoments
from shardwise.program.step_problem import Assignment, StepProblem
from shardwise.program.step_repair import Repair
from shardwise.program.step_solution import solve_step

__all__ = ["PricedSearch"]

_FIRST_PRICE = Fraction(1, 32)  # of the cost of a step per byte that it keeps
_RAISES = 12  # of the price, by _RAISE each
_RAISE = 8
_HALVINGS = 4  # of the interval between a price that is too low and one that is enough
_SEVERAL = 3  # mesh dims up to which a step is bounded at two prices
_SPARE = 256  # of the limit, this part
_NEARLY = 32  # of the limit, this part: while less is left, there is little to be had for it
_FEWER = 2  # numbers of layers, until what a run by decisions does fits as well
_ENOUGH = 8  # of the limit, this part: while less is left beside what is kept, a higher price on that comes first
_CLOSE = 2  # the least that was found exceeds a limit by at most this part of it; further off, nothing is there
_HOPELESS = 4  # rounds of prices on moments, each eight times the last, after which it should be that close
_POINTS = 6  # of the assignments that hold least, changed by single choices
_TRIALS = 200_000  # calls that are looked at under such changes: some seconds
_FEW_TRIALS = 20_000  # where a limit is kept already
_SMALL = 200  # calls of a step in which moments are priced though a limit is kept: it takes a second or two
_NAMED = 6  # tensors that an error names


@frozen(eq=False)
class _Tried:
    """What was found at a price: nanoseconds without it, the most bytes that a rank holds at a time, and how many of
    them the call that runs then has.
    """

    price: Fraction
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
    _least: Least | None = field(default=None, init=False)
    _moments: StepMoments = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._moments = self.problem.moments

    def best(self, limit: int | None = None) -> Assignment:
        """The cheapest assignment found in which a rank holds at most ``limit`` bytes at any time. A start that keeps
        the limit is no cheaper.

        Raises :class:`MemoryPlanError` where none is found.
        """
        if limit is not None:
            self._refuse_impossible(limit)
        return self._or_start(self._searched(limit), limit)

    def _searched(self, limit: int | None) -> _Tried:
        """The cheapest that is found at prices and between them."""
        if not self._tried:
            self._try(Fraction(0), self.starts, exchanges=bool(self.problem.free - self.problem.pinned))
        if limit is None:
            return self._improved(self._tried[0], None)
        if not self._within(limit):
            self._raise_price(limit)
        if self._within(limit):
            self._halve_price(limit)
        is_small = len(self.problem.graph.calls) <= _SMALL
        if not self._within(limit) or (is_small and self._exceeding(limit)):
            self._price_moments(limit)
        if not self._exchange_parts(limit):
            self._mix(limit)
        return self._improved(min(self._within(limit), key=lambda tried: tried.found.cost), limit)

    def _or_start(self, best: _Tried, limit: int | None) -> Assignment:
        """What was found, or a cheaper start that keeps the limit, and what is reached from there at the same price.

        The search begins at the starts without a price, and goes on from what it found there. With fewer layers, too,
        it may miss a start.
        """
        for start in sorted(self.starts, key=lambda start: start.cost):
            if start.cost >= best.found.cost:
                break
            if limit is None or self.peak(start) <= limit:
                better = self._solved_at(best.price, lambda starts: solve_step(self.problem, starts), [start])
                keeps = limit is None or better.nbytes <= limit
                return better.found if keeps and better.found.cost < start.cost else start
        return best.found

    def _halve_price(self, limit: int) -> None:
        """Bring the price that is too low and the one that is enough closer to each other."""
        for _ in range(_HALVINGS):
            low, high = self._around(limit)
            if low is None or low.price == high.price:
                break
            self._try(Fraction((float(low.price or high.price / 16) * float(high.price)) ** 0.5), [low.found])

    def _exchange_parts(self, limit: int) -> bool:
        """Try what holds too much with parts of what holds less; whether that fills the limit, or nearly so."""
        low, high = self._around(limit)
        if self.short is None or low is None:
            return False
        exchange = PartExchange(self.problem, self.short.step.of_whole, low.found, high.found)
        for found in exchange.within(limit - limit // _SPARE):
            # Calls that look the same do the same in a run.
            followed = replayed(self.problem, found, DEEPEST, tries=0)
            tried = high if followed is None else self._as_tried(high.price, followed)
            if tried.nbytes <= limit and tried.found.cost < high.found.cost:
                self._tried.append(tried)
                self._done.append(tried)
                return limit - tried.nbytes <= limit // _NEARLY
        return False

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
        if low is None:
            return self._bound_at(high, limit, work)
        # On many mesh dims a bound takes minutes, and the two prices are close to each other.
        several = self.problem.graph.mesh.ndim <= _SEVERAL
        return max(self._bound_at(one, limit, work) for one in ((low, high) if several else (self._even(low, high),)))

    def _even(self, low: _Tried, high: _Tried) -> _Tried:
        """What holds less, at the price at which it is as good as what holds too much: there bounds are highest."""
        problem, memory = self.problem, self.problem.memory
        assert memory is not None
        problem.memory = memory.after_forward()
        fewer = problem.nbytes(low.found) - problem.nbytes(high.found)
        problem.memory = memory
        price = Fraction(high.found.cost - low.found.cost, fewer) if fewer > 0 else high.price
        return evolve(high, price=min(max(price, low.price), high.price))

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

    def _exceeding(self, limit: int) -> list[_Tried]:
        return [tried for tried in self._tried if tried.nbytes > limit]

    def _around(self, limit: int) -> tuple[_Tried | None, _Tried]:
        """What was tried at the highest price that is too low, and at the lowest above it that is enough."""
        low = max(self._exceeding(limit), key=lambda tried: tried.price, default=None)
        high = [tried for tried in self._within(limit) if low is None or tried.price > low.price]
        return low, min(high or self._within(limit), key=lambda tried: tried.price)

    def _raise_price(self, limit: int) -> None:
        """Raise the price until the limit is kept, or what is kept leaves enough of it for a call while it runs."""
        last = max(self._tried, key=lambda tried: tried.price)
        highest = Fraction(FORBIDDEN, 64 * max(last.nbytes, 1))
        price = last.price * _RAISE or Fraction(max(last.found.cost, 1), max(last.nbytes, 1)) * _FIRST_PRICE
        for _ in range(_RAISES):
            if last.nbytes <= limit or limit - (last.nbytes - last.running) >= limit // _ENOUGH:
                return
            price = min(price, highest)
            last = self._try(price, [last.found])
            if last.nbytes > limit and price == highest and self.lean is not None:
                last = self._try(price, [self.lean()])
            if price == highest:
                return
            price *= _RAISE

    def _price_moments(self, limit: int) -> None:
        """Try prices on what is held at each moment, and change single choices.

        Raises :class:`MemoryPlanError` where nothing is found within the limit.
        """
        least = min(self._tried, key=lambda tried: self._rank(tried.found, limit))
        price = max(tried.price for tried in self._tried)
        for n, found in enumerate(MomentSearch(self.problem, limit, self._solved_at_prices).run(least.found)):
            self._tried.append(self._as_tried(price, found))
            is_close = min(tried.nbytes for tried in self._tried) - limit <= limit // _CLOSE
            if n >= _HOPELESS and not is_close:
                break
        if is_close:
            points = [tried.found for tried in self._tried]
            for found in self._repaired(points, limit, _FEW_TRIALS if self._within(limit) else _TRIALS):
                self._tried.append(self._as_tried(price, found))
                self._done.append(self._tried[-1])
        if not self._within(limit):
            raise self._too_little(limit)

    def _repaired(self, points: Sequence[Assignment], limit: int, trials: int) -> Iterator[Assignment]:
        """The points that exceed the limit by least, changed so that they keep it, and for less cost."""
        points = sorted(points, key=lambda found: self._rank(found, limit))
        points = [one for n, one in enumerate(points) if not any(map(one.is_same, points[:n]))]
        for n, point in enumerate(points[:_POINTS]):
            repair = Repair(self.problem, limit, point, trials // (_POINTS - n))
            repaired = repair.run()
            trials -= repair.spent
            # Calls that look the same do the same in a run.
            followed = replayed(self.problem, repaired, DEEPEST, tries=0)
            yield repaired if followed is None or self.peak(followed) > limit else followed

    def _rank(self, found: Assignment, limit: int) -> tuple[int, int]:
        return int(np.maximum(self._moments.held(found) - limit, 0).sum()), found.cost

    def _solved_at_prices(self, prices: MomentPrices, start: Assignment) -> Assignment:
        problem = self.problem
        problem.prices = prices
        try:
            found = None if self.short is None else self.short.solved([start], exchanges=False)
            if found is None:
                priced = start.copy()
                priced.cost = problem.cost(priced)
                found = solve_step(problem, [priced])
        finally:
            problem.prices = None
        found = found.copy()
        found.cost = problem.cost(found)
        return found

    def _try(self, price: Fraction, starts: Sequence[Assignment], *, exchanges: bool = False) -> _Tried:
        self._tried.append(self._solved_at(price, partial(self._solved, exchanges=exchanges), starts))
        return self._tried[-1]

    def _solved(self, starts: Sequence[Assignment], *, exchanges: bool = False) -> Assignment:
        found = None if self.short is None else self.short.solved(starts, exchanges=exchanges)
        return solve_step(self.problem, starts, exchanges=exchanges) if found is None else found

    def _solved_at(
        self, price: Fraction, solved: Callable[[Sequence[Assignment]], Assignment], starts: Sequence[Assignment]
    ) -> _Tried:
        problem = self.problem
        problem.price = price
        try:
            priced = [start.copy() for start in starts]
            for start in priced:
                start.cost = problem.cost(start)
            found = solved(priced)
        finally:
            problem.price = Fraction(0)
        return self._as_tried(price, found.copy())

    def _as_tried(self, price: Fraction, found: Assignment) -> _Tried:
        problem = self.problem
        found.cost = problem.cost(found)
        nbytes, at = self._moments.peak_and_place(found)
        running = 0 if at is None else self._moments.running_bytes(found, at)
        return _Tried(price, found, nbytes, running)

    def _refuse_impossible(self, limit: int) -> None:
        """Raise :class:`MemoryPlanError` where no plan can keep a limit, before one is searched for."""
        if self._least is None:
            self._least = LeastMemory(self.problem, self.starts[0]).found()
        of = self._least
        if of.nbytes > limit:
            raise self._refusal(limit, "every plan holds at least", of.nbytes, of.place, of.running, of.kept)

    def _too_little(self, limit: int) -> MemoryPlanError:
        problem, least = self.problem, min(self._tried, key=lambda tried: tried.nbytes)
        assert problem.memory is not None
        kept: dict[str, int] = {}
        for t in problem.memory.kept:
            what = problem.graph.describe(t)
            kept[what] = kept.get(what, 0) + problem.memory.kept_bytes(t, problem.rests(least.found, t))
        _, at = self._moments.peak_and_place(least.found)
        return self._refusal(limit, "the least that was found is", least.nbytes, at, least.running, kept)

    def _refusal(
        self, limit: int, what: str, nbytes: int, place: int | None, running: int, kept: Mapping[str, int]
    ) -> MemoryPlanError:
        """The error for a limit, with the call that runs where most is held, and what is kept for later."""
        most = sorted(kept.items(), key=lambda item: (-item[1], item[0]))[:_NAMED]
        filled = ", ".join(f"{name} ({size_text(size)})" for name, size in most)
        while_running = "" if place is None else f", {size_text(running)} of it in {self.problem.graph.calls[place]}"
        return MemoryPlanError(
            asked=f"plan a step in which a rank holds {size_text(limit)}",
            found=f"{what} {size_text(nbytes)} at a time{while_running}. "
            + (f"It is filled by {filled}" if filled else "Nothing is kept for later"),
            do="Use a larger mesh or a smaller batch, or wrap layers in torch.utils.checkpoint, which keeps their "
            "inputs alone.",
            limit=limit,
        )
