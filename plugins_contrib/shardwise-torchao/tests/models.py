"""Models, ways to quantise them that a CPU can run, and layouts: what several tests share."""

import torch
import torchao.quantization as ao
from torch import nn
from torchao.float8.inference import Float8MMConfig
from torchao.quantization import Float8Tensor, PerGroup, PerRow, PerTensor, quantize_
from torchao.quantization.quantize_.common import KernelPreference
from torchao.quantization.quantize_.workflows.float8.float8_tensor import QuantizeTensorToFloat8Kwargs

from shardwise import Replicate, Shard

R = [Replicate()]


class Block(nn.Module):
    """A gated feed-forward block with a norm: what tensor parallelism is written for."""

    def __init__(self, width=64, hidden=128, *, bias=False):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=bias)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


COLUMNS_AND_ROWS = {"gate.weight": [Shard(0)], "up.weight": [Shard(0)], "down.weight": [Shard(1)]}


def block(*, dtype=torch.float32, **options):
    torch.manual_seed(0)
    return Block(**options).to(dtype)


def batch(rows=6, width=64, dtype=torch.float32):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).to(dtype)


CONFIGS = {
    "int8 weights by row": ao.Int8WeightOnlyConfig,
    "int8 weights by group": lambda: ao.Int8WeightOnlyConfig(granularity=PerGroup(32)),
    "int8 weights by tensor": lambda: ao.Int8WeightOnlyConfig(granularity=PerTensor()),
    "int8 both": ao.Int8DynamicActivationInt8WeightConfig,
    "int8 both, asymmetric": lambda: ao.Int8DynamicActivationInt8WeightConfig(
        act_mapping_type=ao.MappingType.ASYMMETRIC
    ),
    "float8 weights": ao.Float8WeightOnlyConfig,
    "int4 weights by group": lambda: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    "int4 weights by group, int8 activations": lambda: ao.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=PerGroup(32)
    ),
}
# The products of these are exact, or of whole blocks: the bits of one device, in any layout.
EXACT = ("int8 both", "int8 both, asymmetric")


def quantised(name, model):
    quantize_(model, CONFIGS[name]())
    return model


def float8_both(model, granularity):
    """As torchao's Float8DynamicActivationFloat8WeightConfig, which asks for a GPU, though torch has the product."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            options = {"granularity": granularity, "kernel_preference": KernelPreference.TORCH}
            weight = Float8Tensor.from_hp(
                layer.weight.detach(),
                mm_config=Float8MMConfig(use_fast_accum=False),
                act_quant_kwargs=QuantizeTensorToFloat8Kwargs(**options),
                **options,
            )
            layer.weight = nn.Parameter(weight, requires_grad=False)
    return model


FLOAT8 = {"float8 both by tensor": PerTensor, "float8 both by row": PerRow}
