"""The other models that plans are measured on, in plain torch: each takes its inputs and gives its loss."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

import shardwise as sw
from shardwise import Replicate, Shard

CLASSES = 1000


def heads_of(x, heads):
    """``(batch, time, heads * size)`` as ``(batch, heads, time, size)``."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


# -- a decoder like Llama --------------------------------------------------------------------------------------------


def turned(x, cos, sin):
    """Rotary positions: pairs of halves turn by an angle that grows with the position."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class GroupedAttention(nn.Module):
    """Causal attention in which several heads of queries share one of keys and values."""

    def __init__(self, width, heads, groups):
        super().__init__()
        self.heads, self.groups = heads, groups
        size = width // heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, groups * size, bias=False)
        self.wv = nn.Linear(width, groups * size, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x, cos, sin):
        q = turned(heads_of(self.wq(x), self.heads), cos, sin)
        k = turned(heads_of(self.wk(x), self.groups), cos, sin)
        k, v = (self.repeated(t) for t in (k, heads_of(self.wv(x), self.groups)))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))

    def repeated(self, x):
        """Keys or values, once for each head of queries."""
        return x.unsqueeze(2).expand(-1, -1, self.heads // self.groups, -1, -1).flatten(1, 2)


class GatedFeed(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    def __init__(self, width, heads, groups, inner):
        super().__init__()
        self.norm1 = nn.RMSNorm(width)
        self.attention = GroupedAttention(width, heads, groups)
        self.norm2 = nn.RMSNorm(width)
        self.feed = GatedFeed(width, inner)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.feed(self.norm2(x))


class Llama(nn.Module):
    """A decoder with RMS norms, rotary positions, grouped-query attention and gated feed-forward layers."""

    def __init__(self, layers, width, heads, groups, inner, words, context):
        super().__init__()
        self.words = nn.Embedding(words, width)
        size = width // heads
        angles = torch.outer(torch.arange(context), 10_000.0 ** (-torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, groups, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids, targets):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


# -- an encoder and a decoder ----------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention of ``x`` to itself, or to what an encoder has made."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x, other=None, *, causal=False):
        other = x if other is None else other
        q, k, v = (heads_of(w(t), self.heads) for w, t in ((self.wq, x), (self.wk, other), (self.wv, other)))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class Feed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(functional.gelu(self.up(x)))


class EncoderBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.feed = Attention(width, heads), Feed(width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class DecoderBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.attention, self.cross, self.feed = Attention(width, heads), Attention(width, heads), Feed(width)

    def forward(self, x, encoded):
        x = x + self.attention(self.norm1(x), causal=True)
        x = x + self.cross(self.norm2(x), encoded)
        return x + self.feed(self.norm3(x))


class EncoderDecoder(nn.Module):
    """A translator: each layer of the decoder also attends to what the encoder has made."""

    def __init__(self, layers, width, heads, words, context):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.encoder = nn.ModuleList(EncoderBlock(width, heads) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderBlock(width, heads) for _ in range(layers))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, source, ids, targets):
        encoded = self.words(source) + self.positions
        for block in self.encoder:
            encoded = block(encoded)
        encoded = self.norm1(encoded)
        x = self.words(ids) + self.positions
        for block in self.decoder:
            x = block(x, encoded)
        return functional.cross_entropy(self.head(self.norm2(x)).flatten(0, 1), targets.flatten())


# -- images ----------------------------------------------------------------------------------------------------------


class VisionTransformer(nn.Module):
    def __init__(self, layers, width, heads, image, patch, classes=CLASSES):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn((image // patch) ** 2, width))
        self.blocks = nn.ModuleList(EncoderBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images, targets):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x).mean(1)), targets)


class Bottleneck(nn.Module):
    def __init__(self, channels, inner, stride):
        super().__init__()
        out = 4 * inner
        self.conv1, self.norm1 = nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.norm2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv3, self.norm3 = nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out)
        self.short = None
        if stride > 1 or channels != out:
            self.short = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        y = self.norm1(self.conv1(x)).relu()
        y = self.norm2(self.conv2(y)).relu()
        return (self.norm3(self.conv3(y)) + (x if self.short is None else self.short(x))).relu()


class ResNet(nn.Module):
    """``ResNet((3, 4, 6, 3), 64)`` is the one with 50 layers."""

    def __init__(self, depths, width, classes=CLASSES):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        blocks, channels = [], width
        for stage, depth in enumerate(depths):
            inner = width << stage
            for i in range(depth):
                blocks.append(Bottleneck(channels, inner, 2 if stage and not i else 1))
                channels = 4 * inner
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, images, targets):
        x = functional.max_pool2d(self.norm(self.conv(images)).relu(), 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x.mean((2, 3))), targets)


class Convolutions(nn.Module):
    """Two convolutions with group norms, and a residual."""

    def __init__(self, channels, out):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, out), nn.Conv2d(out, out, 3, padding=1)
        self.short = None if channels == out else nn.Conv2d(channels, out, 1)

    def forward(self, x):
        y = self.conv1(functional.silu(self.norm1(x)))
        y = self.conv2(functional.silu(self.norm2(y)))
        return y + (x if self.short is None else self.short(x))


class PixelAttention(nn.Module):
    """Every pixel attends to all others."""

    def __init__(self, channels, heads):
        super().__init__()
        self.norm, self.attention = nn.GroupNorm(8, channels), Attention(channels, heads)

    def forward(self, x):
        y = self.norm(x).flatten(2).transpose(1, 2)
        return x + self.attention(y).transpose(1, 2).unflatten(2, x.shape[2:])


class UNet(nn.Module):
    """A U-Net that removes noise: attention where the image is smallest, and skips from the way down to the way up."""

    def __init__(self, width, depth, heads):
        super().__init__()
        sizes = [width << i for i in range(depth)]
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(Convolutions(sizes[max(i - 1, 0)], size) for i, size in enumerate(sizes))
        self.shrink = nn.ModuleList(nn.Conv2d(size, size, 3, 2, 1) for size in sizes)
        self.middle = nn.ModuleList([Convolutions(sizes[-1], sizes[-1]), PixelAttention(sizes[-1], heads)])
        self.up = nn.ModuleList(Convolutions(2 * size, sizes[max(i - 1, 0)]) for i, size in enumerate(sizes))
        self.norm, self.last = nn.GroupNorm(8, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, images, noise):
        x, skips = self.first(images), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            skips.append(block(x))
            x = shrink(skips[-1])
        for block in self.middle:
            x = block(x)
        for block in reversed(self.up):
            x = functional.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat((x, skips.pop()), 1))
        return functional.mse_loss(self.last(functional.silu(self.norm(x))), noise)


# -- recommendation --------------------------------------------------------------------------------------------------


def tower(*widths):
    """Linear layers of these widths, with a ReLU after each."""
    layers = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers)


class Recommendation(nn.Module):
    """Tables of categories and a tower of numbers; their products with each other go through a second tower."""

    def __init__(self, tables, rows, width, numbers):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = tower(numbers, 4 * width, 2 * width, width)
        count = tables + 1
        self.register_buffer("pairs", torch.tensor([i * count + j for i in range(count) for j in range(i)]))
        self.top = tower(width + self.pairs.numel(), 8 * width, 4 * width)
        self.head = nn.Linear(4 * width, 1)

    def forward(self, numbers, categories, clicked):
        dense = self.bottom(numbers)
        every = torch.stack([dense, *(table(categories[:, i]) for i, table in enumerate(self.tables))], 1)
        products = (every @ every.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        score = self.head(self.top(torch.cat((dense, products), 1)))
        return functional.binary_cross_entropy_with_logits(score.squeeze(1), clicked)


# -- experts by grouped products -------------------------------------------------------------------------------------


class Grouped(nn.Module):
    """Tokens are sorted by the experts that they take, and each expert multiplies its own rows."""

    def __init__(self, width, inner, experts, chosen=2):
        super().__init__()
        self.chosen, self.experts = chosen, experts
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(0.02 * torch.randn(experts, width, inner))
        self.down = nn.Parameter(0.02 * torch.randn(experts, inner, width))

    def forward(self, x):
        tokens = x.flatten(0, -2)
        weights, experts = self.gate(tokens).softmax(-1).topk(self.chosen, -1)
        taken, order = experts.flatten().sort(stable=True)
        every = torch.arange(self.experts, device=x.device)
        ends = (taken.unsqueeze(1) <= every).sum(0).to(torch.int32)
        rows = tokens.repeat_interleave(self.chosen, 0).index_select(0, order)
        rows = functional.silu(functional.grouped_mm(rows, self.up, offs=ends))
        rows = functional.grouped_mm(rows, self.down, offs=ends)
        back = torch.zeros_like(rows).index_copy(0, order, rows).unflatten(0, (-1, self.chosen))
        return (back * weights.unsqueeze(-1)).sum(1).view_as(x)


class GroupedExperts(nn.Module):
    """Layers of experts, and a loss of what they make."""

    def __init__(self, layers, width, inner, experts):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.blocks = nn.ModuleList(Grouped(width, inner, experts) for _ in range(layers))

    def forward(self, x):
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return x.pow(2).mean()


# -- what goes in ----------------------------------------------------------------------------------------------------


def words_in(words, *shape):
    """Ids and targets."""
    return tuple(torch.randint(words, shape) for _ in range(2))


def pairs_in(words, *shape):
    """Ids of one language, ids and targets of the other."""
    return tuple(torch.randint(words, shape) for _ in range(3))


def images_in(batch, size, classes=CLASSES):
    return torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))


def vectors_in(*shape):
    return (torch.randn(shape),)


def noisy_in(batch, size):
    return torch.randn(batch, 3, size, size), torch.randn(batch, 3, size, size)


def clicks_in(batch, tables, rows, numbers):
    return torch.randn(batch, numbers), torch.randint(rows, (batch, tables)), torch.randint(2, (batch,)).float()


def placed(mesh, model, inputs, shared=()):
    """A step with whole parameters; mesh dims that are ``shared`` have parts of the batch."""
    sw.distribute_module(model, mesh, src_data_rank=None)
    places = [Shard(0) if name in shared else Replicate() for name in mesh.mesh_dim_names]
    inputs = tuple(sw.distribute_tensor(t.to(mesh.device_type), mesh, places, src_data_rank=None) for t in inputs)
    return model, inputs, torch.optim.AdamW(model.parameters(), fused=True)
