"""Explanations: every legal strategy of one call with its cost, the one chosen, and why the others lost.

The choice is the planner's own: the same search gives the cheapest strategy first, then the next, so nothing here can
disagree with what a program does. It needs no process group; specs may lie on an abstract mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from attrs import evolve, frozen

from shardwise.discovery.process import default_registry
from shardwise.engine.decided import look_up, resting, result_moves
from shardwise.engine.decomposition import Failed, answered, decompose, stand_ins
from shardwise.engine.make_plan import DescribedCall
from shardwise.engine.moved_writes import moved_writes, overwritten
from shardwise.engine.no_rule import decomposed_entry
from shardwise.engine.plan_call import describe_call
from shardwise.engine.traffic import Collective, Issued, in_lowering, in_path
from shardwise.errors import MeshMismatchError, NoStrategyError
from shardwise.kernel.arguments import refuse_argument
from shardwise.kernel.mesh import Mesh
from shardwise.kernel.nested import tensors_in
from shardwise.kernel.placements import REPLICATE, show
from shardwise.kernel.plurals import counted
from shardwise.kernel.precedence import Entry
from shardwise.kernel.rule import FullMeshRule
from shardwise.kernel.schema import OpSchema, RuntimeSchemaInfo
from shardwise.kernel.signature import Op, as_op, op_name, signature
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.path import Path, shortest_path
from shardwise.planning.results import output_metas
from shardwise.planning.strategies import merged, problems
from shardwise.private_torch.dispatch import watching
from shardwise.private_torch.modes import outside_modes
from shardwise.private_torch.ops import is_composite
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tools.call_binding import bind_call, call_error, composite_error
from shardwise.tools.program import is_split_first
from shardwise.tools.ranking import Decision, RankedStrategy, as_decided, decisions_of, full_mesh_decision, result_names

__all__ = [
    "RankedStrategy",
    "Decision",
    "Explanation",
    "LISTED",
    "Redistribution",
    "explain",
    "explain_call",
    "explain_parts",
]

LISTED = 100
"""How many strategies of one decision are listed by default."""


@frozen
class Redistribution:
    """The redistribution of one operand before the op runs, or of one result after it."""

    operand: str
    source: TensorSpec
    target: TensorSpec
    path: Path

    @property
    def collectives(self) -> list[Collective]:
        """The collectives that it issues, in order."""
        return in_path(self.source, self.path, self.operand)


@frozen(repr=False)
class Explanation:
    """What happens to one call, and why.

    ``redistributions`` come in the order in which they run, ``lowering`` is what the rule's lowering issues after them
    (None: the op runs on the shards as it is). ``after`` are the redistributions of results, where a plan for the whole
    step says that they rest elsewhere. ``others`` are rules for the op that are not in force. An op without a rule has
    ``parts``, the calls that it is decomposed into, and no decisions of its own.
    """

    schema: OpSchema
    entry: Entry
    others: tuple[Entry, ...]
    decisions: tuple[Decision, ...]
    redistributions: tuple[Redistribution, ...]
    lowering: Issued | None
    results: tuple[TensorSpec | None, ...]
    parts: tuple[Explanation, ...] = ()
    after: tuple[Redistribution, ...] = ()

    def __repr__(self) -> str:
        """The call and what was chosen, in a line; `shardwise explain` prints all of it."""
        operands = ", ".join(
            f"{name}={spec.tensor_meta} [{', '.join(map(show, spec.placements))}]"
            for name, spec in zip(self.schema.operand_names, self.schema.specs, strict=True)
            if spec is not None
        )
        rows = "; ".join(" | ".join(decision.chosen.names) for decision in self.decisions)
        runs = rows or (f"runs as {counted(len(self.parts), 'call')}" if self.parts else "no choice")
        sent = counted(len(self.collectives), "collective")
        mesh = "x".join(map(str, self.schema.mesh.shape))
        return f"<Explanation of {op_name(self.schema.op)}({operands}) on mesh {mesh}: {runs}; {sent}>"

    @property
    def collectives(self) -> list[Collective]:
        """All collectives of the call, in order; see ``lowering.complete``."""
        inside = () if self.lowering is None else self.lowering.collectives
        before = [c for redistribution in self.redistributions for c in redistribution.collectives]
        moved = [c for redistribution in self.after for c in redistribution.collectives]
        return before + list(inside) + moved + [c for part in self.parts for c in part.collectives]


def explain(op: Op, *args: Any, **kwargs: Any) -> Explanation:
    """Explain one call; ``args`` are as in a call of the op, with a :class:`TensorSpec` or MeshTensor for each tensor.

    Raises what the call would raise: :class:`NoRuleError`, :class:`NoStrategyError`, :class:`InPlaceError`; and
    :class:`CallError` for arguments that the op's schema or the op itself does not allow.
    """
    overload = as_op(op)
    if overload is None:
        refuse_argument(
            "explain a call",
            "op",
            op,
            "Give an op with its overload, as torch.ops.aten.mm.default; `shardwise explain mm` takes names.",
        )
    return explain_call(overload, args, kwargs)


def explain_call(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], *, limit: int | None = LISTED) -> Explanation:
    """As :func:`explain`, with the number of strategies to list (None: all, which may be very many)."""
    values = [_spec_of(v) for v in bind_call(op, args, kwargs)]
    flat = [v for value in values for v in (value if isinstance(value, tuple) else (value,))]
    specs = [v for v in flat if isinstance(v, TensorSpec)]
    if not specs:
        raise call_error(op, "no argument is a tensor that lies on a mesh")
    other = next((s for s in specs if s.mesh != specs[0].mesh), None)
    if other is not None:
        raise MeshMismatchError(
            asked=f"explain a call of {op_name(op)}",
            found=f"{specs[0]!r} and {other!r} lie on different meshes",
            do="Place all operands on one mesh.",
            meshes=(str(specs[0].mesh), str(other.mesh)),
        )
    mesh = specs[0].mesh
    registry = default_registry()
    if op not in registry:
        if is_composite(op):
            raise composite_error(op, values)
        return explain_parts(op, values, mesh, limit=limit)
    entry = registry.lookup(op)
    info = RuntimeSchemaInfo.of(op, entry.rule.static, entry.rule.writes)
    schema, described = describe_call(MeshTensor, entry, info, mesh, values)
    try:
        with outside_modes():
            outputs = output_metas(op, described, entry.rule.meta)
    except Exception as error:  # torch raises whatever it likes, assertions among them
        raise call_error(op, f"torch refuses it: {error}".strip().rstrip(".")) from error
    stated = DescribedCall.of(entry, schema, outputs)
    try:
        return _explain_stated(stated, described, limit)
    except NoStrategyError:
        explanation = _explain_moved_writes(stated, described, limit)
        if explanation is None:
            raise
        return explanation


def _spec_of(value: Any) -> Any:
    if isinstance(value, MeshTensor):
        return value._spec
    return tuple(map(_spec_of, value)) if isinstance(value, (list, tuple)) else value


def _explain_stated(stated: DescribedCall, described: Sequence[Any], limit: int | None) -> Explanation:
    entry, schema = stated.entry, stated.schema
    if isinstance(entry.rule, FullMeshRule):
        decisions = [full_mesh_decision(entry.rule, schema, limit)]
    else:
        decisions = decisions_of(problems(entry.rule, schema, stated.call), limit)
    decided_on = look_up(entry.rule, schema, stated.call)
    if decided_on is not None:
        decisions = [as_decided(decision, decided_on[0]) for decision in decisions]
    by_position = {i: d.chosen for d in decisions for i in d.positions}
    inputs, results = merged(schema, [by_position[i] for i in sorted(by_position)])
    stated.check(inputs)
    lowered = entry.rule.lowering is not None and any(d.chosen.lowered for d in decisions)
    inside = in_lowering(entry, schema, described, stated.call, inputs, results) if lowered else None
    others = tuple(e for e in default_registry().find(schema.op) if e is not entry)
    redistributions = _redistributions(schema, inputs)
    after: tuple[Redistribution, ...] = ()
    if decided_on is not None:
        made, results = results, resting(results, decided_on[1])
        after = _moves_of_results(made, results)
    return Explanation(schema, entry, others, tuple(decisions), redistributions, inside, tuple(results), after=after)


def _explain_moved_writes(stated: DescribedCall, described: Sequence[Any], limit: int | None) -> Explanation | None:
    """The explanation of a call that writes moved operands and moves them back; ``None`` if no layout of them helps."""
    entry, schema = stated.entry, stated.schema
    metas = stated.metas if stated.is_known else None
    not_read = overwritten(schema)
    for moved in moved_writes(schema):
        pairs = zip(described, moved.values, strict=True)
        arguments = [spec if isinstance(old, (TensorSpec, tuple)) else old for old, spec in pairs]
        with suppress(NoStrategyError):
            explanation = _explain_stated(DescribedCall.of(entry, moved, metas), arguments, limit)
            reads = [r for r in _redistributions(schema, moved.specs) if r.operand.split("[")[0] not in not_read]
            parts = {new: old for old, new in zip(schema.specs, moved.specs, strict=True) if old is not new}
            results = tuple(parts.get(spec, spec) for spec in explanation.results)
            moves = (*reads, *explanation.redistributions)
            return evolve(explanation, schema=schema, redistributions=moves, results=results)
    return None


def _moves_of_results(
    made: Sequence[TensorSpec | None], rests: Sequence[TensorSpec | None]
) -> tuple[Redistribution, ...]:
    pairs = zip(result_names(len(made)), result_moves(made, rests) or (), strict=False)
    return tuple(
        Redistribution(
            move.reason.replace("result", name, 1), move.made, move.rests, shortest_path(move.made, move.rests)
        )
        for name, move in pairs
        if move is not None
    )


def _redistributions(schema: OpSchema, targets: Sequence[TensorSpec | None]) -> tuple[Redistribution, ...]:
    return tuple(
        Redistribution(name, src, dst, shortest_path(src, dst))
        for name, src, dst in zip(schema.operand_names, schema.specs, targets, strict=True)
        if src is not None and dst is not None and src.placements != dst.placements
    )


def explain_parts(op: Op, values: Sequence[Any], mesh: Mesh, *, limit: int | None = LISTED) -> Explanation:
    """As :func:`explain_call` for an op without a rule: the calls that torch decomposes it into, each explained.

    Raises :class:`NoRuleError`, which names the parts without a rule, if the op cannot be decomposed.
    """
    registry = default_registry()
    args, kwargs = signature(op).unbind(values)
    by_id: dict[int, Any] = {}
    stand_in = stand_ins(args, by_id), stand_ins(kwargs, by_id)
    try:
        source = decompose(registry, op, *stand_in)
    except Exception as error:  # torch raises whatever it likes
        raise call_error(op, f"torch refuses it: {error}".strip().rstrip(".")) from error
    if isinstance(source, Failed):
        raise registry.missing(op, source.text, parts=source.parts, missing=source.missing)
    entry = decomposed_entry(source)
    schema, _ = describe_call(MeshTensor, entry, RuntimeSchemaInfo.of(op), mesh, values)
    watch = _PartsWatch(mesh, limit)
    flat = [spec for spec in _flat([args, kwargs]) if isinstance(spec, TensorSpec)]
    for tensor, spec in zip(tensors_in(stand_in), flat, strict=True):
        watch.put(tensor, spec)
    with outside_modes(), torch.no_grad(), torch.device("meta"), watching(watch.run, is_split_first):
        result = answered(op, *stand_in, source.formula.run(*stand_in[0], **stand_in[1]))
    results = tuple(watch.spec(tensor) for tensor in tensors_in(result))
    return Explanation(schema, entry, (), (), (), None, results, tuple(watch.parts))


def _flat(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return _flat(list(value.values()))
    return [v for part in value for v in _flat(part)] if isinstance(value, (list, tuple)) else [value]


class _PartsWatch:
    """Explains each call of a decomposition that runs on the meta device, and knows the spec of each tensor."""

    def __init__(self, mesh: Mesh, limit: int | None) -> None:
        self._mesh = mesh
        self._limit = limit
        self.parts: list[Explanation] = []

    def put(self, tensor: torch.Tensor, spec: TensorSpec | None) -> None:
        """Set the spec of a tensor; None stands for replicated."""
        whole = TensorSpec(self._mesh, (REPLICATE,) * self._mesh.ndim, TensorMeta.of(tensor))
        # On the tensor itself: torch copies a factory's result if anything else refers to it.
        tensor.shardwise_spec = spec or whole  # type: ignore[attr-defined]

    def spec(self, tensor: torch.Tensor) -> TensorSpec:
        """The spec of a tensor."""
        if not hasattr(tensor, "shardwise_spec"):
            self.put(tensor, None)
        spec: TensorSpec = tensor.shardwise_spec  # type: ignore[attr-defined]
        return spec

    def run(self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one op of the decomposition, and explain it."""
        result = op(*args, **kwargs)
        if not any(hasattr(t, "shardwise_spec") for t in tensors_in([args, kwargs])):
            for tensor in tensors_in(result):
                if tensor.dim():
                    self.put(tensor, None)
            return result
        part = explain_call(op, self._specs(args), self._specs(kwargs), limit=self._limit)
        self.parts.append(part)
        for tensor, spec in zip(tensors_in(result), part.results, strict=False):
            self.put(tensor, spec)
        return result

    def _specs(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.spec(value)
        if isinstance(value, Mapping):
            return {name: self._specs(part) for name, part in value.items()}
        return [self._specs(part) for part in value] if isinstance(value, (list, tuple)) else value
