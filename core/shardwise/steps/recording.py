"""Record a step as it runs: each call by a rule, the tensors between the calls, and what fixes layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from attrs import define, evolve, field
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from shardwise.kernel.dispatcher import observe, record
from shardwise.kernel.mesh import Mesh
from shardwise.kernel.placements import Placement
from shardwise.kernel.plan import Plan
from shardwise.kernel.rule import Rule
from shardwise.kernel.schema import OpSchema
from shardwise.kernel.signature import Kind, Op
from shardwise.kernel.spec import TensorSpec
from shardwise.private_torch.dispatch import in_backward, leaf_to_accumulate
from shardwise.program.step_graph import CallNode, Places, Sink, StepGraph, TensorNode
from shardwise.program.step_rows import in_whole
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tensor.names import name_of, tag_by_name

__all__ = ["Recording"]

_NODE = "_shardwise_node"
_tokens = count()


@define(eq=False)
class Recording:
    """The recorder of one step. It keeps leaves alive, and no other tensor.

    A step may have ``most`` calls: at the next one ``on_full`` is called, which ends the recording.
    """

    most: int | None = None
    on_full: Callable[[], None] = lambda: None
    meshes: list[Mesh] = field(factory=list)
    leaves: list[Any] = field(factory=list)
    _calls: list[CallNode] = field(factory=list)
    _tensors: list[TensorNode] = field(factory=list)
    _sinks: list[Sink] = field(factory=list)
    # By leaf, which sinks are those of its gradients that wait for each other.
    _late: dict[int, list[int]] = field(factory=dict)
    _moved: dict[int, int] = field(factory=dict)
    _written: set[int] = field(factory=set)
    _plan: Plan | None = None
    _gradient_of: tuple[int, int] | None = None
    _token: int = field(factory=lambda: next(_tokens))
    _modules: list[str] = field(factory=list)
    _made_in: dict[int, str] = field(factory=dict)
    _names: dict[int, str] = field(factory=dict)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record what runs while the context lasts."""
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        try:
            with record(self), observe(self._saw_plan):
                yield
        finally:
            before.remove()
            after.remove()

    def graph(self) -> StepGraph:
        """The step so far, without calls that nobody needs."""
        assert self.meshes, "nothing was recorded"
        sinks = list(self._sinks)
        for of_leaf in self._late.values():
            for i in of_leaf:
                sinks[i] = evolve(sinks[i], shared_by=len(of_leaf))
        whole = StepGraph(
            self.meshes[0],
            tuple(self._calls),
            tuple(self._tensors),
            tuple(sinks),
            frozenset(self._written),
            moved=dict(self._moved),
        )
        return whole.without_dead_calls()

    @property
    def calls(self) -> int:
        """How many calls were recorded."""
        return len(self._calls)

    @property
    def schemas(self) -> set[OpSchema]:
        """The different calls that were recorded."""
        return {call.schema for call in self._calls}

    def tag_leaves(self, depth: int) -> None:
        """Give parameters and buffers the tags by which decisions know them."""
        for leaf in self.leaves:
            tag_by_name(leaf, depth)
            leaf.__dict__.pop(_NODE, None)

    # -- what the dispatcher tells -------------------------------------------------------------------------------

    def _saw_plan(self, plan: Plan) -> None:
        self._plan = plan

    def called(self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any] | None, result: Any) -> None:
        """A call that ran by a rule."""
        plan, self._plan = self._plan, None
        if len(self._calls) == self.most:
            self.on_full()
            return
        if plan is None or plan.schema.op is not op or plan.schema.is_symbolic:
            return
        schema = plan.schema
        operands: list[int | None] = []
        flat = iter(schema.specs)
        for arg, value in zip(schema.signature.args, schema.signature.bind(args, kwargs or {}), strict=True):
            if arg.kind is Kind.TENSOR:
                operands.append(self._operand(value, next(flat)))
            elif arg.kind is Kind.TENSORS:
                operands += [self._operand(part, next(flat)) for part in value or ()]
        mesh = schema.mesh
        if mesh not in self.meshes:
            self.meshes.append(mesh)
        self._written.update(self._tensors[t].root for i in schema.written if (t := operands[i]) is not None)
        is_open = (
            isinstance(plan.entry.rule, Rule)
            and not plan.entry.rule.zip_lists
            and len(plan.strategies) == 1
            and not any(r.reseats for r in schema.signature.results)
            and (schema.is_view or leaf_to_accumulate() is None)  # see engine.decided
        )
        number = len(self._calls) if is_open else None
        results = self._results(plan, operands, result, number)
        if number is not None:
            module = self._module(operands)
            for t in results:
                if t is not None:
                    self._made_in[t] = module
            self._calls.append(
                CallNode(
                    number,
                    plan.entry,
                    schema,
                    tuple(operands),
                    tuple(results),
                    plan.strategies,
                    "backward" if in_backward() else "forward",
                    module,
                )
            )
            return
        for t in operands:
            if t is not None:
                self._sinks.append(Sink(t, _layout(self._tensors[t].spec)))

    def redistributed(self, source: Any, result: Any) -> None:
        """The program, or the layout of a gradient, asked for another layout of a tensor."""
        before = self._operand(source, source._spec)
        assert before is not None
        # In a run by decisions the source may lie elsewhere, and then the result is another tensor, also where it is
        # the same one here.
        after = self._new(result, None, before)
        self._moved[after] = before
        of, self._gradient_of = self._gradient_of, None
        leaf = of[1] if of is not None and of[0] == before else None
        self._sinks.append(Sink(before, _layout(result._spec), leaf=leaf))

    def accumulated(self, gradient: Any, leaf: Any, is_placed: bool) -> None:
        """A gradient reaches its leaf (None if it is only computed), and has the leaf's layout if ``is_placed``."""
        t = self._operand(gradient, gradient._spec)
        assert t is not None
        # It becomes ``.grad``, which anybody may write: it may not be a copy that a view had to make.
        self._written.add(self._tensors[t].root)
        node = None if leaf is None else self._operand(leaf, leaf._spec)
        # The redistribution to the leaf's layout comes next.
        self._gradient_of = None if node is None else (t, node)
        if is_placed:
            self.redistributed(gradient, gradient)

    def waits(self, gradient: Any, leaf: Any, placements: Sequence[Placement]) -> None:
        """A gradient that reaches its leaf waits there for the next ones, to have these placements with them.

        What is done with the sum is not about this gradient any more: backward passes stay independent of each other,
        so that each is decided on as if it were alone, with its share of the cost.
        """
        t = self._operand(gradient, gradient._spec)
        assert t is not None
        self._late.setdefault(id(leaf), []).append(len(self._sinks))
        at = in_whole(tuple(placements), gradient._spec.mesh_shape)
        self._sinks.append(Sink(t, at, leaf=self._operand(leaf, leaf._spec)))
        # From here on it is a tensor of its own, whose tag is that of the gradient.
        self._moved[self._new(gradient, None, None)] = t

    def read(self, tensor: Any) -> None:
        """The program took the local part of a tensor."""
        t = self._operand(tensor, tensor._spec)
        assert t is not None
        self._sinks.append(Sink(t, _layout(tensor._spec), stays=True))

    # -- tensors -------------------------------------------------------------------------------------------------

    def _operand(self, value: Any, spec: TensorSpec | None) -> int | None:
        """The number of an operand: a new one for a tensor that no recorded call made."""
        if spec is None:
            return None
        if not isinstance(value, MeshTensor):
            return self._append(spec, None, None)
        known = value.__dict__.get(_NODE)
        # A parameter that is made while this records was an op's result before it had its name.
        if known is not None and known[0] == self._token and (self._tensors[known[1]].name or not name_of(value)):
            return int(known[1])
        number = self._new(value, None, None)
        if (value.is_leaf and value.requires_grad) or name_of(value):
            self.leaves.append(value)
        return number

    def _new(self, tensor: Any, maker: int | None, base: int | None) -> int:
        number = self._append(tensor._spec, maker, base, name_of(tensor))
        tensor.__dict__[_NODE] = (self._token, number)
        return number

    def _append(self, spec: TensorSpec, maker: int | None, base: int | None, name: str = "") -> int:
        number = len(self._tensors)
        root = number if base is None else self._tensors[base].root
        self._tensors.append(TensorNode(number, spec, maker, root, name))
        return number

    def _results(self, plan: Plan, operands: Sequence[int | None], result: Any, maker: int | None) -> list[int | None]:
        schema = plan.schema
        starts = schema.starts
        declared = schema.signature.results
        values = result if len(declared) > 1 else (result,)
        numbers: list[int | None] = []
        for of, value in zip(declared, values, strict=False):
            if not of.is_tensor:
                continue
            base = None if of.alias is None else operands[starts[of.alias]]
            parts = value if of.is_list else (value,)
            numbers += [self._new(part, maker, base) if isinstance(part, MeshTensor) else None for part in parts]
        return numbers

    # -- where in the program ------------------------------------------------------------------------------------

    def name_modules(self, model: nn.Module) -> None:
        """Give the modules of a model their paths."""
        for name, module in model.named_modules():
            self._names.setdefault(id(module), name)

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        if not self._modules:
            self.name_modules(module)
        self._modules.append(self._names.get(id(module), type(module).__name__))

    def _leave(self, _module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        if self._modules:
            self._modules.pop()

    def _module(self, operands: Sequence[int | None]) -> str:
        """The module that runs; in a backward pass, the one that made the latest of the operands in forward."""
        if self._modules:
            return self._modules[-1]
        made = [t for t in operands if t is not None and t in self._made_in]
        return self._made_in[max(made)] if made else ""


def _layout(spec: TensorSpec) -> Places:
    return in_whole(spec.placements, spec.mesh_shape)
