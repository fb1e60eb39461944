"""Optimizer steps on local tensors, without a dispatch per op.

A step that treats each element alone does the same to every shard, so it can run on this rank's shards as they are. A
plugin names the optimizer classes with such a step (``registry.add_optimizers``). Before a step of exactly such a
class, the optimizer is replaced by its twin. The twin's parameters, gradients and states are the local tensors of the
original's, in the same memory. Other steps (layouts that differ, a closure, an observer of plans) run op by op, with
the same numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise.comm.rank_failures import at_step
from shardwise.discovery.process import default_registry
from shardwise.kernel.dispatcher import is_observed
from shardwise.kernel.kept_moves import kept_moves
from shardwise.kernel.recording import recording
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.view_copies import note_write, watched
from shardwise.private_torch.dispatch import leave_out_of_graphs
from shardwise.tensor.late_grads import late, place_late
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tensor.open_sizes import on_its_own
from shardwise.tensor.optimizer_state import attend, placed_state
from shardwise.tensor.replaced import take_new_parameters
from shardwise.tensor.replica_check import check_after_step, replica_steps

__all__ = ["first_told", "install"]

# The attribute in which an optimizer keeps its twin. Torch leaves it out of pickles and copies.
_TWIN = "_shardwise_twin"


first_told: list[Callable[[Optimizer], None]] = []
"""Who is told that a step of any optimizer begins, before it is looked at. Compiled code reads this."""


def install() -> None:
    """Let every optimizer of this process step on local tensors where it may."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """A torch hook: the arguments of the step, with the twin in place of the optimizer if the step may be local."""
    for tell in first_told:
        tell(optimizer)
    take_new_parameters(optimizer, placed_state)
    if late:
        place_late(_parameters(optimizer))
    first = next(_parameters(optimizer), None)
    if not isinstance(first, MeshTensor):
        return None
    if torch.compiler.is_compiling():
        from shardwise.tensor.allow_in_graph import before_step  # imports dynamo

        return before_step(_before, optimizer, args, kwargs)
    mesh: Any = first._spec.mesh
    at_step(mesh)
    attend(optimizer)
    # The step is over: what is kept would make each write of the optimizer slower.
    kept_moves.clear()
    if not (
        len(args) == 1
        and all(value is None for value in kwargs.values())
        and type(optimizer) in default_registry().optimizers
        and not is_observed()
        and not any(group.get("differentiable") for group in optimizer.param_groups)
        and not _has_mesh_tensor(chain(optimizer.__dict__.values(), *(g.values() for g in optimizer.param_groups)))
    ):
        return _by_ops(optimizer)
    twin = optimizer.__dict__.get(_TWIN)
    if twin is None or not twin.still_fits(optimizer):
        twin = optimizer.__dict__[_TWIN] = _Twin(optimizer)
    return ((twin.prepared(optimizer),), kwargs) if twin.take_gradients() else _by_ops(optimizer)


# With it each hook of a compiled step runs by itself, where the graph ends; and then dynamo would compile its calls.
leave_out_of_graphs(_before)


def _by_ops(optimizer: Optimizer) -> None:
    """Leave a step as it is. Compiled code guards the classes of gradients, and has to find none that is under way."""
    if recording.has_compiled:
        for parameter in _parameters(optimizer):
            _local(parameter.grad)


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001  # torch's signature
    """A torch hook: copy the results of the twin's step to the optimizer."""
    if torch.compiler.is_compiling():
        return
    if args and args[0] is not optimizer and _TWIN in optimizer.__dict__:
        optimizer.__dict__[_TWIN].hand_back(optimizer)
    if replica_steps() and isinstance(next(_parameters(optimizer), None), MeshTensor):
        check_after_step(optimizer)


leave_out_of_graphs(_after)


def _has_mesh_tensor(values: Iterable[Any]) -> bool:
    """Whether a setting is or holds a MeshTensor. A learning rate may be one, and a pair of betas may hold one."""
    return any(isinstance(v, MeshTensor) or (isinstance(v, tuple) and _has_mesh_tensor(v)) for v in values)


class _Twin:
    """The local side of one optimizer. ``parameters`` and ``locals`` have the same order, over all groups."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.parameters = list(_parameters(optimizer))
        self.seen = list(map(_local, self.parameters))
        # Separate objects, so that their gradients are visible nowhere else.
        self.locals = [t.detach() for t in self.seen]
        rest = iter(self.locals)
        self.groups = [[next(rest) for _ in group["params"]] for group in optimizer.param_groups]
        self.versioned = [p for p in self.parameters if not p.is_inference()]
        self._look_at_states(optimizer)
        self.fits = all(_fits(p, optimizer.state.get(p, {})) for p in self.parameters)
        self.optimizer: Any = object.__new__(type(optimizer))

    def _look_at_states(self, optimizer: Optimizer) -> None:
        self.states = list(optimizer.state.values())
        self.tensors = list(_values(self.states))
        local_of = dict(zip(self.parameters, self.locals, strict=True))
        # A loaded state may have entries of parameters that the optimizer does not have. A step does not read them.
        known = ((local_of.get(p), s) for p, s in optimizer.state.items())
        states = {p: {k: _part(v) for k, v in s.items()} for p, s in known if p is not None}
        self.local_states = defaultdict(dict, states)
        self.local_tensors = list(_values(states.values()))

    def still_fits(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer still holds exactly the parameters and states from which the twin was built."""
        return (
            _same(list(_parameters(optimizer)), self.parameters)
            and _same([p._local_tensor if type(p) is MeshTensor else _local(p) for p in self.parameters], self.seen)
            and _same(list(optimizer.state.values()), self.states)
            and _same(list(_values(self.states)), self.tensors)
        )

    def take_gradients(self) -> bool:
        """Give the local parameters the local gradients; returns whether all have the layouts of their parameters."""
        if not self.fits:
            return False
        for parameter, local in zip(self.parameters, self.locals, strict=True):
            grad = parameter.grad
            if grad is None:
                local.grad = None
            elif isinstance(grad, MeshTensor) and isinstance(parameter, MeshTensor):
                if grad._spec is not parameter._spec and not _same_layout(parameter._spec, grad._spec):
                    return False
                local.grad = on_its_own(grad._local_tensor)
            elif not _has_mesh_tensor((parameter, grad)):
                local.grad = grad
            else:
                return False
        return True

    def prepared(self, optimizer: Optimizer) -> Optimizer:
        """The twin optimizer with the optimizer's current settings."""
        pairs = zip(optimizer.param_groups, self.groups, strict=True)
        groups = [{**group, "params": params} for group, params in pairs]
        own = {k: v for k, v in optimizer.__dict__.items() if k != _TWIN}
        self.optimizer.__dict__ = {**own, "param_groups": groups, "state": self.local_states}
        twin: Optimizer = self.optimizer
        return twin

    def hand_back(self, optimizer: Optimizer) -> None:
        """After a step: drop the gradients, and give new states to the optimizer as MeshTensors."""
        for local in self.locals:
            local.grad = None
        increment_version(self.versioned)  # as a write to the parameters does
        if watched:
            for local in self.seen:
                note_write(local)
        if _same(list(_values(self.local_states.values())), self.local_tensors):
            return
        for parameter, local in zip(self.parameters, self.locals, strict=True):
            if local in self.local_states:
                for name, value in self.local_states[local].items():
                    _store(optimizer.state[parameter], name, value, parameter)
        self._look_at_states(optimizer)


def _parameters(optimizer: Optimizer) -> Iterator[Any]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, MeshTensor) else value


def _part(value: Any) -> Any:
    """A state for the twin, whose step enters a graph by itself where a program has compiled ``optimizer.step``."""
    return on_its_own(value._local_tensor) if isinstance(value, MeshTensor) else value


def _values(states: Iterable[Any]) -> Iterator[Any]:
    return chain.from_iterable(s.values() for s in states if isinstance(s, dict))


def _same(some: list[Any], others: list[Any]) -> bool:
    """Whether two lists hold the same objects in the same order."""
    return len(some) == len(others) and all(map(is_, some, others))


def _same_layout(one: TensorSpec, other: TensorSpec) -> bool:
    return one is other or (one.mesh == other.mesh and one.placements == other.placements and one.shape == other.shape)


def _fits(parameter: Any, state: dict[str, Any]) -> bool:
    """Whether a parameter and its states have the same layout, and it is not partial.

    Numbers and replicated 0-dim tensors always fit.
    """
    if not isinstance(parameter, MeshTensor):
        return not _has_mesh_tensor(state.values())
    spec = parameter._spec
    specs = [v._spec for v in state.values() if isinstance(v, MeshTensor)]
    # The state of a 0-dim parameter looks the same as a counter.
    return (
        not spec.reductions
        and spec.ndim > 0
        and all(s.is_replicated if s.ndim == 0 else _same_layout(spec, s) for s in specs)
    )


def _store(state: dict[str, Any], name: str, value: Any, parameter: Any) -> None:
    """Store a value of the twin's state in the original's state. A value that was changed in place is there already."""
    before = state.get(name)
    if value is _local(before):
        return
    of_parameter = (
        isinstance(parameter, MeshTensor)
        and isinstance(value, torch.Tensor)
        and value.shape == parameter._local_tensor.shape
    )
    if not of_parameter:
        state[name] = value
        return
    spec = parameter._spec
    meta = spec.tensor_meta
    if value.dtype != meta.dtype:
        spec = spec.with_meta(type(meta)(meta.shape, meta.stride, value.dtype))
    state[name] = MeshTensor(value, spec)
