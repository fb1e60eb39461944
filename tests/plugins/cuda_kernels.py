"""CPU kernels for ops that only CUDA has, in plain torch, so that the oracle can judge their rules on any machine.

They keep the contract of the real ones: which results there are, their shapes and dtypes, the padding of a logsumexp.
They are registered for the CPU dispatch key of this process, where no call but a test's reaches them.
"""

from contextlib import contextmanager

import torch
from torch.utils._pytree import tree_map

aten = torch.ops.aten
BLOCK = 32


def scores(q, k, bias, causal, scale):
    grouped = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    result = q @ grouped.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    result = result if bias is None else result + bias
    return result.masked_fill(torch.ones_like(result).tril().logical_not(), float("-inf")) if causal else result


def forward(q, k, v, bias, causal, scale):
    attention = scores(q, k, bias, causal, scale)
    lse = attention.logsumexp(-1)
    weights = (attention - lse[..., None]).exp()
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), lse.float()


def backward(grad, q, k, v, bias, lse, causal, scale):
    """Gradients of query, key, value and bias, by the definition: from the weights that the logsumexp gives back."""
    weights = (scores(q, k, bias, causal, scale) - lse[..., None]).exp()
    many, few = q.shape[1], k.shape[1]
    of_values = weights.transpose(-1, -2) @ grad
    inner = grad @ v.repeat_interleave(many // few, 1).transpose(-1, -2)
    of_scores = weights * (inner - (weights * inner).sum(-1, keepdim=True))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    of_query = of_scores @ k.repeat_interleave(many // few, 1) * factor
    of_keys = of_scores.transpose(-1, -2) @ q * factor
    groups = [x.unflatten(1, (few, many // few)).sum(2) for x in (of_keys, of_values)]
    return of_query, *groups, None if bias is None else of_scores.sum_to_size(bias.shape)


def number(dtype=torch.int64, shape=()):
    return torch.zeros(shape, dtype=dtype)


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    out, lse = forward(q, k, v, None, is_causal, scale)
    seeds = number(torch.uint64, (2,)), number(torch.uint64)
    return out, lse, None, None, q.shape[2], k.shape[2], *seeds, q.new_empty(0)


def flash_backward(
    grad, q, k, v, out, lse, _cq, _ck, max_q, max_k, dropout_p, is_causal, _seed, _offset, *, scale=None
):
    assert (max_q, max_k) == (q.shape[2], k.shape[2])
    return backward(grad, q, k, v, None, lse, is_causal, scale)[:3]


def efficient(q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    out, lse = forward(q, k, v, attn_bias, is_causal, scale)
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % BLOCK)) if compute_log_sumexp else lse[..., :0]
    return out, padded, number(), number()


def efficient_backward(
    grad, q, k, v, bias, out, lse, _seed, _offset, dropout_p, grad_input_mask, is_causal=False, *, scale=None
):
    result = backward(grad, q, k, v, bias, lse[..., : q.shape[2]], is_causal, scale)
    return tuple(x if wanted else None for x, wanted in zip(result, grad_input_mask, strict=True))


def cudnn(
    q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):
    out, lse = forward(q, k, v, attn_bias, is_causal, scale)
    return out, lse[..., None], None, None, q.shape[2], k.shape[2], number(), number(), None


def cudnn_backward(
    grad, q, k, v, out, lse, _seed, _offset, bias, _cq, _ck, max_q, max_k, dropout_p, is_causal, *, scale=None
):
    assert (max_q, max_k) == (q.shape[2], k.shape[2])
    return backward(grad, q, k, v, bias, lse[..., 0], is_causal, scale)[:3]


# -- recurrent cells: aten/src/ATen/native/cuda/RNN.cu ------------------------------------------------------------


def biased(gates, *biases):
    return sum((bias for bias in biases if bias is not None), gates)


def lstm_cell(input_gates, hidden_gates, cx, input_bias=None, hidden_bias=None):
    gates = biased(input_gates + hidden_gates, input_bias, hidden_bias).chunk(4, 1)
    i, f, g, o = gates[0].sigmoid(), gates[1].sigmoid(), gates[2].tanh(), gates[3].sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias):
    i, f, g, o = workspace.chunk(4, 1)
    of_hy = torch.zeros_like(cx) if grad_hy is None else grad_hy
    of_cell = of_hy * o * (1 - cy.tanh() ** 2) + (0 if grad_cy is None else grad_cy)
    of_o = of_hy * cy.tanh() * o * (1 - o)
    of_gates = torch.cat([of_cell * g * i * (1 - i), of_cell * cx * f * (1 - f), of_cell * i * (1 - g * g), of_o], 1)
    return of_gates, of_cell * f, of_gates.sum(0) if has_bias else None


def gru_cell(input_gates, hidden_gates, hx, input_bias=None, hidden_bias=None):
    (ir, iz, ic), (hr, hz, hc) = (
        biased(gates, bias).chunk(3, 1) for gates, bias in ((input_gates, input_bias), (hidden_gates, hidden_bias))
    )
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (ic + r * hc).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hc], 1)


def gru_cell_backward(grad_hy, workspace, has_bias):
    r, z, n, hx, hc = workspace.chunk(5, 1)
    of_n = grad_hy * (1 - z) * (1 - n * n)
    of_z, of_r = grad_hy * (hx - n) * z * (1 - z), of_n * hc * r * (1 - r)
    of_input, of_hidden = torch.cat([of_r, of_z, of_n], 1), torch.cat([of_r, of_z, of_n * r], 1)
    of_biases = [x.sum(0) if has_bias else None for x in (of_input, of_hidden)]
    return of_input, of_hidden, grad_hy * z, *of_biases


def in_wide(op):
    """A kernel of ``op`` with the dtype of the result as last positional argument."""

    def run(*args, **kwargs):
        *tensors, dtype = args
        return op(*(t.to(dtype) for t in tensors), **kwargs)

    return run


KERNELS = {
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_scaled_dot_product_cudnn_attention": cudnn,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
    **{f"{name}.dtype": in_wide(getattr(aten, name).default) for name in ("mm", "bmm")},
}


# -- the real ones ------------------------------------------------------------------------------------------------

ON_GPU = []


@contextmanager
def on_gpu():
    """While it lasts, the kernels below are the real ones: operands go to the GPU, results come back."""
    ON_GPU.append(True)
    try:
        yield
    finally:
        ON_GPU.pop()


def moved(value, device):
    return tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, value)


def chosen(name, kernel):
    op = getattr(aten, name.partition(".")[0])
    overload = getattr(op, name.partition(".")[2] or "default")

    def run(*args, **kwargs):
        if ON_GPU:
            found = moved(overload(*moved(args, "cuda"), **moved(kwargs, "cuda")), "cpu")
            # Where the generator stood differs from call to call, and says nothing without dropout.
            return tree_map(
                lambda x: x.zero_() if isinstance(x, torch.Tensor) and not x.is_floating_point() else x, found
            )
        return kernel(*args, **kwargs)

    return run


def register():
    """Install the kernels for the life of this process; once."""
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in KERNELS.items():
        library.impl(name, chosen(name, kernel), "CPU")
    return library


LIBRARY = register()
