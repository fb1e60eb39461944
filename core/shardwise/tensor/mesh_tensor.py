"""``MeshTensor``: a ``torch.Tensor`` that lies on a mesh."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.comm.origins import ORIGIN
from shardwise.comm.policy import InForceThen
from shardwise.comm.policy import in_force as policies
from shardwise.engine.decided import in_force
from shardwise.engine.judging import judge_move
from shardwise.errors import ArgumentError, ItemError, ItemTypeError, ItemValueError, MeshMismatchError
from shardwise.kernel.arguments import check_dtype, check_flag, check_mesh, kind_of, refuse_argument
from shardwise.kernel.dispatcher import dispatch, rules_version
from shardwise.kernel.placements import Placement, Replicate, check_placements, show_all
from shardwise.kernel.places import Places
from shardwise.kernel.recording import NODE, recording
from shardwise.kernel.results import views
from shardwise.kernel.spec import SpecLayout, TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.kernel.view_copies import fresh
from shardwise.private_torch.dispatch import (
    disabled_torch_function,
    new_wrapper,
)
from shardwise.private_torch.sizes import make_known
from shardwise.private_torch.tracing import (
    is_compiled_now,
    is_traced,
)
from shardwise.tensor import (
    autograd,
    copies,
    dcp_chunks,
    from_local,
    host_copies,
    leaf_grads,
    memory_access,
    open_sizes,
)
from shardwise.tensor.grad_layouts import grad_layout, grad_under
from shardwise.tensor.indexing import PLACES, is_listless, is_one_truth, one_or_none, with_tensors
from shardwise.tensor.learned_layouts import note_asked, now_elsewhere, warn_of_another_layout
from shardwise.tensor.memory_access import refusing
from shardwise.tensor.names import tag_by_name
from shardwise.tensor.sharing import is_sharing_asked_for
from shardwise.tensor.torch_setup import set_torch_up

__all__ = ["MeshTensor"]

_PROCESS = os.urandom(16).hex()
_Known = tuple[SpecLayout, bool, InForceThen]


class MeshTensor(torch.Tensor):
    """A global tensor of which each rank of a mesh holds a part, as its placements say.

    Create one with :func:`shardwise.distribute_tensor` (from a whole tensor), :meth:`from_local` (from this rank's
    part) or a factory (such as :func:`shardwise.zeros`). Every torch op on it runs by a plan; see the docs.
    """

    _local_tensor: torch.Tensor
    _spec: TensorSpec
    __slots__ = ("_kept_moves", "_local_tensor", "_spec")

    __torch_function__ = disabled_torch_function

    def __new__(cls, local: torch.Tensor, spec: TensorSpec, requires_grad: bool = False) -> Self:
        tensor: Self = new_wrapper(cls, local, _own_spec(spec), False)
        return tensor.requires_grad_() if requires_grad else tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Not for users: takes a local tensor and its spec without a check."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates it as an instance method
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return dispatch(func, args, kwargs)

    # -- torch.compile --
    def __tensor_flatten__(self) -> tuple[list[str], _Known]:
        """The local tensor, and what compiled code is guarded by besides sizes: the layout, whether a hook brings
        gradients to it, and the policies on communication.
        """
        if is_compiled_now():
            open_sizes.leave_to_whole(self._local_tensor)
        return ["_local_tensor"], (self._spec.layout, leaf_grads.HAS_GRAD_HOOK in self.__dict__, policies.then)

    @classmethod
    def __metadata_guard__(cls, saved: _Known, now: _Known) -> bool:
        """Whether compiled code fits a tensor of its input. Torch asks as soon as there is such code."""
        recording.has_compiled = True
        return saved == now and saved[2].stack == now[2].stack

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], known: _Known, size: Sequence[int], stride: Sequence[int]
    ) -> MeshTensor:
        local, (layout, has_grad_hook, _) = inner["_local_tensor"], known
        spec = layout.spec(size, stride, local.dtype)
        traced = is_traced(local)
        if traced:
            # The sizes of an output's gradient were computed in an earlier pass, so this trace has not seen them.
            make_known((*size, *stride))
            local = open_sizes.tied(local, spec)
        tensor: MeshTensor = new_wrapper(MeshTensor, local, spec, False)
        if has_grad_hook and traced:
            leaf_grads.keep_grad_layout_in_graph(tensor)
        return tensor

    def _stable_hash_for_caching(self) -> str:
        """The part of this tensor in the key under which torch caches compiled graphs on disk.

        A graph is made for one rank's place and by the rules of this process. No other process can use it.
        """
        spec, local = self._spec, self._local_tensor
        layout = (hash(spec.mesh), spec.coordinate(), spec.placements, spec.tensor_meta, spec.is_copy)
        part = (local.shape, local.stride(), local.dtype, local.device)
        has_hook = leaf_grads.HAS_GRAD_HOOK in self.__dict__
        key = (_PROCESS, rules_version(), layout, part, has_hook, self.requires_grad)
        return hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()

    def __coerce_tangent_metadata__(self) -> MeshTensor:
        """The layout that compiled code assumes for an output's gradient: the output's, with partial as replicated."""
        return grad_under(self, grad_layout(self._spec.placements))  # type: ignore[no-any-return]

    def __coerce_same_metadata_as_tangent__(self, known: _Known, expected: type | None = None) -> MeshTensor | None:
        """The gradient in the layout that compiled code expects; ``None`` if the code expects another class."""
        return None if expected is not None else grad_under(self, known[0].placements)

    # -- layout --
    @property
    def device_mesh(self) -> DeviceMesh:
        mesh: Any = self._spec.mesh
        return mesh  # type: ignore[no-any-return]

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh dim."""
        return self._spec.placements

    @property
    def spec(self) -> TensorSpec:
        """Mesh, placements and global meta."""
        return self._spec

    # -- in and out --
    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Places | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> MeshTensor:
        """A MeshTensor from this rank's part; shares its memory and is differentiable. Every rank must call this.

        Without the global ``shape``, the parts of all ranks are assumed to have the same shape, so an uneven layout
        needs ``shape``. ``stride`` defaults to what the local strides imply. The ranks compare the first tensor of each
        layout. ``run_check`` compares every tensor, ``requires_grad`` and replicated copies too, with communication.
        The gradient has ``grad_placements`` (default: ``placements`` with partial read as replicated). Raises
        :class:`LayoutError` for a local shape that does not fit, and :class:`RankDisagreementError` on every rank if
        the ranks differ.
        """
        tensor: MeshTensor = from_local.from_local(
            local_tensor, device_mesh, placements, run_check, shape, stride, grad_placements
        )
        return tensor

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The part of this rank; shares memory and is differentiable.

        ``grad_placements`` are the placements of the gradient whose parts are the local gradients; default: those of
        this tensor, with partial read as replicated. Autograd does not see a write to the part under ``no_grad`` or to
        a detached part: after it, call ``torch.autograd.graph.increment_version(x)``.
        """
        if now_elsewhere:
            warn_of_another_layout(self)
        return autograd.to_local(self, grad_placements)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor on every rank, by communication."""
        whole = self.redistribute(placements=[Replicate()] * self.device_mesh.ndim)
        return whole.to_local(grad_placements=grad_placements)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Places | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> MeshTensor:
        """The same tensor under other placements, by the cheapest sequence of collectives; differentiable.

        ``device_mesh`` must be the tensor's own mesh; the signature is torch's. The gradient has ``grad_placements``
        (default: those of this tensor, with partial read as replicated). With ``async_op`` the call returns while the
        last collective runs, and the first use of the result waits for it. The same holds for the gradient. Do not
        write to this tensor's local tensor before that first use.

        The tensor is sent, and returned, in ``forward_dtype``, and its gradient is sent in ``backward_dtype``
        (defaults: the dtypes that they have). The gradient that arrives at this tensor has this tensor's dtype.
        """
        if device_mesh is not None and device_mesh is not self.device_mesh and device_mesh != self.device_mesh:
            check_mesh(f"redistribute {self.spec}", device_mesh)
            raise MeshMismatchError(
                asked=f"redistribute {self.spec} to {device_mesh}",
                found=f"it lies on {self.device_mesh}",
                do="Take full_tensor() and distribute_tensor it on the other mesh.",
            )
        asked = "redistribute a MeshTensor"
        if placements is None:
            refuse_argument(asked, "placements", None, "Give one placement per mesh dim: placements=[Replicate()].")
        if forward_dtype is not None or backward_dtype is not None or async_op is not False:
            check_dtype(asked, forward_dtype, "forward_dtype")
            check_dtype(asked, backward_dtype, "backward_dtype")
            check_flag(asked, async_op, "async_op")
        tensor = self if forward_dtype is None else self.to(forward_dtype)
        redistributed: MeshTensor = autograd.redistribute(tensor, placements, grad_placements, async_op, backward_dtype)
        if now_elsewhere:
            note_asked(redistributed)
        return redistributed

    @classmethod
    def from_dtensor(cls, tensor: DTensor) -> MeshTensor:
        """The same layout and the same memory as a torch ``DTensor``; differentiable.

        Raises :class:`LayoutError` for a layout in which mesh dims split a dim in another order than left to right.
        """
        given: Any = tensor
        if not isinstance(given, DTensor):
            do = "Use distribute_tensor for a whole tensor, and MeshTensor.from_local for this rank's part."
            refuse_argument("take over a DTensor", "tensor", tensor, do)
        placements = check_placements(tensor.placements, tensor.device_mesh.ndim, tensor.ndim)
        # Passed explicitly: torch's default for a partial tensor differs between its releases.
        local = tensor.to_local(grad_placements=grad_layout(placements))
        return cls.from_local(local, tensor.device_mesh, placements, shape=tensor.shape, stride=tensor.stride())

    def to_dtensor(self) -> DTensor:
        """The same layout and the same memory as a torch ``DTensor``; differentiable."""
        return DTensor.from_local(
            autograd.to_local(self, None),
            self.device_mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride(),
        )

    # -- gradients: a leaf's .grad has the layout of the leaf --
    def requires_grad_(self, requires_grad: bool = True) -> Self:
        torch.Tensor.requires_grad_(self, requires_grad)
        if requires_grad:
            leaf_grads.keep_grad_layout(self)
        return self

    @property
    def requires_grad(self) -> bool:
        return torch.Tensor.requires_grad.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def _follow_layout(self) -> None:
        """Bring gradients to the layout that this tensor has now: an op or ``x.data = y`` gave it another one."""
        leaf_grads.follow_layout(self)

    # -- views --
    def view(self, *size: Any, **kwargs: Any) -> MeshTensor:
        """A view of another shape or dtype.

        If it needs data from another rank, it is a copy that follows its base, and that its base follows: see
        docs/dispatch.md. Raises :class:`ViewError` instead under :func:`shardwise.sharing_views`.
        """
        viewed: Any
        if not is_sharing_asked_for():  # most calls; what follows costs a microsecond
            viewed = torch.Tensor.view(self, *size, **kwargs)
            return viewed  # type: ignore[no-any-return]
        before, views.must_share = views.must_share, True
        try:
            viewed = torch.Tensor.view(self, *size, **kwargs)
            return viewed  # type: ignore[no-any-return]
        finally:
            views.must_share = before

    def view_as(self, other: torch.Tensor) -> MeshTensor:
        """:meth:`view` with the shape of ``other``."""
        return self.view(other.shape)

    # -- indexing --
    def __getitem__(self, index: Any) -> Any:
        if type(index) in PLACES or (type(index) is tuple and PLACES.issuperset(map(type, index))):
            return torch.Tensor.__getitem__(self, index)  # most calls: torch reads these by itself
        if is_one_truth(index):
            return self.unsqueeze(0)[one_or_none(self, index)]
        return torch.Tensor.__getitem__(self, index if is_listless(index) else with_tensors(self, index))

    def __setitem__(self, index: Any, value: Any) -> None:
        if is_one_truth(index):
            self.unsqueeze(0)[one_or_none(self, index)] = value
        else:
            torch.Tensor.__setitem__(self, index if is_listless(index) else with_tensors(self, index), value)

    # -- one element --
    def item(self) -> Any:
        """The element of a one-element tensor, the same on every rank; raises :class:`ItemError` for another size."""
        return self._only("item()").item()

    def _only(self, what: str, refusal: type[ItemError] = ItemError) -> torch.Tensor:
        if self.numel() != 1:
            raise refusal(
                asked=f"take {what} of {self._spec}",
                found=f"it has {self.numel()} elements",
                do="Reduce it to one element first, or read full_tensor().",
                shape=tuple(self.shape),
            )
        judge_move(what, "x", self._spec, [Replicate()] * self._spec.mesh.ndim)
        with torch.no_grad():
            return self.full_tensor()

    def __bool__(self) -> bool:
        return bool(self._only("bool()"))

    def __float__(self) -> float:
        return float(self._only("float()", ItemValueError))

    def __int__(self) -> int:
        return int(self._only("int()", ItemValueError))

    def __index__(self) -> int:
        return self._only("index", ItemTypeError).__index__()

    def __complex__(self) -> complex:
        return complex(self._only("complex()", ItemValueError))

    def __format__(self, format_spec: str) -> str:
        # Without a format it does not communicate, because printing on one rank alone must not hang. A number that is
        # on every rank is written as torch writes it: programs make names of such numbers.
        if self.dim() == 0 and (format_spec or self._spec.is_replicated):
            return format(self.item(), format_spec)
        return torch.Tensor.__format__(self, format_spec) if format_spec else repr(self)  # type: ignore[no-untyped-call]

    def tolist(self) -> Any:
        """The whole tensor as nested lists, by communication."""
        with torch.no_grad():
            judge_move("tolist()", "x", self._spec, [Replicate()] * self._spec.mesh.ndim)
            return self.full_tensor().tolist()

    # -- devices --
    cpu = host_copies.cpu  # type: ignore[assignment]  # torch annotates its own as positional, and takes none
    to = host_copies.to
    numpy = host_copies.numpy

    # -- memory --
    data = memory_access.data
    data_ptr = memory_access.data_ptr
    share_memory_ = memory_access.share_memory_
    is_shared = memory_access.is_shared
    pin_memory = memory_access.pin_memory
    is_pinned = memory_access.is_pinned
    new_empty = memory_access.new_empty
    record_stream = memory_access.record_stream
    is_set_to = memory_access.is_set_to
    untyped_storage = memory_access.untyped_storage
    as_subclass = memory_access.as_subclass
    apply_ = refusing(
        "call a Python function for each element of {}",
        "Use torch ops, or to_local().apply_(), which runs on this part.",
    )
    map_ = map2_ = refusing(
        "call a Python function for the elements of {}", "Use torch ops, or map_ and map2_ of to_local()."
    )
    set_ = memory_access.set_
    __dlpack__ = refusing("pass {} on by DLPack", "Pass to_local() or full_tensor().")
    __cuda_array_interface__ = memory_access.cuda_array_interface
    # Readers of DLPack look for its C functions at the class, and find that there are none.
    __dlpack_c_exchange_api__ = None

    # -- torch.distributed.checkpoint: its protocol for tensors of other classes --
    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:  # noqa: A002  # torch's signature
        return dcp_chunks.write_items_of(fqn, self._spec, fresh(self._local_tensor))

    def __create_chunk_list__(self) -> list[Any]:
        return dcp_chunks.chunks_of(self._spec)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return dcp_chunks.part_at(index.offset, self._spec, fresh(self._local_tensor))

    # -- copies --
    __deepcopy__ = copies.deep_copy
    __copy__ = copies.shallow_copy

    def __reduce_ex__(self, proto: Any) -> Any:
        dcp_chunks.check_has_data(f"pickle {self._spec}")
        # One rank's part, and the place of that rank. To join the parts is the task of a checkpoint.
        of_this_run = (leaf_grads.HAS_GRAD_HOOK, ORIGIN, NODE)
        attributes = {k: v for k, v in self.__dict__.items() if k not in of_this_run}
        meta = self._spec.tensor_meta
        parts = (self._spec.mesh, self._spec.placements, (meta.shape, meta.stride, meta.dtype))
        where = self._spec.mesh.get_coordinate() if isinstance(self._spec.mesh, DeviceMesh) else None
        return _rebuild, (fresh(self._local_tensor), *parts, self.requires_grad, attributes, where and tuple(where))

    def __repr__(self) -> str:  # type: ignore[override]
        mesh = self._spec.mesh
        names = getattr(mesh, "mesh_dim_names", None)
        sizes = "x".join(map(str, self._spec.mesh_shape)) + (f" ({', '.join(names)})" if names else "")
        extra = ", requires_grad=True" if self.requires_grad and self.is_leaf else ""
        if self.grad_fn is not None:
            extra = f", grad_fn=<{self.grad_fn.name()}>"
        return (
            f"MeshTensor({self._spec.tensor_meta}, {show_all(self.placements)}, mesh={sizes}, "
            f"local={tuple(self._local_tensor.shape)} on {self._local_tensor.device}{extra})"
        )


def _own_spec(spec: Any) -> TensorSpec:
    """A spec as it is, or one with the fields of another class of specs, as DTensor has.

    Raises :class:`ArgumentError` if it has no such fields.
    """
    if isinstance(spec, TensorSpec):
        return spec
    meta = getattr(spec, "tensor_meta", None)
    if meta is None or not hasattr(spec, "mesh"):
        raise ArgumentError(
            asked="make a MeshTensor of a local tensor and a spec",
            found=f"its argument 'spec' is {kind_of(spec)}, which has no mesh, placements and tensor_meta",
            do="Call MeshTensor.from_local(local_tensor, mesh, placements).",
            argument="spec",
        )
    return TensorSpec(spec.mesh, tuple(spec.placements), TensorMeta(torch.Size(meta.shape), meta.stride, meta.dtype))


def _rebuild(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    meta: tuple[torch.Size, tuple[int, ...], torch.dtype],
    requires_grad: bool,
    attributes: dict[str, Any],
    saved_at: tuple[int, ...] | None,
) -> MeshTensor:
    copies.check_same_place(saved_at, mesh, placements, meta[0])
    tensor = MeshTensor(local, TensorSpec(mesh, placements, TensorMeta(*meta)), requires_grad)
    tensor.__dict__.update(attributes)
    if in_force.decisions is not None:
        tag_by_name(tensor, in_force.decisions.depth)
    return tensor


# torch.load(weights_only=True) accepts only functions that are listed.
torch.serialization.add_safe_globals([_rebuild])
set_torch_up(MeshTensor)
