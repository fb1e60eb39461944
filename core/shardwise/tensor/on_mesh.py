"""Tensors that a program makes for itself lie on the mesh: ``with shardwise.on(mesh):``.

Models make tables of positions, masks and zero states inside their forward pass, from sizes and numbers alone. Under
:func:`on` such a tensor is a replicated MeshTensor. It is taken below Python, by a mode of torch's dispatcher, so that
tensors that torch's own C++ code makes are seen. Modules that ``distribute_module`` placed enter it by themselves.

The mode is off while an op on MeshTensors runs: it never sees what a kernel, a lowering or a collective makes.
"""

from __future__ import annotations

import copy
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, NoReturn, cast

import torch
from attrs import frozen
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.policy import PolicyScope, hold_for_graph, number_of_scope
from shardwise.engine.call_site import is_call_of_program
from shardwise.engine.composites import replicated_tensor
from shardwise.engine.plain_tensors import is_known, know
from shardwise.errors import ArgumentError
from shardwise.kernel.arguments import check_mesh
from shardwise.kernel.dispatcher import dispatch_under_mode
from shardwise.kernel.nested import tensors_in
from shardwise.kernel.signature import Op, signature
from shardwise.private_torch.dispatch import OpMode, is_zero_tensor
from shardwise.private_torch.modes import count_modes, recording_mode
from shardwise.private_torch.ops import draws, packet_name
from shardwise.private_torch.tracing import enter_in_traces
from shardwise.tensor.factories import empty, rand, randint, randn, randperm
from shardwise.tensor.mesh_tensor import MeshTensor

__all__ = ["enter_in_forward", "locally", "on"]


class _OnMesh(OpMode):  # type: ignore[no-untyped-call]  # torch leaves its __init_subclass__ unannotated
    """Makes new tensors on a mesh. One instance per entry, because torch keeps what it found inside the instance."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.mesh = mesh
        self.call: FrameType | None = None
        # Of the thread that entered it. A backward pass on a card runs in a thread of autograd's, under the same modes.
        self.entered: list[_OnMesh] = _entered.modes

    def run(self, op: Op, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one op. The mode is off meanwhile."""
        if len(types) == 1 and types[0] is MeshTensor:
            return dispatch_under_mode(_OnMesh, op, args, kwargs)
        for kind in types:
            if getattr(kind, "meets_mesh_tensors", False):  # a class of a plugin, which says what it does beside them
                return op(*args, **kwargs)
            if issubclass(kind, MeshTensor):  # as without the mode: torch lists a subclass before its base
                return kind.__torch_dispatch__(op, types, args, kwargs)
        mesh = self.mesh
        # An op that the innermost mode runs reaches the outer ones.
        if mesh is None or self.entered[-1] is not self or _is_over(self.call):
            return op(*args, **kwargs)
        operands = list(tensors_in([args, kwargs]))
        if not operands:
            return _made(op, args, kwargs, mesh)
        known = not draws(op) and all(is_known(t, mesh) for t in operands)
        result = op(*args, **kwargs)
        if known:
            _know_results(op, args, kwargs, result, mesh)
        return result


class _OnMeshOverModes(_OnMesh):  # type: ignore[no-untyped-call]  # as above
    """One above modes of the program, which see its ops on whole tensors, as they do outside."""

    def run(self, op: Op, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one op, or hand it down."""
        if any(issubclass(kind, MeshTensor) for kind in types):
            return op(*args, **kwargs)
        return super().run(op, types, args, kwargs)


class _OnMeshInTrace(_OnMesh):  # type: ignore[no-untyped-call]  # as above
    """What such a mode is while a graph is recorded: it leaves every op to the mode that records."""

    def run(self, op: Op, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ARG002
        """Run one op as without the mode."""
        return op(*args, **kwargs)


def _know_results(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, mesh: DeviceMesh) -> None:
    """What was made from tensors that the ranks have compared is the same on every rank."""
    values = zip(signature(op).args, signature(op).bind(args, kwargs), strict=True)
    written = [t for arg, value in values if arg.written or arg.is_out for t in tensors_in(value)]
    for tensor in written:
        know(tensor, mesh, 1)  # torch counts the write when it has run
    for tensor in tensors_in(result):
        if type(tensor) is torch.Tensor and not tensor.requires_grad and not any(tensor is w for w in written):
            know(tensor, mesh)


def _made(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], mesh: DeviceMesh) -> Any:
    """The result of an op without a tensor among its operands, on the mesh where it is a tensor of its devices."""
    if not is_call_of_program(__file__):
        return op(*args, **kwargs)
    if draws(op):
        drawn = _drawn(op, args, kwargs, mesh)
        return op(*args, **kwargs) if drawn is None else drawn
    result = op(*args, **kwargs)
    if is_zero_tensor(result):  # autograd's own, for a tangent that is zero everywhere; only torch computes with it
        return result
    if type(result) is torch.Tensor and result.device.type == mesh.device_type and result.layout is torch.strided:
        return replicated_tensor(MeshTensor, mesh, result)
    return result


# By the name of torch's function: one that takes the same arguments, by position.
_DRAWING: Mapping[str, Callable[..., torch.Tensor]] = {
    "rand": rand,
    "randn": randn,
    "randint": randint,
    "randperm": randperm,
    "normal": lambda mean, std, size, **options: empty(size, **options).normal_(mean, std),
}


def _drawn(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], mesh: DeviceMesh) -> Any:
    """Random numbers that are the same on every rank; ``None`` where torch is to draw: from a generator of the
    program's own, on another device, or by an op that is not listed. Such numbers stay plain, and are compared.
    """
    draw = _DRAWING.get(packet_name(op))
    device = kwargs.get("device")
    options = {k: v for k, v in kwargs.items() if v is not None and k in ("dtype", "layout")}
    if (
        draw is None
        or kwargs.get("generator") is not None
        or any(isinstance(value, torch.Generator) for value in args)
        or torch.device(device or "cpu").type != mesh.device_type
        or kwargs.get("layout") not in (None, torch.strided)
    ):
        return None
    return draw(*args, **options, device_mesh=mesh)


class _Entered(threading.local):
    """The modes that are on in this thread, and the forward passes under way, the innermost last."""

    def __init__(self) -> None:
        self.modes: list[_OnMesh] = []
        self.passes: list[_Pass] = []


@frozen(eq=False)
class _Pass:
    """A forward pass: whose it is, the call of the module, and the mode that it entered."""

    hooks: _Hooks
    call: FrameType | None
    mode: _OnMesh | None


_entered = _Entered()


def _switch_off() -> None:
    """In a process that was forked, as the workers of a DataLoader are: it is no rank and must not communicate."""
    for mode in _entered.modes:
        mode.mesh = None


os.register_at_fork(after_in_child=_switch_off)


def _enter(mesh: DeviceMesh | None) -> _OnMesh:
    # Torch finds the handlers of warm ops by the class, and these run an op without the modes below.
    mode = _OnMesh(mesh) if count_modes() == len(_entered.modes) else _OnMeshOverModes(mesh)
    mode.__enter__()  # type: ignore[no-untyped-call]
    _entered.modes.append(mode)
    return mode


def _leave() -> None:
    _entered.modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]


@contextmanager
def _asleep() -> Iterator[None]:
    """Leave the ops of a graph that is recorded to the mode that records them. It lies below, so it would see the ops
    on this rank's part alone, and take the part for a constant.
    """
    awake = [(mode, type(mode)) for mode in _entered.modes]
    # By the class, because torch finds the handlers of warm ops by it.
    for mode, _ in awake:
        mode.__class__ = _OnMeshInTrace
    try:
        yield
    finally:
        for mode, kind in awake:
            mode.__class__ = kind


enter_in_traces(_asleep)


def _is_traced() -> bool:
    """Whether a graph is made, by a compiler, or by a mode that records: these are not to see the mode."""
    return torch.compiler.is_compiling() or recording_mode() is not None


@contextmanager
def on(device_mesh: DeviceMesh | None) -> Iterator[None]:
    """Put the tensors that a program makes on a mesh, replicated, while the context lasts.

    It holds for torch's factories (``torch.zeros``, ``arange``, ``full``, ``eye``, ``rand`` and so on) where the
    tensor's device is one of the mesh's, in the thread that entered it. Random numbers are the same on every rank (see
    docs/random.md). ``torch.tensor(data)`` and tensors of NumPy stay plain: their data may differ between ranks, and
    are compared where they meet a MeshTensor. ``on(None)`` switches it off, for code that works on this rank's part.

    The forward pass of a module that :func:`distribute_module` placed is in such a context already; generation loops,
    loss functions and metrics are not. In compiled code and in graphs of ``make_fx`` it does nothing: there plain
    tensors count as replicated.
    """
    if _is_traced():
        yield
        return
    if device_mesh is not None:
        check_mesh("put the tensors of a program on a mesh", device_mesh)
    _enter(device_mesh)
    try:
        yield
    finally:
        _leave()


def locally() -> AbstractContextManager[None]:
    """``on(None)``, which costs nothing where the program makes no tensors on a mesh."""
    return nullcontext() if torch.compiler.is_compiling() or not _entered.modes else on(None)


# -- modules ---------------------------------------------------------------------------------------------------------


def enter_in_forward(module: nn.Module, mesh: DeviceMesh, scope: PolicyScope | None = None) -> None:
    """Run the forward passes of a module, and of its submodules where they are called by themselves, under :func:`on`,
    and those of the module under a policy.

    A recomputation in a backward pass calls submodules. Modules of ``torch.nn`` that make no tensors are left alone.
    """
    for submodule in module.modules():
        if submodule is module or not type(submodule).__module__.startswith("torch.nn.modules") or _makes(submodule):
            hooks = _Hooks(mesh, scope if submodule is module else None)
            submodule.register_forward_pre_hook(hooks.before, prepend=True)
            submodule.register_forward_hook(hooks.after, always_call=True)
            vars(submodule)["__prepare_scriptable__"] = _refuse_to_script  # torch.jit asks the module for it


def _refuse_to_script() -> NoReturn:
    """What ``torch.jit.script`` asks a module to become first. It cannot compile the hooks."""
    raise ArgumentError(
        asked="torch.jit.script a module that lies on a mesh",
        found="TorchScript cannot compile its hooks, which have its forward pass make tensors on the mesh",
        do="Use torch.compile, torch.export or torch.jit.trace, which take it as it is. For a script, load "
        "{name: t.full_tensor() for name, t in model.state_dict().items()} into a model that is not placed.",
        argument="obj",
    )


def _makes(module: nn.Module) -> bool:
    return isinstance(module, (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.Transformer))


class _Hooks:
    """The two hooks of one module: to enter the mode, unless it is on, and to leave it again; the same for a policy."""

    def __init__(self, mesh: DeviceMesh, scope: PolicyScope | None) -> None:
        self.mesh = mesh
        self.scope = scope
        self.number = None if scope is None else number_of_scope(scope)

    def __deepcopy__(self, _memo: Any) -> _Hooks:
        # The copy of a module lies on the same mesh. Without data, as in a rehearsal, a mesh cannot be copied.
        return copy.copy(self)

    def before(self, module: nn.Module, args: Any) -> None:  # noqa: ARG002  # torch's signature
        """Enter."""
        if torch.compiler.is_compiling():
            if self.number is not None:
                hold_for_graph(self.number)
            return
        _leave_interrupted()
        # This frame has no name here: one that holds itself is a cycle, and keeps what the forward calculates.
        call = cast("FrameType", inspect.currentframe()).f_back
        enters = not _entered.modes or _entered.modes[-1].mesh not in (None, self.mesh)
        enters = enters and recording_mode() is None
        mode = _enter(self.mesh) if enters else None
        if mode is not None:
            mode.call = call
        _entered.passes.append(_Pass(self, call, mode))
        if self.scope is not None:
            self.scope.__enter__()

    def after(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        """Leave."""
        # Another hook may have raised before this module's own hook ran.
        if torch.compiler.is_compiling() or not _entered.passes or _entered.passes[-1].hooks is not self:
            return
        if self.scope is not None:
            self.scope.__exit__()
        if _entered.passes.pop().mode is not None:
            _leave()


def _leave_interrupted() -> None:
    """Leave the modes of forward passes that Ctrl-C or an exit ended: torch runs no hook after these."""
    while _entered.passes and _is_over(_entered.passes[-1].call):
        mode = _entered.passes[-1].mode
        if mode is not None and _entered.modes[-1] is not mode:
            return  # inside one that the program entered since, and leaves
        scope = _entered.passes.pop().hooks.scope
        if scope is not None:
            scope.__exit__()
        if mode is not None:
            _leave()


def _is_over(call: FrameType | None) -> bool:
    """Whether a call has ended. Python clears the frame of such a call, and no other."""
    if call is None:
        return False
    try:
        call.clear()
    except RuntimeError:
        return False
    return True
