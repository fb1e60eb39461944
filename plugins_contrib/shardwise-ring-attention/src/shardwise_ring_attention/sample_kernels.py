"""CPU kernels for the flash attention of CUDA, in plain torch, so that the oracle can judge its rule on any machine.

They keep the contract of the real ones: the results, their shapes and dtypes, causal ones that are square, weights
whose sum is 1 whatever the logsumexp rounds to, and an infinite logsumexp where no score is a number above minus
infinity.
"""

import torch

aten = torch.ops.aten


def scores(q, k, causal, scale):
    found = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    assert not causal or q.shape[2] == k.shape[2], "the real one counts from the end where they differ"
    return found.masked_fill(torch.ones_like(found).tril().logical_not(), float("-inf")) if causal else found


def forward(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    found = scores(q, k, is_causal, scale)
    top = found.amax(-1, keepdim=True).nan_to_num(nan=float("nan"), posinf=float("inf"), neginf=0.0)
    weights = (found - top).exp()
    total = weights.sum(-1, keepdim=True)
    nothing = (total == 0) | total.isnan()
    out = weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1) / total.masked_fill(nothing, 1)
    lse = (top + total.log()).masked_fill(nothing, float("inf"))[..., 0]
    seeds = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return out, lse.float(), None, None, q.shape[2], k.shape[2], *seeds, q.new_empty(0)


def backward(grad, q, k, v, out, lse, _cq, _ck, max_q, max_k, dropout_p, causal, _seed, _offset, *, scale=None):
    assert (max_q, max_k) == (q.shape[2], k.shape[2])
    many, few = q.shape[1], k.shape[1]
    weights = (scores(q, k, causal, scale) - lse[..., None]).exp()
    inner = grad @ v.repeat_interleave(many // few, 1).mT
    of_scores = weights * (inner - (grad * out).sum(-1, keepdim=True))
    of_scores = of_scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    of_query = of_scores @ k.repeat_interleave(many // few, 1)
    groups = [x.unflatten(1, (few, many // few)).sum(2) for x in (of_scores.mT @ q, weights.mT @ grad)]
    return of_query, *groups


def register():
    """Install the kernels for the life of this process; once."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", backward, "CPU")
    return library


LIBRARY = register()
