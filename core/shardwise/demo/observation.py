"""What a run did: which operators with which strategy, which collectives with how many bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from attrs import field, frozen

from shardwise import collectives, dispatcher
from shardwise.collectives import Event
from shardwise.plan import Plan
from shardwise.signature import op_name

__all__ = ["CollectiveUse", "Observed", "OperatorUse", "observing"]


@frozen(order=True)
class OperatorUse:
    """An operator, the plugin of its rule, and the strategy chosen (input placements -> output placements)."""

    plugin: str
    operator: str
    strategy: str


@frozen(order=True)
class CollectiveUse:
    """A kind of collective over a group of mesh dims."""

    kind: str
    mesh_dims: tuple[int, ...]
    group_size: int


@frozen
class Observed:
    """How often each use was seen on this rank, and the bytes that each kind of collective moved."""

    operators: Counter[OperatorUse] = field(factory=Counter)
    collectives: Counter[CollectiveUse] = field(factory=Counter)
    nbytes: Counter[CollectiveUse] = field(factory=Counter)

    def saw_plan(self, plan: Plan) -> None:
        """Count one dispatch; an operator over lists counts once for each different strategy in the list."""
        plugin, operator = plan.entry.origin.plugin, op_name(plan.schema.op)
        for strategy in {str(strategy) for strategy in plan.strategies}:
            self.operators[OperatorUse(plugin, operator, strategy)] += 1

    def saw_collective(self, event: Event) -> None:
        """Count one collective."""
        use = CollectiveUse(event.kind, tuple(event.mesh_dims), event.group_size)
        self.collectives[use] += 1
        self.nbytes[use] += event.nbytes


@contextmanager
def observing() -> Iterator[Observed]:
    """Watch every dispatch and every collective of this process."""
    seen = Observed()
    with dispatcher.observe(seen.saw_plan), collectives.observe(seen.saw_collective):
        yield seen
