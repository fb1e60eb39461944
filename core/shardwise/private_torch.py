"""Every use of torch API that is not public, each with the reason why the public way does not do.

``tests/core/test_private_torch.py`` holds one test per function here, which fails clearly when torch takes it away.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import torch
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.errors import MeshMismatchError

__all__ = [
    "binding_namespaces",
    "current_mesh",
    "direct_call",
    "disabled_torch_function",
    "in_backward",
    "is_composite",
    "new_wrapper",
    "outside_modes",
    "recorded_ops",
    "schema_of",
    "support_foreach",
    "swap_parameter",
    "version_of",
]


def schema_of(op: Any) -> Any:
    """The ``FunctionSchema`` of an op overload. There is no public accessor; every out-of-tree backend uses this."""
    return op._schema


# Turns __torch_function__ off for a tensor subclass. The documented spelling is this private name.
disabled_torch_function: Any = torch._C._disabled_torch_function_impl


def _portable_wrapper(cls: type, local: torch.Tensor, spec: Any, requires_grad: bool = False) -> Any:
    meta = spec.tensor_meta
    made: Any = torch.Tensor._make_wrapper_subclass(
        cls,
        meta.shape,
        strides=meta.stride,
        dtype=meta.dtype,
        device=local.device,
        layout=local.layout,
        requires_grad=requires_grad,
    )
    made._local_tensor = local
    made._spec = spec
    return made


# The C++ constructor that torch made for its own distributed tensor: it reads spec.tensor_meta, sets _spec and
# _local_tensor, and costs less than half of _make_wrapper_subclass (1.0 against 2.4 microseconds), which stays as
# the fallback where it is missing.
new_wrapper: Callable[..., Any] = getattr(torch.Tensor, "_dtensor__new__", _portable_wrapper)


def direct_call(op: Any) -> Callable[..., Any]:
    """The C++ callable behind an op overload: what ``OpOverload.__call__`` calls, without its Python frame."""
    return getattr(op, "_op", op)  # type: ignore[no-any-return]


def binding_namespaces() -> tuple[Any, ...]:
    """Where the C functions behind ops are found: the public namespaces, and what Python code in them covers up."""
    hidden = (getattr(torch._C, name, None) for name in ("_VariableFunctions", "TensorBase", "_nn"))
    return torch, torch.Tensor, torch.nn.functional, torch.special, torch.linalg, torch.fft, *hidden


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its __init_subclass__ unannotated
    """Notes each op that reaches the dispatcher, with its arguments. Documented, but in a module named private."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def recorded_ops(call: Callable[..., Any], args: Any, kwargs: Any) -> list[tuple[Any, Any, Any]]:
    """The ops that a call makes on plain tensors, each with its arguments."""
    recorder = _Recorder()
    with torch.no_grad(), recorder:
        call(*args, **kwargs)
    return recorder.ops


def support_foreach(cls: type) -> None:
    """Let optimizers and gradient clipping hand lists of ``cls`` to foreach ops by default, as for torch's own DTensor.

    There is no public way to say so. Where the lists are missing, users must ask with ``foreach=True``.
    """
    # torch.optim takes the names of its modules away again.
    for name in ("torch.utils._foreach_utils", "torch.optim.optimizer"):
        types = getattr(import_module(name), "_foreach_supported_types", None)
        if types is not None and cls not in types:
            types.append(cls)


def current_mesh() -> DeviceMesh:
    """The mesh of the innermost ``with mesh:``. DeviceMesh is a context manager in public, its stack is not."""
    try:
        found: DeviceMesh = device_mesh._mesh_resources.get_current_mesh()
    except (AttributeError, RuntimeError) as error:
        raise MeshMismatchError(
            asked="make a MeshTensor without naming a mesh",
            found="no mesh is in force here",
            do="Pass device_mesh=, or enter one: `with mesh:`.",
        ) from error
    return found


def is_composite(op: Any) -> bool:
    """Whether torch itself writes the op in terms of others for every backend. Only the dispatcher's tables say so."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"))


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread. Only the engine knows its graph task."""
    return bool(torch._C._current_graph_task_id() != -1)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written in place. Autograd's notes name the counter, its attribute is not public."""
    return tensor._version


def swap_parameter(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put a tensor in a parameter's place. Assigning it is refused, and taking a parameter out and back in reorders
    ``parameters()``.
    """
    module._parameters[name] = tensor  # type: ignore[assignment]


def outside_modes() -> AbstractContextManager[Any]:
    """Run torch for real inside a block, whatever mode (fake tensors, tracing) is in force around it.

    Modes are public only for those who enter them; ``torch.compile`` itself leaves them this way.
    """
    modes: AbstractContextManager[Any] = _python_dispatch._disable_current_modes()
    return modes
