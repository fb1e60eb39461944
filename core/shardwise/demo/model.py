"""A small byte-level GPT in plain torch: nothing in it depends on a mesh."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.demo.settings import RunSettings

__all__ = ["GPT", "build"]

BYTES = 256


class Attention(nn.Module):
    """Causal self-attention over ``(batch, time, width)``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, width, bias=False)
        self.wv = nn.Linear(width, width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix each position with the ones before it; keeps the shape."""
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """Two linear layers with a GELU between, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Keeps the shape."""
        out: Tensor = self.down(functional.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """One transformer layer, normalised before each half."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.feed = FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        """Keeps the shape."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.feed(self.norm2(x))
        return out


class GPT(nn.Module):
    """Bytes in, a score for every possible next byte out."""

    def __init__(self, *, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores ``(batch, time, 256)`` for ids ``(batch, time)``, with time equal to the context."""
        x = self.bytes(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def build(settings: RunSettings) -> GPT:
    """The model of the settings, with the weights of their seed: the same numbers in every process."""
    torch.manual_seed(settings.seed)
    return GPT(layers=settings.layers, width=settings.width, heads=settings.heads, context=settings.context)
