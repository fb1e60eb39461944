"""Ops that torch composes of other ops, and that create new tensors on the way.

Their parts have the rules. The new tensor (a range of classes, a causal mask, an identity) is the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise_tensor.padded import is_left_aligned, padded_batch

__all__ = ["CREATING", "INSTEAD"]

aten = torch.ops.aten

CREATING = (
    aten.combinations.default,
    aten.istft.default,
    aten.linalg_matrix_power.default,
    aten.linalg_matrix_rank.atol_rtol_float,
    aten.linalg_matrix_rank.atol_rtol_tensor,
    aten.linalg_matrix_rank.default,
    aten.linalg_matrix_rank.tol_tensor,
    aten.linalg_vander.default,
    aten.matrix_power.default,
    aten.nanquantile.default,
    aten.nanquantile.scalar,
    aten.quantile.default,
    aten.quantile.scalar,
    aten.trace_backward.default,
)


WHOLE_LAYERS = (
    aten.grid_sampler.default,
    aten.gru.data,
    aten.gru.input,
    aten.lstm.data,
    aten.lstm.input,
    aten.rnn_relu.data,
    aten.rnn_relu.input,
    aten.rnn_tanh.data,
    aten.rnn_tanh.input,
)


def _mvlgamma(x: Tensor, p: int) -> Tensor:
    """The sum of ``lgamma(x + (1 - j) / 2)`` for j of 1 to p, plus ``p (p - 1) / 4 log pi``.

    torch's own gradient formula for the op adds a plain tensor, which no rank may do.
    """
    if p < 1:
        raise RuntimeError("p has to be greater than or equal to 1")
    if x.dtype == torch.bool:
        raise RuntimeError("The input tensor may not be a boolean tensor.")
    terms = [torch.lgamma(x + (1 - j) / 2) for j in range(1, p + 1)]
    return sum(terms[1:], start=terms[0]) + p * (p - 1) / 4 * math.log(math.pi)


def _tensor_split(x: Tensor, where: Tensor, dim: int = 0) -> list[Tensor]:
    """Every rank reads the numbers; torch's kernel reads them from memory that a MeshTensor does not have."""
    return list(torch.tensor_split(x, where.tolist(), dim))


def _one_hot(x: Tensor, num_classes: int = -1) -> Tensor:
    """A comparison with a range, as torch has it for tensor classes, and the checks that torch leaves out there."""
    if x.dtype != torch.int64:
        raise RuntimeError("one_hot is only applicable to index tensor of type LongTensor.")
    if x.numel() == 0 and num_classes <= 0:
        raise RuntimeError("Can not infer total number of classes from empty tensor.")
    if x.numel():
        # Both have one value on every rank, so every rank raises.
        torch.ops.aten._assert_async.msg(x.min() >= 0, "Class values must be non-negative.")
        if num_classes == -1:
            num_classes = int(x.max().item()) + 1
        else:
            torch.ops.aten._assert_async.msg(x.max() < num_classes, "Class values must be smaller than num_classes.")
    classes = x.new_ones([num_classes]).cumsum(0) - 1  # made of an operand, so that it lies on the mesh
    return (x.unsqueeze(-1) == classes).to(torch.int64)


def _fill_diagonal_(x: Tensor, value: Any, wrap: bool = False) -> Any:
    """The diagonals are filled. Torch's composite names them by a place in memory, which a view does not have here."""
    if wrap and not x.is_contiguous():
        return NotImplemented
    if x.dim() < 2:  # noqa: PLR2004  # as torch
        raise RuntimeError("dimensions must larger than 1")
    if x.dim() > 2 and len(set(x.shape)) > 1:  # noqa: PLR2004
        raise RuntimeError("all dimensions of input must be of equal length")
    diagonal = x
    if wrap and x.dim() == 2 and x.shape[0] > x.shape[1]:  # noqa: PLR2004  # another begins below each
        diagonal = x.view(-1)[:: x.shape[1] + 1]
    while diagonal.dim() > 1:
        diagonal = diagonal.diagonal()
    diagonal.fill_(value)
    return x


def _in_parts(op: Any) -> Callable[..., Any]:
    """A recurrent layer or a sampling of a grid as the ops that have rules, whatever device it is on.

    Without cuDNN, and of an LSTM without oneDNN: their kernels for a whole layer hide the products that have rules.
    """

    def run(*args: Any) -> Any:
        one_dnn: Any = torch.backends.mkldnn
        cudnn: Any = torch.backends.cudnn
        if not one_dnn.enabled and not cudnn.enabled:
            return NotImplemented
        # Not an assignment to one_dnn.enabled, which torch refuses once its own testing tools are imported.
        rest = {name: getattr(one_dnn, name) for name in ("deterministic", "allow_tf32", "fp32_precision")}
        of_cudnn = {name: getattr(cudnn, name) for name in ("benchmark", "benchmark_limit", *rest)}
        with one_dnn.flags(enabled=False, **rest), cudnn.flags(enabled=False, **of_cudnn):
            return op(*args)

    return run


# -- sequences of several lengths ------------------------------------------------------------------------------------


def _pack_padded_sequence(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """The steps of a batch of sequences, one after the other; torch's kernel reads the lengths from memory.

    It packs the numbers of the steps here, which are then looked up. The batch sizes are plain, as torch's recurrent
    kernels read them from memory, too.
    """
    lengths = torch.tensor(lengths.tolist(), dtype=torch.int64)
    steps = _count(x.shape[0] * x.shape[1]).view(x.shape[:2])
    packed, batch_sizes = aten._pack_padded_sequence(steps, lengths, batch_first)
    return x.flatten(0, 1).index_select(0, _on_mesh_of(x, packed)), batch_sizes


def _pad_packed_sequence(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """The inverse: each step of each sequence is looked up, and what there is not is filled."""
    longest, batch = len(batch_sizes), int(batch_sizes[0])
    if 0 < total_length < longest:
        raise RuntimeError(
            "Expected total_length to be at least the length of the longest sequence in input, but got "
            f"total_length={total_length} and max sequence length being {longest}"
        )
    absent = batch_sizes[:, None] <= _count(batch)
    first = batch_sizes.cumsum(0) - batch_sizes
    steps = (first[:, None] + _count(batch)).masked_fill(absent, 0)
    more = max(total_length, longest) - longest
    steps, absent = (torch.nn.functional.pad(t, (0, 0, 0, more), value=v) for t, v in ((steps, 0), (absent, True)))
    if batch_first:
        steps, absent = steps.t(), absent.t()
    padded = data.index_select(0, _on_mesh_of(data, steps.flatten())).view(*steps.shape, *data.shape[1:])
    missing = _on_mesh_of(data, absent.long()).bool().view(*absent.shape, *[1] * (data.dim() - 1))
    return padded.masked_fill(missing, padding_value), (batch_sizes[:, None] > _count(batch)).sum(0)


def _count(n: int) -> Tensor:
    """The range of n as a plain tensor, which ``torch.arange`` would put on the mesh under ``sw.on``."""
    return torch.tensor(1).expand(n).cumsum(0) - 1


def _on_mesh_of(x: Tensor, whole: Tensor) -> Tensor:
    """A tensor of whole numbers that is the same on every rank, on the mesh of another; made of an operand for that."""
    return x.new_zeros(whole.shape, dtype=torch.int64) + whole.to(x.device)


def _ctc_loss(
    scores: Tensor,
    targets: Tensor,
    inputs: Any,
    lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    """Torch's own formula. Its kernel reads and writes lengths in memory that a MeshTensor does not have."""
    inputs, lengths = (t.flatten().tolist() if isinstance(t, Tensor) else t for t in (inputs, lengths))
    is_batch = scores.dim() == 3  # noqa: PLR2004  # steps, batch, classes
    if not is_batch:
        scores, targets = scores.unsqueeze(1), targets.unsqueeze(0)
    losses: Tensor = aten._ctc_loss.default(scores, targets, inputs, lengths, blank, zero_infinity)[0]
    losses = losses if is_batch else losses.squeeze(0)
    if zero_infinity:
        losses = losses.masked_fill(losses == math.inf, 0)
    if reduction == 1:
        mean_of = torch.tensor(lengths).clamp(min=1).view(losses.shape)
        return (losses / _on_mesh_of(losses, mean_of)).mean()
    return losses.sum() if reduction == 2 else losses  # noqa: PLR2004  # torch's number for a sum


INSTEAD: dict[Any, Callable[..., Any]] = {
    aten._nested_tensor_from_mask_left_aligned.default: is_left_aligned,
    aten._nested_tensor_from_mask.default: padded_batch,
    aten._pack_padded_sequence.default: _pack_padded_sequence,
    aten._pad_packed_sequence.default: _pad_packed_sequence,
    aten.fill_diagonal_.default: _fill_diagonal_,
    aten.ctc_loss.IntList: _ctc_loss,
    aten.ctc_loss.Tensor: _ctc_loss,
    **{op: _in_parts(op) for op in WHOLE_LAYERS},
    aten.mvlgamma.default: _mvlgamma,
    aten.one_hot.default: _one_hot,
    aten.tensor_split.tensor_indices_or_sections: _tensor_split,
}
