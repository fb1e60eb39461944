"""Graph networks: node features on the mesh, edges whole."""

from functools import partial

import torch
import torch_geometric.nn as pyg
from torch import nn
from zoo_trial import BATCH, Recipe


class OnGraph(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.first = layer(6, 8)
        self.second = layer(8, 4)

    def forward(self, x, edges):
        return self.second(self.first(x, edges).relu(), edges)


LAYERS = {
    "gcn": pyg.GCNConv,
    "sage": pyg.SAGEConv,
    "gat": lambda a, b: pyg.GATConv(a, b // 2, heads=2),
    "gat_v2": lambda a, b: pyg.GATv2Conv(a, b // 2, heads=2),
    "gin": lambda a, b: pyg.GINConv(nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b))),
    "transformer": lambda a, b: pyg.TransformerConv(a, b // 2, heads=2),
    "tag": pyg.TAGConv,
    "cheb": lambda a, b: pyg.ChebConv(a, b, 2),
    "arma": pyg.ARMAConv,
}


def made(layer):
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0, 3], [1, 2, 3, 4, 5, 6, 7, 0, 5, 6]])
    return OnGraph(layer), (torch.randn(2 * BATCH, 6), edges)


recipes = [Recipe(name, "torch_geometric", partial(made, layer)) for name, layer in LAYERS.items()]
