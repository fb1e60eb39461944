"""The kernels that torch chooses on a CUDA device, for fake CUDA tensors where there is no device.

Torch's composite ops choose a kernel in C++: attention, batch norm, recurrent layers and grid sampling. They
ask what the build and the device can do, so a build without CUDA chooses what no card would run: attention in math
form, batch norm and recurrent layers without cuDNN. Here the choice is made again, by the conditions in torch's
sources, for a card that is described. Nothing public makes the choice for another device than the one that is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from shardwise.private_torch.ops import kernel_at

__all__ = ["Card", "HOPPER", "choosing_for"]

aten = torch.ops.aten


@frozen
class Card:
    """What a choice depends on: the compute capability, and the version of cuDNN as cuDNN writes it."""

    name: str = "stand-in for an NVIDIA H100"
    capability: tuple[int, int] = (9, 0)
    cudnn: int = 91900
    memory: int = 80 << 30
    processors: int = 132


HOPPER = Card()


@contextmanager
def choosing_for(card: Card) -> Iterator[None]:
    """A context in which composite ops on CUDA tensors choose their kernels as on a card."""
    choices: dict[Any, Callable[..., Any]] = {
        aten.scaled_dot_product_attention.default: _Attention(card).run,
        aten._batch_norm_impl_index.default: _batch_norm,
        aten.grid_sampler.default: _grid_sampler,
    }
    choices |= {getattr(aten, name).input: _recurrent(getattr(aten, name).input, mode) for name, mode in _MODES.items()}
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    implicit = torch._C.DispatchKey.CompositeImplicitAutograd
    # Under inference mode, modes split a composite op by this entry.
    before = {op: op.py_kernels.get(implicit) for op in choices}
    try:
        for op, choose in choices.items():
            library.impl(op, choose, "AutogradCUDA")  # type: ignore[no-untyped-call]
            _split_by(op, _for_cuda(op, choose, before[op]))
        library.impl("_fused_rms_norm", _RmsNorm.apply, "AutogradCUDA")  # type: ignore[no-untyped-call]
        yield
    finally:
        for op, split in before.items():
            _split_by(op, split)
        library._destroy()  # type: ignore[no-untyped-call]


def _split_by(op: Any, split: Callable[..., Any] | None) -> None:
    """Have modes split a composite op by a function; None for torch's own way."""
    implicit = torch._C.DispatchKey.CompositeImplicitAutograd
    op.py_kernels.pop(implicit, None)
    if split is not None:
        op.py_kernels[implicit] = split
    op._dispatch_cache.clear()


def _for_cuda(op: Any, choose: Callable[..., Any], before: Callable[..., Any] | None) -> Callable[..., Any]:
    def run(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        if first.device.type == "cuda":
            return choose(first, *args, **kwargs)
        return _as_elsewhere(op, first, *args, **kwargs) if before is None else before(first, *args, **kwargs)

    return run


def _as_elsewhere(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Torch's own kernel of a composite op."""
    return kernel_at(op, torch._C.DispatchKey.CompositeImplicitAutograd)(*args, **kwargs)


# -- attention: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, attention.cpp ------------------------------------

_MATH, _FLASH, _EFFICIENT, _CUDNN = 0, 1, 2, 3  # at::SDPBackend
_DEFAULT_ORDER = [_FLASH, _EFFICIENT, _MATH, _CUDNN]
_SETTINGS: Any = torch.backends.cuda  # torch leaves its functions unannotated
_HALF = (torch.float16, torch.bfloat16)
_MOST = 65535
_IS_2_11 = torch.__version__ < "2.12"  # compared as versions
"""The conditions of cuDNN's kernels are others there: seen on an H100."""


@frozen
class _Attention:
    """The choice of an attention kernel."""

    card: Card

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """Attention by the kernel that the card would run. Raises what torch raises if every kernel is turned off."""
        tensors = (query, key, value)
        backend = self.backend(*tensors, attn_mask, dropout_p, is_causal, enable_gqa)
        mask = attn_mask
        if mask is not None and mask.dtype is torch.bool and backend != _MATH:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
        needs_statistics = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if backend == _FLASH:
            width = query.shape[-1]
            scale = width**-0.5 if scale is None else scale
            padded = [torch.nn.functional.pad(t, (0, -width % 8)) if width % 8 else t for t in tensors]
            out = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
            return out[..., :width] if width % 8 else out
        if backend == _CUDNN:
            return aten._scaled_dot_product_cudnn_attention(
                *tensors, mask, needs_statistics, dropout_p, is_causal, False, scale=scale
            )[0]
        if backend == _EFFICIENT:
            mask = None if mask is None else _aligned(mask).expand(*query.shape[:-1], key.shape[-2])
            return aten._scaled_dot_product_efficient_attention(
                *tensors, mask, needs_statistics, dropout_p, is_causal, scale=scale
            )[0]
        return _as_elsewhere(
            aten.scaled_dot_product_attention.default,
            *tensors,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )

    def backend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool, gqa: bool) -> int:
        """The number of the first kernel in the order of preference that takes the call."""
        takes: dict[int, Callable[[], bool]] = {
            _FLASH: lambda: self._flash(q, k, v, mask, p, causal, gqa),
            _EFFICIENT: lambda: self._efficient(q, k, v, mask),
            _CUDNN: lambda: self._cudnn(q, k, v, mask, p, gqa),
            _MATH: _SETTINGS.math_sdp_enabled,
        }
        for backend in self._order():
            if backend in takes and takes[backend]():
                return backend
        raise RuntimeError("No available kernel. Aborting execution.")

    def _order(self) -> list[int]:
        order = list(torch._C._get_sdp_priority_order())
        prefers_cudnn = self.card.capability[0] in (9, 10) and self.card.cudnn > 91500  # noqa: PLR2004
        is_default = [backend for backend in order if backend <= _CUDNN] == _DEFAULT_ORDER
        return [_CUDNN, _FLASH, _EFFICIENT, _MATH] if is_default and prefers_cudnn else order

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool, gqa: bool) -> bool:
        major = self.card.capability[0]
        width = q.shape[-1]
        small = self.card.capability in ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))
        too_wide = small and _needs_gradient(q, k, v) and width > 192 and (p > 0 or width <= 224)  # noqa: PLR2004
        return (
            _SETTINGS.flash_sdp_enabled()
            and major >= 8  # noqa: PLR2004  # sm80
            and mask is None
            and _is_dense(q, k, v)
            and width == k.shape[-1] == v.shape[-1] <= 256  # noqa: PLR2004
            and not too_wide
            and not (causal and q.shape[-2] != k.shape[-2])
            and q.dtype is k.dtype is v.dtype
            and q.dtype in _HALF
            and _heads_fit(q, k, v, gqa, values_as_keys=True)
            and _rows_lie_together(q, k, v, or_single=True)
        )

    def _efficient(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
        is_new = self.card.capability[0] >= 8  # noqa: PLR2004  # sm80
        aligned = (8 if q.dtype in _HALF else 4) if is_new or q.dtype in _HALF else 1
        dtypes = (*_HALF, torch.float32) if is_new else (torch.float16, torch.float32)
        return (
            _SETTINGS.mem_efficient_sdp_enabled()
            and _is_dense(q, k, v)
            and q.shape[-1] == k.shape[-1]
            and all(t.shape[-1] % aligned == 0 and t.shape[-1] > 0 for t in (q, v))
            and all(t.storage_offset() % aligned == 0 or not is_new for t in (q, k, v))
            and q.dtype is k.dtype is v.dtype
            and q.dtype in dtypes
            and _heads_fit(q, k, v, False, values_as_keys=True)  # it has no grouped queries
            and _rows_lie_together(q, k, v, *([] if mask is None else [mask]), or_single=False)
        )

    def _cudnn(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, gqa: bool) -> bool:
        if not (_SETTINGS.cudnn_sdp_enabled() and self.card.capability >= (8, 0) and _is_dense(q, k, v)):
            return False
        if _IS_2_11 and p and 91100 < self.card.cudnn < 91400:  # noqa: PLR2004
            return False
        return (
            not (
                torch.are_deterministic_algorithms_enabled()
                and not torch.is_deterministic_algorithms_warn_only_enabled()
            )
            and q.dtype is k.dtype is v.dtype
            and q.dtype in _HALF
            and (mask is None or _mask_fits(mask, q, k))
            and (_IS_2_11 or (p * 16).is_integer())
            and _heads_fit(q, k, v, gqa, values_as_keys=False)
            and _rows_lie_together(q, k, v, or_single=True)
            and q.shape[0] <= _MOST
            and q.shape[1] <= _MOST
            and all(t.shape[-1] <= self._widest(q, v) and t.shape[-1] % 8 == 0 for t in (q, v))
            and k.shape[-2] != 1
            and not (p and q.shape[-2] == 1)
        )

    def _widest(self, q: Tensor, v: Tensor) -> int:
        """The most that cuDNN takes as the width of a head."""
        is_hopper = self.card.capability == (9, 0)
        if _IS_2_11:
            return 256 if is_hopper and self.card.cudnn >= 91000 else 128  # noqa: PLR2004
        new = is_hopper or self.card.capability[0] == 10  # noqa: PLR2004
        return 192 if new and self.card.cudnn >= 91100 and (q.shape[-1], v.shape[-1]) == (192, 128) else 128  # noqa: PLR2004


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _is_dense(*tensors: Tensor) -> bool:
    """Whether all have four dims and no empty sequence."""
    return all(t.dim() == 4 and t.shape[-2] > 0 for t in tensors)  # noqa: PLR2004  # batch, heads, positions, width


def _rows_lie_together(*tensors: Tensor, or_single: bool) -> bool:
    return all(t.stride(-1) == 1 or (or_single and t.shape[-1] == 1) for t in tensors)


def _heads_fit(q: Tensor, k: Tensor, v: Tensor, gqa: bool, *, values_as_keys: bool) -> bool:
    heads, few, of_values = (t.shape[1] for t in (q, k, v))
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        return False
    if not gqa:
        return bool(heads == few == of_values)
    fits = heads % few == 0 and heads % of_values == 0
    return bool(fits and (few == of_values or not values_as_keys))


def _mask_fits(mask: Tensor, q: Tensor, k: Tensor) -> bool:
    whole = (*q.shape[:2], q.shape[-2], k.shape[-2])
    sizes = zip(reversed(mask.shape), reversed(whole), strict=False)
    return not mask.requires_grad and mask.dim() in (2, 4) and all(n in (1, size) for n, size in sizes)


def _aligned(mask: Tensor) -> Tensor:
    """The mask with rows that begin at multiples of eight elements, as the memory-efficient kernel reads it."""
    if mask.stride(-1) == 1 and all(s % 8 == 0 for s in mask.stride()[:-1]):
        return mask
    width = mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, -width % 8))[..., :width]


# -- cuDNN: aten/src/ATen/native/Normalization.cpp, RNN.cpp, GridSampler.cpp -------------------------------------------

_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # cudnnRNNMode_t
_CUDNN_KERNEL = 1  # at::native::BatchNormBackend::Cudnn
_LARGEST = (1 << 31) - 1


def _batch_norm(  # noqa: PLR0913, PLR0917  # the op's own arguments
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    args = (x, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled)
    tracked = running_mean is not None and running_var is not None
    if (
        weight is not None
        and bias is not None
        and torch.bfloat16 not in (x.dtype, weight.dtype)
        and (x.dtype is not torch.float16 or weight.dtype is torch.float32)
        and (tracked or (training and running_mean is None and running_var is None))
        and x.dim() >= 3  # noqa: PLR2004
        and x.shape[0] <= (880801 if training else _MOST)
        and torch.backends.cudnn.enabled
        and x.numel() < _LARGEST
        and x.numel() > 0
    ):
        packed = x if _is_packed(x) else x.contiguous()
        kernel = aten.cudnn_batch_norm
        return (*kernel(packed, weight, bias, running_mean, running_var, training, momentum, eps), _CUDNN_KERNEL)
    return _as_elsewhere(aten._batch_norm_impl_index.default, *args)


def _is_packed(x: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.is_contiguous() or (x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()]))


def _grid_sampler(x: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool) -> Any:
    if (
        torch.backends.cudnn.enabled
        and x.dtype in (torch.float32, torch.float64, torch.float16)
        and x.numel() > 0
        and (mode, padding, align_corners) == (0, 0, True)
        and x.dim() == 4  # noqa: PLR2004
        and x.shape[1] <= 1024  # noqa: PLR2004
    ):
        return aten.cudnn_grid_sampler(x, grid)
    return _as_elsewhere(aten.grid_sampler.default, x, grid, mode, padding, align_corners)


def _recurrent(op: Any, mode: int) -> Callable[..., Any]:
    """A recurrent layer of sequences of one length: one kernel of cuDNN for all its steps, if cuDNN takes them."""

    def run(  # noqa: PLR0913, PLR0917  # the op's own arguments
        x: Tensor,
        hx: Any,
        params: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        args = (x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)
        takes = x.dtype in (*_HALF, torch.float32, torch.float64) and x.numel() > 0 and torch.backends.cudnn.enabled
        if not takes:
            return _as_elsewhere(op, *args)
        state, cell = hx if mode == _MODES["lstm"] else (hx, None)
        hidden = state.shape[2] if cell is None else cell.shape[2]
        projected = state.shape[2] if cell is not None and state.shape[2] != hidden else 0
        weights = x.new_empty(sum(weight.numel() for weight in params))
        per_layer = (4 if has_biases else 2) + (1 if projected else 0)
        out, last, last_cell, *_ = aten._cudnn_rnn(
            x,
            list(params),
            per_layer,
            weights,
            state,
            cell,
            mode,
            hidden,
            projected,
            num_layers,
            batch_first,
            dropout,
            train,
            bidirectional,
            [],
            torch.empty(0, dtype=torch.uint8, device=x.device) if dropout and train else None,
        )
        return (out, last) if cell is None else (out, last, last_cell)

    return run


class _RmsNorm(torch.autograd.Function):
    """CUDA's RMS norm: a build without CUDA has neither the kernel nor its derivative, and runs the parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: Sequence[int], weight: Tensor | None, eps: float | None) -> Any:
        """The norm and the inverse root of each row."""
        with torch._C._AutoDispatchBelowAutograd():
            out, scale = aten._fused_rms_norm(x, size, weight, eps)
        ctx.size = size
        ctx.save_for_backward(x, scale, weight)
        ctx.mark_non_differentiable(scale)
        return out, scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The gradients of the input and of the weight."""
        x, scale, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[2]]
        of_x, of_weight = aten._fused_rms_norm_backward(gradients[0], x, ctx.size, scale, weight, wanted)
        return of_x, None, of_weight, None
