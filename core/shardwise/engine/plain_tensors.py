"""Plain tensors among the operands of an op on MeshTensors.

A program makes tensors without thinking of a mesh: a table of positions, a mask, a cache. Such a tensor counts as
replicated, and whether it is the same on every rank is compared, not believed. The ranks compare a digest of it at the
first op that it meets. Afterwards the tensor is known, and costs nothing, until it is written or replaced. What an op
on MeshTensors writes into it is the same on every rank by construction.

:func:`plain` chooses another policy for a part of a program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from attrs import define
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.comm.contents import digest, traced_digest
from shardwise.comm.groups import all_reduce, backend_of
from shardwise.comm.rule_agreement import differences, different_summaries
from shardwise.engine.call_site import users_line
from shardwise.engine.replaced_parameters import leaves_of, refuse_replaced
from shardwise.engine.several_meshes import mesh_of
from shardwise.errors import PlainTensorError, RankDisagreementError, SettingsError
from shardwise.kernel.engine import tensor_class
from shardwise.kernel.known_tensors import key_of_plain, known_tensor, known_without_mesh, remember
from shardwise.kernel.local_strides import other_layout
from shardwise.kernel.mesh import Mesh
from shardwise.kernel.recording import recording
from shardwise.kernel.signature import Op, op_name, signature
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.private_torch.dispatch import base_of, in_backward
from shardwise.private_torch.fake import is_rehearsing
from shardwise.private_torch.modes import outside_modes
from shardwise.private_torch.ops import ignores_addend, overwritten_arg
from shardwise.private_torch.tracing import (
    assert_when_run,
    is_traced,
    is_without_data,
    may_vary_between_ranks,
)
from shardwise.settings import PLAIN_POLICIES, Settings, read_settings

__all__ = ["accept", "compare_on", "is_known", "know", "plain", "plain_operands", "policy", "refuse_foreign"]

# -- the policy ------------------------------------------------------------------------------------------------------

# One entry per context in force, the innermost last. One list for the process: a backward pass may run in other threads
# than its forward pass.
_chosen: list[str] = []


@contextmanager
def plain(policy: str) -> Iterator[None]:
    """Choose what becomes of plain tensors that meet MeshTensors in an op, while the context lasts.

    - ``"compare"``, the default: they count as replicated, and the ranks compare their values when they first meet a
      MeshTensor and after each write by something else than an op on MeshTensors;
    - ``"replicate"``: they count as replicated, and nothing is compared: different values give wrong numbers;
    - ``"refuse"``: an op raises :class:`PlainTensorError`. Tensors without dims are compared.

    The context holds for all threads of the process. Every rank must enter and leave it at the same point. Raises
    :class:`SettingsError` for another policy.
    """
    if policy not in PLAIN_POLICIES:
        raise SettingsError(
            asked=f"treat plain tensors by the policy {policy!r}",
            found=f"the policies are {', '.join(PLAIN_POLICIES)}",
            do="Choose one of them.",
            setting="plain",
        )
    _chosen.append(policy)
    known_without_mesh.clear()
    try:
        yield
    finally:
        _chosen.pop()


def policy() -> str:
    """The policy in force: that of the innermost context, else that of the settings."""
    return _chosen[-1] if _chosen else _settings().plain


@cache
def _settings() -> Settings:
    return read_settings()


# -- tensors that are known ------------------------------------------------------------------------------------------


@define
class _Meshes:
    """The mesh of all comparisons so far; ``several`` once there was another."""

    only: Mesh | None = None
    several: bool = False


_meshes = _Meshes()


def is_known(tensor: torch.Tensor, mesh: Mesh) -> bool:
    """Whether a plain tensor is known to be the same on every rank of a mesh: it was compared, or its base was."""
    if tensor.is_inference():
        return False  # torch does not count the writes to it
    base = base_of(tensor)
    return known_tensor(tensor, mesh) is not None or (base is not None and known_tensor(base, mesh) is not None)


def know(tensor: torch.Tensor, mesh: Mesh, writes: int = 0) -> None:
    """Note that the ranks of a mesh have the same plain tensor, after so many writes that are under way."""
    if tensor.is_inference():
        return
    if _meshes.only is None:
        _meshes.only = mesh
    elif not _meshes.several and _meshes.only != mesh:
        _meshes.several = True
        known_without_mesh.clear()
    looked_at = _meshes.several or bool(_chosen) or _settings().check_ranks
    remember(tensor, mesh, writes, for_handlers=not looked_at)


def compare_on(cls: type, op: Op, values: Sequence[Any], mesh: Mesh) -> None:
    """Compare the plain operands of a call that is planned, unless the ranks of its mesh have done so.

    A handler does not look at the mesh for which it knows a tensor.
    """
    named = {arg.name: value for arg, value in zip(signature(op).args, values, strict=True)}
    unread = "self" if ignores_addend(op, named) else None
    for arg, value in zip(signature(op).args, values, strict=True):
        if arg.name == unread:
            continue
        parts = value if isinstance(value, (list, tuple)) else (value,)
        plain = {f"{arg.name}[{i}]": t for i, t in enumerate(parts) if isinstance(t, torch.Tensor)}
        unknown = {
            name: t
            for name, t in plain.items()
            if not isinstance(t, cls) and not is_without_data(t) and not is_known(t, mesh)
        }
        if unknown and not arg.written and _meshes.only is not None and _meshes.only != mesh:
            _meet(op, unknown, mesh, values, written=False)


# -- operands --------------------------------------------------------------------------------------------------------


def plain_operands(
    cls: type,
    op: Op,
    operands: Mapping[str, torch.Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    written: bool,
) -> list[Any]:
    """The parts of a plan's key for the plain tensors that are one argument of a call: one tensor, or those of a list.

    The ranks compare those that are not known yet. Raises :class:`PlainTensorError` for a tensor that cannot be one of
    the call's operands, and :class:`RankDisagreementError` on every rank when the ranks differ.
    """
    mesh = mesh_of(cls, [*args, *(kwargs or {}).values()])
    assert mesh is not None  # dispatch has seen a MeshTensor
    keys: list[Any] = []
    unknown: dict[str, torch.Tensor] = {}
    looked_at = bool(_chosen) or _settings().check_ranks
    for name, tensor in operands.items():
        entry = None if looked_at else known_tensor(tensor, mesh)
        if entry is None:
            unknown[name] = tensor
        else:
            if written:
                entry.version += 1
            if not _meshes.several:
                known_without_mesh[id(tensor)] = entry  # a scope of `plain` has emptied it
        keys.append(None if entry is None else entry.key)
    if unknown:
        unread = "self" if ignores_addend(op, kwargs or {}) else None
        _meet(op, unknown, mesh, [*args, *(kwargs or {}).values()], written=written, unread=unread)
        keys = [key_of_plain(t) if key is None else key for key, t in zip(keys, operands.values(), strict=True)]
    return keys


def _meet(
    op: Op,
    operands: Mapping[str, torch.Tensor],
    mesh: Mesh,
    arguments: Sequence[Any],
    *,
    written: bool,
    unread: str | None = None,
) -> None:
    """Check plain operands by the policy, compare them over the ranks, and take note of them. ``arguments`` are all
    that the call has. The values of one that is ``unread`` may differ.
    """
    chosen = policy()
    compared: dict[str, torch.Tensor] = {}
    overwritten = written and overwritten_arg(op)
    operands = _with_values(op, operands, () if overwritten else arguments)
    for name, tensor in operands.items():
        _refuse_unless_ordinary(op, name, tensor)
        refuse_replaced(op, name, tensor)
        if is_without_data(tensor):
            if tensor.dim() and chosen == "refuse":
                _accept_zeros_and_ones(op, name, tensor, written)
            elif chosen == "compare" and not overwritten and is_traced(tensor):
                _compare_when_run(f"run {op_name(op)} on MeshTensors and plain tensors", name, tensor, mesh)
            if is_traced(tensor) and tensor.requires_grad:
                _want_whole_gradient(tensor)
            continue
        if chosen == "refuse" and tensor.dim():
            _accept_zeros_and_ones(op, name, tensor, written)
        elif chosen == "replicate" or overwritten or name == unread:
            continue
        elif _settings().check_ranks or not is_known(tensor, mesh):
            compared[name] = tensor
    if compared:
        _compare(f"run {op_name(op)} on MeshTensors and plain tensors", compared, mesh)
    for name, tensor in operands.items():
        if is_without_data(tensor):
            continue
        if tensor.requires_grad:
            _want_whole_gradient(tensor)
        base = base_of(tensor)
        if written and base is not None and is_known(base, mesh):
            know(base, mesh, 1)
        if name in compared or overwritten or is_known(tensor, mesh):
            know(tensor, mesh, int(written))


def _with_values(op: Op, operands: Mapping[str, torch.Tensor], arguments: Iterable[Any]) -> Mapping[str, torch.Tensor]:
    """The plain operands but for those on the meta device, which have no values to compare.

    Raises :class:`PlainTensorError` for such a one beside a MeshTensor that has values. Where none has, the program
    asks for shapes.
    """
    empty = {name: tensor for name, tensor in operands.items() if tensor.is_meta}
    if not empty:
        return operands
    parts = (part for one in arguments for part in (one if isinstance(one, (list, tuple)) else (one,)))
    if any(isinstance(part, tensor_class()) and not part._local_tensor.is_meta for part in parts):
        name, tensor = next(iter(empty.items()))
        raise _refusal(op, name, tensor, "a Tensor on the meta device, which has no values", _GIVE_VALUES)
    return {name: tensor for name, tensor in operands.items() if name not in empty}


def refuse_foreign(cls: type, op: Op, values: Sequence[Any]) -> None:
    """Raise :class:`PlainTensorError` for a list with a tensor of another class that has a spec and a part, a DTensor.

    A handler reads the specs of a list without a look at the classes of its tensors. It knows no plan for such a list.
    """
    for arg, value in zip(signature(op).args, values, strict=True):
        for i, part in enumerate(value if isinstance(value, (list, tuple)) else ()):
            if isinstance(part, torch.Tensor) and not isinstance(part, cls) and hasattr(part, "_spec"):
                _refuse_unless_ordinary(op, f"{arg.name}[{i}]", part)


def accept(tensor: torch.Tensor, mesh: Mesh, asked: str, *, compare: bool = True) -> bool:
    """Whether a plain tensor may count as whole on a mesh, outside of an op; the ranks compare it first.

    ``asked`` says for what. Without a comparison only zeros and ones are accepted. Raises
    :class:`RankDisagreementError` on every rank when the ranks differ.
    """
    if not compare or policy() == "refuse":
        return _is_zeros_or_ones(tensor)
    if policy() == "compare" and is_traced(tensor):
        _compare_when_run(asked, "tensor", tensor, mesh)
    elif (
        policy() == "compare"
        and not is_without_data(tensor)
        and (_settings().check_ranks or not is_known(tensor, mesh))
    ):
        _compare(asked, {"tensor": tensor}, mesh)
    return True


def _refuse_unless_ordinary(op: Op, name: str, tensor: torch.Tensor) -> None:
    """Raise unless a tensor is one of torch's own, with its elements in memory."""
    is_torchs = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ or is_without_data(tensor)
    layout = other_layout(tensor)
    if is_torchs and not layout:
        return
    what = f"a {type(tensor).__name__}" + (f" with the layout {layout}" if layout else "")
    raise _refusal(op, name, tensor, what, _MAKE_DENSE if layout else _how_to_make(tensor))


def _refusal(op: Op, name: str, tensor: torch.Tensor, what: str, do: str) -> PlainTensorError:
    file, line = users_line()
    shape = None if tensor.is_nested else tuple(tensor.shape)
    return PlainTensorError(
        asked=f"run {op_name(op)} on MeshTensors ({file}:{line})",
        found=f"its argument {name!r} is {what}" + ("" if shape is None else f" of shape {shape}"),
        do=do,
        op=op_name(op),
        argument=name,
        shape=shape,
    )


def _how_to_make(tensor: torch.Tensor) -> str:
    if type(tensor).__name__ == "DTensor":
        return "Take it over with its layout: MeshTensor.from_dtensor(t)."
    return _MAKE_ONE


_MAKE_ONE = (
    "Make it a MeshTensor: distribute_tensor(t, mesh, placements) for a whole tensor, "
    "or MeshTensor.from_local(t, mesh, placements) for this rank's part."
)
_MAKE_DENSE = (
    "Pass a dense tensor (to_dense(), to_padded_tensor(0), dequantize()), or use this one with to_local() of the "
    "others: placements say how dense memory is divided."
)
_GIVE_VALUES = (
    "Make it on a device of the mesh: where a module was made on the meta device, call module.to_empty(device=...) and "
    "give its tensors their values before it is used."
)
_IN_BACKWARD = (
    "It was made in a backward: make it there from a tensor that is at hand (torch.zeros_like(grad), "
    "grad.new_full(size, value), x.detach()), so that it lies on the mesh, too."
)


def _accept_zeros_and_ones(op: Op, name: str, tensor: torch.Tensor, written: bool) -> None:
    """Raise for a plain tensor that is refused.

    Autograd's own formulas make plain zeros (for unused results of split) and ones (for prod). They are the same on
    every rank. An operand that the op writes may hold zeros on some ranks only.
    """
    if in_backward() and not written and _is_zeros_or_ones(tensor):
        return
    what = f"a {type(tensor).__name__}"
    raise _refusal(op, name, tensor, what, _IN_BACKWARD if in_backward() else _MAKE_ONE)


def _is_zeros_or_ones(value: torch.Tensor) -> bool:
    """Whether all elements are 0 or all are 1. While a graph is traced: True, and the graph asserts it when it runs."""
    if is_traced(value):
        is_either = (value == 0).all() | (value == 1).all()
        assert_when_run(is_either, "a plain tensor met a MeshTensor in backward; return MeshTensors from backward")
        return True
    if is_without_data(value):
        return True
    return not value.any() or bool((value == 1).all())


def _compare(asked: str, tensors: Mapping[str, torch.Tensor], mesh: Mesh) -> None:
    """Raise on every rank unless all ranks of a mesh have the same tensors; their names are those of arguments."""
    if not isinstance(mesh, DeviceMesh) or mesh.size() == 1 or is_rehearsing() or backend_of(mesh) == "fake":
        return
    with outside_modes():
        here = {name: f"{TensorMeta.of(t)} with the digest {digest(t):016x}" for name, t in tensors.items()}
        summaries = different_summaries(mesh, {asked: here})
    if summaries is None:
        return
    file, line = users_line()
    by_rank = {rank: one.get(asked, {"instead": ", ".join(one)}) for rank, one in summaries.items()}
    different = differences("argument", by_rank)
    raise RankDisagreementError(
        asked=f"{asked} ({file}:{line})",
        found=f"a plain tensor counts as whole, and the ranks do not have the same: {'; '.join(different)}",
        do=_ALIKE,
        differences=tuple(different),
    )


_ALIKE = (
    "Make it the same on every rank: torch.zeros for torch.empty, whose values differ until they are written. Where "
    "each rank holds its own part, use "
    "MeshTensor.from_local(t, mesh, placements); "
    "distribute_tensor(t, mesh, placements) sends the values of the first rank to all."
)


def _compare_when_run(asked: str, name: str, tensor: torch.Tensor, mesh: Mesh) -> None:
    """Have a graph that is being traced compare a tensor over the ranks of a mesh each time it runs.

    What the graph makes from sizes and numbers alone is the same on every rank.
    """
    dims = tuple(m for m in range(mesh.ndim) if mesh.size(m) > 1)
    if not isinstance(mesh, DeviceMesh) or not dims or not may_vary_between_ranks(tensor):
        return
    number = traced_digest(tensor)
    extremes = all_reduce(torch.stack([number, ~number]), "min", mesh, dims)
    file, line = users_line()
    assert_when_run(
        extremes[0] == ~extremes[1],
        f"{asked} ({file}:{line}): the argument {name!r} is a plain tensor, "
        f"which counts as whole, and the ranks do not have the same values there. {_ALIKE}",
    )


# -- gradients -------------------------------------------------------------------------------------------------------

# Tensors whose gradient is brought to them whole already.
_hooked: Any = WeakIdKeyDictionary()


def _want_whole_gradient(tensor: torch.Tensor) -> None:
    """Bring the gradient of a plain tensor to it as a plain tensor, whole on every rank."""
    if tensor not in _hooked:
        _hooked[tensor] = tensor.register_hook(_whole)  # type: ignore[no-untyped-call]
    if recording.recorder is not None and not is_without_data(tensor):
        recording.recorder.trains(leaves_of(tensor))


def _whole(gradient: Any) -> Any:
    full: Callable[[], torch.Tensor] | None = getattr(gradient, "full_tensor", None)
    return gradient if full is None else full()
