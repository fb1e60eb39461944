"""An explanation as JSON: the values that ``shardwise explain --json`` prints."""

from __future__ import annotations

import math
from typing import Any

from shardwise.kernel.placements import show
from shardwise.kernel.precedence import Entry
from shardwise.kernel.signature import op_name
from shardwise.kernel.spec import TensorSpec
from shardwise.tools.explain import Explanation, RankedStrategy, Redistribution

__all__ = ["as_json_values"]


def as_json_values(explanation: Explanation) -> dict[str, Any]:
    """All of an explanation, in values that JSON has: seconds, bytes, and placements as shardwise prints them."""
    schema = explanation.schema
    tensors = {a.name for a in schema.signature.tensor_args}
    return {
        "op": op_name(schema.op),
        "mesh": list(schema.mesh.shape),
        "device_type": schema.mesh.device_type,
        "inputs": [{"name": n, **_json_spec(s)} for n, s in zip(schema.operand_names, schema.specs, strict=True)],
        "arguments": {n: _json_value(v) for n, v in schema.args.items() if n not in tensors},
        "rule": _json_entry(explanation.entry),
        "other_rules": [_json_entry(entry) for entry in explanation.others],
        "decisions": [
            {
                "positions": list(decision.positions),
                "operands": list(decision.operands),
                "legal": decision.legal,
                "legal_is_exact": decision.counted,
                "combinations": decision.combinations,
                "strategies": [_json_strategy(one) for one in decision.ranked],
                "not_considered": [
                    {"reason": e.reason, "mesh_dim": e.mesh_dim, "rows": list(e.rows), "count": e.count}
                    for e in decision.exclusions
                ],
            }
            for decision in explanation.decisions
        ],
        "moves": list(map(_json_redistribution, explanation.redistributions)),
        "moves_of_results": list(map(_json_redistribution, explanation.after)),
        "collectives": [
            {
                "kind": collective.kind,
                "mesh_dims": list(collective.mesh_dims),
                "ranks": collective.ranks,
                "bytes": collective.nbytes,
                "purpose": collective.purpose,
            }
            for collective in explanation.collectives
        ],
        "collectives_are_complete": explanation.lowering is None or explanation.lowering.complete,
        "results": [_json_spec(spec) for spec in explanation.results],
        "parts": [as_json_values(part) for part in explanation.parts],
    }


def _json_redistribution(redistribution: Redistribution) -> dict[str, Any]:
    return {
        "operand": redistribution.operand,
        "cost": redistribution.path.cost,
        "steps": [
            {
                "kind": step.kind,
                "mesh_dims": list(step.mesh_dims),
                "from": list(map(show, step.source)),
                "to": list(map(show, step.target)),
                "cost": step.cost,
            }
            for step in redistribution.path.steps
        ],
    }


def _json_value(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return [_json_value(v) for v in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _json_spec(spec: TensorSpec | None) -> dict[str, Any]:
    if spec is None:
        return {"meta": None, "placements": None}
    return {"meta": str(spec.tensor_meta), "placements": list(map(show, spec.placements))}


def _json_entry(entry: Entry) -> dict[str, str]:
    return {
        "text": entry.rule.text,
        "plugin": entry.origin.plugin,
        "distribution": entry.origin.distribution,
        "version": entry.origin.version,
        "source": entry.rule.source,
    }


def _json_strategy(one: RankedStrategy) -> dict[str, Any]:
    strategy = one.strategy
    return {
        "rows": list(strategy.names),
        "inputs": [_json_spec(spec)["placements"] for spec in strategy.input_specs],
        "outputs": [_json_spec(spec)["placements"] for spec in strategy.output_specs],
        "costs": list(map(_json_cost, strategy.redistribute_cost)),
        "cost": _json_cost(strategy.cost),
        "lowered": strategy.lowered,
        "taken": not one.reason,
        "reason": one.reason,
    }


def _json_cost(seconds: float) -> float | None:
    """JSON has no infinity: None for a redistribution that is not possible."""
    return None if math.isinf(seconds) else seconds
