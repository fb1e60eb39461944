"""Whole programs on four gloo ranks against one device: forward, backward and three optimizer steps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.testing import mesh

# float64 makes a wrong scale or a term counted twice stand out from rounding by many orders of magnitude.
TIGHT = {"rtol": 1e-9, "atol": 1e-11}
LR, STEPS = 0.02, 3


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 16)
        self.down = nn.Linear(16, 5)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width, heads, norm):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = norm(width), norm(width)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def attend(self, x):
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))

    def feed(self, x):
        return self.down(functional.gelu(self.up(x)))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Transformer(nn.Module):
    """Ids ``(batch, time)`` in, scores ``(batch, vocabulary, time)`` out."""

    def __init__(self, norm=nn.LayerNorm, width=8, heads=4, vocabulary=12, context=6):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(context, width))
        self.layers = nn.ModuleList(Block(width, heads, norm) for _ in range(2))
        self.norm = norm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.embed(ids) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).transpose(1, 2)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.second = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.head = nn.Linear(8 * 4 * 4, 5)

    def forward(self, x):
        x = functional.max_pool2d(torch.relu(self.norm(self.first(x))), 2)
        x = functional.adaptive_avg_pool2d(torch.relu(self.second(x)), (4, 4))
        return self.head(x.flatten(1))


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=LR, momentum=0.9, weight_decay=0.01, foreach=False),
    "sgd foreach": lambda ps: torch.optim.SGD(ps, lr=LR, momentum=0.9, nesterov=True, foreach=True),
    "sgd fused": lambda ps: torch.optim.SGD(ps, lr=LR, momentum=0.9, fused=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=LR, foreach=False),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=LR, foreach=True),
    "adamw amsgrad": lambda ps: torch.optim.AdamW(ps, lr=LR, foreach=True, amsgrad=True),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=LR, fused=True),
    "adam fused": lambda ps: torch.optim.Adam(ps, lr=LR, fused=True, amsgrad=True),
}


def train(model, x, target, optimizer, clip=None):
    """Losses of the steps, and the parameters and gradients after the last."""
    steps = OPTIMIZERS[optimizer](model.parameters())
    losses = []
    for _ in range(STEPS):
        steps.zero_grad()
        loss = functional.cross_entropy(model(x), target)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        steps.step()
        losses.append(loss.detach())
    parameters = dict(model.named_parameters())
    return losses, {n: p.detach() for n, p in parameters.items()}, {n: p.grad for n, p in parameters.items()}


def gathered(tensors):
    return {n: t.full_tensor() for n, t in tensors.items()}


def compare(make, x, target, mesh_of, partition, data, optimizer, hook=None, clip=None):
    """Train on one device and on the mesh; losses, parameters and gradients must be equal."""
    m = mesh(*mesh_of)
    x, target = x.to(m.device_type), target.to(m.device_type)
    torch.manual_seed(0)
    reference = make().double().to(m.device_type)
    spread = copy.deepcopy(reference)
    expected = train(reference, x, target, optimizer, clip)
    sw.distribute_module(spread, m, partition)
    before = {n: p.placements for n, p in spread.named_parameters()}
    if hook is not None:
        hook(spread)
    losses = train(
        spread, sw.distribute_tensor(x, m, data), sw.distribute_tensor(target, m, data[: m.ndim]), optimizer, clip
    )
    torch.testing.assert_close([loss.full_tensor() for loss in losses[0]], expected[0], **TIGHT)
    torch.testing.assert_close(gathered(losses[2]), expected[2], **TIGHT)
    torch.testing.assert_close(gathered(losses[1]), expected[1], **TIGHT)
    for name, parameter in spread.named_parameters():
        assert parameter.placements == parameter.grad.placements == before[name], name


def floats(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def ids(high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(2))


# Batches that divide evenly are the smaller question: .ci/run asks it.
SAMPLE = [pytest.mark.slow, pytest.mark.sample]

DP_TP = ((2, 2), ("dp", "tp"))
ONE = ((4,), ("all",))
BATCH = {"one": [Shard(0)], "two": [Shard(0), Replicate()]}

MLP_TENSOR = {"up.weight": {"tp": Shard(0)}, "up.bias": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}}
MLP_CASES = {
    "data (4,)": (ONE, {}, BATCH["one"]),
    "data 2x2": (DP_TP, {}, [Shard(0), Shard(0)]),
    "tensor (4,)": (ONE, {k: list(v.values()) for k, v in MLP_TENSOR.items()}, [Replicate()]),
    "data and tensor 2x2": (DP_TP, MLP_TENSOR, BATCH["two"]),
    "parameters over data (4,)": (ONE, {"*": [Shard(0)]}, BATCH["one"]),
    "parameters over data, tensor 2x2": (
        DP_TP,
        {"up.*": [Shard(0), Shard(0)], "down.weight": [Shard(0), Shard(1)], "down.bias": [Shard(0), Replicate()]},
        BATCH["two"],
    ),
}


@pytest.mark.parametrize("batch", [pytest.param(8, marks=SAMPLE), 7])
@pytest.mark.parametrize("case", MLP_CASES)
def test_an_mlp_trains_as_on_one_device(pool, case, batch):
    mesh_of, partition, data = MLP_CASES[case]
    pool.run(compare, MLP, floats(batch, 6), ids(5, batch), mesh_of, partition, data, "adamw foreach")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_steps_as_on_one_device(pool, optimizer):
    mesh_of, partition, data = MLP_CASES["parameters over data, tensor 2x2"]
    pool.run(compare, MLP, floats(8, 6), ids(5, 8), mesh_of, partition, data, optimizer)


@pytest.mark.parametrize("case", ["data and tensor 2x2", "parameters over data (4,)"])
def test_gradients_are_clipped_as_on_one_device(pool, case):
    mesh_of, partition, data = MLP_CASES[case]
    pool.run(compare, MLP, floats(8, 6), ids(5, 8), mesh_of, partition, data, "sgd foreach", None, 0.1)


TENSOR = {
    "layers.*.wq.weight": {"tp": Shard(0)},
    "layers.*.wk.weight": {"tp": Shard(0)},
    "layers.*.wv.weight": {"tp": Shard(0)},
    "layers.*.wo.weight": {"tp": Shard(1)},
    "layers.*.up.*": {"tp": Shard(0)},
    "layers.*.down.weight": {"tp": Shard(1)},
    "embed.weight": {"tp": Shard(1)},
    "head.weight": {"tp": Shard(0)},
}
OVER_DATA = {"positions": {"dp": Shard(0)}, "*weight": {"dp": Shard(0)}, "*bias": {"dp": Shard(0)}}
BOTH = {
    "layers.*.w[qkv].weight": [Shard(0), Shard(0)],
    "layers.*.wo.weight": [Shard(0), Shard(1)],
    "layers.*.up.*": [Shard(0), Shard(0)],
    "layers.*.down.weight": [Shard(0), Shard(1)],
    "embed.weight": [Shard(0), Shard(1)],
    **OVER_DATA,
}
ROWS = {**TENSOR, "embed.weight": {"tp": Shard(0)}}
flat = {k: list(v.values()) for k, v in TENSOR.items()}


def sequence_parallel(model):
    """Norms and residuals run on shards of the sequence; the linear layers see it whole, as Megatron does it."""

    def whole(_, inputs):
        return (inputs[0].redistribute(placements=[inputs[0].placements[0], Replicate()]),)

    def sharded(_, __, output):
        return output.redistribute(placements=[output.placements[0], Shard(1)])

    model.embed.register_forward_hook(sharded)
    for layer in model.layers:
        for name in ("wq", "wk", "wv", "up"):
            getattr(layer, name).register_forward_pre_hook(whole)
        for name in ("wo", "down"):
            getattr(layer, name).register_forward_hook(sharded)
    model.head.register_forward_pre_hook(whole)


TRANSFORMER_CASES = {
    "data (4,)": (ONE, {}, BATCH["one"], None),
    "tensor (4,)": (ONE, flat, [Replicate()], None),
    "parameters over data (4,)": (ONE, {k: list(v.values()) for k, v in OVER_DATA.items()}, BATCH["one"], None),
    "data and tensor 2x2": (DP_TP, TENSOR, BATCH["two"], None),
    "embedding by row 2x2": (DP_TP, ROWS, BATCH["two"], None),
    "data, tensor and sequence 2x2": (DP_TP, TENSOR, BATCH["two"], sequence_parallel),
    "parameters over data 2x2": (DP_TP, OVER_DATA, BATCH["two"], None),
    "parameters over data, tensor and sequence 2x2": (DP_TP, BOTH, BATCH["two"], sequence_parallel),
}


# tests/tensor/test_late_grads.py has another one every day.
EVERYDAY = (
    *("tensor (4,)", "data and tensor 2x2", "embedding by row 2x2", "parameters over data (4,)"),
    "parameters over data, tensor and sequence 2x2",
)


@pytest.mark.parametrize("batch", [pytest.param(4, marks=SAMPLE), 7])
@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in EVERYDAY else SAMPLE) for c in TRANSFORMER_CASES])
def test_a_transformer_trains_as_on_one_device(pool, case, batch):
    mesh_of, partition, data, hook = TRANSFORMER_CASES[case]
    optimizer = "adamw fused" if batch % 2 else "adamw foreach"
    pool.run(compare, Transformer, ids(12, batch, 6), ids(12, batch, 6), mesh_of, partition, data, optimizer, hook)


def rms_transformer():
    return Transformer(norm=nn.RMSNorm)


@pytest.mark.parametrize(
    "case", ["data and tensor 2x2", pytest.param("parameters over data, tensor and sequence 2x2", marks=SAMPLE)]
)
def test_a_transformer_with_rms_norm_trains_as_on_one_device(pool, case):
    mesh_of, partition, data, hook = TRANSFORMER_CASES[case]
    pool.run(compare, rms_transformer, ids(12, 4, 6), ids(12, 4, 6), mesh_of, partition, data, "sgd", hook)


CONV_CASES = {
    "data (4,)": (ONE, {}, BATCH["one"]),
    "data and channels 2x2": (DP_TP, {"first.*": {"tp": Shard(0)}, "second.*": {"tp": Shard(0)}}, BATCH["two"]),
    "parameters over data (4,)": (ONE, {"*": [Shard(0)]}, BATCH["one"]),
}


@pytest.mark.parametrize("batch", [pytest.param(4, marks=SAMPLE), 5])
@pytest.mark.parametrize("case", [pytest.param(c, marks=SAMPLE if c == "data (4,)" else ()) for c in CONV_CASES])
def test_a_convolutional_net_trains_as_on_one_device(pool, case, batch):
    mesh_of, partition, data = CONV_CASES[case]
    pool.run(compare, ConvNet, floats(batch, 3, 8, 8), ids(5, batch), mesh_of, partition, data, "sgd foreach")


def on_cuda(mesh_of):
    return (*mesh_of, "cuda")


@pytest.fixture(params=["gloo", "nccl"])
def cuda_pool(request, pool_of):
    """Four ranks on CUDA: through gloo on however many GPUs there are, with NCCL on one each."""
    if request.param == "nccl" and torch.cuda.device_count() < 4:
        pytest.skip("NCCL wants one GPU per rank")
    return pool_of(4, request.param)


@pytest.mark.cuda
@pytest.mark.parametrize("case", MLP_CASES)
def test_an_mlp_trains_on_cuda_as_on_one_device(cuda_pool, case):
    mesh_of, partition, data = MLP_CASES[case]
    cuda_pool.run(compare, MLP, floats(7, 6), ids(5, 7), on_cuda(mesh_of), partition, data, "adamw fused")


@pytest.mark.cuda
@pytest.mark.parametrize("case", TRANSFORMER_CASES)
def test_a_transformer_trains_on_cuda_as_on_one_device(cuda_pool, case):
    mesh_of, partition, data, hook = TRANSFORMER_CASES[case]
    model, texts = Transformer, (ids(12, 4, 6), ids(12, 4, 6))
    cuda_pool.run(compare, model, *texts, on_cuda(mesh_of), partition, data, "adamw foreach", hook)


@pytest.mark.cuda
@pytest.mark.parametrize("case", CONV_CASES)
def test_a_convolutional_net_trains_on_cuda_as_on_one_device(cuda_pool, case):
    mesh_of, partition, data = CONV_CASES[case]
    cuda_pool.run(compare, ConvNet, floats(4, 3, 8, 8), ids(5, 4), on_cuda(mesh_of), partition, data, "sgd foreach")
