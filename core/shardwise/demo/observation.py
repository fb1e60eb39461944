"""What a run did: operators with their strategies, collectives with their bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

from attrs import field, frozen

from shardwise.comm import events
from shardwise.comm.events import Event
from shardwise.kernel import dispatcher
from shardwise.kernel.placements import show_all
from shardwise.kernel.plan import Plan
from shardwise.kernel.signature import op_name
from shardwise.kernel.spec import TensorSpec

__all__ = ["CollectiveUse", "Observed", "OperatorUse", "observing"]

LONG_RUN = 8


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
    """How often this rank ran each use, and the bytes of each kind of collective."""

    operators: Counter[OperatorUse] = field(factory=Counter)
    collectives: Counter[CollectiveUse] = field(factory=Counter)
    nbytes: Counter[CollectiveUse] = field(factory=Counter)

    def saw_plan(self, plan: Plan) -> None:
        """Count one dispatch; an operator over lists counts once for each different strategy in the list."""
        plugin, operator = plan.entry.origin.plugin, op_name(plan.schema.op)
        texts = {f"{_operands(s.input_specs)} -> {_operands(s.output_specs)}" for s in plan.strategies}
        for strategy in texts:
            self.operators[OperatorUse(plugin, operator, strategy)] += 1

    def saw_collective(self, event: Event) -> None:
        """Count one collective."""
        use = CollectiveUse(event.kind, tuple(event.mesh_dims), event.group_size)
        self.collectives[use] += 1
        self.nbytes[use] += event.nbytes


def _operands(specs: Sequence[TensorSpec | None]) -> str:
    """Placements of each operand; a run of equal ones, as in a list of tensors, is written once with its length."""
    shown = ["-" if spec is None else show_all(spec.placements) for spec in specs]
    runs = [(text, len(list(run))) for text, run in groupby(shown)]
    return ", ".join(f"{length} x {text}" if length > LONG_RUN else ", ".join([text] * length) for text, length in runs)


@contextmanager
def observing() -> Iterator[Observed]:
    """Watch every dispatch and every collective of this process."""
    seen = Observed()
    with dispatcher.observe(seen.saw_plan), events.observe(seen.saw_collective):
        yield seen
