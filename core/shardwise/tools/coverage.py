"""Coverage: the ops that a program needs, and those of them that no plugin has a rule for.

The program runs unchanged on one device, on fake tensors: they have shapes, dtypes and a device, but neither memory nor
values. So torch chooses the kernels of that device (the fused attention, the foreach optimizer), and a model of any
size fits. The ops that reach torch's dispatcher are the ones that reach it with MeshTensors.
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
from shardwise.engine.decomposition import Decomposition, decompose, stand_ins
from shardwise.errors import CallError, RuleConflictError
from shardwise.kernel.nested import tensors_in
from shardwise.kernel.signature import Op, op_name, signature
from shardwise.private_torch.absent_card import as_on
from shardwise.private_torch.dispatch import forward_traceback, in_backward, watching
from shardwise.private_torch.fake import fake_tensors, is_unknowable
from shardwise.private_torch.modes import outside_modes
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tools.program import (
    Phases,
    is_split_first,
    run_returned,
    running_compiled_code_eagerly,
    stand_in_number,
)

__all__ = ["Coverage", "Use", "cover"]

# Files whose frames are never the user's: torch, and the parts of this package that run the program.
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
    """One op of a program: how often it ran, in which phases, and where first.

    ``data`` says that data decides its result, and that a stand-in was used. ``parts`` are the ops that an op without a
    rule is decomposed into at its first call, if each of them has a rule.
    """

    op: Op
    site: str
    calls: int = 0
    phases: set[str] = field(factory=set)
    data: bool = False
    parts: tuple[Op, ...] = ()

    def joined(self, later: Use) -> Use:
        """The uses of an op in two parts of a program, as one."""
        data = self.data or later.data
        parts = self.parts and later.parts
        return Use(self.op, self.site, self.calls + later.calls, self.phases | later.phases, data, parts)

    @property
    def name(self) -> str:
        return op_name(self.op)

    @property
    def plugin(self) -> str | None:
        """The plugin whose rule holds; None without a rule, and where plugins are in :attr:`conflict`."""
        try:
            return default_registry().lookup(self.op).origin.plugin if self.op in default_registry() else None
        except RuleConflictError:
            return None

    @property
    def conflict(self) -> str:
        """The plugins that have a rule for the op, if nothing says which of them holds."""
        entries = default_registry().find(self.op) if self.plugin is None else []
        return ", ".join(sorted(entry.origin.plugin for entry in entries))


@frozen
class Coverage:
    """All ops that ran, in order, and why the program stopped early, if it did."""

    uses: tuple[Use, ...]
    stopped: str = ""

    @property
    def missing(self) -> list[Use]:
        """The ops that have no rule and do not decompose into ops that have one."""
        return [use for use in self.uses if use.plugin is None and not use.parts]

    @property
    def is_complete(self) -> bool:
        """Whether the program ran to its end and no op is missing."""
        return not self.stopped and not self.missing


def cover(make: Callable[[], Callable[[], Any]], device: str = "cpu") -> Coverage:
    """Run a program on tensors without data and note its ops; ``make`` loads it (under the same conditions) first.

    The program takes no arguments. It runs whatever it likes, or it returns what to run: a tensor that requires grad
    (its backward pass follows, unless one ran already), ``(model, inputs)`` or ``(model, inputs, optimizer)``.
    ``inputs`` is a tensor, a tuple of arguments or a dict of them. Without an optimizer the step is that of AdamW.

    An error of the program ends the run and is not raised; ``stopped`` describes it.
    """
    watch = _Watch()
    stopped = ""
    # The stack of each forward call stays with its node, so that a backward op can be traced to a line.
    with (
        fake_tensors(),
        torch.autograd.set_detect_anomaly(True, check_nan=False),
        as_on(device),
        watch.installed(),
    ):
        program = make()
        try:
            with watch.watching():
                returned = program()
            run_returned(returned, "run the program", watch)
        except Exception as error:  # noqa: BLE001  # the user's program may raise anything
            stopped = _why_stopped(error, watch)
    return Coverage(tuple(watch.seen()), stopped)


# -- watching --------------------------------------------------------------------------------------------------------


class _Watch:
    """Notes ops, and marks the tensors that would be MeshTensors: see :func:`_on_mesh`."""

    def __init__(self) -> None:
        self._setup: dict[Op, Use] = {}
        self._uses: dict[Op, Use] = {}
        self._called_a_module = False
        self.phases = Phases()
        self.last = ""

    def seen(self) -> Iterable[Use]:
        """The ops from the first call of a module on; all ops if no module was called."""
        if self._called_a_module:
            return self._uses.values()
        uses = dict(self._setup)
        for op, use in self._uses.items():
            uses[op] = uses[op].joined(use) if op in uses else use
        return uses.values()

    def begins(self, _model: nn.Module, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> None:
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
            with running_compiled_code_eagerly(), self.phases.followed():
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
        is_noted = op.namespace != "prim" and bool(signature(op).tensor_args) and any(map(_on_mesh, operands))
        if is_noted:
            mesh_tensor = next((t for t in operands if isinstance(t, (MeshTensor, DTensor))), None)
            if mesh_tensor is not None:
                raise CallError(
                    asked=f"run {op_name(op)} without a mesh",
                    found=f"its operand is a {type(mesh_tensor).__name__}",
                    do="Give the program for one device: placements on a mesh do not change its ops.",
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
        result = self._result(op, args, kwargs)
        for tensor in tensors_in(result):
            if not any(tensor is operand for operand in operands):
                # A result is on the mesh if an operand was; the result of a factory is, if it has dims.
                tensor.shardwise_on_mesh = is_noted if operands else tensor.dim() > 0  # type: ignore[attr-defined]
        return result

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
    """The ops that an op without a rule runs as; empty for an op with a rule, or one that cannot be decomposed."""
    registry = default_registry()
    if op in registry:
        return ()
    by_id: dict[int, Any] = {}
    with suppress(Exception), outside_modes():
        source = decompose(registry, op, stand_ins(args, by_id), stand_ins(kwargs, by_id))
        return source.parts if isinstance(source, Decomposition) else ()
    return ()


def _on_mesh(tensor: torch.Tensor) -> bool:
    """Whether a tensor would be a MeshTensor: parameters, everything with dims, and what is computed from those.

    Plain numbers in 0-dim tensors, such as an optimizer's counters, may stay plain.
    """
    if isinstance(tensor, nn.Parameter):
        return True
    is_marked: bool = getattr(tensor, "shardwise_on_mesh", tensor.dim() > 0)
    return is_marked


# -- where -----------------------------------------------------------------------------------------------------------


def _site() -> str:
    """``file:line`` of the user's code that the running op comes from: in backward, of the forward call."""
    if in_backward():
        for text in reversed(forward_traceback()):
            frame_text = _FRAME.search(text)
            if frame_text is not None and frame_text["function"] == cover.__name__ and frame_text["file"] == __file__:
                break
            if frame_text is not None and _is_the_users(frame_text["file"]):
                return _relative_site(frame_text["file"], frame_text["line"])
    frame = inspect.currentframe()
    # Frames outside of cover() are its caller's.
    while frame is not None and frame.f_code is not cover.__code__:
        if _is_the_users(frame.f_code.co_filename):
            return _relative_site(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return "-"


def _is_the_users(file: str) -> bool:
    return not file.startswith(("<", *_NOT_THE_USERS)) and Path(file).name != "contextlib.py"


def _relative_site(file: str, line: object) -> str:
    path, here = Path(file), Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{line}"


def _why_stopped(error: Exception, watch: _Watch) -> str:
    """Why the run ended, in one paragraph."""
    frames = traceback.extract_tb(error.__traceback__)
    where = next((_relative_site(f.filename, f.lineno) for f in reversed(frames) if _is_the_users(f.filename)), "-")
    if is_unknowable(error):
        return (
            f"{watch.last}: its result's shape depends on data, which is not there. "
            "Give the program a branch without it, or check what follows by itself."
        )
    reason = f"{type(error).__name__} at {where}: {error}".strip()
    distributed = str(Path(torch.distributed.__file__).parent)
    if any(f.filename.startswith(distributed) for f in frames):
        reason += "\nThe program runs on one device here: leave its mesh and process groups out."
    return reason
