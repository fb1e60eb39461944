"""What a call costs apart from moving its operands: its local work, and what its lowering sends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from shardwise.engine.traffic import Collective, in_lowering
from shardwise.kernel.arguments import kind_of
from shardwise.kernel.authored import authored, refuse_answer
from shardwise.kernel.placements import shard_dim
from shardwise.kernel.rule import Row, Rule
from shardwise.kernel.signature import Call
from shardwise.kernel.spec import TensorSpec
from shardwise.planning.cost import StepCosts, links_of, step_costs
from shardwise.planning.strategies import make_call
from shardwise.program.step_graph import CallNode, StepGraph
from shardwise.program.step_rows import Choices, as_placements, placed, shards_of

__all__ = ["WorkCosts", "stated_work"]


@define(eq=False)
class WorkCosts:
    """Seconds of a call on one rank: a start, its floating-point operations or its bytes, whichever take longer, and
    the collectives of its lowering.
    """

    graph: StepGraph
    _costs: StepCosts = field(init=False)
    _lowered: dict[Any, float] = field(factory=dict, init=False)
    _flops: dict[Any, float] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self._costs = step_costs(tuple(self.graph.mesh.shape), links_of(self.graph.mesh))

    def __call__(self, call: CallNode, choices: Choices, rows: Sequence[Row]) -> float:
        return self._work(call, choices, rows) + self._sent(call, choices, rows)

    def _work(self, call: CallNode, choices: Choices, rows: Sequence[Row]) -> float:
        if call.schema.is_view:
            return 0.0
        shape = tuple(self.graph.mesh.shape)
        nbytes = 0.0
        for tensors, sides in ((call.operands, [r.inputs for r in rows]), (call.results, [r.outputs for r in rows])):
            for i, t in enumerate(tensors):
                if t is not None:
                    meta = self.graph.tensors[t].spec.tensor_meta
                    pieces = math.prod(n for n, side in zip(shape, sides, strict=True) if _is_cut(side[i]))
                    nbytes += meta.nbytes / pieces
        return self._costs.work(nbytes, self._operations(call, choices) / shards_of(rows, shape))

    def at_least(self, call: CallNode, choices: Choices, rows: Sequence[Sequence[int]]) -> NDArray[np.float64]:
        """Seconds of the local work by combination of rows, lists of which are given by mesh dim; without what
        lowerings send.
        """
        shape = tuple(map(len, rows))
        if call.schema.is_view:
            return np.zeros(shape)
        sizes = tuple(self.graph.mesh.shape)
        nbytes = np.zeros(shape)
        for tensors, made in ((call.operands, False), (call.results, True)):
            for i, t in enumerate(tensors):
                if t is not None:
                    cut = [[_is_cut((_side(choices.rows[r], made))[i]) for r in of] for of in rows]
                    nbytes += self.graph.tensors[t].spec.tensor_meta.nbytes * _shares(cut, sizes)
        split = [[any(map(_is_cut, (*choices.rows[r].inputs, *choices.rows[r].outputs))) for r in of] for of in rows]
        operations = self._operations(call, choices) * _shares(split, sizes)
        seconds: NDArray[np.float64] = np.vectorize(self._costs.work, otypes=[np.float64])(nbytes, operations)
        return seconds

    def _operations(self, call: CallNode, choices: Choices) -> float:
        """Floating-point operations of the whole call, by its rule."""
        rule = call.entry.rule
        if not isinstance(rule, Rule) or rule.work is None:
            return 0.0
        key = id(choices)
        if key not in self._flops:
            self._flops[key] = stated_work(rule, self._as_call(call))
        return self._flops[key]

    def _as_call(self, call: CallNode) -> Call:
        metas = [None if t is None else self.graph.tensors[t].spec.tensor_meta for t in call.results]
        return make_call(call.entry.rule, call.schema, metas)

    def _sent(self, call: CallNode, choices: Choices, rows: Sequence[Row]) -> float:
        """Seconds of what a lowering sends. One that depends on data counts for what is known before it does."""
        if not any(row.lowered for row in rows):
            return 0.0
        key = (id(choices), tuple(rows))
        known = self._lowered.get(key)
        if known is None:
            known = self._lowered[key] = sum(_seconds(self._costs, one) for one in self.sent_by_lowering(call, rows))
        return known

    def sent_by_lowering(self, call: CallNode, rows: Sequence[Row]) -> tuple[Collective, ...]:
        """The collectives of a lowering under rows, one per mesh dim."""
        if not any(row.lowered for row in rows) or call.entry.rule.lowering is None:
            return ()
        inputs = [
            None if spec is None else _placed(spec, [row.inputs[i] for row in rows])
            for i, spec in enumerate(call.schema.specs)
        ]
        results = [
            None if t is None else _placed(self.graph.tensors[t].spec, [row.outputs[i] for row in rows])
            for i, t in enumerate(call.results)
        ]
        schema = call.schema.with_specs(inputs)
        return in_lowering(call.entry, schema, schema.values, self._as_call(call), inputs, results).collectives


def _side(row: Row, made: bool) -> Sequence[Any]:
    return row.outputs if made else row.inputs


def _shares(is_cut: Sequence[Sequence[bool]], sizes: Sequence[int]) -> NDArray[np.float64]:
    """The part that a rank has by combination of rows, from whether each row cuts."""
    each = [np.array([1 / n if cut else 1.0 for cut in of]) for of, n in zip(is_cut, sizes, strict=True)]
    share: NDArray[np.float64] = reduce(np.multiply.outer, each)
    return share


def _is_cut(placement: Any) -> bool:
    return shard_dim(placement) is not None


def _placed(spec: TensorSpec, places: Sequence[Any]) -> TensorSpec:
    return spec.untagged.with_placements(as_placements(tuple(map(placed, places)), spec.mesh_shape))


def stated_work(rule: Rule, call: Call) -> float:
    """What a rule's ``work`` says of a call. A negative cost, or one that is no number, could decide for any row."""
    assert rule.work is not None
    with authored(call.op, rule.source, "work="):
        operations: object = rule.work(call)
    if isinstance(operations, bool) or not isinstance(operations, (int, float)) or not 0 <= operations < math.inf:
        answer = repr(operations) if isinstance(operations, (int, float)) else kind_of(operations)
        refuse_answer(call.op, rule.source, "work=", answer, "Return a finite number of operations, 0 or more")
    return float(operations)


def _seconds(costs: StepCosts, one: Collective) -> float:
    """A collective by the bytes that a rank sends in."""
    match one.kind:
        case "all_gather":
            return costs.all_gather(one.mesh_dims, one.nbytes)
        case "reduce_scatter":
            return costs.reduce_scatter(one.mesh_dims, one.nbytes // one.ranks)
        case "all_reduce":
            return costs.all_reduce(one.mesh_dims, one.nbytes)
        case _:  # an exchange of pieces, or a shift to the neighbours
            return costs.all_to_all(one.mesh_dims, -(-one.nbytes // one.ranks))
