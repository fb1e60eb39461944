"""The demo's GPT as each library runs it: tensor-parallel over four ranks, the same weights and the same layout.

"free": the libraries choose every layout between the weights, from the weights' placements alone.
"pinned": activations are replicated between the halves of a block, forward and backward, as Megatron and torch's
``parallelize_module`` lay them out; then all kinds send the same all-reduces.
"plain" is that program by hand on bare local tensors: local matrices, and the all-reduces called directly.

Attention is written out (matrix product, mask, softmax), because DTensor has no rule for the fused CPU kernel and
refuses the mask that torch's own math form makes. Heads come first in it, so that a matrix product of many heads, which
folds its leading dims into one, folds them with the sharded dim in front.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import shardwise as sw
from shardwise import Replicate
from shardwise.demo.model import Attention, build
from shardwise.demo.run import TENSOR_PARALLEL
from shardwise.demo.settings import RunSettings

FREE, PINNED = "free", "pinned"
MAX_NORM = 1.0


class WrittenAttention(Attention):
    """The demo's attention in ops that every library here has."""

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)).permute(2, 0, 1, 3) for w in (self.wq, self.wk, self.wv))
        scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]))
        mixed = torch.softmax(scores + self.mask, -1) @ v
        return self.wo(mixed.permute(1, 2, 0, 3).flatten(2))


def written_out(settings):
    """The demo's model with its attention written out; weights by the settings' seed."""
    model = build(settings)
    mask = torch.full((settings.context, settings.context), -math.inf).triu(1)
    for block in model.blocks:
        block.attention.__class__ = WrittenAttention
        block.attention.register_buffer("mask", mask.clone())
    return model


# -- as MeshTensor and as DTensor --------------------------------------------------------------------------------


def mesh_model(settings, mesh, layout, *, fused_attention=False):
    """The model with MeshTensor parameters and buffers."""
    model = build(settings) if fused_attention else written_out(settings)
    sw.distribute_module(model, mesh, TENSOR_PARALLEL, src_data_rank=None)
    return pin(model) if layout == PINNED else model


def dtensor_model(settings, mesh, layout):
    """The same with DTensor parameters and buffers, parameter by parameter in the same layout."""
    model, like = written_out(settings), mesh_model(settings, mesh, FREE)
    for name, tensor in [*like.named_parameters(), *like.named_buffers()]:
        prefix, _, key = name.rpartition(".")
        dtensor = tensor.detach().to_dtensor()
        setattr(model.get_submodule(prefix), key, nn.Parameter(dtensor) if tensor.requires_grad else dtensor)
    return pin(model) if layout == PINNED else model


def pin(model):
    """Replicate what leaves each half of a block, and the gradient that enters it."""

    def whole(tensor):
        return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)

    def after(module, inputs, output):
        return whole(output)

    def before(module, inputs, output):
        if output.requires_grad:
            output.register_hook(whole)

    for block in model.blocks:
        block.attention.register_forward_hook(after)
        block.feed.register_forward_hook(after)
        block.norm1.register_forward_hook(before)
        block.norm2.register_forward_hook(before)
    model.bytes.register_forward_hook(after)
    model.norm.register_forward_hook(before)
    model.head.register_forward_hook(after)
    return model


# -- by hand on local tensors ------------------------------------------------------------------------------------


class Enter(torch.autograd.Function):
    """Into a half of a block: the same tensor forward, all-reduce of the gradient backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Leave(torch.autograd.Function):
    """Out of a half of a block: all-reduce forward, the same gradient backward."""

    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


# The name that torch 2.13 warns about is the only one that 2.11 has.
_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class GatherLast(torch.autograd.Function):
    """All parts of the last dim on every rank forward, this rank's part of the gradient backward."""

    @staticmethod
    def forward(ctx, x):
        world = dist.get_world_size()
        out = x.new_empty((world * x.shape[0], *x.shape[1:]))
        _gather(out, x.contiguous())
        return out.unflatten(0, (world, -1)).movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(dist.get_world_size(), -1)[dist.get_rank()]


class LocalEmbedding(nn.Module):
    """This rank's rows of a table: ids of other ranks give zeros."""

    def __init__(self, weight, first):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.first = first

    def forward(self, ids):
        local = ids - self.first
        outside = (local < 0) | (local >= self.weight.shape[0])
        result = functional.embedding(local.masked_fill(outside, 0), self.weight)
        return Leave.apply(result.masked_fill(outside.unsqueeze(-1), 0.0))


def entering(module, inputs, output):
    return Enter.apply(output)


def leaving(module, inputs, output):
    return Leave.apply(output)


def gathering(module, inputs, output):
    return GatherLast.apply(output)


def plain_model(settings, mesh, layout, *, fused_attention=False):
    """The tensor-parallel program by hand; ``layout`` makes no difference to it."""
    model = build(settings) if fused_attention else written_out(settings)
    like = mesh_model(settings, mesh, FREE, fused_attention=fused_attention)
    for name, tensor in like.named_parameters():
        prefix, _, key = name.rpartition(".")
        setattr(model.get_submodule(prefix), key, nn.Parameter(tensor.detach().to_local().clone()))
    rows = model.bytes.weight.shape[0]
    model.bytes = LocalEmbedding(model.bytes.weight.detach(), rows * dist.get_rank())
    for block in model.blocks:
        block.attention.heads //= dist.get_world_size()
        for half in (block.attention, block.feed):
            half.register_forward_hook(leaving)
        for norm in (block.norm1, block.norm2):
            norm.register_forward_hook(entering)
    model.norm.register_forward_hook(entering)
    model.head.register_forward_hook(gathering)
    model.sharded = [
        p for p, q in zip(model.parameters(), like.parameters(), strict=True) if q.placements[0].is_shard()
    ]
    return model


def clip_plain(model):
    """``clip_grad_norm_`` by hand: the sharded gradients' squares are summed over the ranks."""
    sharded = {id(p) for p in model.sharded}
    grads = [p.grad for p in model.parameters()]
    norms = torch.stack(torch._foreach_norm(grads))
    squares = norms.square()
    is_sharded = torch.tensor([id(p) in sharded for p in model.parameters()], device=norms.device)
    total = torch.where(is_sharded, squares, 0.0).sum()
    dist.all_reduce(total)
    norm = (total + torch.where(is_sharded, 0.0, squares).sum()).sqrt()
    torch._foreach_mul_(grads, torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0))
    return norm


def clip(model):
    return nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, foreach=True)


# -- steps -------------------------------------------------------------------------------------------------------


def batch(settings):
    """Ids and targets, the same on every rank."""
    generator = torch.Generator().manual_seed(settings.seed)
    shape = (settings.batch, settings.context)
    return torch.randint(256, shape, generator=generator), torch.randint(256, shape, generator=generator)


def loss_of(model, ids, targets):
    scores = model(ids)
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def training_step(model, ids, targets, settings, clip_grads=clip) -> Callable[[], torch.Tensor]:
    """Forward, backward, clipped norm and fused AdamW, as the demo trains; gives the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, fused=True)

    def step():
        loss = loss_of(model, ids, targets)
        optimizer.zero_grad()
        loss.backward()
        clip_grads(model)
        optimizer.step()
        return loss.detach()

    return step


def steps(settings, mesh, layout) -> dict[str, Callable[[], torch.Tensor]]:
    """One training step per kind, each with a model and an optimizer of its own."""
    ids, targets = batch(settings)
    ours = [sw.distribute_tensor(t, mesh, [Replicate()] * mesh.ndim, src_data_rank=None) for t in (ids, targets)]
    return {
        "shardwise": training_step(mesh_model(settings, mesh, layout), *ours, settings),
        "DTensor": training_step(dtensor_model(settings, mesh, layout), *(t.to_dtensor() for t in ours), settings),
        "plain": training_step(plain_model(settings, mesh, layout), ids, targets, settings, clip_plain),
    }


def gpt_settings(width=128, context=64, batch=4, layers=4):
    return RunSettings(mesh=(4,), layers=layers, width=width, heads=4, context=context, batch=batch)
