"""Ops without a rule. They are decomposed if every part has a rule, else replicated if the program asks, or refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field

from shardwise.comm.redistribute import runner
from shardwise.comm.rule_agreement import agree_on_asking
from shardwise.engine.composites import replicated_tensor, replicating
from shardwise.engine.decomposition import Decomposition, Failed, answered, decompose, stand_ins
from shardwise.engine.first_run import refuse_nested
from shardwise.engine.judging import judge_move
from shardwise.engine.make_plan import check_written
from shardwise.engine.plan_call import common_mesh, describe_call
from shardwise.engine.replication import is_asked_for, replicated_entry, warn_once
from shardwise.engine.resized_outs import resize_outs
from shardwise.errors import InPlaceError
from shardwise.kernel.dispatcher import PLANS_PER_OP, handler_of, tell_observers
from shardwise.kernel.engine import Handler
from shardwise.kernel.known_tensors import key_of_plain
from shardwise.kernel.mesh import Mesh
from shardwise.kernel.nested import tensors_in
from shardwise.kernel.operands import operand_of
from shardwise.kernel.placements import REPLICATE
from shardwise.kernel.plan import Plan
from shardwise.kernel.precedence import Entry, Origin
from shardwise.kernel.registry import Registry, is_collective, refused_collective
from shardwise.kernel.rule import FullMeshRule
from shardwise.kernel.schema import OpSchema, OpStrategy, RuntimeSchemaInfo
from shardwise.kernel.signature import Kind, Op, op_name, signature
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta, memory_order
from shardwise.kernel.view_copies import fresh
from shardwise.private_torch.dispatch import new_wrapper
from shardwise.private_torch.modes import outside_modes
from shardwise.private_torch.ops import draws

__all__ = ["DecomposedPlan", "UnknownOp", "decomposed_entry"]


class DecomposedPlan(Plan):
    """The plan of a call that is decomposed into other calls. These have their own plans."""

    __slots__ = ("decomposition",)

    def __init__(self, schema: OpSchema, decomposition: Decomposition) -> None:
        super().__init__(schema, decomposed_entry(decomposition), (), None, None, decomposition.formula.run, True, ())
        self.decomposition = decomposition

    @property
    def parts(self) -> tuple[Op, ...]:
        """The ops that run in its place. Each has a rule."""
        return self.decomposition.parts

    def __repr__(self) -> str:
        return f"Plan({op_name(self.schema.op)}: {self.decomposition.text})"


def decomposed_entry(decomposition: Decomposition) -> Entry:
    """The entry that tools show for an op that is decomposed."""
    op, origin = decomposition.op, Origin("torch", "torch", torch.__version__)
    return Entry(op, FullMeshRule((op,), _no_strategies, "torch", text=decomposition.text), origin)


def _no_strategies(_mesh: Mesh, _schema: OpSchema) -> OpStrategy:
    return OpStrategy(())


@define(eq=False)
class UnknownOp:
    """The handler of an op without a rule. It has the arguments of ``__torch_dispatch__``."""

    op: Op
    registry: Registry
    tensor_class: type
    outcomes: dict[Any, DecomposedPlan | Failed] = field(factory=dict, init=False)
    replicated: dict[Any, Handler] = field(factory=dict, init=False)

    def __call__(
        self, _cls: Any, _op: Op, _types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_collective(self.op):  # before anything is compared: the other ranks may call something else
            raise refused_collective(op_name(self.op))
        if "_nested_" in self.op.__name__:  # torch's name for each op that makes or reads one
            refuse_nested(f"run {op_name(self.op)} on MeshTensors")
        # The key has every argument by value, numbers too: a formula may branch on one.
        parts: list[Any] = []
        for arg, value in zip(signature(self.op).args, signature(self.op).bind(args, kwargs), strict=True):
            if arg.kind is Kind.TENSOR:
                is_plain = isinstance(value, torch.Tensor) and not isinstance(value, self.tensor_class)
                # Memory that is overwritten may hold anything: no rank looks at it.
                overwritten = arg.is_out and is_plain
                parts.append(key_of_plain(value) if overwritten else self._key_part(arg.name, value, args, kwargs))
            elif arg.kind is Kind.TENSORS:
                parts.append(None if value is None else tuple(self._key_part(arg.name, v, args, kwargs) for v in value))
            else:
                parts.append(_typed(value))
        key = tuple(parts)
        try:
            outcome = self.outcomes.get(key)
        except TypeError:  # a size that is a symbol of a traced graph has no hash
            outcome = self._decompose(args, kwargs)
            assert outcome is not None  # with symbols nothing is resized
        else:
            if outcome is None:
                outcome = self._decompose(args, kwargs)
                if outcome is None:
                    return self(_cls, _op, _types, args, kwargs)
                if len(self.outcomes) >= PLANS_PER_OP:
                    self.outcomes.clear()
                self.outcomes[key] = outcome
        if isinstance(outcome, Failed):
            return self._replicate(outcome, args, kwargs)
        tell_observers(outcome)
        decomposition = outcome.decomposition
        if decomposition.makes:
            with replicating(self.tensor_class, outcome.schema.mesh):
                result = decomposition.formula.run(*args, **kwargs)
        else:
            result = decomposition.formula.run(*args, **kwargs)
        result = answered(self.op, args, kwargs, result)
        return self._finished(result, outcome, iter(decomposition.metas or ()), (args, kwargs))

    # -- decomposed --

    def _key_part(self, name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if type(value) is self.tensor_class:
            return value._spec  # type: ignore[attr-defined]
        part, _ = operand_of(self.op, False, name, value, args, kwargs)
        return part if isinstance(value, torch.Tensor) else (part, value)

    def _decompose(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DecomposedPlan | Failed | None:
        """The plan, or why there is none. None if the ``out=`` tensors were resized to the shape of the results."""
        schema = self._schema(args, kwargs)
        known: dict[int, Any] = {}
        with outside_modes():
            outcome = decompose(self.registry, self.op, stand_ins(args, known), stand_ins(kwargs, known))
        if isinstance(outcome, Failed):
            return outcome
        if outcome.metas is not None:
            if resize_outs(self.registry, schema, signature(self.op).bind(args, kwargs), outcome.metas):
                return None
            check_written(schema, outcome.metas)
        return DecomposedPlan(schema, outcome)

    def _schema(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpSchema:
        values = signature(self.op).bind(args, kwargs)
        mesh = common_mesh(self.tensor_class, self.op, values)
        entry = replicated_entry(self.op)
        return describe_call(self.tensor_class, entry, RuntimeSchemaInfo.of(self.op), mesh, values)[0]

    def _finished(
        self, result: Any, plan: DecomposedPlan, metas: Iterator[TensorMeta | None], plain: tuple[Any, ...]
    ) -> Any:
        """The results as MeshTensors with the op's own strides."""
        if isinstance(result, (tuple, list)):
            return type(result)(self._finished(part, plan, metas, plain) for part in result)
        meta = next(metas, None)
        if not isinstance(result, torch.Tensor):
            return result
        if not isinstance(result, self.tensor_class):
            if any(result is t for t in tensors_in(plain)):
                return result
            return replicated_tensor(self.tensor_class, plan.schema.mesh, result)
        spec: TensorSpec = result._spec  # type: ignore[attr-defined]
        if meta is None or spec.tensor_meta.stride == meta.stride or spec.tensor_meta.is_symbolic:
            return result
        local: torch.Tensor = result._local_tensor  # type: ignore[attr-defined]
        order = memory_order(meta)
        back = sorted(range(len(order)), key=order.__getitem__)
        return new_wrapper(type(result), local.permute(order).contiguous().permute(back), spec.with_meta(meta), False)

    # -- on whole tensors, or refused --

    def _replicate(self, failed: Failed, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        schema = self._schema(args, kwargs)
        asked = is_asked_for(self.registry)
        agree_on_asking(schema.mesh, op_name(self.op), asked)
        if not asked or draws(self.op):
            reason = "it draws random numbers, and each rank would draw its own" if asked else failed.text
            parts, missing = ((), ()) if asked else (failed.parts, failed.missing)
            raise self.registry.missing(self.op, reason, parts=parts, missing=missing)
        warn_once(schema)
        shape = (len(args), *kwargs)
        handle = self.replicated.get(shape)
        if handle is None:
            handle = handler_of(replicated_entry(self.op), len(args), tuple(kwargs))
            self.replicated[shape] = handle
        return self._write_back(handle, args, kwargs)

    def _write_back(self, handle: Handler, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run on gathered copies of the tensors that the op writes, then copy the new values into the tensors."""
        values = signature(self.op).bind(args, kwargs)
        gathered: dict[int, tuple[Any, Any]] = {}
        for arg, value in zip(signature(self.op).args, values, strict=True):
            for tensor in tensors_in(value) if arg.written else ():
                if isinstance(tensor, self.tensor_class) and not tensor._spec.is_replicated:  # type: ignore[attr-defined]
                    spec: TensorSpec = tensor._spec  # type: ignore[attr-defined]
                    whole = spec.with_placements((REPLICATE,) * spec.mesh.ndim)
                    judge_move(op_name(self.op), "an operand that it writes", spec, whole.placements)
                    local = runner(spec, whole)(fresh(tensor._local_tensor))  # type: ignore[attr-defined]
                    gathered[id(tensor)] = tensor, new_wrapper(type(tensor), local, whole, False)
        if not gathered:
            return handle(None, self.op, (), args, kwargs)
        views = [r.alias for r in signature(self.op).results if r.alias is not None and not r.written]
        if any(id(t) in gathered for alias in views for t in tensors_in(values[alias])):
            raise InPlaceError(
                asked=f"run {op_name(self.op)} replicated",
                found="it writes an operand that is not replicated and returns a view of it",
                do="Redistribute the operand to Replicate() first.",
                op=op_name(self.op),
            )
        copies = {key: copy for key, (_, copy) in gathered.items()}
        named = {name: _swapped(value, copies) for name, value in kwargs.items()}
        result = handle(None, self.op, (), _swapped(args, copies), named)
        for original, copy in gathered.values():
            original.copy_(copy)
        return _swapped(result, {id(copy): original for original, copy in gathered.values()})


def _typed(value: Any) -> Any:
    """A key of a static argument that tells 1 from 1.0 and True."""
    return tuple(map(_typed, value)) if isinstance(value, (tuple, list)) else (type(value), value)


def _swapped(value: Any, replacements: Mapping[int, Any]) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_swapped(part, replacements) for part in value)
    return replacements.get(id(value), value)
