"""What a tool asks about one call: the metas of its results, the rows of a rule, a strategy written out with its cost.

A function of the full mesh (``full_mesh_rule``) builds its answer with :func:`strategy`; a tool that hands rules on to
another system reads them with :func:`rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwise.errors import NoStrategyError
from shardwise.flow import Row
from shardwise.meta import UNKNOWN, schema_metas
from shardwise.placements import Placement
from shardwise.planner import make_call
from shardwise.rule import Rule
from shardwise.schema import OpSchema, PlacementStrategy
from shardwise.signature import op_name
from shardwise.spec import TensorMeta, TensorSpec
from shardwise.transition import transition_cost

__all__ = ["result_metas", "rows", "strategy"]

Places = Sequence[Placement] | None


def result_metas(schema: OpSchema, instead: Callable[..., Any] | None = None) -> tuple[TensorMeta | None, ...]:
    """Metas of the tensor results of a call, lists flattened, ``None`` for one that is undefined.

    ``instead`` runs on the meta device in place of the op, as a rule's ``meta=`` does.

    Raises :class:`NoStrategyError` when the shapes depend on data, and what the op itself raises for a wrong call.
    """
    found = schema_metas(schema, instead)
    if found is UNKNOWN:
        raise NoStrategyError(
            asked=f"enumerate the strategies of {schema}",
            found="the shape of its result depends on data",
            do="Run the op on data.",
            op=op_name(schema.op),
        )
    metas: tuple[TensorMeta | None, ...] = found
    return metas


def rows(rule: Rule, schema: OpSchema) -> tuple[Row, ...]:
    """The legal rows of one call on one mesh dim, in order of preference; where its operands lie plays no part."""
    return rule.rows(make_call(rule, schema, result_metas(schema, rule.meta)))


def strategy(
    schema: OpSchema,
    inputs: Sequence[Places],
    outputs: Sequence[Places],
    metas: Sequence[TensorMeta | None],
    *,
    lowered: bool = False,
) -> PlacementStrategy:
    """A strategy from one placement per mesh dim for each operand and result (flat, ``None`` where absent).

    ``metas`` are those of :func:`result_metas`. The cost is that of moving each operand there from where it lies.
    Raises :class:`PlacementError` for a placement that a tensor cannot have.
    """
    placed = tuple(
        None if spec is None or places is None else spec.with_placements(places)
        for spec, places in zip(schema.specs, inputs, strict=True)
    )
    results = tuple(
        None if meta is None or places is None else TensorSpec(schema.mesh, tuple(places), meta)
        for meta, places in zip(metas, outputs, strict=True)
    )
    costs = tuple(
        0.0 if src is None or dst is None else transition_cost(src, dst)
        for src, dst in zip(schema.specs, placed, strict=True)
    )
    return PlacementStrategy(placed, results, costs, (), lowered)
