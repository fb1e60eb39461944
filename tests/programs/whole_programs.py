"""Training scripts as people write them, whole: models made, copied and trained under ``sw.on``.

Each takes a :class:`Setting`, which places modules and shards batches, or on one device does neither.
"""

from __future__ import annotations

import copy
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from attrs import define, field
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributions import MultivariateNormal
from torch.nn import functional

import shardwise as sw
from shardwise import MeshTensor, Replicate, Shard


@define
class Setting:
    """One device, or a mesh of two dims; and what the program has told of itself."""

    mesh: DeviceMesh | None = None
    layout: str = "by column and row"
    told: dict[str, Any] = field(factory=dict)

    def on(self) -> AbstractContextManager[None]:
        return nullcontext() if self.mesh is None else sw.on(self.mesh)

    def place(self, module: nn.Module) -> nn.Module:
        if self.mesh is not None:
            patterns = {name: self._places(turn, p) for turn, (name, p) in enumerate(module.named_parameters())}
            sw.distribute_module(module, self.mesh, patterns)
        return module

    def _places(self, turn: int, parameter: torch.Tensor) -> list[Any]:
        if self.layout == "every one over all ranks":
            return [Shard(0), Shard(0)]
        return [Replicate(), Shard(turn % parameter.ndim)]

    def batch(self, whole: torch.Tensor) -> torch.Tensor:
        return whole if self.mesh is None else sw.distribute_tensor(whole, self.mesh, [Shard(0), Replicate()])

    def tell(self, name: str, value: torch.Tensor) -> None:
        self.told[name] = value.detach().clone()

    def tell_all(self, **modules: nn.Module) -> None:
        for name, module in modules.items():
            for key, tensor in module.state_dict().items():
                self.tell(f"{name}.{key}", tensor)


def results(program: Any, setting: Setting) -> dict[str, torch.Tensor]:
    """What a program tells, whole, in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    try:
        with setting.on():
            program(setting)
        told = setting.told.items()
        return {name: t.full_tensor() if isinstance(t, MeshTensor) else t for name, t in told}
    finally:
        torch.set_default_dtype(before)


# -- a distributional DQN with noisy layers --------------------------------------------------------------------------

ACTIONS, ATOMS, LOW, HIGH = 3, 7, -3.0, 3.0


class Noisy(nn.Module):
    """A linear layer whose noise is a buffer."""

    def __init__(self, inputs, outputs):
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.scale = nn.Parameter(torch.ones(outputs, inputs) * 0.5 * bound)
        self.register_buffer("noise", torch.empty(outputs, inputs))
        self.reset_noise()

    def reset_noise(self):
        rows, columns = (torch.randn(size) for size in self.weight.shape)
        self.noise.copy_((rows.sign() * rows.abs().sqrt()).ger(columns.sign() * columns.abs().sqrt()))

    def forward(self, x):
        return functional.linear(x, self.weight + self.scale * self.noise)


class Values(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(4, 8)
        self.value, self.advantage = Noisy(8, ATOMS), Noisy(8, ACTIONS * ATOMS)

    def forward(self, x):
        x = functional.relu(self.hidden(x))
        value, advantage = self.value(x).view(-1, 1, ATOMS), self.advantage(x).view(-1, ACTIONS, ATOMS)
        return value + advantage - advantage.mean(1, keepdim=True)


def distributional_dqn(s):
    online = s.place(Values())
    target = copy.deepcopy(online)
    optimizer = torch.optim.Adam(online.parameters(), 1e-2, eps=1.5e-4)
    support, step, size = torch.linspace(LOW, HIGH, ATOMS), (HIGH - LOW) / (ATOMS - 1), 6
    for number in range(3):
        states, following = s.batch(torch.randn(size, 4)), s.batch(torch.randn(size, 4))
        actions, rewards = s.batch(torch.randint(ACTIONS, (size,))), s.batch(torch.randn(size))
        goes_on = s.batch((torch.arange(size) % 3 != 0).double()[:, None])
        scores = online(states).log_softmax(2)[range(size), actions]
        with torch.no_grad():
            best = (support * online(following).softmax(2)).sum(2).argmax(1)
            target.value.reset_noise()
            chances = target(following).softmax(2)[range(size), best]
            places = ((rewards[:, None] + goes_on * 0.9 * support).clamp(LOW, HIGH) - LOW) / step
            lower, upper = places.floor().long(), places.ceil().long()
            lower[(upper > 0) * (lower == upper)] -= 1
            upper[(lower < ATOMS - 1) * (lower == upper)] += 1
            wanted = states.new_zeros(size, ATOMS)
            first = torch.arange(size)[:, None] * ATOMS
            wanted.view(-1).index_add_(0, (lower + first).view(-1), (chances * (upper - places)).view(-1))
            wanted.view(-1).index_add_(0, (upper + first).view(-1), (chances * (places - lower)).view(-1))
        loss = -(wanted * scores).sum(1)
        optimizer.zero_grad()
        loss.mean().backward()
        nn.utils.clip_grad_norm_(online.parameters(), 10)
        optimizer.step()
        online.advantage.reset_noise()
        s.tell(f"loss {number}", loss)
    s.tell_all(online=online, target=target)


# -- a normalising flow ----------------------------------------------------------------------------------------------


class Flow(nn.Module):
    """RealNVP after a rotation that a QR decomposition made."""

    def __init__(self):
        super().__init__()
        self.rotation = nn.Parameter(torch.linalg.qr(torch.randn(2, 2))[0])
        masks = torch.from_numpy(np.array([[0.0, 1], [1, 0]] * 2)).to(torch.get_default_device())
        self.masks = nn.Parameter(masks, requires_grad=False)
        self.scales = nn.ModuleList(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in self.masks)
        self.shifts = nn.ModuleList(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in self.masks)
        self.prior = MultivariateNormal(torch.zeros(2), torch.eye(2))

    def forward(self, x):
        z, volume = x @ self.rotation, x.new_zeros(x.shape[0]) + self.rotation.slogdet()[1]
        for mask, scale, shift in zip(self.masks, self.scales, self.shifts, strict=True):
            kept = mask * z
            log_scale, offset = scale(kept) * (1 - mask), shift(kept) * (1 - mask)
            z = (1 - mask) * (z - offset) * (-log_scale).exp() + kept
            volume -= log_scale.sum(1)
        return self.prior.log_prob(z) + volume


def normalising_flow(s):
    model = s.place(Flow())
    average = copy.deepcopy(model)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for number in range(3):
        loss = -model(s.batch(torch.randn(6, 2))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
        s.tell(f"loss {number}", loss)
    s.tell_all(model=model, average=average)


PROGRAMS = {"distributional DQN": distributional_dqn, "normalising flow": normalising_flow}
