"""The layout of a gradient. A gradient is a global tensor, so every layout of it is correct: one is chosen here.

The default is the layout of the forward tensor, with partial read as replicated, because each partial part has the
whole gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.comm.redistribute import runner
from shardwise.engine.judging import judge_move
from shardwise.kernel.placements import REPLICATE, Partial, Placement, check_placements
from shardwise.kernel.places import per_mesh_dim
from shardwise.kernel.results import wrap
from shardwise.kernel.spec import TensorSpec

__all__ = ["checked_grad_layout", "grad_layout", "grad_under"]


def grad_layout(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The default placements of the gradient of a tensor with these placements."""
    return tuple(REPLICATE if isinstance(p, Partial) else p for p in placements)


def checked_grad_layout(grad_placements: Sequence[Placement] | None, spec: TensorSpec) -> tuple[Placement, ...]:
    """The placements that a program gives for a gradient; the default where it gives none."""
    if grad_placements is None:
        return grad_layout(spec.placements)
    return check_placements(per_mesh_dim(grad_placements, spec.mesh), spec.mesh.ndim, spec.ndim)


def grad_under(grad: Any, target: tuple[Placement, ...]) -> Any:
    """A gradient under other placements, below autograd."""
    spec = grad._spec
    goal = spec.with_placements(target)
    if goal is not spec:
        judge_move("run compiled code backward", "the gradient of a result", spec, target)
    return grad if goal is spec else wrap(runner(spec, goal)(grad._local_tensor), goal)
