"""Programs of the usual kinds for a mesh of any size, and training steps of them, on tensors without data."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.testing import on_device

WARM = 2  # steps before one that is watched: the first makes plans, the second makes those of later steps


def sharded(tensor, mesh, dim=0):
    """The tensor with a dim sharded over the first mesh dim."""
    placements = [Shard(dim), *[Replicate()] * (mesh.ndim - 1)]
    return sw.distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def distributed(module, mesh, plan=None):
    sw.distribute_module(module, mesh, plan or {}, src_data_rank=None)
    return module


class Block(nn.Module):
    """A transformer block: RMS norm, grouped queries, a gated feed-forward."""

    def __init__(self, width=64, heads=4, key_heads=4, dropout=0.0):
        super().__init__()
        self.heads, self.key_heads, self.dropout = heads, key_heads, dropout
        self.size = width // heads
        self.before, self.between = nn.RMSNorm(width), nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * key_heads * self.size, bias=False)
        self.out = nn.Linear(width, width)
        self.gate, self.up = nn.Linear(width, 4 * width, bias=False), nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        normed = self.before(x)
        query = self.query(normed).view(batch, length, self.heads, self.size).transpose(1, 2)
        key, value = self.key_value(normed).view(batch, length, 2, self.key_heads, self.size).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.heads != self.key_heads, dropout_p=dropout
        )
        x = x + functional.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, width)), dropout)
        normed = self.between(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Language(nn.Module):
    """An embedding, blocks, and the loss of the next token."""

    def __init__(self, dropout=0.0, recompute=False, key_heads=4):
        super().__init__()
        self.embedding = nn.Embedding(96, 64)
        self.blocks = nn.ModuleList(Block(dropout=dropout, key_heads=key_heads) for _ in range(2))
        self.head = nn.Linear(64, 96)
        self.recompute = recompute

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, stride=2),
            nn.GroupNorm(2, 8), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 4 * 4, 10),
        )  # fmt: skip

    def forward(self, x):
        return self.body(x).square().mean()


class Experts(nn.Module):
    """A mixture of experts, each token for the best two."""

    def __init__(self, experts=4, width=16):
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width))
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width))

    def forward(self, x):
        best, which = self.gate(x).softmax(-1).topk(2, -1)
        share = (functional.one_hot(which, self.gate.out_features).to(x.dtype) * best.unsqueeze(-1)).sum(-2)
        hidden = torch.einsum("bd,edh->ebh", x, self.up).relu()
        return torch.einsum("ebd,be->bd", torch.einsum("ebh,ehd->ebd", hidden, self.down), share).square().mean()


class Sampled(nn.Module):
    """An image that is sampled at moved places."""

    def __init__(self):
        super().__init__()
        self.places = nn.Linear(2, 2)

    def forward(self, x):
        grid = self.places(torch.zeros_like(x[:, :2]).movedim(1, -1))
        return functional.grid_sample(x, grid, align_corners=True).square().mean()


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers = getattr(nn, kind)(8, 16, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.layers(x)[0].square().mean()


def ids(mesh):
    return sharded(torch.zeros(16, 8, dtype=torch.int64), mesh)


def images(mesh):
    return sharded(torch.zeros(16, 3, 16, 16), mesh)


def rows(mesh):
    return sharded(torch.zeros(16, 16), mesh)


def sequences(mesh):
    return sharded(torch.zeros(16, 5, 8), mesh)


def adamw(**options):
    return lambda parameters: torch.optim.AdamW(parameters, **options)


def sgd(**options):
    return lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, **options)


FUSED = adamw(fused=True)

# By name: the model, its input, the optimizer, and the dtype of autocast (float16 has a scaler).
PROGRAMS = {
    "language": (Language, ids, FUSED, None),
    "language bfloat16": (lambda: Language(key_heads=2).bfloat16(), ids, FUSED, None),
    "language autocast": (lambda: Language(key_heads=2), ids, FUSED, torch.bfloat16),
    "language scaled": (Language, ids, FUSED, torch.float16),
    "language scaled foreach": (Language, ids, adamw(foreach=True), torch.float16),
    "language dropout": (lambda: Language(0.1), ids, FUSED, None),
    "language recomputed": (lambda: Language(0.1, recompute=True), ids, FUSED, None),
    "language foreach": (Language, ids, adamw(foreach=True), None),
    "language capturable": (Language, ids, adamw(foreach=True, capturable=True), None),
    "language sgd": (Language, ids, sgd(foreach=True), None),
    "language sgd fused": (Language, ids, sgd(fused=True), None),
    "convolutions": (ConvNet, images, FUSED, None),
    "experts": (Experts, rows, FUSED, None),
    "sampled": (Sampled, images, FUSED, None),
    "recurrent": (lambda: Recurrent("RNN"), sequences, FUSED, None),
    "lstm": (lambda: Recurrent("LSTM"), sequences, FUSED, None),
    "gru": (lambda: Recurrent("GRU"), sequences, FUSED, None),
}


def training(name, watched=None):
    """A program that trains for some steps; ``watched`` receives where a warm one leaves the device."""
    make, inputs, optimizer_of, dtype = PROGRAMS[name]

    def program(mesh):
        model = distributed(make(), mesh)
        x = inputs(mesh)
        optimizer = optimizer_of(model.parameters())
        scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)

        def step():
            with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
                loss = model(x)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        for _ in range(WARM):
            step()
        if watched is None:
            step()
            return
        # As in a program of its own, where a tensor that names no device is on the host.
        with torch.device("cpu"), on_device(raises=False) as waits:
            step()
        watched.extend(waits)

    return program
