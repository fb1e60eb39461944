"""Philox4x32-10: the known answers of its authors, and the definition written out in plain integers."""

import pytest
import torch

from shardwise.rng.philox import philox

# kat_vectors of Random123 (Salmon, Moraes, Dror, Shaw, SC 2011), lines "philox4x32 10": counter, key, answer.
KNOWN = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text):
    return tuple(int(word, 16) for word in text.split())


def answered(counters, key):
    c = torch.tensor(counters).t()
    even, odd = philox(c[[0, 2]], c[[1, 3]], key)
    return torch.stack((even[0], odd[0], even[1], odd[1]), -1).tolist()


def by_definition(counter, key):
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [second >> 32 ^ c[1] ^ k[0], second & 0xFFFFFFFF, first >> 32 ^ c[3] ^ k[1], first & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN, ids=["zeros", "ones", "pi"])
def test_the_known_answers(counter, key, answer):
    assert answered([words(counter)], words(key)) == [list(words(answer))]
    assert by_definition(words(counter), words(key)) == list(words(answer))


def test_many_counters_at_once_are_as_defined():
    draw = torch.Generator().manual_seed(0)
    counters = torch.randint(1 << 32, (200, 4), generator=draw).tolist()
    key = tuple(torch.randint(1 << 32, (2,), generator=draw).tolist())
    assert answered(counters, key) == [by_definition(counter, key) for counter in counters]


def test_operands_are_left_as_they_are():
    even, odd = torch.arange(6).view(2, 3), torch.arange(6, 12).view(2, 3)
    philox(even, odd, (1, 2))
    assert even.flatten().tolist() == list(range(6))
    assert odd.flatten().tolist() == list(range(6, 12))
