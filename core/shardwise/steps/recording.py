"""Record a step as it runs: each call by a rule, the tensors between the calls, and what fixes layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from shardwise.kernel.dispatcher import record
from shardwise.kernel.mesh import Mesh
from shardwise.kernel.placements import Placement
from shardwise.kernel.plan import Plan
from shardwise.kernel.precedence import Entry
from shardwise.kernel.recording import NODE
from shardwise.kernel.rule import Rule
from shardwise.kernel.schema import OpSchema
from shardwise.kernel.signature import Kind, Op
from shardwise.kernel.spec import TensorSpec
from shardwise.private_torch.dispatch import in_backward, leaf_to_accumulate
from shardwise.program.step_graph import CallNode, Places, Sink, StepGraph, TensorNode
from shardwise.program.step_rows import in_whole
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tensor.names import NAME, tag_by_name

__all__ = ["Recording", "Trial"]

_tokens = count()


@frozen(eq=False)
class _Facts:
    """What all calls of an op have in common."""

    entry: Entry  # keeps its id
    is_rule: bool
    is_view: bool
    #: Per argument with tensors: its place, its name, and whether it is a list.
    tensors: tuple[tuple[int, str, bool], ...]
    #: Per tensor that is returned: which of the results it is, whether a list, and the argument that it aliases.
    results: tuple[tuple[int, bool, int | None], ...]
    has_lists: bool
    #: Whether there is one result, a tensor, and no operand is in a list; then the operand that it aliases.
    is_single: bool
    base: int | None

    @classmethod
    def of(cls, schema: OpSchema, entry: Entry) -> _Facts:
        args, declared = schema.signature.args, schema.signature.results
        is_rule = isinstance(entry.rule, Rule) and not entry.rule.zip_lists and not any(r.reseats for r in declared)
        kinds = [(i, arg.name, arg.kind) for i, arg in enumerate(args) if arg.kind in (Kind.TENSOR, Kind.TENSORS)]
        tensors = tuple((i, name, kind is Kind.TENSORS) for i, name, kind in kinds)
        results = tuple((i, r.is_list, r.alias) for i, r in enumerate(declared) if r.is_tensor)
        has_lists = any(is_list for _, _, is_list in tensors)
        is_single = len(declared) == 1 and not has_lists and [is_list for _, is_list, _ in results] == [False]
        alias = results[0][2] if is_single else None
        base = None if alias is None else [i for i, _, _ in tensors].index(alias)
        return cls(entry, is_rule, schema.is_view, tensors, results, has_lists, is_single, base)

    def start(self, schema: OpSchema, argument: int) -> int:
        """Which of the operands of a call, lists flattened, an argument's first tensor is."""
        if self.has_lists:
            return schema.starts[argument]
        return next(n for n, (i, _, _) in enumerate(self.tensors) if i == argument)


@define(eq=False)
class Trial:
    """What tells a program that trains from one that does not, before its first optimizer's step."""

    #: Calls without gradients and calls in all before the first backward pass, and backward passes.
    most_without_grad: int
    most_calls: int
    most_passes: int
    _without_grad: int = 0
    _calls: int = 0
    _passes: int = 0
    _was_backward: bool = False

    def fails(self, is_backward: bool) -> bool:
        """Whether the program does not train, as it seems after one more call."""
        if is_backward is not self._was_backward:
            self._passes += is_backward
            self._was_backward = is_backward
        if self._passes:
            return self._passes > self.most_passes
        self._calls += 1
        self._without_grad += not torch.is_grad_enabled()
        return self._without_grad > self.most_without_grad or self._calls > self.most_calls


_OfPlan = tuple[Plan, _Facts, OpSchema, tuple[int, ...], bool]
"""What calls by a plan have in common, most of which have one that an earlier one had: the plan (so that its id stays
its own), what all calls of its op have, the schema, the operands that are written, and whether a decision may be about
them.
"""


@define(eq=False)
class Recording:
    """The recorder of one step. It keeps leaves alive, and no other tensor.

    With ``follows_modules`` each call has the name of the module that makes it, by hooks on all modules, after which
    compiled code is compiled again. Else it has that of the parameter, or of the call, from which it comes.

    A step may have ``most`` calls: at the next one ``on_full`` is called, which ends the recording. With a ``trial`` it
    is called as well once that says that the program does not train.
    """

    most: int | None = None
    on_full: Callable[[], None] = lambda: None
    trial: Trial | None = None
    follows_modules: bool = True
    meshes: list[Mesh] = field(factory=list)
    leaves: list[Any] = field(factory=list)
    #: By id, plain leaves that this step brings gradients to.
    plain_leaves: dict[int, Any] = field(factory=dict)
    # What becomes the nodes of the graph: nothing is made of it while the step runs.
    _calls: list[tuple[Any, ...]] = field(factory=list)
    # Of each tensor: its spec, the call that made it, the tensor that it is a view of, and its name.
    _tensors: list[tuple[TensorSpec, int | None, int | None, str]] = field(factory=list)
    _sinks: list[Sink] = field(factory=list)
    # By leaf, which sinks are those of its gradients that wait for each other.
    _late: dict[int, list[int]] = field(factory=dict)
    _moved: dict[int, int] = field(factory=dict)
    _written: set[int] = field(factory=set)
    plan: Plan | None = None
    _plans: dict[int, _OfPlan] = field(factory=dict)
    # By id of an op's entry.
    _facts: dict[int, _Facts] = field(factory=dict)
    _gradient_of: tuple[int, int] | None = None
    _token: int = field(factory=lambda: next(_tokens))
    _modules: list[str] = field(factory=list)
    _names: dict[int, str] = field(factory=dict)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record what runs while the context lasts."""
        if not self.follows_modules:
            with record(self):
                yield
            return
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        try:
            with record(self):
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
        roots: list[int] = []
        for n, (_, _, base, _) in enumerate(self._tensors):
            roots.append(n if base is None else roots[base])
        tensors = zip(self._tensors, roots, strict=True)
        whole = StepGraph(
            self.meshes[0],
            tuple(self._call_nodes()),
            tuple(TensorNode(n, spec, maker, root, name) for n, ((spec, maker, _, name), root) in enumerate(tensors)),
            tuple(sinks),
            frozenset(roots[t] for t in self._written),
            moved=dict(self._moved),
        )
        return whole.without_dead_calls()

    def _call_nodes(self) -> Iterator[CallNode]:
        """The calls. One that no module made, as in a backward pass, is of the module that made the latest of its
        operands in forward. Where modules are not followed, a call is of that of its first parameter, if it has one, or
        of that of its operands from which a parameter was used last: a layer that multiplies by a table, which was made
        before all layers, does so itself.
        """
        made_in: dict[int, str] = {}
        last_used: dict[str, int] = {}
        for n, (plan, operands, results, is_backward, running) in enumerate(self._calls):
            module = running if self.follows_modules else self._owner(operands)
            if module is None:
                made = [t for t in operands if t in made_in]
                latest = max(made, key=lambda t: (last_used.get(made_in[t], -1), t), default=None)
                module = "" if latest is None else made_in[latest]
            elif not self.follows_modules:
                last_used[module] = n
            made_in.update((t, module) for t in results if t is not None)
            phase = "backward" if is_backward else "forward"
            yield CallNode(n, plan.entry, plan.schema, tuple(operands), tuple(results), plan.strategies, phase, module)

    def _owner(self, operands: Sequence[int | None]) -> str | None:
        """The module of the first parameter or buffer, or view of one, among the operands of a call."""
        for operand in operands:
            t = operand
            while t is not None:
                _, _, base, name = self._tensors[t]
                if name:
                    return name.rpartition(".")[0]
                t = base
        return None

    @property
    def calls(self) -> int:
        """How many calls were recorded."""
        return len(self._calls)

    @property
    def schemas(self) -> set[OpSchema]:
        """The different calls that were recorded."""
        return {call[0].schema for call in self._calls}

    def tag_leaves(self, depth: int) -> None:
        """Give parameters and buffers the tags by which decisions know them."""
        for leaf in self.leaves:
            tag_by_name(leaf, depth)
            leaf.__dict__.pop(NODE, None)

    # -- what the dispatcher tells -------------------------------------------------------------------------------

    def called(self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any] | None, result: Any) -> None:
        """A call that ran by a rule."""
        plan, self.plan = self.plan, None
        if len(self._calls) == self.most:
            self.on_full()
            return
        if plan is None:
            return
        _, of, schema, written, may_decide = self._plans.get(id(plan)) or self._met(plan)
        if schema.op is not op:
            return
        operands = self._operands(of, schema, args, kwargs)
        if written:
            self._written.update(t for i in written if (t := operands[i]) is not None)
        is_backward = in_backward()
        if self.trial is not None and self.trial.fails(is_backward):
            self.on_full()
            return
        # The copy that autograd makes of a gradient is the leaf's: no decision is about it.
        is_open = may_decide and (not is_backward or of.is_view or leaf_to_accumulate() is None)
        number = len(self._calls) if is_open else None
        results = self._results(of, schema, operands, result, number)
        if number is None:
            self._sinks += [Sink(t, _layout(self._tensors[t][0])) for t in operands if t is not None]
            return
        module = self._modules[-1] if self._modules else None
        self._calls.append((plan, operands, results, is_backward, module))

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
        self._written.add(t)
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

    def trains(self, leaves: Sequence[Any]) -> None:
        """Plain leaves whose gradients come from calls on MeshTensors."""
        self.plain_leaves.update((id(leaf), leaf) for leaf in leaves)

    def read(self, tensor: Any) -> None:
        """The program took the local part of a tensor."""
        t = self._operand(tensor, tensor._spec)
        assert t is not None
        self._sinks.append(Sink(t, _layout(tensor._spec), stays=True))

    def _met(self, plan: Plan) -> _OfPlan:
        """Note a plan that runs a call for the first time."""
        schema, entry = plan.schema, plan.entry
        of = self._facts.get(id(entry))
        if of is None:
            of = self._facts[id(entry)] = _Facts.of(schema, entry)
        if schema.mesh not in self.meshes:
            self.meshes.append(schema.mesh)
        known = plan, of, schema, schema.written, of.is_rule and len(plan.strategies) == 1
        self._plans[id(plan)] = known
        return known

    # -- tensors -------------------------------------------------------------------------------------------------

    def _operands(
        self, of: _Facts, schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> list[int | None]:
        """The number of each tensor operand, lists flattened."""
        numbers: list[int | None] = []
        passed, token, specs = len(args), self._token, schema.values
        for i, name, is_list in of.tensors:
            value = args[i] if i < passed else None if kwargs is None else kwargs.get(name)
            if is_list:
                parts = zip(value or (), specs[i] or (), strict=True)
                numbers += [self._operand(part, spec) for part, spec in parts]
                continue
            if type(value) is MeshTensor:
                of_value = value.__dict__
                known = of_value.get(NODE)
                if known is not None and known[0] == token and NAME not in of_value:
                    numbers.append(known[1])
                    continue
            numbers.append(self._operand(value, specs[i]))
        return numbers

    def _operand(self, value: Any, spec: TensorSpec | None) -> int | None:
        """The number of an operand: a new one for a tensor that no recorded call made."""
        if spec is None:
            return None
        if not isinstance(value, MeshTensor):
            self._tensors.append((spec, None, None, ""))
            return len(self._tensors) - 1
        of_value = value.__dict__
        known = of_value.get(NODE)
        # A parameter that is made while this records was an op's result before it had its name.
        if known is not None and known[0] == self._token and (NAME not in of_value or self._tensors[known[1]][3]):
            number: int = known[1]
            return number
        number = self._new(value, None, None)
        if self._tensors[number][3] or (value.is_leaf and value.requires_grad):
            self.leaves.append(value)
        return number

    def _new(self, tensor: Any, maker: int | None, base: int | None) -> int:
        of_tensor, tensors = tensor.__dict__, self._tensors
        number = len(tensors)
        tensors.append((tensor._spec, maker, base, of_tensor.get(NAME, "")))
        of_tensor[NODE] = (self._token, number)
        return number

    def _results(
        self, of: _Facts, schema: OpSchema, operands: Sequence[int | None], result: Any, maker: int | None
    ) -> list[int | None]:
        if of.is_single and type(result) is MeshTensor:
            return [self._new(result, maker, None if of.base is None else operands[of.base])]
        numbers: list[int | None] = []
        for i, is_list, alias in of.results:
            base = None if alias is None else operands[of.start(schema, alias)]
            value = result if len(schema.signature.results) == 1 else result[i]
            parts = value if is_list else (value,)
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


def _layout(spec: TensorSpec) -> Places:
    return in_whole(spec.placements, spec.mesh_shape)
