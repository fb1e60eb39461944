"""Sample calls for the oracle: sizes that split evenly and not, whole tiles and parts, all dtypes of the kernels."""

import torch

# For its kernels, which lowerings call: the oracle's stand-ins take the place of an op, not of what a lowering calls.
from shardwise_quant import sample_kernels  # noqa: F401

aten = torch.ops.aten


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(*shape, low=-128, high=128, dtype=torch.int8, seed=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def positive(*shape, dtype=torch.float32, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).add(0.1).to(dtype)


def int_mm():
    sizes = [(8, 16, 12), (5, 7, 3), (1, 9, 2), (3, 0, 4), (0, 4, 3), (20, 130, 9)]
    calls = [([whole(m, k), whole(k, n, seed=1)], {}) for m, k, n in sizes]
    calls.append(([whole(6, 8).t(), whole(6, 5, seed=1)], {}))
    calls.append(([whole(6, 8), whole(5, 8, seed=1).t()], {}))
    calls.append(([whole(6, 8, low=0, high=255, dtype=torch.uint8), whole(8, 5, seed=1)], {}))
    return calls


def int_mm_out():
    return [
        (args, {"out": torch.full((args[0].shape[0], args[1].shape[1]), 3, dtype=torch.int32)}) for args, _ in int_mm()
    ]


# The CPU kernel reads past the end where k is no multiple of 16 in bfloat16, so the whole calls keep to that; their
# shards need not.
def int8pack():
    calls = []
    for dtype, k in ((torch.float32, 7), (torch.float32, 32), (torch.bfloat16, 48), (torch.bfloat16, 16)):
        for m, n in ((5, 6), (8, 12), (1, 3)):
            calls.append(([normal(m, k, dtype=dtype), whole(n, k), positive(n, dtype=dtype)], {}))
    calls.append(([normal(5, 48, dtype=torch.float16), whole(6, 48), positive(6, dtype=torch.float16)], {}))
    calls += [([normal(m, k), whole(n, k), positive(n)], {}) for m, k, n in ((0, 8, 4), (4, 0, 3), (4, 8, 0))]
    return calls


def pack_for_cpu():
    sizes = [(256, 8), (128, 6), (96, 4), (64, 2), (16, 4), (192, 4)]
    return [([whole(n, k, low=0, high=16, dtype=torch.int32), 1], {}) for n, k in sizes]


def int4(pack, sizes, dtypes=(torch.float32, torch.bfloat16)):
    calls = []
    for m, n, k, group in sizes:
        weight = pack(whole(n, k, low=0, high=16, dtype=torch.int32))
        for dtype in dtypes:
            x, scales = normal(m, k, dtype=dtype), positive(k // group, n, 2, dtype=dtype)
            calls.append((x, weight, group, scales))
    return calls


def int4_for_cpu():
    sizes = [(5, 256, 64, 32), (4, 128, 64, 64), (3, 96, 32, 32), (1, 384, 32, 32)]
    return [(list(call), {}) for call in int4(lambda w: aten._convert_weight_to_int4pack_for_cpu(w, 1), sizes)]


def int4_blocked():
    from shardwise_quant.blocked import pack

    sizes = [(5, 256, 128, 32), (4, 128, 192, 64), (3, 64, 64, 32), (1, 192, 96, 32), (0, 64, 64, 64)]
    return [([x, w, scales, group], {}) for x, w, group, scales in int4(pack, sizes)]


def eighths(*shape, seed=0, dtype=torch.float8_e4m3fn):
    """Float8 with few bits: every sum of products is exact, so that no order of adding up rounds."""
    return whole(*shape, low=-4, high=5, seed=seed, dtype=torch.float32).to(dtype)


def power(*shape, seed=0):
    return 2.0 ** whole(*shape, low=-2, high=3, seed=seed, dtype=torch.float32)


def scales_of(m, n):
    return (torch.tensor(0.5), torch.tensor(2.0)), (power(m, 1), power(1, n, seed=1))


def scaled():
    calls = []
    for m, k, n in ((8, 16, 12), (5, 7, 6), (1, 16, 3), (4, 3, 1), (0, 4, 3)):
        for scales in scales_of(m, n):
            a, b = eighths(m, k), eighths(n, k, seed=1).t()
            for dtype in (torch.float32, torch.bfloat16):
                calls.append(([a, b, *scales], {"out_dtype": dtype}))
                calls.append(([a, b, *scales, whole(n, low=-4, high=5, dtype=dtype)], {"out_dtype": dtype}))
        calls.append(([a, b, *scales_of(m, n)[0], None, torch.tensor(2.0)], {}))
        calls.append(([eighths(k, m).t(), eighths(k, n), *scales_of(m, n)[0]], {"out_dtype": torch.float32}))
    return calls


def scaled_v2():
    calls = []
    for m, k, n in ((8, 16, 12), (5, 7, 6), (1, 3, 2)):
        for recipe, scales in enumerate(scales_of(m, n)):
            for bias in (None, whole(n, low=-4, high=5, dtype=torch.bfloat16)):
                of = [[scales[0]], [recipe], [0], [scales[1]], [recipe], [0]]
                calls.append(([eighths(m, k), eighths(n, k, seed=1).t(), *of, bias, torch.bfloat16], {}))
    return calls


def dynamic_weights(n, k, bias):
    packed = whole(n, k // 2, low=0, high=255, dtype=torch.uint8)
    return [packed, positive(n), positive(n, seed=1) if bias else None, k, k, n]


def dynamic_pack():
    return [(dynamic_weights(n, k, bias), {}) for n, k in ((6, 32), (3, 64)) for bias in (False, True)]


def dynamic_mm():
    calls = []
    for m, k, n in ((8, 32, 6), (5, 64, 3), (1, 32, 2)):
        packed = aten._dyn_quant_pack_4bit_weight(*dynamic_weights(n, k, bias=False))
        calls.append(([normal(m, k), packed, k, k, n], {}))
    return calls


# -- what only CUDA has ------------------------------------------------------------------------------------------


def pack_for_cuda():
    sizes = [(64, 128, 2), (32, 256, 4), (8, 32, 2), (24, 96, 2)]
    return [([whole(n, k // 2, low=0, high=256, dtype=torch.uint8), tiles], {}) for n, k, tiles in sizes]


def int4_for_cuda():
    calls = []
    for m, n, k, group, tiles in ((5, 64, 256, 32, 2), (4, 32, 512, 64, 4), (3, 8, 128, 128, 8), (1, 24, 192, 64, 2)):
        packed = aten._convert_weight_to_int4pack(whole(n, k // 2, low=0, high=256, dtype=torch.uint8), tiles)
        scales = positive(k // group, n, 2, dtype=torch.bfloat16)
        calls.append(([normal(m, k, dtype=torch.bfloat16), packed, group, scales], {}))
    return calls


SAMPLES = {
    aten._int_mm.default: int_mm,
    aten._int_mm.out: int_mm_out,
    aten._weight_int8pack_mm.default: int8pack,
    aten._convert_weight_to_int4pack_for_cpu.default: pack_for_cpu,
    aten._weight_int4pack_mm_for_cpu.default: int4_for_cpu,
    torch.ops.shardwise_quant.int4_linear.default: int4_blocked,
    aten._convert_weight_to_int4pack.default: pack_for_cuda,
    aten._weight_int4pack_mm.default: int4_for_cuda,
    aten._scaled_mm.default: scaled,
    aten._scaled_mm_v2.default: scaled_v2,
    aten._dyn_quant_pack_4bit_weight.default: dynamic_pack,
    aten._dyn_quant_matmul_4bit.default: dynamic_mm,
}

UNSAMPLED = (
    {} if torch.__version__ >= "2.12" else {aten._scaled_mm_v2.default: "it has no CPU kernel before torch 2.12"}
)
