"""Gradients that wait: ``with shardwise.accumulate():`` sums them over the mesh once for several backward passes.

Inside the context a gradient that would need a collective to reach the layout of its leaf is accumulated as it comes.
A partial sum is a value like any other, so ``.grad`` is right at any time; only its placements are not yet the leaf's.
At the end, or before an optimizer's step, the gradients are brought to their layouts together, in the order in which
they were first accumulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from shardwise.comm.coalescing import coalesced
from shardwise.comm.origins import subject_of
from shardwise.engine.judging import judge_move
from shardwise.kernel.engine import tensor_class
from shardwise.kernel.placements import Partial, Placement
from shardwise.kernel.spec import TensorSpec
from shardwise.planning.path import Step, shortest_path
from shardwise.private_torch.tracing import is_recorded
from shardwise.tensor.autograd import redistribute
from shardwise.tensor.grad_layouts import grad_layout, grad_under
from shardwise.tensor.names import name_of

__all__ = ["accumulate", "late", "layout_until_later", "place_late", "prepared"]

# Collectives that are issued together send at most about this many bytes: coalescing may copy what it sends.
_MOST_TOGETHER = 1 << 25

_LOCAL = ("slice", "fill", "relabel")  # steps of a path that send nothing


class _Late:
    """The contexts that are open, and the leaves whose gradients wait, in the order of their first gradients."""

    def __init__(self) -> None:
        self.depth = 0
        # By id, because tensors compare element by element. Not weak: torch swaps no tensor with weak references.
        self._leaves: dict[int, Any] = {}

    @property
    def is_open(self) -> bool:
        return self.depth > 0

    def __bool__(self) -> bool:
        return bool(self._leaves)

    def add(self, leaf: Any) -> None:
        """Note that the gradient of a leaf waits."""
        self._leaves.setdefault(id(leaf), leaf)

    def take(self, among: Iterable[Any] | None) -> list[Any]:
        """The leaves whose gradients wait, all or among some; they are no longer noted."""
        ids = set(self._leaves) if among is None else set(map(id, among))
        return [self._leaves.pop(key) for key in list(self._leaves) if key in ids]


# One for the process: backward runs in threads of autograd's.
late = _Late()


@contextmanager
def accumulate() -> Iterator[None]:
    """Sum gradients over the mesh once, at the end of the context, and not in each backward pass.

    For several backward passes before one optimizer's step, as ``no_sync()`` of data parallelism is::

        with shardwise.accumulate():
            for x, target in micro_batches:
                loss(model(x), target).backward()
        optimizer.step()

    Inside, ``.grad`` may have partial placements: it is the right value, and an op on it does what it must. At the
    end, or before a step of an optimizer inside, gradients have the layouts of their leaves again. Small ones are
    sent together. A gradient that waits is as large as it comes from backward: sharded parameters have whole
    gradients meanwhile. Every rank must enter and leave at the same points of the program.

    Contexts may be nested; the outermost one sums. If it ends by an exception nothing is sent: gradients keep their
    values and layouts, and an optimizer's step brings them to their leaves'. Graphs of ``torch.compile`` and backward
    passes with ``create_graph`` sum at once, as without the context.
    """
    if torch.compiler.is_compiling():
        yield
        return
    late.depth += 1
    try:
        yield
    finally:
        late.depth -= 1
    if not late.is_open:
        place_late()


def layout_until_later(grad: Any, target: TensorSpec) -> tuple[Placement, ...] | None:
    """The layout in which a gradient waits for the next ones; None if it is brought to ``target`` at once."""
    if torch.is_grad_enabled() or is_recorded(grad._local_tensor):
        return None
    return _layout(grad._spec.untagged, target.untagged)


def prepared(leaf: Any, grad: Any, layout: tuple[Placement, ...]) -> Any:
    """The gradient of a leaf, in the layout in which it waits, and ``leaf.grad`` as it must be to take it."""
    late.add(leaf)
    before = leaf.grad
    if isinstance(before, tensor_class()) and before._spec.placements != layout:
        # It stays as it is where that would send something: then this gradient is brought to it.
        pairs = zip(before._spec.placements, layout, strict=True)
        both = tuple(new if isinstance(new, Partial) else old for old, new in pairs)
        if _is_local(before._spec, before._spec.with_placements(both)):
            leaf.grad = redistribute(before, both)
    return grad_under(grad, layout)  # sends nothing, so it is no part of what is planned


def place_late(among: Iterable[Any] | None = None) -> None:
    """Bring the gradients that wait, all or those of some leaves, to the layouts of their leaves.

    Every rank must call this. Those that take one collective go together; which ones is known from global specs alone,
    as ranks with empty parts send less.
    """
    together: list[tuple[Any, tuple[Placement, ...]]] = []
    others: list[tuple[Any, tuple[Placement, ...]]] = []
    for leaf in late.take(among):
        grad = leaf.grad
        if not isinstance(grad, tensor_class()):
            continue
        target = grad_layout(leaf._spec.placements)
        if grad._spec.placements != target:
            judge_move("sum gradients that wait", "the gradient of a leaf", grad._spec, target, "gradients")
            steps = shortest_path(grad._spec.untagged, grad._spec.untagged.with_placements(target)).steps
            (together if sum(map(_is_sent, steps)) == 1 else others).append((leaf, target))
    with coalesced() as batch:
        size = 0
        for leaf, target in together:
            leaf.grad = _placed(leaf, target)
            size += leaf.numel() * leaf.element_size()
            if size > _MOST_TOGETHER:
                batch.issue()
                size = 0
    for leaf, target in others:
        leaf.grad = _placed(leaf, target)


def _placed(leaf: Any, target: tuple[Placement, ...]) -> Any:
    """The gradient of a leaf in its layout, with the leaf for the ranks to compare."""
    return redistribute(leaf.grad, target, async_op=True, subject=subject_of(leaf, name_of(leaf)))


def _is_sent(step: Step) -> bool:
    return step.kind not in _LOCAL


def _is_local(src: TensorSpec, dst: TensorSpec) -> bool:
    """Whether no rank sends anything to bring a tensor from one layout to another."""
    return not any(map(_is_sent, shortest_path(src.untagged, dst.untagged).steps))


@lru_cache(maxsize=4096)
def _layout(grad: TensorSpec, target: TensorSpec) -> tuple[Placement, ...] | None:
    if any(reduction != "sum" for reduction in grad.reductions.values()):
        return None  # averages and the like do not add up with what comes later
    goal = grad.with_placements(target.placements)
    if _is_local(grad, goal):
        return None
    # What costs nothing is done now, so that less waits.
    smaller = tuple(g if isinstance(g, Partial) else t for g, t in zip(grad.placements, goal.placements, strict=True))
    return smaller if _is_local(grad, grad.with_placements(smaller)) else grad.placements
