"""The gradients of leaves: each is brought to the layout of its leaf before autograd accumulates it, or waits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

from shardwise.comm import origins
from shardwise.engine.judging import judge_move
from shardwise.kernel.dispatcher import at_next_dispatch
from shardwise.kernel.recording import recording
from shardwise.kernel.spec import TensorSpec
from shardwise.private_torch.dispatch import is_batched, leaf_of_hook, leaf_to_accumulate, leave_out_of_graphs
from shardwise.tensor.autograd import on_mesh, reduce_later
from shardwise.tensor.grad_layouts import grad_layout
from shardwise.tensor.late_grads import late, layout_until_later, prepared
from shardwise.tensor.names import name_of

__all__ = ["HAS_GRAD_HOOK", "follow_layout", "keep_grad_layout", "keep_grad_layout_in_graph"]

# Marks a leaf that has a hook which brings its gradients to its own layout. The attribute holds the function that tells
# the hook another layout, or None before a stand-in has its hook.
HAS_GRAD_HOOK = "_shardwise_has_grad_hook"


def keep_grad_layout(leaf: Any) -> None:
    """Bring every gradient that reaches a leaf to the leaf's own layout before it is accumulated."""
    if not leaf.is_leaf or HAS_GRAD_HOOK in leaf.__dict__:
        return
    leaf.__dict__[HAS_GRAD_HOOK] = _hook_grad_layout(leaf)


def keep_grad_layout_in_graph(stand_in: Any) -> None:
    """Bring the gradient of a leaf's stand-in in a traced program to the leaf's layout, inside the graph.

    Torch runs a leaf's own hooks outside the graph. The stand-in joins autograd's graph only after it is created. At
    the first op it has joined, and can take a hook that becomes part of the graph.
    """
    stand_in.__dict__[HAS_GRAD_HOOK] = None
    at_next_dispatch(partial(_register_if_there, ref(stand_in)))


def _register_if_there(stand_in: Callable[[], Any]) -> None:
    tensor = stand_in()
    if tensor is not None and tensor.requires_grad:
        tensor.__dict__[HAS_GRAD_HOOK] = _hook_grad_layout(tensor, in_graph=True)


def follow_layout(leaf: Any) -> None:
    """Bring the gradients of a leaf to the layout that the leaf has now."""
    follow = leaf.__dict__.get(HAS_GRAD_HOOK)
    if follow is not None:
        follow(leaf._spec)


def _hook_grad_layout(tensor: Any, *, in_graph: bool = False) -> Callable[[TensorSpec], None]:
    """Hook a tensor; returns the function that tells the hook another spec of the tensor.

    In a graph gradients do not wait: it is used outside of ``accumulate()``, too.
    """
    spec = tensor._spec.with_placements(grad_layout(tensor._spec.placements))
    subject = 0

    def follow(changed: TensorSpec) -> None:
        nonlocal spec
        spec = changed.with_placements(grad_layout(changed.placements))

    def keep_layout(grad: Any) -> Any:
        nonlocal subject
        # The usual case is cheap, as this runs for every leaf at every step. A backward without a gradient for the leaf
        # passes None.
        if grad is None:
            return None
        own, recorder = getattr(grad, "_spec", None), recording.recorder
        is_placed = own is spec or (own is not None and own.tag is not None and own.placements == spec.placements)
        if recorder is not None and own is not None:
            recorder.accumulated(grad, leaf_to_accumulate(), is_placed)
        if is_placed:
            return None
        if is_batched(grad):  # by vmap, over a MeshTensor: what asked for it takes it as it is
            return None
        grad = on_mesh(grad, spec, "accumulate the gradient of a MeshTensor")
        leaf = leaf_to_accumulate() if late.is_open and not in_graph else None
        if leaf is not None and (layout := layout_until_later(grad, spec)) is not None:
            if recorder is not None:
                recorder.waits(grad, leaf, spec.placements)
            return prepared(leaf, grad, layout)
        judge_move("accumulate a gradient", "the gradient of a leaf", grad._spec, spec.placements, "gradients")
        # Two gradients of one shape look the same to the ranks, and some may come to them in another order than others.
        if not subject and not in_graph and (leaf := leaf_of_hook()) is not None:
            subject = origins.subject_of(leaf, name_of(leaf)) or -1
        return reduce_later(grad, spec.placements, max(subject, 0))

    leave_out_of_graphs(keep_layout)
    tensor.register_hook(keep_layout)
    return follow
