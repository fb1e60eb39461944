"""Small operations on cost tables, each done once per distinct operands.

Repeated layers have the same tables, as the same objects. So results are kept by the identities of the operands, and
equal operands give the same result object: the repetition carries through all of an elimination. A result depends on
values alone; identities only decide whether it is computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwise.program.cost_graph import FORBIDDEN, Costs

__all__ = ["ArrayCache", "Choices"]

Choices: TypeAlias = NDArray[np.uint16]

_CHUNK = 1 << 17  # entries of a sum that are worked on together: 1 MiB, which a core's own cache holds
_KEPT = 1 << 16  # larger results are not kept; they take longer to compute than to find, but fill the memory


class ArrayCache:
    """Results of operations on cost tables by the identities of their operands."""

    def __init__(self) -> None:
        self._results: dict[tuple[Any, ...], Any] = {}
        self._contents: dict[tuple[Any, ...], Costs] = {}
        self._snapshots: dict[tuple[Any, ...], Costs] = {}
        #: Orders of elimination by the structure of a network.
        self.orders: dict[Any, Any] = {}

    def interned(self, costs: Costs) -> Costs:
        """The first array with these contents, where they are few."""
        if costs.size > _KEPT:
            return costs
        return self._contents.setdefault((costs.shape, costs.tobytes()), costs)

    def snapshot(self, costs: Costs) -> Costs:
        """An array with these contents that stays so, where they are few: this one may be changed later."""
        if costs.size > _KEPT:
            return costs.copy()
        key = (costs.shape, costs.tobytes())
        known = self._snapshots.get(key)
        if known is None:
            known = self._snapshots[key] = costs.copy()
        return known

    def transposed(self, costs: Costs) -> Costs:
        return self._once(("transposed", id(costs)), (costs,), lambda: np.ascontiguousarray(costs.T))

    def added(self, a: Costs, b: Costs) -> Costs:
        """The sum of two tables of one shape, at most FORBIDDEN."""
        return self._once(("added", id(a), id(b)), (a, b), lambda: np.minimum(a + b, FORBIDDEN))

    def row(self, costs: Costs, state: int) -> Costs:
        """The costs that remain when the first variable of a table has a state."""
        return self._once(("row", id(costs), state), (costs,), lambda: np.ascontiguousarray(costs[state]))

    def column(self, costs: Costs, state: int) -> Costs:
        """The costs that remain when the second variable of a table has a state."""
        return self._once(("column", id(costs), state), (costs,), lambda: np.ascontiguousarray(costs[:, state]))

    def part(self, costs: Costs, rows: tuple[int, ...] | None, columns: tuple[int, ...] | None) -> Costs:
        """The costs of some states; None stands for all."""

        def cut() -> Costs:
            some = costs if rows is None else costs[list(rows)]
            return np.ascontiguousarray(some if columns is None else some[:, list(columns)])

        return self._once(("part", id(costs), rows, columns), (costs,), cut)

    def minimum(
        self, tables: Sequence[Costs], axes: tuple[tuple[int, ...], ...], shape: tuple[int, ...]
    ) -> tuple[Costs, Choices]:
        """The least sum of tables over a variable, and its lowest state that gives it, for every state of the others.

        ``shape`` is (states of the variable, states of its neighbours in order). ``axes`` has, for each dim of each
        table, the axis of that shape. All but the axis 0 are in ascending order.
        """
        key = ("minimum", shape, axes, *map(id, tables))
        result = self._results.get(key)
        if result is None:
            least, choice = _minimum(tables, axes, shape)
            if max(costs.size for costs in (least, *tables)) > _KEPT:
                return least, choice
            result = self._results[key] = self.interned(least), choice, tuple(tables)
        return result[0], result[1]

    def _once(self, key: tuple[Any, ...], operands: tuple[Costs, ...], compute: Callable[[], Costs]) -> Costs:
        result: tuple[Costs, tuple[Costs, ...]] | None = self._results.get(key)
        if result is None:
            costs = compute()
            if max(each.size for each in (costs, *operands)) > _KEPT:
                return costs
            # The operands are kept as well: an identity is only one as long as its object lives.
            result = self._results[key] = self.interned(costs), operands
        return result[0]


def _minimum(tables: Sequence[Costs], each: Sequence[tuple[int, ...]], shape: tuple[int, ...]) -> tuple[Costs, Choices]:
    """The work of :meth:`ArrayCache.minimum`, in chunks of the neighbours' states that fit a cache."""
    spread = []
    for costs, axes in sorted(zip(tables, each, strict=True), key=lambda factor: factor[0].size):
        at = axes.index(0)
        front = costs if at == 0 else costs.transpose(at, *range(at), *range(at + 1, len(axes)))
        spread.append(front.reshape([n if axis in axes else 1 for axis, n in enumerate(shape)]))
    least = np.empty(shape[1:], np.int64)
    choice = np.empty(shape[1:], np.uint16)
    leading = 1
    while leading < len(shape) and math.prod(shape[leading:]) * shape[0] > _CHUNK:
        leading += 1
    for index in np.ndindex(*shape[1:leading]):
        total = None
        for costs in spread:
            # An axis of length 1 has index 0 alone.
            here = (slice(None), *(i if n > 1 else 0 for i, n in zip(index, costs.shape[1:leading], strict=True)))
            total = costs[here] if total is None else total + costs[here]
        assert total is not None
        total = np.broadcast_to(total, (shape[0], *shape[leading:]))
        chosen = total.argmin(axis=0)
        choice[index] = chosen
        least[index] = np.minimum(total.min(axis=0), FORBIDDEN)
    return least, choice
