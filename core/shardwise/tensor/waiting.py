"""Waiting tensors: MeshTensors whose local tensor is not here yet.

A waiting tensor knows its spec, and where its local tensor will come from: a :class:`Source`, most often an
``AsyncResult``. The first look at ``_local_tensor`` asks the source; where its answer is final, the tensor is a plain
``MeshTensor`` from then on. So nothing on the hot path knows of waiting: a tensor that is not exactly a ``MeshTensor``
takes the dispatcher's slow way once.

An op that only aliases its operand (its schema says so: a view, a detach) does not wait. Its result waits for the same
source, which is what lets autograd put a gradient away while its collective is under way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any, Protocol

import torch

from shardwise.discovery.process import default_registry
from shardwise.errors import ViewError
from shardwise.kernel.dispatcher import dispatch, tensor_class, views, wrap
from shardwise.kernel.nested import freeze
from shardwise.kernel.registry import Registry
from shardwise.kernel.signature import Kind, Op, signature
from shardwise.kernel.spec import TensorSpec, memory_order
from shardwise.private_torch.ops import is_composite

__all__ = ["Source", "source_of", "waiting"]


class Source(Protocol):
    """Where a local tensor comes from."""

    @property
    def final(self) -> bool:
        """Whether :meth:`wait` will give the same tensor for ever; if not, it is asked at each look."""

    def wait(self) -> torch.Tensor:
        """The local tensor."""


# Shape, strides and storage offset; the offset counts from the start of the tensor that is viewed.
Form = tuple[tuple[int, ...], tuple[int, ...], int]


class _Seen:
    """The local tensor of a view: a window of known form in its base's memory."""

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
    """A MeshTensor that asks ``source`` for its local tensor, on ``device``, when that is first needed.

    The local tensor will be dense, its dims in the order of the global tensor's memory, as redistribution leaves it.
    """
    made = wrap(_nothing(device, spec.dtype), spec)
    form, slot = _waiting_form()
    slot.__set__(made, source)
    made.__class__ = form
    return made


@cache
def _nothing(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, device=device, dtype=dtype)


def source_of(tensor: Any) -> Source | None:
    """What a waiting tensor waits for; None for any other tensor."""
    form, slot = _waiting_form()
    source = slot.__get__(tensor) if type(tensor) is form else None
    return None if isinstance(source, torch.Tensor) else source


@cache
def _waiting_form() -> tuple[type, Any]:
    """The waiting form of the tensor class, and the slot of that class in which the source lies meanwhile."""
    plain = tensor_class()
    slot = plain.__dict__["_local_tensor"]

    class Waiting(plain):  # type: ignore[misc, valid-type]  # its base is the class that the dispatcher was started with
        """A MeshTensor until whose first use a collective may still be under way."""

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
                seen = _seen(func, args, kwargs or {})
                if seen is not None:
                    return seen
            return dispatch(func, args, kwargs)

    return Waiting, slot


# -- views of what is not here yet -------------------------------------------------------------------------------


@cache
def _only_aliases(op: Op) -> bool:
    """Whether an op's one result is always its first operand's memory, and nothing is written."""
    of = signature(op)
    tensors = [a for a in of.args if a.kind in (Kind.TENSOR, Kind.TENSORS)]
    if len(of.results) != 1 or len(tensors) != 1 or tensors[0] is not of.args[0]:
        return False
    result = of.results[0]
    aliases = result.is_tensor and not result.is_list and result.alias == 0 and not result.written
    # A composite one, such as reshape, may copy, and a copy has to be made now.
    return aliases and not tensors[0].written and not is_composite(op)


def _seen(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an aliasing op on a waiting tensor, itself waiting; None where it cannot be had so."""
    base, *rest = args
    spec = base._spec
    source = source_of(base)
    if source is None:
        return None
    form = source.form if isinstance(source, _Seen) else _dense_form(spec)
    try:
        seen = _outcome(op, spec, form, freeze(rest), tuple(kwargs.items()))
    except (TypeError, ViewError):  # an argument that cannot be a key, or data that would have to move
        return None
    return None if seen is None else waiting(_Seen(source, seen[1]), seen[0], base.device)


@lru_cache(maxsize=1024)
def _outcome(op: Op, spec: TensorSpec, form: Form, rest: Any, kwargs: Any) -> tuple[TensorSpec, Form] | None:
    """Spec and local form of an aliasing op's result, found without data; None where the form does not say all.

    Raises ViewError when data would have to move.
    """
    _forget_with(default_registry())
    shape, stride, _ = form
    local = torch.empty_strided(shape, stride, dtype=spec.dtype, device="meta")
    before, views.must_share = views.must_share, True
    try:
        made = dispatch(op, (wrap(local, spec), *rest), dict(kwargs))
    finally:
        views.must_share = before
    found = made._local_tensor
    if found.dtype != local.dtype or found.is_conj() or found.is_neg():
        return None
    return made._spec, (tuple(found.shape), found.stride(), found.storage_offset())


@cache
def _forget_with(registry: Registry) -> None:
    """What was found by rules is forgotten when they change."""
    registry.on_change(_outcome.cache_clear)


@lru_cache(maxsize=1024)
def _dense_form(spec: TensorSpec) -> Form:
    shape, order = spec.local_shape(), memory_order(spec.tensor_meta)
    stride = [1] * len(shape)
    for outer, inner in reversed(list(pairwise(order))):
        stride[outer] = stride[inner] * max(shape[inner], 1)
    return shape, tuple(stride), 0
