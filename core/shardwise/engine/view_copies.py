"""Copies in place of views: how they follow their base, and their base follows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from math import prod
from typing import Any

import torch
from attrs import define, evolve

from shardwise.errors import InPlaceError
from shardwise.kernel.nested import tensors_in
from shardwise.kernel.signature import Op, op_name
from shardwise.kernel.view_copies import Writes, fresh, note_write, source_of_copy, tie, writes_of
from shardwise.private_torch.dispatch import memory_of, new_wrapper
from shardwise.private_torch.tracing import is_layout_only

__all__ = ["after_write", "link", "link_deep_copy", "link_view", "writable"]

Undo = Callable[..., Any]


@define(eq=False)
class _MovedView:
    """A copy that a view op made of a base in another layout. The base has a wrapper of its own: ``base.data = other``
    and ``base.t_()`` change what the program's tensor is, not this view.
    """

    op: Op
    undo: Undo | None
    base: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    index: int
    writes: Writes
    seen: int
    #: Shape and strides that the view would have in the base.
    form: tuple[Sequence[int], Sequence[int]]

    def refresh(self, local: torch.Tensor) -> None:
        if self.base._spec.is_copy:
            fresh(self.base._local_tensor)
        if self.seen == self.writes.count:
            return
        with torch.no_grad():
            again = self.op(self.base, *self.args, **self.kwargs)
            part = again[self.index] if isinstance(again, (list, tuple)) else again
            local.copy_(part._local_tensor)
        self.seen = self.writes.count
        note_write(local)

    def check_writable(self) -> None:
        if self.undo is None:
            raise InPlaceError(
                asked=f"write to the result of {op_name(self.op)} in place",
                found="its base was redistributed for it, and nothing says how a write gets back to the base",
                do="Write to the base itself, or clone() the view first.",
                op=op_name(self.op),
            )
        if _shares(*self.form):
            raise InPlaceError(
                asked=f"write to the result of {op_name(self.op)} in place",
                found="its base was redistributed for it, several of its elements are one element of the base, and "
                "nothing says how a write gets back to that",
                do="Write to the base itself, or clone() the view first.",
                op=op_name(self.op),
            )
        if _may_overlap(self.base.shape, self.base.stride()):
            raise InPlaceError(
                asked=f"write to the result of {op_name(self.op)} in place",
                found="its base was redistributed for it, and elements of the base share memory, so that a write would "
                "have to reach several of them",
                do="Write to the tensor whose view the base is, or clone() the base first.",
                op=op_name(self.op),
            )

    def write(self, copy: Any) -> None:
        assert self.undo is not None
        # Its values are the newest, also where the same op has just written another copy of the base.
        self.seen = self.writes.count
        with torch.no_grad():
            self.base.copy_(self.undo(self.base, copy, self.index, *self.args, **self.kwargs))
        self.seen = self.writes.count

    def deep_copied(self, memo: dict[int, Any]) -> _MovedView:
        base = deepcopy(self.base, memo)
        writes = writes_of(base._local_tensor)
        return evolve(self, base=base, writes=writes, seen=writes.count)


@define(eq=False)
class _ViewOfCopy:
    """A view that shares memory with a copy."""

    copy: Any

    def refresh(self, local: torch.Tensor) -> None:  # noqa: ARG002  # the memory is that of the copy
        fresh(self.copy._local_tensor)

    def check_writable(self) -> None:
        source = source_of_copy(self.copy._local_tensor)
        assert source is not None
        source.check_writable()

    def write(self, copy: Any) -> None:  # noqa: ARG002  # the memory is that of the copy
        source = source_of_copy(self.copy._local_tensor)
        assert source is not None
        source.write(self.copy)

    def deep_copied(self, memo: dict[int, Any]) -> _ViewOfCopy:
        return _ViewOfCopy(deepcopy(self.copy, memo))


def link(
    cls: Any, op: Op, undo: Undo | None, results: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> None:
    """Note where the results of a view op come from that are copies. ``op`` makes the view of the base anew."""
    base: Any = args[0] if args else None
    if not isinstance(base, cls) or is_layout_only(base._local_tensor):
        return  # dynamo keeps tensors with its graphs, and copies that are alive make writes slower
    for index, result in enumerate(tensors_in(results)):
        copy: Any = result
        if not copy._spec.is_copy:
            continue
        local = base._local_tensor
        if memory_of(local) == memory_of(copy._local_tensor):
            link_view(base, copy)
            continue
        writes = writes_of(local)
        own = _alias(cls, base)
        form = copy.shape, copy.stride()
        moved = _MovedView(op, undo, own, tuple(args[1:]), dict(kwargs or {}), index, writes, writes.count, form)
        tie(copy._local_tensor, moved)


def link_view(base: Any, view: Any) -> None:
    """Note that a tensor is a view that shares memory with another, if that is a copy."""
    source = source_of_copy(base._local_tensor)
    if source is not None:
        # A view of a view is one of the copy itself: a tensor may be turned in place any number of times.
        copy = source.copy if isinstance(source, _ViewOfCopy) else _alias(type(view), base)
        tie(view._local_tensor, _ViewOfCopy(copy))


def link_deep_copy(local: torch.Tensor, twin: torch.Tensor, memo: dict[int, Any]) -> bool:
    """Note that the deep copy of a copy comes from the deep copy of its base, as torch copies the memory that tensors
    share once. Whether that is so: a copy whose writes cannot reach its base has a deep copy for itself.
    """
    source = source_of_copy(local)
    if not isinstance(source, (_MovedView, _ViewOfCopy)):
        return False
    try:
        source.check_writable()
    except InPlaceError:
        return False
    tie(twin, source.deep_copied(memo))
    return True


_MOST_COUNTED = 1 << 16  # elements; a larger view counts as sharing where its strides do not rule it out


def _shares(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements of a view share memory in its base. On one device torch writes such elements one after the
    other: ``windows.add_(1)`` adds as often as there are windows over an element.
    """
    if not _may_overlap(shape, strides):
        return False
    if prod(shape) > _MOST_COUNTED:
        return True
    places = [0]
    for size, stride in zip(shape, strides, strict=True):
        places = [place + i * stride for place in places for i in range(size)]
    return len(set(places)) < len(places)


def _may_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements of a tensor may lie in one place, as those of windows that overlap."""
    extent = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride <= extent:
            return True
        extent += (size - 1) * stride
    return False


def _alias(cls: Any, tensor: Any) -> Any:
    return new_wrapper(cls, tensor._local_tensor, tensor._spec, False)


def writable(op: Op) -> Callable[[torch.Tensor], torch.Tensor]:
    """The step that an operand takes that is a copy and is written."""

    def step(local: torch.Tensor) -> torch.Tensor:
        source = source_of_copy(local)
        if source is None and is_layout_only(local):
            return local
        if source is None:
            raise InPlaceError(
                asked=f"run {op_name(op)} in place",
                found="what it writes is a copy in another layout: of the base of a view, or of a parameter that "
                "sw.prefetch has gathered for a forward. The write would be lost",
                do="Write to the base, or to the parameter outside of forward, or clone() the copy first.",
                op=op_name(op),
            )
        source.check_writable()
        source.refresh(local)
        return local

    return step


def after_write(cls: Any, tensors: Sequence[Any]) -> None:
    """Have what was written to copies reach their bases, and copies of what was written be stale."""
    for value in tensors_in(tensors):
        tensor: Any = value
        if not isinstance(tensor, cls):
            continue
        local = tensor._local_tensor
        note_write(local)
        if tensor._spec.is_copy:
            source = source_of_copy(local)
            if source is not None:
                source.write(tensor)
