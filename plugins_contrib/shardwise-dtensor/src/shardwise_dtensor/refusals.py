"""Why an op and its rule cannot be exported to DTensor: what ``register_sharding`` cannot express."""

from __future__ import annotations

import torch

from shardwise.rule import FullMeshRule, Op, OpSchema, Rule
from shardwise_dtensor import torch_private

__all__ = ["refusals"]


def refusals(op: Op, rule: Rule | FullMeshRule, *, override: bool) -> tuple[str, ...]:
    """The reasons; empty for an op that can be exported. For each of them, DTensor would compute a wrong result."""
    return tuple(_of_rule(rule)) + tuple(_of_op(op)) + tuple(_of_torch(op, override=override))


def _of_rule(rule: Rule | FullMeshRule) -> list[str]:
    if isinstance(rule, FullMeshRule):
        return ["the rule is a function of the full mesh, and DTensor takes rows of one mesh dim"]
    reasons = []
    if rule.zip_lists:
        reasons.append("every list position chooses for itself, and DTensor takes one choice for all")
    if rule.writes:
        reasons.append(f"the op writes {', '.join(sorted(rule.writes))} without its schema saying so")
    return reasons


def _of_op(op: Op) -> list[str]:
    schema = torch_private.schema_of(op)
    tensors = OpSchema.of(op).signature.tensor_args
    reasons = []
    if any(a.is_out for a in tensors):
        reasons.append("it has out= arguments, which register_sharding does not take")
    keyword = [a.name for a in tensors if a.kwarg_only and not a.is_out]
    if keyword:
        reasons.append(f"DTensor does not redistribute keyword-only tensors ({', '.join(keyword)})")
    if not all(isinstance(r.type, torch.TensorType) for r in schema.returns):
        reasons.append("DTensor takes rows for results that are single tensors, and it has others")
    if torch.Tag.nondeterministic_seeded in op.tags:
        reasons.append("it draws random numbers, which DTensor synchronises for its own ops only")
    return reasons + _of_writing(op)


def _of_writing(op: Op) -> list[str]:
    """DTensor assumes that an op whose name ends with ``_`` writes its first argument, and that no other op writes."""
    schema = torch_private.schema_of(op)
    written = [i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write and not a.is_out]
    in_place = schema.name.endswith("_")
    single = bool(schema.arguments) and isinstance(schema.arguments[0].type, torch.TensorType)
    if in_place != bool(written) or (in_place and (written != [0] or not single)):
        names = ", ".join(schema.arguments[i].name for i in written) or "nothing"
        return [f"it writes {names}, and DTensor goes by the name: it keeps only the first argument of name_ in place"]
    return []


def _of_torch(op: Op, *, override: bool) -> list[str]:
    if torch_private.has_handler(op):
        return ["DTensor runs it by code of its own, without asking a rule"]
    if torch_private.rewrites_arguments(op):
        return ["DTensor makes its arguments local by itself, as only its own rule needs it"]
    if torch_private.has_rule(op) and not override:
        return ["DTensor has a rule for it; pass override=True to replace it"]
    return []
