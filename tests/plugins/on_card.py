"""The oracle with the kernels of a card: its tensors stay on the CPU, and each kernel runs on the device."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.kernel.mesh import AbstractMesh
from shardwise.testing import oracle, trial

NO_KERNEL = "Could not run", "not implemented for", "is not available for this tensor type"
"""How torch says that a device has no kernel of an op."""


class KernelsOf(TorchDispatchMode):
    """Every op but a view runs on a device: operands are copied there as they lie in memory, results and what was
    written come back. ``ran`` and ``without`` are the names of the ops that the device ran, and of those that it has no
    kernel of, which run on the CPU; ``last`` is the op that it ran last, or tried to.
    """

    supports_higher_order_operators = True

    def __init__(self, device):
        super().__init__()
        self.device = torch.device(device)
        self.ran: set[str] = set()
        self.last = ""
        self.without: dict[str, str] = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not isinstance(op, torch._ops.OpOverload):  # a function of functions, which runs as ops of its own
            return op(*args, **kwargs)
        if (
            _is_view(op)
            or kwargs.get("pin_memory")
            or _kind(op, args, kwargs) in self.without
            or _is_elsewhere(args, kwargs)
        ):
            return op(*args, **kwargs)
        self.last = str(op)
        call = _Call(self.device)
        if torch.Tag.nondeterministic_seeded in op.tags:
            _seed(self.device)
        try:
            returned = call.run(op, args, kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if not any(said in str(error) for said in NO_KERNEL):
                raise
            self.without[_kind(op, args, kwargs)] = str(error).splitlines()[0]
            return op(*args, **kwargs)
        self.ran.add(str(op))
        return returned


def _is_view(op):
    """Whether an op has no kernel: what it returns, or what it changes, is where an operand lies and how."""
    return torch.Tag.inplace_view in op.tags or any(
        r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns
    )


def _kind(op, args, kwargs):
    """An op with the dtypes of its operands."""
    dtypes = [str(t.dtype).removeprefix("torch.") for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    return f"{op}({', '.join(dtypes)})"


def _is_elsewhere(args, kwargs):
    """Whether some operand has no memory on the CPU to copy."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    named = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.device)]
    return any(t.device.type != "cpu" or t.layout != torch.strided for t in tensors) or any(
        device.type != "cpu" for device in named
    )


class _Call:
    """One call on the device. Operands that share memory share it there, too."""

    def __init__(self, device):
        self.device = device
        self.storages: dict[int, Any] = {}
        self.moved: list[tuple[Tensor, Tensor]] = []

    def run(self, op, args, kwargs):
        there = tree_map(self._there, (args, kwargs))
        # Numbers for lists of tensors, which torch reads on the host.
        for number, arg in enumerate(op._schema.arguments[: len(args)]):
            if arg.name == "scalars":
                there = [*there[0][:number], args[number], *there[0][number + 1 :]], there[1]
        if not any(isinstance(v, Tensor) for v in tree_leaves((args, kwargs))) and _takes_device(op):
            there[1]["device"] = self.device
        returned = op(*there[0], **there[1])
        for number, arg in enumerate(op._schema.arguments):
            # Running statistics are written, and not all schemas say so.
            if (arg.alias_info is not None and arg.alias_info.is_write) or arg.name.startswith("running_"):
                value = args[number] if number < len(args) else kwargs.get(arg.name)
                for written in tree_leaves(value):
                    self._written(written)
        returned = tree_map(self._back, returned)
        if "_scaled_dot_product" in str(op) and isinstance(returned, tuple):
            # Where a generator stood, which says nothing without dropout.
            return tuple(
                torch.zeros_like(r) if isinstance(r, Tensor) and not r.dtype.is_floating_point else r for r in returned
            )
        return returned

    def _there(self, value):
        if isinstance(value, torch.device):
            return self.device
        if isinstance(value, torch.Generator):
            seed = int(torch.randint(2**31, (), generator=value))
            return torch.Generator(self.device).manual_seed(seed)
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        if storage._cdata not in self.storages:
            self.storages[storage._cdata] = _copy_of(storage, self.device)
        moved = _laid(self.storages[storage._cdata], value)
        self.moved.append((value, moved))
        return moved

    def _written(self, value):
        if not isinstance(value, Tensor):
            return
        moved = next(there for here, there in self.moved if here is value)
        if moved.shape != value.shape or moved.untyped_storage().nbytes() != value.untyped_storage().nbytes():
            value.resize_(moved.shape).copy_(moved)
        else:
            value.untyped_storage().copy_(moved.untyped_storage())

    def _back(self, value):
        if not isinstance(value, Tensor):
            return value
        for here, there in self.moved:
            if there is value:
                return here
        return _laid(_copy_of(value.untyped_storage(), "cpu"), value)


def _seed(device):
    """The generator of the device goes by the CPU's."""
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(int(torch.randint(2**31, ())))


def _takes_device(op):
    return any(arg.name == "device" for arg in op._schema.arguments)


def _copy_of(storage, device):
    copy = torch.UntypedStorage(storage.nbytes(), device=device)
    return copy.copy_(storage) if storage.nbytes() else copy


def _laid(storage, like):
    laid = torch.empty(0, dtype=like.dtype, device=storage.device)
    laid = laid.set_(storage, like.storage_offset(), like.shape, like.stride())
    return torch.conj(laid) if like.is_conj() else torch._neg_view(laid) if like.is_neg() else laid


@contextmanager
def kernels_of(device):
    """While it lasts, the oracle's kernels are those of ``device``. Yields the :class:`KernelsOf`.

    A call that the CPU refuses is not made: on a card, an index out of range ends all that the process may do there.
    """
    kernels = KernelsOf(device)
    mesh = partial(AbstractMesh, device_type=torch.device(device).type)
    run, make = trial._run, trial.Trial.of

    def on_device(*args):
        with kernels:
            return run(*args)

    def of(*args):
        with mock.patch.object(trial, "_run", run), mock.patch.object(trial, "AbstractMesh", AbstractMesh):
            make(*args)
        return make(*args)

    with (
        mock.patch.object(trial, "_run", on_device),
        mock.patch.object(trial.Trial, "of", of),
        mock.patch.object(trial, "AbstractMesh", mesh),
        mock.patch.object(oracle, "AbstractMesh", mesh),
    ):
        yield kernels
