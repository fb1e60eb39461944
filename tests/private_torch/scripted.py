"""A program of scripted functions, fused as on a card; its last line of output says where it was."""

import warnings

import torch
import torch.distributed as dist
from torch import Tensor

import shardwise as sw
from shardwise import Shard

warnings.simplefilter("ignore")
torch._C._jit_set_texpr_fuser_enabled(True)
torch._C._jit_override_can_fuse_on_cpu(True)
torch._C._jit_set_te_must_use_llvm_cpu(False)


def branched(x: Tensor) -> Tensor:
    y = torch.sign(x) * 2.0
    return torch.where(y > 0, x * y + 1.0, x.abs())


def of_pairs(pair: tuple[Tensor, Tensor]) -> Tensor:
    y = torch.sign(pair[0]) * 2.0
    return torch.where(y > 0, pair[1] * y + 1.0, pair[0].abs())


class Model(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return branched(x) * 1.0


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Module()
        self.inner.weight = torch.nn.Parameter(torch.ones(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return branched(x * self.inner.weight)


plain = torch.arange(-16.0, 16.0).reshape(8, 4)
expected = Model()(plain)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.init_device_mesh("cpu", (1,))
fused, pairs = torch.jit.script(branched), torch.jit.script(of_pairs)
for _ in range(4):
    fused(plain)
assert "TensorExprGroup" in str(fused.graph_for(plain))
calls = {
    "a function that was fused for plain tensors": fused,
    "by name": lambda x: fused(x=x),
    "in a tuple": lambda x: pairs((x, x)),
    "a module": torch.jit.script(Model()),
    "a traced function": torch.jit.trace(Model(), plain).forward,
    "a traced module": torch.jit.trace(Model(), plain),
}
for name, call in calls.items():
    print(name, flush=True)
    x = sw.distribute_tensor(plain, mesh, [Shard(0)])
    leaf = x.clone().requires_grad_()
    for _ in range(4):
        result = call(x)
        assert isinstance(result, sw.MeshTensor)
        assert torch.equal(result.full_tensor(), expected), (name, result.full_tensor())
        call(leaf).sum().backward()
    assert torch.equal(leaf.grad.full_tensor(), 4 * torch.where(plain > 0, 2.0, plain.sign())), (name, leaf.grad)
for _ in range(4):
    assert torch.equal(fused(plain), expected)
assert "TensorExprGroup" in str(fused.graph_for(plain))
placed, traced = Scale(), torch.jit.trace(Scale(), plain)
for name, model in {"traced, then placed": traced, "placed, then traced": placed}.items():
    print(name, flush=True)
    sw.distribute_module(model, mesh, {"*": [Shard(0)]})
    call = torch.jit.trace(placed, plain) if model is placed else model
    for _ in range(4):
        result = call(plain)
        assert torch.equal(result.full_tensor(), expected), (name, result.full_tensor())
        result.sum().backward()
    assert torch.equal(model.inner.weight.grad.full_tensor(), 4 * torch.where(plain > 0, 2.0, plain.sign()) * plain)

weight = sw.distribute_tensor(plain, mesh, [Shard(0)])


class Offset(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return branched(x) * weight + 1.0


for name, call in {
    "a constant": torch.jit.trace(Offset().forward, plain),
    "of a module": torch.jit.trace(Offset(), plain),
}.items():
    print(name, flush=True)
    for _ in range(4):
        assert torch.equal(call(plain).full_tensor(), expected * plain + 1.0), name
