"""Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
1, 2, 3" (SC 2011): four 32-bit words from a counter of four and a key of two, by ten rounds of multiplying and mixing.

There is no state, so any part of a stream can be computed by itself. Words are held in int64 tensors, whose products
wrap and so have all 64 bits. The same code runs on every device.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["WORD", "philox"]

WORD = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(even: Tensor, odd: Tensor, key: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Words 0 and 2, and words 1 and 3, of each counter's output.

    ``even`` holds words 0 and 2 of ``n`` counters, ``odd`` words 1 and 3: int64 of shape ``(2, n)``, each word in
    ``[0, 2**32)``. The results have the same form. Neither operand is changed.
    """
    multipliers = _multipliers(even.device)
    schedule = [[(word + i * step) & WORD for word, step in zip(key, _WEYL, strict=True)] for i in range(_ROUNDS)]
    # In each round the key's words have the order that the rows have in that round.
    rounds = [words if i % 2 else words[::-1] for i, words in enumerate(schedule)]
    keys = torch.tensor(rounds, device=even.device).view(_ROUNDS, 2, 1).unbind()
    buffers = [torch.empty_like(even) for _ in range(4)]
    # Each buffer with its two rows: on a small tensor a view in every round costs more than the arithmetic.
    product, high, spare, other = ((buffer, *buffer.unbind()) for buffer in buffers)
    words, (first, second) = even, odd.unbind()
    for i in range(_ROUNDS):
        # The rows swap in each round, and so do multipliers and keys. This avoids a copy.
        torch.mul(words, multipliers[i % 2], out=product[0])
        torch.bitwise_right_shift(product[0], 32, out=high[0])
        high[1].bitwise_xor_(second)
        high[2].bitwise_xor_(first)
        words = high[0].bitwise_xor_(keys[i]).bitwise_and_(WORD)
        _, first, second = odd_rows = product
        high, product, spare, other = spare, other, high, product
    return words, odd_rows[0].bitwise_and_(WORD)


@lru_cache
def _multipliers(device: torch.device) -> tuple[Tensor, ...]:
    first, second = _MULTIPLIERS
    return torch.tensor([[first, second], [second, first]], device=device).view(2, 2, 1).unbind()
