"""A mixture of experts, every expert on every token with a weight (dense dispatch)."""

import torch
from torch import nn
from torch.nn import functional

CHOSEN = 2


class Experts(nn.Module):
    """Experts of two products each; a token takes the two that its gate prefers."""

    def __init__(self, width, inner, experts):
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(0.02 * torch.randn(experts, width, inner))
        self.down = nn.Parameter(0.02 * torch.randn(experts, inner, width))

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        best, places = scores.topk(CHOSEN, -1)
        weights = torch.zeros_like(scores).scatter(-1, places, best)
        hidden = functional.silu(torch.einsum("btd,edh->ebth", x, self.up))
        return torch.einsum("ebtd,bte->btd", torch.einsum("ebth,ehd->ebtd", hidden, self.down), weights)


class MixtureOfExperts(nn.Module):
    """Layers of experts, and a loss of what they make."""

    def __init__(self, layers, width, inner, experts):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.blocks = nn.ModuleList(Experts(width, inner, experts) for _ in range(layers))

    def forward(self, x):
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return x.pow(2).mean()
