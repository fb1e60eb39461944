"""CUDA's 4-bit kernels in plain torch, registered for CPU in the process of a test, so that the oracle can judge their
rules on any machine.

They keep the contract of the real ones, layout of the packed weight and refusals included
(aten/src/ATen/native/cuda/int4mm.cu): a word holds eight values of one row, from two tiles of 16 columns.
"""

import torch

aten = torch.ops.aten

# Within 16 columns, lane t of 4 holds the columns 2t, 2t+1, 2t+8, 2t+9; the nibbles of a word are those of the even
# places, low and high tile, then those of the odd ones.
NIBBLES = (1, 3, 5, 7, 0, 2, 4, 6)


def columns_of(lane):
    first = [2 * lane, 2 * lane + 1, 2 * lane + 8, 2 * lane + 9]
    return first + [16 + c for c in first]


def pack(weight, inner):
    assert inner in (2, 4, 8)
    assert weight.shape[1] * 2 % (16 * inner) == 0
    n, k = weight.shape[0], weight.shape[1] * 2
    values = torch.stack([weight >> 4, weight & 15], -1).reshape(n, k).long()
    tiles = values.view(n // 8, 8, k // (16 * inner), inner // 2, 32)
    words = torch.zeros(n // 8, k // (16 * inner), 32, inner // 2, dtype=torch.int64)
    for lane in range(4):
        eight = tiles[..., columns_of(lane)]
        word = sum(eight[..., c] << (4 * place) for place, c in enumerate(NIBBLES))
        words[:, :, lane::4] = word.permute(0, 2, 1, 3)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack(packed):
    tiles, supers, _, halves = packed.shape
    values = torch.zeros(tiles, 8, supers, halves, 32, dtype=torch.int64)
    for lane in range(4):
        word = packed[:, :, lane::4].permute(0, 2, 1, 3).long() & 0xFFFFFFFF
        for place, c in enumerate(NIBBLES):
            values[..., columns_of(lane)[c]] = word >> (4 * place) & 15
    return values.reshape(tiles * 8, supers * halves * 32)


def mm(x, packed, group, scales_and_zeros):
    m, k = x.shape
    n = packed.shape[0] * 8
    assert m > 0, "invalid configuration argument"
    assert x.is_contiguous()
    assert packed.is_contiguous()
    assert packed.shape[1:3] == (k // (32 * packed.shape[3]), 32)
    assert k % group == 0
    assert scales_and_zeros.shape == (k // group, n, 2)
    scale, zero = scales_and_zeros.float().unbind(-1)
    weight = (unpack(packed).view(n, k // group, group) - 8) * scale.t()[..., None] + zero.t()[..., None]
    return (x.float() @ weight.reshape(n, k).t()).to(x.dtype)


LIBRARY = torch.library.Library("aten", "IMPL")
LIBRARY.impl("_convert_weight_to_int4pack", pack, "CPU")
LIBRARY.impl("_weight_int4pack_mm", mm, "CPU")
