"""Coverage: which ops a program needs, found without data, and which of them no plugin has a rule for.

The program runs as it is on one device, on fake tensors: they have shapes, dtypes and a device, and neither memory nor
values. So torch takes the very kernels that it takes on the device (the fused attention, the foreach optimizer), and a
model of any size fits. What reaches torch's dispatcher then is what reaches it with MeshTensors.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from attrs import define, field, frozen
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook

from shardwise.discovery.process import default_registry
from shardwise.engine.decomposition import Decomposition, find, stand_ins
from shardwise.errors import CallError, RuleConflictError
from shardwise.kernel.nested import tensors_in
from shardwise.kernel.signature import Op, op_name, signature
from shardwise.private_torch.dispatch import forward_traceback, in_backward, watching
from shardwise.private_torch.fake import fake_tensors, is_unknowable
from shardwise.private_torch.tracing import outside_modes
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tools.program import Phases, is_split_first, run_returned, stand_in_number

__all__ = ["Coverage", "Use", "cover"]

# Where a frame is never the user's: torch, this package's own parts that stand around the program.
_CORE = Path(__file__).parents[1]
_NOT_THE_USERS = (
    str(Path(torch.__file__).parent),
    __file__,
    run_returned.__code__.co_filename,
    str(_CORE / "private_torch"),
    str(_CORE / "cli"),
)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


@define
class Use:
    """What became of one op: how often it ran, in which phases, where first, and the plugin that has a rule (or none).

    ``data`` says that its result depends on data, for which a stand-in was taken. ``parts`` are the ops that one
    without a rule is decomposed into at its first call, all of which have one.
    """

    op: Op
    site: str
    calls: int = 0
    phases: set[str] = field(factory=set)
    data: bool = False
    parts: tuple[Op, ...] = ()

    def joined(self, later: Use) -> Use:
        """Both together."""
        data = self.data or later.data
        parts = self.parts and later.parts
        return Use(self.op, self.site, self.calls + later.calls, self.phases | later.phases, data, parts)

    @property
    def name(self) -> str:
        return op_name(self.op)

    @property
    def plugin(self) -> str | None:
        """The plugin whose rule holds; None for no rule; two plugins that conflict are named in :attr:`conflict`."""
        try:
            return default_registry().lookup(self.op).origin.plugin if self.op in default_registry() else None
        except RuleConflictError:
            return None

    @property
    def conflict(self) -> str:
        """The plugins that all have a rule for the op, where nothing says which holds."""
        found = default_registry().find(self.op) if self.plugin is None else []
        return ", ".join(sorted(entry.origin.plugin for entry in found))


@frozen
class Coverage:
    """All ops that were seen, in the order in which they came, and why the program stopped early, if it did."""

    uses: tuple[Use, ...]
    stopped: str = ""

    @property
    def missing(self) -> list[Use]:
        """The ops without a rule that do not run as others either."""
        return [use for use in self.uses if use.plugin is None and not use.parts]

    @property
    def is_complete(self) -> bool:
        """Whether the program came to its end and every op has a rule."""
        return not self.stopped and not self.missing


def cover(make: Callable[[], Callable[[], Any]], device: str = "cpu") -> Coverage:
    """Run a program on tensors without data and note its ops; ``make`` loads it (under the same conditions) first.

    The program takes no arguments and runs whatever it likes, or returns what is to be run: a tensor that requires
    grad (its backward pass follows, unless one ran already), ``(model, inputs)`` or ``(model, inputs, optimizer)``.
    ``inputs`` is a tensor, a tuple of arguments or a dict of them; without an optimizer the step is that of AdamW.

    Nothing that the program raises comes through: it ends the run, and ``stopped`` tells.
    """
    watch = _Watch()
    stopped = ""
    # The stack of each forward call stays with its node, so that a backward op can be traced to a line.
    with (
        fake_tensors(),
        torch.autograd.set_detect_anomaly(True, check_nan=False),
        torch.device(device),
        watch.installed(),
    ):
        program = make()
        try:
            with watch.watching():
                returned = program()
            run_returned(returned, "run the program", watch)
        except Exception as error:  # noqa: BLE001  # it is the user's program: what it raises is told
            stopped = _why_stopped(error, watch)
    return Coverage(tuple(watch.seen()), stopped)


# -- watching --------------------------------------------------------------------------------------------------------


class _Watch:
    """Notes ops, and which tensors would lie on a mesh: see :meth:`_on_mesh`."""

    def __init__(self) -> None:
        self._setup: dict[Op, Use] = {}
        self._uses: dict[Op, Use] = {}
        self._called_a_module = False
        self.phases = Phases()
        self.last = ""

    def seen(self) -> Iterable[Use]:
        """The ops from the first call of a module on; all of them where no module was called."""
        if self._called_a_module:
            return self._uses.values()
        found = dict(self._setup)
        for op, use in self._uses.items():
            found[op] = found[op].joined(use) if op in found else use
        return found.values()

    def restart(self) -> None:
        """Forget what was seen."""
        self._setup.clear()
        self._uses.clear()
        self._called_a_module = self.phases.saw_backward = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Observe calls of modules and optimizer steps while the context lasts."""

        def module_called(*_: Any) -> None:
            self._called_a_module = True

        hook = register_module_forward_pre_hook(module_called)
        try:
            with self.phases.followed():
                yield
        finally:
            hook.remove()

    def watching(self) -> Any:
        """A context whose ops are noted."""
        return watching(self._see, is_split_first)

    def first_gradients(self, roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Ones, made outside: the program has not called this op."""
        return [torch.ones_like(t) for t in roots]

    def backward_ended(self, parameters: Sequence[nn.Parameter]) -> None:
        """Nothing to note."""

    def _see(self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        operands = list(tensors_in([args, kwargs]))
        counts = op.namespace != "prim" and bool(signature(op).tensor_args) and any(map(_on_mesh, operands))
        if counts:
            self._note(op, operands, args, kwargs)
        result = self._result(op, args, kwargs)
        for tensor in tensors_in(result):
            if not any(tensor is operand for operand in operands):
                # A result is on the mesh when an operand was; what is made of nothing is a plain number without dims.
                tensor.shardwise_on_mesh = counts if operands else tensor.dim() > 0  # type: ignore[attr-defined]
        return result

    def _note(self, op: Op, operands: Iterable[torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        placed = next((t for t in operands if isinstance(t, (MeshTensor, DTensor))), None)
        if placed is not None:
            raise CallError(
                asked=f"run {op_name(op)} without a mesh",
                found=f"its operand is a {type(placed).__name__}",
                do="Give the program as it is for one device; where it lies on a mesh does not decide its ops.",
                op=op_name(op),
            )
        phase = self.phases.of_op()
        uses = self._uses if self._called_a_module or phase != "forward" else self._setup
        use = uses.get(op)
        if use is None:
            use = uses[op] = Use(op, _site(), parts=_parts(op, args, kwargs))
        use.calls += 1
        use.phases.add(phase)
        self.last = f"{op_name(op)} at {use.site if use.calls == 1 else _site()}"

    def _result(self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            return op(*args, **kwargs)
        except Exception as error:
            number = stand_in_number(op, args, kwargs) if is_unknowable(error) else None
            if number is None:
                raise
            for uses in (self._uses, self._setup):
                if op in uses:
                    uses[op].data = True
            return number


def _parts(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Op, ...]:
    """What an op without a rule would run as; nothing where it has one, or where that does not go."""
    registry = default_registry()
    if op in registry:
        return ()
    known: dict[int, Any] = {}
    with suppress(Exception), outside_modes():
        found = find(registry, op, stand_ins(args, known), stand_ins(kwargs, known))
        return found.parts if isinstance(found, Decomposition) else ()
    return ()


def _on_mesh(tensor: torch.Tensor) -> bool:
    """Whether a tensor would be a MeshTensor: parameters, everything with dims, and what is computed from those.

    Plain numbers in 0-dim tensors, such as an optimizer's counters, may stay plain.
    """
    if isinstance(tensor, nn.Parameter):
        return True
    found: bool = getattr(tensor, "shardwise_on_mesh", tensor.dim() > 0)
    return found


# -- where -----------------------------------------------------------------------------------------------------------


def _site() -> str:
    """``file:line`` of the user's code that the running op comes from: in backward, of the forward call."""
    if in_backward():
        for text in reversed(forward_traceback()):
            found = _FRAME.search(text)
            if found is not None and found["function"] == cover.__name__ and found["file"] == __file__:
                break
            if found is not None and _is_the_users(found["file"]):
                return _shown(found["file"], found["line"])
    frame = inspect.currentframe()
    # What is outside of cover() is whoever asked for it.
    while frame is not None and frame.f_code is not cover.__code__:
        if _is_the_users(frame.f_code.co_filename):
            return _shown(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return "-"


def _is_the_users(file: str) -> bool:
    return not file.startswith(("<", *_NOT_THE_USERS)) and Path(file).name != "contextlib.py"


def _shown(file: str, line: object) -> str:
    path, here = Path(file), Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{line}"


def _why_stopped(error: Exception, watch: _Watch) -> str:
    """What ended the run, in one paragraph."""
    frames = traceback.extract_tb(error.__traceback__)
    where = next((_shown(f.filename, f.lineno) for f in reversed(frames) if _is_the_users(f.filename)), "-")
    if is_unknowable(error):
        return (
            f"{watch.last}: its result's shape depends on data, which is not there. "
            "Give the program a branch without it, or check what follows by itself."
        )
    said = f"{type(error).__name__} at {where}: {error}".strip()
    distributed = str(Path(torch.distributed.__file__).parent)
    if any(f.filename.startswith(distributed) for f in frames):
        said += "\nThe program runs on one device here: leave its mesh and process groups out."
    return said
