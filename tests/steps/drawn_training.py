"""Training programs drawn from a seed: layers, placements, branches, batches and shapes that change, an optimizer."""

from __future__ import annotations

import random
from contextlib import nullcontext

import torch
from attrs import field, frozen
from torch import nn
from torch.nn import functional

import shardwise as sw
from shardwise import Replicate, Shard

STEPS = 6
CLASSES = 5
WORDS = 11

ACTIVATIONS = {
    "relu": torch.relu,
    "gelu": functional.gelu,
    "tanh": torch.tanh,
    "silu": functional.silu,
    "softmax": lambda x: torch.softmax(x, -1),
}
ANYWHERE = ["linear", "norm", "activation", "residual", "gate", "moved"]
LAYERS = {
    "features": ANYWHERE,
    "sequence": [*ANYWHERE, "attention", "attention", "convolution"],
    "images": ["convolution", "convolution", "group norm", "batch norm", "activation", "residual", "pool", "moved"],
}


# -- drawing -----------------------------------------------------------------------------------------------------


@frozen
class Layer:
    """A layer: what it is, its numbers of channels, and when it runs; it is skipped in other steps."""

    what: str
    width: int
    to: int
    choice: int
    when: tuple[str, int] = ("always", 0)

    def __str__(self) -> str:
        when, n = self.when
        there = "" if when == "always" else f" when {when} {n}"
        return f"{self.what} {self.width}->{self.to} ({self.choice}){there}"


@frozen
class Training:
    """A whole program. ``batches`` has the sizes of each step's inputs, one for each of its backward passes."""

    seed: int
    mesh: tuple[int, ...]
    data: str
    width: int
    words: bool
    layers: tuple[Layer, ...]
    optimizer: str
    foreach: bool
    clips: bool
    batches: tuple[tuple[tuple[int, ...], ...], ...]
    accumulates: tuple[bool, ...]
    placements: dict[str, tuple[str, ...]] = field(factory=dict)
    inputs: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"seed {self.seed}: {self.data}{' of words' if self.words else ''} on {self.mesh}, inputs {self.inputs}"
        steps = f"{self.optimizer}, foreach {self.foreach}, clips {self.clips}, batches {self.batches}"
        waits = f"accumulates {self.accumulates}"
        return "\n".join([head, *map(str, self.layers), steps, waits, str(self.placements)])


def draw(seed: int) -> Training:
    """The program of a seed."""
    rng = random.Random(seed)  # noqa: S311  # chance, no secret
    data = rng.choice(["features", "sequence", "sequence", "images"])
    mesh = rng.choice([(4,), (2, 2)])
    words = data == "sequence" and rng.random() < 0.5
    width = rng.choice([4, 6, 8])
    layers, channels = [], width
    for _ in range(rng.randint(4, 8)):
        layers.append(_layer(rng, data, channels))
        channels = layers[-1].to
    training = Training(
        seed=seed,
        mesh=mesh,
        data=data,
        width=width,
        words=words,
        layers=tuple(layers),
        optimizer=rng.choice(["sgd", "momentum", "adam"]),
        foreach=rng.random() < 0.5,
        clips=rng.random() < 0.3,
        batches=_batches(rng, data),
        accumulates=_accumulates(rng),
        inputs=tuple(rng.choice(["R", "0", "0", "1" if data == "sequence" else "0"]) for _ in mesh),
    )
    model = Drawn(training)
    for name, parameter in model.named_parameters():
        training.placements[name] = tuple(
            "R" if rng.random() < 0.4 else str(rng.randrange(parameter.ndim)) for _ in mesh
        )
    return training


def _layer(rng, data, width):
    what = rng.choice(LAYERS[data])
    widens = what in ("linear", "convolution") and rng.random() < 0.6
    to = rng.choice([4, 6, 8]) if widens else width
    whens = [("always", 0)] * 5 + [("step", rng.randint(2, 3)), ("loss", rng.randrange(2))]
    when = rng.choice(whens) if to == width else ("always", 0)
    return Layer(what, width, to, rng.randrange(100), when)


def _batches(rng, data):
    most = rng.choice([1, 1, 2])
    changes = rng.choice(["never", "size", "shape"])
    first = _sizes(rng, data)
    batches = []
    for _ in range(STEPS):
        passes = []
        for _ in range(most):
            new = _sizes(rng, data)
            passes.append({"never": first, "size": (new[0], *first[1:]), "shape": new}[changes])
        batches.append(tuple(passes))
    return tuple(batches)


def _sizes(rng, data):
    rows = rng.choice([2, 3, 4, 5, 6, 7, 8, 9])
    return (rows, *{"features": (), "sequence": (rng.randint(3, 6),), "images": (rng.randint(4, 7), 6)}[data])


def _accumulates(rng):
    how = rng.choice(["never", "always", "later"])
    return tuple({"never": False, "always": True, "later": step > 2}[how] for step in range(STEPS))


# -- the model ---------------------------------------------------------------------------------------------------


class Part(nn.Module):
    """One layer. Channels are the last dim, of images the second."""

    def __init__(self, layer, data):
        super().__init__()
        self.layer, self.data = layer, data
        width, to = layer.width, layer.to
        what = layer.what
        if what == "linear" or (what == "residual" and data != "images") or what == "gate":
            self.inner = nn.Linear(width, to, bias=layer.choice % 2 == 0)
        elif what in {"convolution", "residual"}:
            self.inner = (nn.Conv2d if data == "images" else nn.Conv1d)(width, to, 3, padding=1)
        elif what == "norm":
            self.inner = (nn.LayerNorm if layer.choice % 2 else nn.RMSNorm)(width)
        elif what == "group norm":
            self.inner = nn.GroupNorm(2, width)
        elif what == "batch norm":
            self.inner = nn.BatchNorm2d(width)
        elif what == "attention":
            self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        what, choice = self.layer.what, self.layer.choice
        names = sorted(ACTIVATIONS)
        if what == "convolution" and self.data == "sequence":
            return self.inner(x.transpose(1, 2)).transpose(1, 2)
        special = {
            "activation": lambda: ACTIVATIONS[names[choice % len(names)]](x),
            "residual": lambda: x + torch.tanh(self.inner(x)),
            "gate": lambda: x * torch.sigmoid(self.inner(x)),
            "pool": lambda: functional.avg_pool2d(x, 3, stride=1, padding=1),
            "attention": lambda: self.attend(x),
            "moved": lambda: moved(x, choice),
        }
        return special[what]() if what in special else self.inner(x)

    def attend(self, x):
        q, k, v = (w(x).unflatten(-1, (2, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        if self.layer.choice % 3:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.layer.choice % 2 == 0)
        else:
            mixed = torch.softmax(q @ k.transpose(-2, -1) * 0.5, -1) @ v
        return self.wo(mixed.transpose(1, 2).flatten(2))


def moved(x, choice):
    """An explicit redistribution; nothing on one device."""
    if not isinstance(x, sw.MeshTensor):
        return x
    n = x.device_mesh.ndim
    places = [[Replicate()] * n, [Shard(0)] * n, [Shard(1), *[Replicate()] * (n - 1)]]
    return x.redistribute(placements=places[choice % 3])


class Drawn(nn.Module):
    """The model of a program."""

    def __init__(self, training):
        super().__init__()
        self.training_program = training
        if training.words:
            self.embed = nn.Embedding(WORDS, training.width)
        self.parts = nn.ModuleList(Part(layer, training.data) for layer in training.layers)
        self.head = nn.Linear(training.layers[-1].to, CLASSES)

    def forward(self, x, runs, after=None):
        """``runs`` says of each layer whether it runs; ``after(i, x)`` gives what goes on from layer ``i``."""
        x = self.embed(x) if self.training_program.words else x
        for i, (part, does) in enumerate(zip(self.parts, runs, strict=True)):
            x = part(x) if does else x
            x = x if after is None else after(i, x)
        if self.training_program.data == "images":
            x = x.mean((2, 3))
        scores = self.head(x)
        return scores.transpose(1, 2) if self.training_program.data == "sequence" else scores


def made(training):
    """The model, with the same weights each time."""
    torch.manual_seed(training.seed)
    return Drawn(training).double()


# -- training ----------------------------------------------------------------------------------------------------


def batch(training, step, turn):
    """The inputs and targets of a backward pass."""
    sizes = training.batches[step][turn]
    generator = torch.Generator().manual_seed(1000 * training.seed + 10 * step + turn)
    if training.data == "images":
        x = torch.randn(sizes[0], training.width, *sizes[1:], dtype=torch.float64, generator=generator)
    elif training.words:
        x = torch.randint(WORDS, sizes, generator=generator)
    else:
        x = torch.randn(*sizes, training.width, dtype=torch.float64, generator=generator)
    targets = sizes if training.data == "sequence" else sizes[:1]
    return x, torch.randint(CLASSES, targets, generator=generator)


def places(names):
    return [Replicate() if name == "R" else Shard(int(name)) for name in names]


def runs_now(training, step, losses):
    """Which layers run in a step: some depend on its number, some on whether the loss has fallen."""
    fell = len(losses) < 2 or losses[-1] < losses[-2]

    def runs(when, n):
        return when == "always" or (step % n == 0 if when == "step" else fell == bool(n))

    return [runs(*layer.when) for layer in training.layers]


def optimizer_of(training, parameters):
    if training.optimizer == "adam":
        # Where a gradient is zero but for rounding, its sign shall not decide.
        return torch.optim.Adam(parameters, lr=0.01, eps=1e-3, foreach=training.foreach)
    momentum = 0.9 if training.optimizer == "momentum" else 0.0
    return torch.optim.SGD(parameters, lr=0.05, momentum=momentum, foreach=training.foreach)


def train(training, model, spread=lambda x: x, after=None, end_of_step=lambda: None):
    """The losses of each backward pass, and the gradients after each step; ``spread`` puts a batch on the mesh."""
    optimizer = optimizer_of(training, model.parameters())
    losses, numbers, gradients = [], [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        runs = runs_now(training, step, numbers)
        with sw.accumulate() if training.accumulates[step] else nullcontext():
            for turn in range(len(training.batches[step])):
                x, target = map(spread, batch(training, step, turn))
                loss = functional.cross_entropy(model(x, runs, after), target)
                loss.backward()
                losses.append(loss.detach())
        if training.clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        numbers.append(losses[-1].item())
        optimizer.step()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        end_of_step()
    return losses, gradients


# -- planted differences -----------------------------------------------------------------------------------------


#: What all ranks run and what the planted one runs, on two whole tensors (6, 6), with what its error must name: all of
#: it without communication, so that only the record tells. Its result is summed, so what comes next is alike.
PLANTED = {
    "another op": (lambda t: t[0].sin(), lambda t: t[0].cos(), "aten.cos"),
    "another shape": (lambda t: t[0].narrow(0, 0, 4), lambda t: t[0].narrow(0, 0, 3), "aten.slice"),
    "another placement": (lambda t: cut(t[0] * 2, 0), lambda t: cut(t[0] * 2, 1), "then asked for as [S(1)"),
    "one call more": (lambda t: t[0].sin(), lambda t: (t[0] * 1.0).sin(), "aten.mul"),
    "one call less": (lambda t: t[0].sin().exp(), lambda t: t[0].sin(), "aten.sum"),
    "another static argument": (lambda t: t[0].softmax(0), lambda t: t[0].softmax(1), "dim=1"),
    "another operand": (lambda t: t[0] * t[1], lambda t: t[0] * t[0], "aten.mul"),
    "another dtype": (lambda t: t[0].to(torch.float32), lambda t: t[0].to(torch.float16), "torch.float16"),
    "another read": (lambda t: t[0].sin(), lambda t: read(t[0].sin()), "then read by to_local()"),
}


def cut(tensor, dim):
    """A whole tensor with a dim sharded over all mesh dims, and an op on it."""
    return tensor.redistribute(placements=[Shard(dim)] * tensor.device_mesh.ndim).sin()


def read(tensor):
    """A tensor whose local part the program has read."""
    tensor.to_local()
    return tensor


def planting(kind, place, is_planted, m):
    """For ``after`` of a model: a difference behind a layer. It leaves numbers alone."""
    usual, other, _ = PLANTED[kind]
    probes = [
        sw.distribute_tensor(torch.rand(6, 6, dtype=torch.float64), m, [Replicate()] * m.ndim, src_data_rank=None)
        for _ in range(2)
    ]

    def after(i, x):
        if i != place:
            return x
        result = (other if is_planted() else usual)(probes)
        return x + result.sum().to(torch.float64) * 0.0

    return after
