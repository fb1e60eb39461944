"""Waiting tensors: MeshTensors whose local tensor is not there yet.

A waiting tensor has its spec, and a :class:`Source` of its local tensor, most often an ``AsyncResult``. The first read
of ``_local_tensor`` asks the source. If the source is final, the tensor is a plain ``MeshTensor`` from then on. So the
hot path does not know about waiting: a tensor that is not exactly a ``MeshTensor`` takes the dispatcher's slow path
once.

An op that only aliases its operand by its schema (a view, a detach) does not wait. Its result waits for the same
source. So autograd can store a gradient while its collective runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any, Protocol

import torch

from shardwise.comm.rank_failures import trying
from shardwise.discovery.process import default_registry
from shardwise.errors import ViewError
from shardwise.kernel.dispatcher import dispatch
from shardwise.kernel.engine import tensor_class
from shardwise.kernel.nested import freeze
from shardwise.kernel.registry import Registry
from shardwise.kernel.results import views, wrap
from shardwise.kernel.signature import Kind, Op, signature
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import memory_order
from shardwise.private_torch.dispatch import support_foreach
from shardwise.private_torch.ops import is_composite

__all__ = ["Source", "source_of", "waiting"]


class Source(Protocol):
    """Where a local tensor comes from."""

    @property
    def final(self) -> bool:
        """Whether :meth:`wait` always returns the same tensor. If not, every read calls it."""

    def wait(self) -> torch.Tensor:
        """The local tensor."""


# Shape, strides and storage offset. The offset counts from the start of the base tensor.
Form = tuple[tuple[int, ...], tuple[int, ...], int]


class _View:
    """The source of a view: a window of known form in the memory of its base."""

    __slots__ = ("_base", "final", "form")

    def __init__(self, base: Source, form: Form) -> None:
        self.final = base.final
        self.form = form
        self._base = base

    def wait(self) -> torch.Tensor:
        local = self._base.wait()
        shape, stride, offset = self.form
        return local.as_strided(shape, stride, local.storage_offset() + offset)


def waiting(source: Source, spec: TensorSpec, device: torch.device) -> Any:
    """A MeshTensor that asks ``source`` for its local tensor, on ``device``, at its first use.

    The local tensor must be dense, with its dims in the order of the global tensor's memory, as redistribution leaves
    them.
    """
    tensor = wrap(_placeholder(device, spec.dtype), spec)
    form, slot = _waiting_form()
    slot.__set__(tensor, source)
    tensor.__class__ = form
    return tensor


@cache
def _placeholder(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, device=device, dtype=dtype)


def source_of(tensor: Any) -> Source | None:
    """The source of a waiting tensor; None for any other tensor."""
    form, slot = _waiting_form()
    source = slot.__get__(tensor) if type(tensor) is form else None
    return None if isinstance(source, torch.Tensor) else source


@cache
def _waiting_form() -> tuple[type, Any]:
    """The waiting form of the tensor class, and the slot of the class that holds the source meanwhile."""
    plain = tensor_class()
    slot = plain.__dict__["_local_tensor"]

    class Waiting(plain):  # type: ignore[misc, valid-type]  # its base is the class that the dispatcher was started with
        """A MeshTensor before its first use, when a collective may still run."""

        __slots__ = ()

        @property
        def _local_tensor(self) -> torch.Tensor:
            source = slot.__get__(self)
            if isinstance(source, torch.Tensor):  # another thread was faster
                return source
            local: torch.Tensor = source.wait()
            if source.final:
                self._local_tensor = local
            return local

        @_local_tensor.setter
        def _local_tensor(self, local: torch.Tensor) -> None:
            slot.__set__(self, local)
            self.__class__ = plain

        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            if args and type(args[0]) is cls and _only_aliases(func) and not torch.is_inference_mode_enabled():
                view = _waiting_view(func, args, kwargs or {})
                if view is not None:
                    return view
            return dispatch(func, args, kwargs)

    # Gradients that wait must be clipped like others: optimizers and clipping ask for the exact class.
    support_foreach(Waiting)
    return Waiting, slot


# -- views of waiting tensors -----------------------------------------------------------------------------------


@cache
def _only_aliases(op: Op) -> bool:
    """Whether an op has one result, which always shares its first operand's memory, and writes nothing."""
    of = signature(op)
    tensors = [a for a in of.args if a.kind in (Kind.TENSOR, Kind.TENSORS)]
    if len(of.results) != 1 or len(tensors) != 1 or tensors[0] is not of.args[0]:
        return False
    result = of.results[0]
    aliases = result.is_tensor and not result.is_list and result.alias == 0 and not result.written
    # A composite op such as reshape may copy, and a copy needs the data now.
    return aliases and not tensors[0].written and not is_composite(op)


def _waiting_view(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an aliasing op on a waiting tensor, as a waiting tensor; None if the op must wait."""
    base, *rest = args
    spec = base._spec
    source = source_of(base)
    if source is None:
        return None
    form = source.form if isinstance(source, _View) else _dense_form(spec)
    try:
        outcome = _outcome(op, spec, form, freeze(rest), tuple(kwargs.items()))
    except (TypeError, ViewError):  # an argument is not hashable, or data must move
        return None
    return None if outcome is None else waiting(_View(source, outcome[1]), outcome[0], base.device)


@lru_cache(maxsize=1024)
def _outcome(op: Op, spec: TensorSpec, form: Form, rest: Any, kwargs: Any) -> tuple[TensorSpec, Form] | None:
    """Spec and local form of an aliasing op's result, computed without data; None if more than the form changes.

    Raises ViewError if data must move.
    """
    _forget_with(default_registry())
    shape, stride, _ = form
    local = torch.empty_strided(shape, stride, dtype=spec.dtype, device="meta")
    before, views.must_share = views.must_share, True
    try:
        with trying():
            result = dispatch(op, (wrap(local, spec), *rest), dict(kwargs))
    finally:
        views.must_share = before
    part = result._local_tensor
    if part.dtype != local.dtype or part.is_conj() or part.is_neg():
        return None
    return result._spec, (tuple(part.shape), part.stride(), part.storage_offset())


@cache
def _forget_with(registry: Registry) -> None:
    """Clear the cache of outcomes whenever rules change."""
    registry.on_change(_outcome.cache_clear)


@lru_cache(maxsize=1024)
def _dense_form(spec: TensorSpec) -> Form:
    shape, order = spec.local_shape(), memory_order(spec.tensor_meta)
    stride = [1] * len(shape)
    for outer, inner in reversed(list(pairwise(order))):
        stride[outer] = stride[inner] * max(shape[inner], 1)
    return shape, tuple(stride), 0
