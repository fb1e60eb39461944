"""PyTorch's own layers."""

from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from zoo_trial import BATCH, Recipe

recipes: list[Recipe] = []


def recipe(fn):
    recipes.append(Recipe(fn.__name__, "torch", fn))
    return fn


class Applied(nn.Module):
    """Layers and how the forward pass uses them."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.how = forward

    def forward(self, *inputs):
        return self.how(self.layers, *inputs)


def tokens(length=6, size=20):
    return torch.randint(0, size, (BATCH, length))


def ragged_mask(length=6):
    return torch.arange(length) >= torch.tensor([[length], [length - 1], [length - 2], [length]])


@recipe
def transformer():
    model = nn.Transformer(16, 4, 2, 2, 32, batch_first=True)

    def forward(layers, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return layers["model"](source, target, tgt_mask=mask, tgt_is_causal=True)

    return Applied(forward, model=model), (torch.randn(BATCH, 6, 16), torch.randn(BATCH, 5, 16))


@recipe
def transformer_encoder():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    forward = lambda layers, x, mask: layers["model"](x, src_key_padding_mask=mask)
    return Applied(forward, model=model), (torch.randn(BATCH, 6, 16), ragged_mask())


@recipe
def transformer_sequence_first():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32), 2, enable_nested_tensor=False)
    return Applied(lambda layers, x: layers["model"](x.transpose(0, 1)), model=model), (torch.randn(BATCH, 6, 16),)


@recipe
def transformer_decoder():
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, batch_first=True, activation="gelu"), 2)
    return model, (torch.randn(BATCH, 6, 16), torch.randn(BATCH, 5, 16))


def attention(**options):
    model = nn.MultiheadAttention(16, 4, batch_first=True, **options)
    size = options.get("kdim", 16), options.get("vdim", 16)
    return model, (torch.randn(BATCH, 6, 16), torch.randn(BATCH, 5, size[0]), torch.randn(BATCH, 5, size[1]))


for label, options in {
    "attention": {},
    "attention_bias_kv": {"add_bias_kv": True},
    "attention_zero": {"add_zero_attn": True},
    "attention_kdim": {"kdim": 12, "vdim": 10, "bias": False},
}.items():
    recipes.append(Recipe(label, "torch", partial(attention, **options)))


def recurrent(kind, **options):
    forward = lambda layers, ids: layers["rnn"](layers["embed"](ids))[0]
    rnn = getattr(nn, kind)(8, 12, batch_first=True, **options)
    return Applied(forward, embed=nn.Embedding(20, 8, padding_idx=0), rnn=rnn), (tokens(),)


for label, (kind, options) in {
    "lstm": ("LSTM", {}),
    "lstm_two_layers_both_ways": ("LSTM", {"num_layers": 2, "bidirectional": True}),
    "lstm_projected": ("LSTM", {"proj_size": 6}),
    "gru": ("GRU", {}),
    "gru_both_ways": ("GRU", {"bidirectional": True}),
    "rnn": ("RNN", {}),
    "rnn_relu": ("RNN", {"nonlinearity": "relu", "num_layers": 2}),
}.items():
    recipes.append(Recipe(label, "torch", partial(recurrent, kind, **options)))


@recipe
def lstm_packed():
    def forward(layers, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, [6, 5, 3, 2], batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(layers["rnn"](packed)[0], batch_first=True)[0]

    return Applied(forward, rnn=nn.LSTM(8, 12, batch_first=True)), (torch.randn(BATCH, 6, 8),)


@recipe
def lstm_with_states():
    model = nn.LSTM(8, 12, batch_first=True)
    return model, (torch.randn(BATCH, 6, 8), (torch.randn(1, BATCH, 12), torch.randn(1, BATCH, 12)))


def cells(kind):
    def forward(layers, x):
        state, outputs = None, []
        for step in x.unbind(1):
            state = layers["cell"](step, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs, 1)

    return Applied(forward, cell=getattr(nn, kind)(8, 12)), (torch.randn(BATCH, 4, 8),)


recipes += [Recipe(kind.lower(), "torch", partial(cells, kind)) for kind in ("LSTMCell", "GRUCell", "RNNCell")]


def bag(mode):
    return Applied(
        lambda layers, ids: layers["head"](layers["bag"](ids)),
        bag=nn.EmbeddingBag(20, 8, mode=mode, padding_idx=0 if mode != "max" else None),
        head=nn.Linear(8, 3),
    ), (tokens(),)


recipes += [Recipe(f"embedding_bag_{mode}", "torch", partial(bag, mode)) for mode in ("sum", "mean", "max")]


@recipe
def embedding_bag_offsets():
    forward = lambda layers, ids: layers["bag"](ids, torch.tensor([0, 3, 4, 7]))
    return Applied(forward, bag=nn.EmbeddingBag(20, 8, mode="mean", include_last_offset=False)), (
        torch.randint(0, 20, (9,)),
    )


@recipe
def convnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, stride=2, groups=4),
        nn.GroupNorm(3, 12),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 5),
    ), (torch.randn(BATCH, 3, 12, 12),)


@recipe
def convnet_1d():
    return nn.Sequential(
        nn.Conv1d(4, 8, 3, dilation=2),
        nn.BatchNorm1d(8),
        nn.GELU(),
        nn.AvgPool1d(2),
        nn.ConvTranspose1d(8, 6, 4, stride=2),
        nn.InstanceNorm1d(6, affine=True),
        nn.Flatten(1),
        nn.Linear(84, 5),
    ), (torch.randn(BATCH, 4, 16),)


@recipe
def convnet_3d():
    return nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.MaxPool3d(2), nn.ConvTranspose3d(4, 3, 2, 2)
    ), (torch.randn(BATCH, 2, 6, 6, 6),)


@recipe
def unet():
    def forward(layers, x):
        down = layers["down"](x)
        low = layers["low"](F.max_pool2d(down, 2))
        up = F.interpolate(low, scale_factor=2, mode="bilinear", align_corners=False)
        return layers["up"](torch.cat([down, up, layers["shuffle"](low)], 1))

    return Applied(
        forward,
        down=nn.Conv2d(3, 4, 3, padding=1),
        low=nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.LeakyReLU(0.1, inplace=True)),
        shuffle=nn.PixelShuffle(2),
        up=nn.Conv2d(14, 3, 3, padding=1, padding_mode="reflect"),
    ), (torch.randn(BATCH, 3, 8, 8),)


@recipe
def autoencoder():
    return nn.Sequential(
        nn.Linear(10, 6), nn.PReLU(), nn.LayerNorm(6), nn.Linear(6, 3), nn.Tanh(), nn.RMSNorm(3), nn.Linear(3, 10)
    ), (torch.randn(BATCH, 10),)


@recipe
def mixture_of_experts_dense():
    def forward(layers, x):
        weights, chosen = layers["gate"](x).softmax(-1).topk(2)
        weights = torch.zeros(*x.shape[:-1], 4, dtype=x.dtype).scatter(-1, chosen, weights)
        outputs = torch.stack([layers[f"expert{i}"](x) for i in range(4)], -1)
        return (outputs * weights.unsqueeze(-2)).sum(-1)

    experts = {f"expert{i}": nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for i in range(4)}
    return Applied(forward, gate=nn.Linear(8, 4), **experts), (torch.randn(BATCH, 6, 8),)


@recipe
def weight_norm():
    norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(norm(nn.Linear(8, 12)), nn.ELU(), norm(nn.Linear(12, 4))), (torch.randn(BATCH, 8),)


@recipe
def spectral_norm():
    norm = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(norm(nn.Linear(8, 12)), nn.ELU(), nn.Linear(12, 4)), (torch.randn(BATCH, 8),)


@recipe
def bilinear():
    return nn.Bilinear(6, 5, 4), (torch.randn(BATCH, 6), torch.randn(BATCH, 5))


@recipe
def cross_entropy():
    forward = lambda layers, x, y: F.cross_entropy(layers["head"](x).transpose(1, 2), y, label_smoothing=0.1)
    return Applied(forward, head=nn.Linear(8, 20)), (torch.randn(BATCH, 6, 8), tokens())


@recipe
def ctc():
    def forward(layers, x, y):
        logits = layers["head"](x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(logits, y, torch.full((BATCH,), 8), torch.full((BATCH,), 3), reduction="mean")

    return Applied(forward, head=nn.Linear(8, 20)), (torch.randn(BATCH, 8, 8), torch.randint(1, 20, (BATCH, 3)))


@recipe
def adaptive_softmax():
    forward = lambda layers, x, y: layers["head"](x, y).loss
    head = nn.AdaptiveLogSoftmaxWithLoss(8, 20, cutoffs=[6, 12])
    return Applied(forward, head=head), (torch.randn(BATCH, 8), torch.randint(0, 20, (BATCH,)))


@recipe
def fourier():
    def forward(layers, x):
        low = torch.fft.rfft(layers["in"](x), dim=1)
        return layers["out"](torch.fft.irfft(low * 0.5, n=x.shape[1], dim=1))

    return Applied(forward, **{"in": nn.Linear(4, 8), "out": nn.Linear(8, 2)}), (torch.randn(BATCH, 8, 4),)


@recipe
def spatial_transformer():
    def forward(layers, x):
        theta = layers["where"](x.flatten(1)).view(-1, 2, 3)
        return F.grid_sample(x, F.affine_grid(theta, x.shape, align_corners=False), align_corners=False)

    return Applied(forward, where=nn.Linear(48, 6)), (torch.randn(BATCH, 3, 4, 4),)


@recipe
def checkpointed():
    from torch.utils.checkpoint import checkpoint

    def forward(layers, x):
        return layers["b"](checkpoint(layers["a"], x, use_reentrant=False))

    return Applied(forward, a=nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), b=nn.Linear(8, 2)), (
        torch.randn(BATCH, 8),
    )


@recipe
def retention_scan():
    def forward(layers, x):
        decay = layers["decay"](x).sigmoid()
        values, state, outputs = layers["value"](x), torch.zeros(x.shape[0], 8, dtype=x.dtype), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + (1 - decay[:, t]) * values[:, t]
            outputs.append(state)
        return torch.stack(outputs, 1)

    return Applied(forward, decay=nn.Linear(8, 8), value=nn.Linear(8, 8)), (torch.randn(BATCH, 5, 8),)


@recipe
def einsum_attention():
    def forward(layers, x):
        q, k, v = (t.unflatten(-1, (4, -1)) for t in layers["qkv"](x).chunk(3, -1))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return layers["out"](torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(-2))

    return Applied(forward, qkv=nn.Linear(16, 48), out=nn.Linear(16, 16)), (torch.randn(BATCH, 6, 16),)


@recipe
def loss_zoo():
    def forward(layers, x, y):
        out = layers["head"](x)
        other = out.roll(1, 0)
        return (
            F.mse_loss(out, x)
            + F.smooth_l1_loss(out, x)
            + F.huber_loss(out, x)
            + F.binary_cross_entropy_with_logits(out, x.sigmoid())
            + F.kl_div(out.log_softmax(-1), x.softmax(-1), reduction="batchmean")
            + F.cosine_embedding_loss(out, x, y)
            + F.triplet_margin_loss(out, x, other)
            + F.multi_margin_loss(out, y.clamp(min=0))
            + F.gaussian_nll_loss(out, x, other.exp())
            + F.poisson_nll_loss(out, x.abs())
            + F.soft_margin_loss(out, x.sign())
        )

    return Applied(forward, head=nn.Linear(6, 6)), (torch.randn(BATCH, 6), torch.tensor([1, -1, 1, 1]))
