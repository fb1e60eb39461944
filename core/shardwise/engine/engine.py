"""The engine: it makes the plans that the dispatcher does not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from attrs import define, field

from shardwise.comm.meeting import meet
from shardwise.comm.rank_failures import tell
from shardwise.comm.rule_agreement import at_first_use
from shardwise.discovery.process import default_registry
from shardwise.engine.compared_operands import reduce_first
from shardwise.engine.composites import intercept
from shardwise.engine.higher_order import take_higher_order
from shardwise.engine.judging import judge
from shardwise.engine.kept_operands import Arguments, on_kept
from shardwise.engine.no_rule import UnknownOp
from shardwise.engine.plain_tensors import plain_operands
from shardwise.engine.plan_call import plan_call
from shardwise.engine.plan_symbolic import forget_choices, plan_symbolic_call
from shardwise.engine.view_copies import after_write, link
from shardwise.kernel.dispatcher import clear_plans, listen
from shardwise.kernel.engine import Handler
from shardwise.kernel.known_tensors import forget_failed_writes
from shardwise.kernel.mesh import Mesh
from shardwise.kernel.plan import Plan
from shardwise.kernel.precedence import Entry
from shardwise.kernel.registry import Registry
from shardwise.kernel.schema import RuntimeSchemaInfo
from shardwise.kernel.signature import Op, op_name
from shardwise.planning.results import forget_metas
from shardwise.private_torch.ops import functional_of, higher_order_operators

__all__ = ["PlanningEngine"]


@define(eq=False)
class PlanningEngine:
    """Plans by the rules of this process's plugins (see :class:`shardwise.kernel.engine.Engine`)."""

    tensor_class: type
    # The registries themselves, not their ids: Python may use the id of a deleted one again.
    _known: WeakSet[Registry] = field(factory=WeakSet, init=False)
    _latest: Registry | None = field(default=None, init=False)
    _intercepted: dict[Any, object] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        at_first_use.append(self.registry)

    def registry(self) -> Registry:
        """The registry of this process.

        At its first use the caches of plans begin to follow its changes, and its plugins' observers begin to listen.
        """
        registry = default_registry()
        if registry is self._latest:
            return registry
        if registry not in self._known:
            self._known.add(registry)
            for op in registry.composites:
                if op not in self._intercepted:
                    self._intercepted[op] = intercept(op, self.tensor_class, lambda: self.registry().composites)
            for operator in (*registry.higher_order, *higher_order_operators()):
                if operator not in self._intercepted:
                    self._intercepted[operator] = take_higher_order(
                        operator, self.tensor_class, lambda: self.registry().higher_order
                    )
            for op in registry.compared:
                if op not in self._intercepted:
                    self._intercepted[op] = reduce_first(op, self.tensor_class, lambda: self.registry().compared)
            registry.on_change(clear_plans)
            for observer in registry.observers:
                listen(observer)
        self._latest = registry
        return registry

    def meet(self, mesh: Mesh) -> None:
        """Have the ranks of a mesh agree on rules and link figures, once."""
        meet(mesh)

    def plan(
        self, entry: Entry, info: RuntimeSchemaInfo, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Plan | None:
        """The plan of one call. None if its ``out=`` tensors were resized to the shape of the results."""
        return plan_call(self.tensor_class, self.registry(), entry, info, args, kwargs)

    def plan_symbolic(
        self, entry: Entry, info: RuntimeSchemaInfo, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Plan:
        """The plan of one call with symbols for sizes."""
        return plan_symbolic_call(self.tensor_class, entry, info, args, kwargs)

    def plain_operands(
        self,
        op: Op,
        operands: Mapping[str, torch.Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        written: bool,
    ) -> Sequence[Any]:
        """The key parts of plain tensors among the operands of a call, after the ranks have compared them."""
        return plain_operands(self.tensor_class, op, operands, args, kwargs, written)

    def without_rule(self, op: Op) -> Handler:
        """The handler of an op for which no plugin has a rule."""
        return UnknownOp(op, self.registry(), self.tensor_class)

    def link(self, plan: Plan, results: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
        """Note what the results of a view op are copies of."""
        op = functional_of(plan.schema.op) or plan.schema.op
        link(self.tensor_class, op, self.registry().views.get(op), results, args, kwargs)

    def on_kept(self, run: Handler, arguments: Arguments) -> Any:
        """Run a call on tensors that earlier calls have moved."""
        return on_kept(run, arguments)

    def judge(self, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
        """Raise, or warn, where the policies in force do not allow what a call would send."""
        judge(plan, args, kwargs)

    def after_write(self, tensors: Sequence[Any]) -> None:
        """Bring what an op has written to the bases of copies."""
        after_write(self.tensor_class, tensors)

    def raised(self, op: Op, error: Exception) -> None:
        """Tell the other ranks, which may wait for this one."""
        forget_failed_writes()
        tell(error, op_name(op))

    def forget(self) -> None:
        """Drop what was made by earlier rules: some rule changed."""
        forget_choices()
        forget_metas()
