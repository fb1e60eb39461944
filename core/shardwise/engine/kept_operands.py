"""Calls on operands that earlier calls have moved: where that is cheaper than to move the operands themselves.

A tensor that was reduced for one op is handed reduced to the next, if the next one is cheaper so. The choice is made
once for a plan and what is kept for its operands, which is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice, product
from typing import Any

from attrs import define, field

from shardwise.engine.make_plan import DescribedCall
from shardwise.engine.shared_moves import SharedMove, checks_ranks, compare_kept, held_moves
from shardwise.errors import NoStrategyError
from shardwise.kernel.engine import tensor_class
from shardwise.kernel.kept_moves import KeptMove
from shardwise.kernel.nested import tensors_in
from shardwise.kernel.plan import Plan
from shardwise.kernel.rule import Rule
from shardwise.kernel.signature import Kind
from shardwise.kernel.spec import TensorSpec
from shardwise.planning.strategies import cheapest
from shardwise.private_torch.dispatch import memory_of

__all__ = ["Arguments", "KeptOperands", "on_kept"]

Arguments = tuple[Sequence[Any], Mapping[str, Any]]
# Combinations of kept operands that are looked at for one call.
_MOST = 8


@define(eq=False)
class KeptOperands:
    """For a plan that moves operands: whether the call is cheaper on what earlier calls have moved them to.

    ``args`` has, for each tensor argument, its position, its name and its place among all tensors of the call.
    """

    plan: Plan
    args: tuple[tuple[int, str, int], ...]
    _known: dict[Any, tuple[TensorSpec | None, ...] | None] = field(factory=dict)

    @property
    def _spec(self) -> TensorSpec:
        return next(spec for spec in self.plan.schema.specs if spec is not None)

    @classmethod
    def of(cls, plan: Plan) -> KeptOperands | None:
        """None for a plan that moves nothing for others, and for a call whose operands must be what they are."""
        schema, rule = plan.schema, plan.entry.rule
        if not any(isinstance(move, SharedMove) for move in plan.redistributes or ()):
            return None
        is_new = not any(r.alias is not None for r in schema.signature.results)
        is_pure = is_new and not schema.written and not schema.fixed
        if not is_pure or not isinstance(rule, Rule) or rule.zip_lists or schema.is_symbolic:
            return None
        declared = enumerate(schema.signature.args)
        single = [(k, arg.name) for k, arg in declared if arg.kind is Kind.TENSOR]
        if any(arg.kind is Kind.TENSORS for arg in schema.signature.args):
            return None
        present = [(k, name, i) for i, (k, name) in enumerate(single) if schema.specs[i] is not None]
        return cls(plan, tuple(present))

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Arguments | None:
        """The arguments with kept tensors in place of some; None where the plan is the cheapest as it is."""
        kept: dict[int, dict[TensorSpec, KeptMove]] = {}
        for k, name, i in self.args:
            value = args[k] if k < len(args) else (kwargs or {}).get(name)
            if isinstance(value, tensor_class()) and (held := held_moves(value)):
                kept[i] = held
        if checks_ranks():
            compare_kept(self._spec, [len(kept.get(i, ())) for _, _, i in self.args])
        if not kept:
            return None
        state = tuple((i, *held) for i, held in kept.items())
        if state not in self._known:
            if len(self._known) >= _MOST * _MOST:
                self._known.clear()
            self._known[state] = self._cheapest({i: tuple(held) for i, held in kept.items()})
        specs = self._known[state]
        if specs is None:
            return None
        positional, named = list(args), dict(kwargs or {})
        for k, name, i in self.args:
            spec = specs[i]
            if spec is not None:
                tensor = kept[i][spec].tensor
                if k < len(positional):
                    positional[k] = tensor
                else:
                    named[name] = tensor
        return positional, named

    def _cheapest(self, kept: Mapping[int, Sequence[TensorSpec]]) -> tuple[TensorSpec | None, ...] | None:
        """The kept layouts on which the call is cheapest; None where it is on none. Of equals, the first."""
        plan, schema = self.plan, self.plan.schema
        (strategy,) = plan.strategies
        targets = [
            None if s is None or t is None else s.untagged.with_placements(t.placements)
            for s, t in zip(schema.specs, strategy.input_specs, strict=True)
        ]
        is_there = [i in kept and target in kept[i] for i, target in enumerate(targets)]
        least = sum(c for c, there in zip(strategy.redistribute_cost, is_there, strict=True) if not there)
        choices = [(None, *kept.get(i, ())) for i in range(len(schema.specs))]
        best = None
        metas = None if None in plan.outs else tuple(spec.tensor_meta for spec in plan.outs if spec is not None)
        for specs in islice(product(*choices), 1, _MOST):
            pairs = zip(schema.specs, specs, strict=True)
            moved = schema.with_specs([old if new is None else new for old, new in pairs])
            described = DescribedCall.of(plan.entry, moved, metas)
            with suppress(NoStrategyError):
                cost = sum(s.cost for s in cheapest(plan.entry.rule, moved, described.call))
                if cost < least:
                    least, best = cost, specs
        return best


def on_kept(run: Callable[..., Any], arguments: Arguments) -> Any:
    """Run a call on kept tensors. Its results never share memory with them."""
    args, kwargs = arguments
    results = run(None, None, (), args, kwargs)
    memories = {memory_of(t._local_tensor) for t in tensors_in([args, kwargs]) if isinstance(t, tensor_class())}
    for result in tensors_in(results):
        if isinstance(result, tensor_class()) and memory_of(result._local_tensor) in memories:
            result._local_tensor = result._local_tensor.clone()
    return results
