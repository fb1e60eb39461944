"""Sample calls for the oracle."""

import torch

# For its kernels: the oracle runs the ops of CUDA too, and a lowering calls them.
from shardwise_ring_attention import sample_kernels  # noqa: F401

aten = torch.ops.aten
FOR_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH = aten._scaled_dot_product_flash_attention.default
FOR_CPU_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default

# batch, query heads, key heads, queries, keys
SIZES = [(2, 2, 2, 16, 16), (2, 4, 2, 5, 5), (1, 3, 1, 7, 7), (3, 2, 2, 9, 4), (2, 2, 2, 3, 11), (1, 2, 2, 1, 6)]


def made(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def operands(sizes, dtype=torch.float64):
    batch, heads, few, queries, keys = sizes
    shapes = (batch, heads, queries, 4), (batch, few, keys, 4), (batch, few, keys, 4)
    return [made(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


def turned(tensors):
    """Heads beside positions in memory, as a model makes them of one projection."""
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]


def for_cpu():
    calls = [([*operands(sizes), 0.0, causal], {}) for sizes in SIZES for causal in (False, True)]
    calls += [([*turned(operands(SIZES[0])), 0.0, True], {"scale": 0.3})]
    calls += [([*operands(SIZES[1], torch.bfloat16), 0.0, causal], {}) for causal in (False, True)]
    masks = made(5, 5), made(2, 1, 5, 5), made(1, 4, 1, 5)
    return calls + [(operands(SIZES[1]), {"attn_mask": mask}) for mask in masks]


def flash():
    calls = [([*operands(s, torch.float32), 0.0, causal], {}) for s in SIZES for causal in (False, True)]
    return [(args, named) for args, named in calls if not args[4] or args[0].shape[2] == args[1].shape[2]]


def for_cpu_backward():
    found = []
    for args, named in for_cpu():
        query, key, value, dropout, causal = [*args, 0.0, False][:5]
        out, lse = FOR_CPU(*args, **named)
        grad = made(*out.shape, dtype=out.dtype, seed=9)
        found.append(([grad, query, key, value, out, lse, dropout, causal], named))
    return found


def flash_backward():
    found = []
    for args, _ in flash():
        query, key, value, dropout, causal = args
        out, lse, *starts, lq, lk, seed, offset, _ = FLASH(*args)
        grad = made(*out.shape, dtype=out.dtype, seed=9)
        found.append(([grad, query, key, value, out, lse, *starts, lq, lk, dropout, causal, seed, offset], {}))
    return found


SAMPLES = {
    FOR_CPU: for_cpu,
    FLASH: flash,
    FOR_CPU_BACKWARD: for_cpu_backward,
    FLASH_BACKWARD: flash_backward,
}
