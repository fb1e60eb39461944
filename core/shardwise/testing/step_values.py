"""The values of a training step as one rank sees them: kept by the process that is one device, compared by the others.

A step has stages: the inputs, the result of each call of a module (inner modules first), the gradients, and what the
optimizer has made of the parameters. For the first stage that differs, the step runs again, and the values of every op
of that stage are compared.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.comm.redistribute import runner
from shardwise.engine.decided import use_decisions
from shardwise.kernel.dispatcher import drop_plans, observe, record
from shardwise.kernel.nested import tensors_in
from shardwise.kernel.placements import REPLICATE
from shardwise.kernel.plan import Plan
from shardwise.kernel.signature import Op, op_name, signature
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.view_copies import fresh
from shardwise.private_torch import trees as pytree
from shardwise.program.step_plan import read_plan
from shardwise.rng.generator import manual_seed, preserved_state
from shardwise.steps.learning import none_by_itself
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tensor.on_mesh import on
from shardwise.testing.step_differences import Compared, Difference, Kept, Place, Values
from shardwise.tools.program import Phases, run_returned, running_compiled_code_eagerly
from shardwise.tools.spot_check import filled_memory

__all__ = ["ASKED", "Asked", "StepRun", "run_step_on_rank"]

ASKED = "check the program"
"""How an error begins of a program that returns what cannot be run."""


@frozen
class StepRun:
    """What one rank has to say of a step: its differences in order, and how many values of each stage it compared.

    ``more`` and ``small_gradients`` are those of :class:`Compared`.
    """

    differences: tuple[Difference, ...]
    compared: Mapping[str, int]
    error: str = ""
    more: Difference | None = None
    small_gradients: float = 0.0


@frozen
class Asked:
    """One step to run: on which mesh, from which seed, and how its values are compared.

    ``plan`` is the file of a plan for the step, ``rtol`` replaces figures by dtype, ``double`` has torch make
    tensors in double precision. ``ops`` names the stage whose ops are compared, and for ``forward`` the module and its
    call.
    ``folder`` has the values of one device, written if ``writes``.
    """

    mesh_shape: tuple[int, ...]
    names: tuple[str, ...]
    seed: int
    folder: str
    writes: bool
    plan: str | None = None
    rtol: float | None = None
    double: bool = False
    ops: Place | None = None


@on(None)  # a tensor that is made here is no tensor of the program's
def whole(value: Tensor) -> Tensor:
    """A tensor as one device has it, by communication for a MeshTensor; every rank must call this."""
    if not isinstance(value, MeshTensor):
        return value.detach()
    spec = value.spec
    meta = spec.tensor_meta
    plain = TensorSpec(spec.mesh, spec.placements, meta)
    local = fresh(value._local_tensor) if spec.is_copy else value._local_tensor
    with torch.no_grad():  # below autograd, and no op of the program's
        return runner(plain, plain.with_placements((REPLICATE,) * spec.mesh.ndim))(local.detach())


def _lies(values: Sequence[Any]) -> str:
    return "; ".join(_lies_one(value) for value in values)


def _lies_one(value: Any) -> str:
    if isinstance(value, MeshTensor):
        return str(value.spec)
    return f"plain {tuple(value.shape)}" if isinstance(value, Tensor) else "number"


@on(None)
def _as_tensor(value: Any) -> Tensor:
    """A number as a tensor: a float is no more exact than the tensors that it comes from."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() >= 64:  # noqa: PLR2004
        value = float(value)
    return torch.tensor(value)


def _taken(values: Sequence[Any]) -> list[Tensor]:
    return [whole(value) if isinstance(value, Tensor) else _as_tensor(value) for value in values]


def _values_in(result: Any) -> Iterator[Any]:
    """The tensors and numbers of what a module or a program returned, those of dataclasses, too."""
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, (Tensor, bool, int, float, complex)):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _values_in([getattr(leaf, part.name) for part in fields(leaf)])


def _numbers_in(value: Any) -> Iterator[Any]:
    if isinstance(value, (bool, int, float, complex)):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _numbers_in(part)


@define
class _Modules:
    """Follows the calls of modules, and names them."""

    values: Values
    takes: bool
    names: dict[int, str] = field(factory=dict)
    roots: list[nn.Module] = field(factory=list)
    open: list[Place] = field(factory=list)
    calls: dict[str, int] = field(factory=dict)

    def begins(self, model: nn.Module) -> None:
        """Count from here: the step of a model begins."""
        self.names.clear()
        self.roots.clear()
        self.calls.clear()
        self._know(model)

    def _know(self, model: nn.Module) -> None:
        self.roots.append(model)  # an id is one module's only while that lives
        number = len(self.roots)
        for name, module in model.named_modules():
            of_root = f"model {number}." if number > 1 else ""
            self.names.setdefault(id(module), f"{of_root}{name}".rstrip("."))

    def enter(self, module: nn.Module, _args: Any) -> None:
        if id(module) not in self.names:
            self._know(module)
        name = self.names[id(module)]
        self.open.append(Place("forward", name, self.calls.get(name, 0), "output"))
        self.calls[name] = self.calls.get(name, 0) + 1

    def leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        place = self.open.pop()
        values = list(_values_in(output)) if self.takes else []
        if values:
            lies = _lies(values)
            self.values.take(place, _taken(values), lies)

    @contextmanager
    def followed(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self.enter).remove)
            stack.callback(register_module_forward_hook(self.leave).remove)
            yield


@define
class _Ops:
    """The recorder of one stage: takes what every op of it reads and gives."""

    values: Values
    modules: _Modules
    phases: Phases
    of: Place
    plan: Plan | None = None

    def saw_plan(self, plan: Plan) -> None:
        self.plan = plan
        _note_dtypes(self.values, plan)

    def called(self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any] | None, result: Any) -> None:
        plan, self.plan = self.plan, None
        if not self._is_inside() or any(r.alias is not None and not r.written for r in signature(op).results):
            return  # a view has the values of its base
        name = op_name(op)
        facts: dict[str, Any] = {"op": name, "line": _line()}
        if plan is not None and plan.schema.op is op:
            facts |= {"rule": f"{plan.entry}", "rows": tuple(plan.names)}
        read: list[Any] = []
        written: list[MeshTensor] = []
        for arg, value in zip(signature(op).args, signature(op).bind(args, kwargs or {}), strict=True):
            tensors = [t for t in tensors_in(value) if isinstance(t, MeshTensor)]
            (written if arg.written else read).extend(tensors)
            read.extend(_numbers_in(value))
        results = [t for t in tensors_in(result) if isinstance(t, MeshTensor)]
        for what, values in (("reads", read), ("gives", [*results, *written])):
            shapes = ", ".join(str(list(t.shape)) for t in values if isinstance(t, Tensor))
            place = Place(self.of.stage, self.of.module, self.of.call, f"{name} {what} {shapes}")
            if values:
                self.values.take(place, _taken(values), _lies(values), **facts)

    def _is_inside(self) -> bool:
        if self.of.stage == "forward":
            return any((p.module, p.call) == (self.of.module, self.of.call) for p in self.modules.open)
        wanted = {"gradients": "backward", "parameters": "optimizer"}.get(self.of.stage)
        return wanted is None or self.phases.of_op() == wanted

    def redistributed(self, source: Any, result: Any) -> None: ...
    def accumulated(self, gradient: Any, leaf: Any, is_placed: bool) -> None: ...

    def trains(self, leaves: Sequence[Any]) -> None: ...
    def waits(self, gradient: Any, leaf: Any, placements: Any) -> None: ...
    def read(self, tensor: Any) -> None: ...


_NOT_THE_USERS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), "<")


def _line() -> str:
    """File and line of the program; empty where no line of it runs, as in a backward pass that a tool starts."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    if frame is None or Path(frame.f_code.co_filename).is_relative_to(sys.base_prefix):
        return ""
    path, here = Path(frame.f_code.co_filename), Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{frame.f_lineno}"


@define
class _Leaves:
    """The recorder of a step: remembers what has a gradient."""

    plan: Any = None
    seen: dict[int, Any] = field(factory=dict)

    def accumulated(self, _gradient: Any, leaf: Any, _is_placed: bool) -> None:
        if leaf is not None:  # an id is one tensor's only while that lives
            self.seen.setdefault(id(leaf), leaf)

    def called(self, op: Op, args: Any, kwargs: Any, result: Any) -> None: ...
    def redistributed(self, source: Any, result: Any) -> None: ...
    def waits(self, gradient: Any, leaf: Any, placements: Any) -> None: ...
    def trains(self, leaves: Sequence[Any]) -> None: ...
    def read(self, tensor: Any) -> None: ...


@define
class _Watch:
    """What :func:`run_returned` tells of a step that it runs, and what a program that runs its steps itself does."""

    values: Values
    modules: _Modules
    takes: bool
    phases: Phases = field(factory=Phases)
    leaves: _Leaves = field(factory=_Leaves)
    is_returned: bool = False
    steps: int = 0
    has_gradients: bool = False
    """Whether gradients were computed that no optimizer has stepped by."""

    def watching(self) -> ExitStack:
        return ExitStack()

    def begins(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.is_returned = True
        self.modules.begins(model)
        if self.takes:
            for name, value in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
                self.values.take(Place("start", what=name), [whole(value)], _lies([value]))
            inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            for number, value in enumerate(inputs):
                self.values.take(Place("inputs", what=f"input {number}"), [whole(value)], _lies([value]))

    def first_gradients(self, roots: Sequence[Tensor]) -> list[Tensor]:
        """Ones for a loss. Other results get numbers that differ: the sum of what softmax gives has no gradient."""
        with preserved_state(), torch.random.fork_rng(devices=[]):
            return [torch.ones_like(t) if t.ndim == 0 else torch.rand_like(t) for t in roots]

    def backward_ended(self, parameters: Sequence[nn.Parameter]) -> None:  # noqa: ARG002  # known by name
        self.take_gradients()

    def _named(self) -> dict[str, Tensor]:
        """What has or may have a gradient, by name: parameters of modules, then other leaves in their order."""
        named: dict[str, Tensor] = {}
        for root in self.modules.roots:
            for name, parameter in root.named_parameters():
                named.setdefault(f"{self.modules.names[id(root)]}.{name}".lstrip("."), parameter)
        known = {id(value) for value in named.values()}
        others = [leaf for number, leaf in self.leaves.seen.items() if number not in known]
        return {**named, **{f"leaf {n} {list(leaf.shape)}": leaf for n, leaf in enumerate(others)}}

    def saw(self, plan: Plan) -> None:
        """An op runs by a plan."""
        self.has_gradients = self.phases.of_op() == "backward" or self.has_gradients
        _note_dtypes(self.values, plan)

    def step_begins(self, *_: Any) -> None:
        """An optimizer of a program that runs its steps itself: it may forget the gradients afterwards."""
        if not self.is_returned:
            self.take_gradients()
            self.steps += 1

    def take_gradients(self) -> None:
        self.has_gradients = False
        for name, parameter in self._named().items():
            if self.takes and parameter.grad is not None:
                grad = parameter.grad
                self.values.take(Place("gradients", call=self.steps, what=name), [whole(grad)], _lies([grad]))

    def take_end(self) -> None:
        """What the step leaves behind: parameters and buffers, and gradients by which no optimizer has stepped."""
        if self.has_gradients and not self.is_returned:
            self.take_gradients()
        if not self.takes:
            return
        for name, parameter in self._named().items():
            self.values.take(Place("parameters", what=name), [whole(parameter)], _lies([parameter]))
        for root in self.modules.roots:
            for name, value in root.named_buffers():
                place = Place("buffers", what=f"{self.modules.names[id(root)]}.{name}".lstrip("."))
                self.values.take(place, [whole(value)], _lies([value]))


def _note_dtypes(values: Values, plan: Plan) -> None:
    for spec in plan.outs:
        if spec is not None:
            values.saw(spec.tensor_meta.dtype)


def run_step_on_rank(load: Callable[[str], Callable[..., Any]], program: str, asked: Asked) -> StepRun:
    """Run a program's step on this rank and keep or compare its values. Every rank of the pool must call this."""
    folder = Path(asked.folder)
    values: Any = Kept(folder) if asked.writes else Compared(folder, asked.rtol, by_op=asked.ops is not None)
    mesh = init_device_mesh("cpu", asked.mesh_shape, mesh_dim_names=asked.names)
    before, drawn = torch.get_default_dtype(), random.getstate()
    error = ""
    stack = ExitStack()
    stack.enter_context(preserved_state())
    stack.enter_context(torch.random.fork_rng(devices=[]))
    try:
        if asked.double:
            torch.set_default_dtype(torch.float64)
        if asked.plan is not None:
            plan = read_plan(asked.plan)
            plan.check_mesh("check a program by a plan", asked.mesh_shape, asked.names)
            use_decisions(plan.decisions, plan.placements_of)
        _run(load(program), mesh, values, asked)
    except Exception as raised:
        if asked.writes:
            raise
        error = f"{type(raised).__name__}: {raised}"
        if not values.differences:
            raise
    finally:
        stack.close()
        random.setstate(drawn)
        torch.set_default_dtype(before)
        if asked.plan is not None:
            use_decisions(None)
        drop_plans()
    if not error:
        values.close()
    if asked.writes:
        return StepRun((), {})
    return StepRun(tuple(values.differences), values.compared, error, values.more, values.small_gradients)


def _run(function: Callable[[DeviceMesh], Any], mesh: DeviceMesh, values: Values, asked: Asked) -> None:
    random.seed(asked.seed)
    manual_seed(asked.seed)
    modules = _Modules(values, takes=asked.ops is None)
    watch = _Watch(values, modules, takes=asked.ops is None)
    with ExitStack() as stack:
        stack.enter_context(none_by_itself())
        stack.enter_context(running_compiled_code_eagerly())
        stack.enter_context(watch.phases.followed())
        stack.enter_context(modules.followed())
        stack.callback(register_optimizer_step_pre_hook(watch.step_begins).remove)
        if asked.ops is not None:
            stack.enter_context(filled_memory())  # what nobody has written is no difference
            ops = _Ops(values, modules, watch.phases, asked.ops)
            stack.enter_context(record(ops))
            stack.enter_context(observe(ops.saw_plan))
        else:
            stack.enter_context(record(watch.leaves))
            stack.enter_context(observe(watch.saw))
        returned = function(mesh)
        step = run_returned(returned, ASKED, watch)
    if step is None:
        results = list(_values_in(returned)) if watch.takes else []
        if results:
            values.take(Place("result", what="what the program returned"), _taken(results), _lies(results))
    watch.take_end()
