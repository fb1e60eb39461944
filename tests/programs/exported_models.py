"""A module that tests make graphs of, in a file that workers can import: Dynamo looks up there what its code names."""

import torch
from torch import nn


class Scored(nn.Module):
    """Has what graphs hold: parameters, a buffer, a plain tensor of its own, and one that it makes."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(6, 8)
        self.register_buffer("table", torch.linspace(0, 1, 40).view(5, 8))
        self.scale = torch.linspace(1, 2, 8)

    def forward(self, x):
        return (self.proj(x).relu() * self.scale + torch.arange(8.0) + self.table[1]).softmax(-1)
