"""The values of a training step as one rank sees them: kept by the process that is one device, compared by the others.

A step has stages: the inputs, the result of each call of a module (inner modules first), the gradients, and what the
optimizer has made of the parameters. For the first stage that differs, the step runs again, and the values of every op
of that stage are compared.
"""

from __future__ import annotations

import inspect
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from shardwise.comm.redistribute import runner
from shardwise.engine.decided import use_decisions
from shardwise.kernel.dispatcher import drop_plans, observe, record
from shardwise.kernel.nested import tensors_in
from shardwise.kernel.placements import REPLICATE
from shardwise.kernel.plan import Plan
from shardwise.kernel.signature import Op, op_name, signature
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.view_copies import fresh
from shardwise.program.step_plan import read_plan
from shardwise.rng.generator import manual_seed, preserved_state
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tensor.on_mesh import on
from shardwise.tools.program import Phases, run_returned

__all__ = ["Asked", "Difference", "Place", "StepRun", "run_step_on_rank"]

# The relative rounding, beside the largest value of a tensor, that the order of sums makes in a step.
RTOL = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
_MOST = 200  # differences of a rank that are kept
_AHEAD = 40  # values of one device among which the next one of the ranks is looked for
_NOISE = 16  # roundings of the largest value of a stage that a value may be off which is 0 in exact arithmetic


@frozen(order=True)
class Place:
    """Where in a step a value is. ``what`` is ``output``, a parameter's name, or an op and which of its tensors."""

    stage: str
    module: str = ""
    call: int = 0
    what: str = ""

    def __str__(self) -> str:
        times = f" (call {self.call + 1})" if self.call else ""
        where = f"module {self.module or 'the model'}{times}, " if self.stage == "forward" else ""
        return f"{self.stage}: {where}{self.what}"


@frozen
class Difference:
    """A value that is not the one of one device.

    ``found`` says how it differs, ``worst`` by how much, relative to the largest value; infinite where it has another
    shape, or another op ran. Ops add the line of the program, the rule, its rows and its source.
    """

    place: Place
    found: str
    worst: float
    placements: str = ""
    line: str = ""
    op: str = ""
    rule: str = ""
    rows: tuple[str, ...] = ()


@frozen
class StepRun:
    """What one rank has to say of a step: its differences in order, and how many values of each stage it compared."""

    differences: tuple[Difference, ...]
    compared: Mapping[str, int]
    error: str = ""


@frozen
class Asked:
    """One step to run: on which mesh, from which seed, and how its values are compared.

    ``plan`` is the file of a plan for the step, ``rtol`` replaces :data:`RTOL`, ``double`` has torch make tensors in
    double precision. ``ops`` names the stage whose ops are compared, and for ``forward`` the module and its call.
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


class Values(Protocol):
    """Takes the values of a step in order."""

    def take(self, place: Place, values: Sequence[Tensor], lies: str = "", **facts: Any) -> None: ...


@define
class Kept:
    """Keeps the values of one device in files of a folder."""

    folder: Path
    places: list[Place] = field(factory=list)
    largest: dict[str, float] = field(factory=dict)

    @on(None)
    def take(self, place: Place, values: Sequence[Tensor], lies: str = "", **facts: Any) -> None:  # noqa: ARG002
        """Keep the values of a place."""
        values = [value.detach().clone() for value in values]
        torch.save(values, self.folder / f"{len(self.places)}.pt")
        self.places.append(place)
        for value in values:
            if value.numel() and (value.is_floating_point() or value.is_complex()):
                size = float(value.abs().nan_to_num(0, 0, 0).max())
                self.largest[place.stage] = max(self.largest.get(place.stage, 0.0), size)

    def close(self) -> None:
        """Write what the values are."""
        (self.folder / "places").write_bytes(pickle.dumps((self.places, self.largest)))


@define
class Compared:
    """Compares the values of this rank with those that one device kept.

    Ops of which one side has more, as for the layout of a gradient, are passed over; ``by_op`` says that values are
    those of ops.
    """

    folder: Path
    rtol: float | None
    by_op: bool = False
    next: int = 0
    places: list[Place] = field(factory=list)
    largest: dict[str, float] = field(factory=dict)
    compared: dict[str, int] = field(factory=dict)
    differences: list[Difference] = field(factory=list)
    is_lost: bool = False
    noise: dict[str, Tensor] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.places, self.largest = pickle.loads((self.folder / "places").read_bytes())

    @on(None)
    def take(self, place: Place, values: Sequence[Tensor], lies: str = "", **facts: Any) -> None:
        """Compare the values of a place with those that one device has there."""
        if self.is_lost or (self.by_op and self.differences):
            return
        ahead = self.places[self.next : self.next + (_AHEAD if self.by_op else 1)]
        if place not in ahead:
            if not self.by_op:
                self.is_lost = True
                other = str(ahead[0]) if ahead else "nothing more"
                self._note(Difference(place, f"one device has {other} here", float("inf"), lies, **facts))
            return
        number = self.next + ahead.index(place)
        self.next = number + 1
        expected = torch.load(self.folder / f"{number}.pt")
        if len(expected) != len(values):
            found = f"there are {len(values)} tensors, and on one device {len(expected)}"
            self._note(Difference(place, found, float("inf"), lies, **facts))
            return
        self.compared[place.stage] = self.compared.get(place.stage, 0) + 1
        for actual, wanted in zip(values, expected, strict=True):
            ignored = self._ignored(place, wanted)
            wrong = difference(actual.detach(), wanted, self.rtol, self.largest.get(place.stage, 0.0), ignored)
            if wrong is not None:
                self._note(Difference(place, wrong[0], wrong[1], lies, **facts))
                return

    def _ignored(self, place: Place, wanted: Tensor) -> Tensor | None:
        """Elements of a parameter whose gradient is rounding alone: optimizers that divide by its size enlarge it."""
        if place.stage == "gradients" and wanted.numel() and wanted.is_floating_point():
            bound = _reach(wanted, self.rtol, self.largest.get(place.stage, 0.0))
            self.noise[place.what] = wanted.abs() <= bound
        return self.noise.get(place.what) if place.stage == "parameters" else None

    def _note(self, difference: Difference) -> None:
        if len(self.differences) < _MOST:
            self.differences.append(difference)

    def close(self) -> None:
        """The step is over: note what one device has besides."""
        if not (self.is_lost or self.by_op) and self.next < len(self.places):
            place = self.places[self.next]
            self._note(Difference(place, "one device has it, and the ranks come to no such value", float("inf")))


def _reach(wanted: Tensor, rtol: float | None, largest: float) -> float:
    size = float(wanted.abs().nan_to_num(0, 0, 0).max()) if wanted.numel() else 0.0
    real = wanted.dtype.to_real() if wanted.is_complex() else wanted.dtype
    relative = RTOL.get(real, RTOL[torch.float32]) if rtol is None else rtol
    return relative * size + _NOISE * torch.finfo(real).eps * largest


def difference(
    actual: Tensor, wanted: Tensor, rtol: float | None, largest: float, ignored: Tensor | None = None
) -> tuple[str, float] | None:
    """How a tensor differs from that of one device, and by how much; None if by no more than rounding."""
    if actual.shape != wanted.shape or actual.dtype != wanted.dtype:
        kinds = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (actual, wanted)]
        return f"it is {kinds[0]} where one device has {kinds[1]}", float("inf")
    if not (wanted.is_floating_point() or wanted.is_complex()):
        wrong = actual != wanted
        apart, reach = wrong.double(), 0.0
    else:
        reach = _reach(wanted, rtol, largest)
        wide = torch.complex128 if wanted.is_complex() else torch.float64
        apart = (actual.to(wide) - wanted.to(wide)).abs()
        same = (actual == wanted) | (actual.isnan() & wanted.isnan())
        apart = torch.where(same, 0.0, apart.nan_to_num(torch.inf, torch.inf, torch.inf))
        wrong = apart > reach
    if ignored is not None:
        wrong = wrong & ~ignored
    if not bool(wrong.any()):
        return None
    at = tuple(torch.where(wrong, apart, -1.0).flatten().argmax().unsqueeze(0).tolist())
    index = tuple(int(n) for n in torch.unravel_index(torch.tensor(at[0]), wanted.shape))
    size = float(wanted.abs().double().nan_to_num(0, 0, 0).max()) if wanted.dtype != torch.bool else 1.0
    worst = float(apart.flatten()[at[0]]) / size if size else float("inf")
    pair = f"at {index} it has {actual[index].item():.6g} where one device has {wanted[index].item():.6g}"
    return f"{int(wrong.sum())} of {wrong.numel()} elements differ; {pair}", worst


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


def _lies(values: Sequence[Tensor]) -> str:
    return "; ".join(str(v.spec) if isinstance(v, MeshTensor) else f"plain {tuple(v.shape)}" for v in values)


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
        values = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        if self.takes and values:
            lies = _lies(values)
            self.values.take(place, [whole(value) for value in values], lies)

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

    def called(self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any] | None, result: Any) -> None:
        plan, self.plan = self.plan, None
        if not self._is_inside() or any(r.alias is not None and not r.written for r in signature(op).results):
            return  # a view has the values of its base
        name = op_name(op)
        facts: dict[str, Any] = {"op": name, "line": _line()}
        if plan is not None and plan.schema.op is op:
            facts |= {"rule": f"{plan.entry}", "rows": tuple(plan.names)}
        read: list[MeshTensor] = []
        written: list[MeshTensor] = []
        for arg, value in zip(signature(op).args, signature(op).bind(args, kwargs or {}), strict=True):
            (written if arg.written else read).extend(t for t in tensors_in(value) if isinstance(t, MeshTensor))
        results = [t for t in tensors_in(result) if isinstance(t, MeshTensor)]
        for what, tensors in (("reads", read), ("gives", [*results, *written])):
            shapes = ", ".join(str(list(t.shape)) for t in tensors)
            place = Place(self.of.stage, self.of.module, self.of.call, f"{name} {what} {shapes}")
            if tensors:
                self.values.take(place, [whole(t) for t in tensors], _lies(tensors), **facts)

    def _is_inside(self) -> bool:
        if self.of.stage == "forward":
            return any((p.module, p.call) == (self.of.module, self.of.call) for p in self.modules.open)
        wanted = {"gradients": "backward", "parameters": "optimizer"}.get(self.of.stage, "")
        return self.phases.of_op() == wanted

    def redistributed(self, source: Any, result: Any) -> None: ...
    def accumulated(self, gradient: Any, leaf: Any, is_placed: bool) -> None: ...
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
class _Watch:
    """What :func:`run_returned` tells of a step that it runs."""

    values: Values
    modules: _Modules
    takes: bool
    phases: Phases = field(factory=Phases)
    parameters: dict[str, Tensor] = field(factory=dict)

    def watching(self) -> ExitStack:
        return ExitStack()

    def begins(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.modules.begins(model)
        self.parameters = dict(model.named_parameters())
        if self.takes:
            for name, value in {**self.parameters, **dict(model.named_buffers())}.items():
                self.values.take(Place("start", what=name), [whole(value)], _lies([value]))
            inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            for number, value in enumerate(inputs):
                self.values.take(Place("inputs", what=f"input {number}"), [whole(value)], _lies([value]))

    def first_gradients(self, roots: Sequence[Tensor]) -> list[Tensor]:
        return [torch.ones_like(t) for t in roots]

    def backward_ended(self, parameters: Sequence[nn.Parameter]) -> None:  # noqa: ARG002  # known by name
        self.take_gradients()

    def take_gradients(self) -> None:
        for name, parameter in self.parameters.items():
            if self.takes and parameter.grad is not None:
                grad = parameter.grad
                self.values.take(Place("gradients", what=name), [whole(grad)], _lies([grad]))

    def take_parameters(self) -> None:
        for name, parameter in self.parameters.items():
            if self.takes:
                self.values.take(Place("parameters", what=name), [whole(parameter)], _lies([parameter]))


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
    return StepRun((), {}) if asked.writes else StepRun(tuple(values.differences), values.compared, error)


def _run(function: Callable[[DeviceMesh], Any], mesh: DeviceMesh, values: Values, asked: Asked) -> None:
    random.seed(asked.seed)
    manual_seed(asked.seed)
    modules = _Modules(values, takes=asked.ops is None)
    watch = _Watch(values, modules, takes=asked.ops is None)
    with ExitStack() as stack:
        stack.enter_context(watch.phases.followed())
        stack.enter_context(modules.followed())
        if asked.ops is not None:
            ops = _Ops(values, modules, watch.phases, asked.ops)
            stack.enter_context(record(ops))
            stack.enter_context(observe(ops.saw_plan))
        else:
            stack.enter_context(observe(lambda _: _note_phase(watch.phases)))
        returned = function(mesh)
        step = run_returned(returned, "check the program", watch)
    if step is None:
        _take_of_loop(watch, modules, returned)
    else:
        watch.take_parameters()


def _note_phase(phases: Phases) -> None:
    phases.of_op()


def _take_of_loop(watch: _Watch, modules: _Modules, returned: Any) -> None:
    """What a program that ran its step itself leaves behind: what it returned, gradients and parameters."""
    for root in modules.roots:
        for name, parameter in root.named_parameters():
            watch.parameters.setdefault(f"{modules.names[id(root)]}.{name}".lstrip("."), parameter)
    results = [t for t in pytree.tree_leaves(returned) if isinstance(t, Tensor)]
    if watch.takes and results:
        watch.values.take(Place("result", what="what the program returned"), list(map(whole, results)), _lies(results))
    watch.take_gradients()
    watch.take_parameters()
