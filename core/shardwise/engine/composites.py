"""New tensors that torch's own code makes inside an op become replicated MeshTensors.

A decomposition or a composite op may need a range of indices, a mask or an identity matrix. It makes them from sizes
and numbers alone, so they are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise.engine.plain_tensors import plain_operands
from shardwise.errors import NoRuleError
from shardwise.kernel.mesh import Mesh
from shardwise.kernel.nested import tensors_in
from shardwise.kernel.placements import REPLICATE
from shardwise.kernel.signature import Op, op_name
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.private_torch.dispatch import new_wrapper, put_above_autograd, watching
from shardwise.private_torch.ops import draws, is_composite

__all__ = ["intercept", "replicated_tensor", "replicating"]


def replicating(tensor_class: type, mesh: Mesh) -> Any:
    """A context in which a tensor that is made from no operand becomes a replicated MeshTensor.

    Torch's own code makes it from shapes and numbers, so it is the same on every rank. A tensor without dims stays
    plain. Raises :class:`NoRuleError` for random numbers, which would differ between ranks.
    """

    def run(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = op(*args, **kwargs)
        operands = list(tensors_in([args, kwargs]))
        if any(isinstance(t, tensor_class) for t in operands):
            return result
        if draws(op) and next(tensors_in(result), None) is not None:
            raise NoRuleError(
                asked=f"run {op_name(op)} as part of an op on MeshTensors",
                found="it draws random numbers for a plain tensor, and each rank would draw its own",
                do="Draw them with an op on MeshTensors (rand_like, bernoulli).",
                op=op_name(op),
            )
        return _wrapped(result, tensor_class, mesh, operands)

    return watching(run, is_composite)


def _wrapped(result: Any, tensor_class: type, mesh: Mesh, operands: Sequence[torch.Tensor]) -> Any:
    if isinstance(result, (tuple, list)):
        return type(result)(_wrapped(part, tensor_class, mesh, operands) for part in result)
    if not isinstance(result, torch.Tensor) or not result.dim() or any(result is t for t in operands):
        return result
    return replicated_tensor(tensor_class, mesh, result)


def replicated_tensor(tensor_class: type, mesh: Mesh, whole: torch.Tensor) -> Any:
    """A replicated MeshTensor of a tensor that is the same on every rank."""
    spec = TensorSpec(mesh, (REPLICATE,) * mesh.ndim, TensorMeta.of(whole))
    return new_wrapper(tensor_class, whole, spec, False)


# -- composite ops ---------------------------------------------------------------------------------------------------


def intercept(op: Op, tensor_class: type, composites: Callable[[], Mapping[Op, Callable[..., Any] | None]]) -> object:
    """Run a composite op under :func:`replicating` when all its tensors are on a mesh, until the result is deleted.

    Torch runs a composite op above autograd, where the dispatcher does not see it, so its new tensors would be plain.
    ``composites()`` maps each op to intercept now to the function that runs in its place, or to None for torch's own
    kernel.
    """

    def run(below: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        tensors = list(tensors_in([args, kwargs]))
        first: Any = next((t for t in tensors if isinstance(t, tensor_class)), None)
        in_force = composites()
        if first is None or op not in in_force:
            return below(*args, **kwargs)
        # Once compared, a plain operand is the same on every rank, and so is what is made from it.
        plain = {f"tensor {i}": t for i, t in enumerate(tensors) if not isinstance(t, tensor_class)}
        if plain:
            plain_operands(tensor_class, op, plain, args, kwargs, written=False)
        instead = in_force[op]
        result = NotImplemented if instead is None else instead(*args, **kwargs)
        if result is not NotImplemented:
            return result
        with replicating(tensor_class, first._spec.mesh):
            return below(*args, **kwargs)

    return put_above_autograd(op, run)
