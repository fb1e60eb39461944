"""``loss_parallel``: losses of scores that are sharded over their classes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardwise import MeshTensor, Replicate

__all__ = ["loss_parallel"]


class _ReducedLosses(TorchFunctionMode):
    """Reduces the losses of ``cross_entropy`` over the mesh dims that the classes are sharded over."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not functional.cross_entropy or not isinstance(result, MeshTensor):
            return result
        scores = args[0] if args else kwargs["input"]
        classes = min(1, scores.ndim - 1)
        pairs = zip(result.placements, scores.placements, strict=True)
        return result.redistribute(placements=[Replicate() if s.is_shard(classes) else p for p, s in pairs])


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Reduce what ``cross_entropy`` returns over the mesh dims that the classes are sharded over, in this context.

    Shardwise computes the loss of such scores without gathering them, in or outside of this context, on any mesh, and
    the backward pass needs no context. With ``reduction="sum"`` and ``"none"`` it leaves a sum over these mesh dims
    pending. In the context that sum is taken at once, as for a DTensor, so that ``to_local()`` gives the loss.
    """
    with _ReducedLosses():
        yield
