"""A quantised MLP, tensor-parallel on the CPUs of one machine: ``torchrun --nproc-per-node 4 mlp.py``.

The first rank says what each kind of layer keeps per rank, and how far the answer of the mesh lies from that of one
device.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise_quant import DynamicInt8Linear, Int4Linear, Int8Linear, quantise, tensor_parallel


def mlp() -> nn.Sequential:
    """The model to be quantised, with the same weights at every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).to(torch.bfloat16)


def kept(model: nn.Module) -> int:
    """Bytes of the parameters and buffers on this rank."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum((t.to_local() if isinstance(t, sw.MeshTensor) else t).nbytes for t in tensors)


def main() -> None:
    """Quantise it in every way, run it on the mesh and on one device, and say what that costs."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    exact = mlp()(x)
    say = print if dist.get_rank() == 0 else lambda _: None
    say(f"bfloat16           {kept(mlp()):>8} bytes")
    for make in (Int8Linear, DynamicInt8Linear, Int4Linear):
        whole = quantise(mlp(), make)
        plan = tensor_parallel(whole, {"0": "outputs", "2": "inputs"})
        sharded = sw.distribute_module(copy.deepcopy(whole), mesh, plan)
        y, expected = sharded(sw.distribute_tensor(x, mesh)).full_tensor(), whole(x)
        apart = (y - expected).abs().max() / expected.abs().max()
        lost = (expected - exact).abs().max() / exact.abs().max()
        say(
            f"{make.__name__:<18} {kept(whole):>8} bytes, {kept(sharded):>7} per rank; mesh and one device differ by "
            f"{apart:.4f}, one device and bfloat16 by {lost:.4f}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
