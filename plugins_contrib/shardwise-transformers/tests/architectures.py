"""Small random models of many architectures, and the comparison of a training step with one device."""

import warnings
from contextlib import nullcontext

import torch
import torch.distributed as dist
import transformers
from torch.overrides import TorchFunctionMode

import shardwise as sw
import shardwise_transformers as st
from shardwise.testing import mesh as mesh_of

transformers.logging.set_verbosity_error()

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEP = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
}
CAUSAL = {
    "Llama": {},
    "Mistral": {"sliding_window": 4},
    "Qwen2": {},
    "Qwen3": {},
    "Qwen3Moe": MOE,
    "Mixtral": MOE,
    "Gemma": {},
    "Gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 4},
    "Gemma3": {"sliding_window": 4, "query_pre_attn_scalar": 4},
    "Phi": ROPE,
    "Phi3": {},
    "GptOss": {**MOE, "sliding_window": 4},
    "DeepseekV2": {**DEEP, "topk_method": "greedy"},
    "DeepseekV3": DEEP,
    "Glm": ROPE,
    "Glm4": ROPE,
    "Glm4Moe": {**DEEP, **ROPE, "num_key_value_heads": 2, "head_dim": 8},
    "Olmo": {},
    "Olmo2": {},
    "Olmo3": {"sliding_window": 4},
    "Olmoe": MOE,
    "Cohere": {},
    "Cohere2": {"sliding_window": 4},
    "Granite": {},
    "GraniteMoe": MOE,
    "Starcoder2": {},
    "Helium": {},
    "Nemotron": ROPE,
    "SmolLM3": {},
    "Qwen2Moe": {**MOE, "shared_expert_intermediate_size": 32},
    "GPTNeoX": {},
    "Ernie4_5": {},
    "Ernie4_5_Moe": {**MOE, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    "Llama4": {**MOE, "intermediate_size_mlp": 64, "attention_chunk_size": 8, "interleave_moe_layer_step": 2},
    "Arcee": {},
    "Apertus": {},
    "Exaone4": {"sliding_window": 4},
    "SeedOss": {},
    "Dots1": DEEP,
    "HunYuanDenseV1": {},
    "HunYuanMoEV1": {**MOE, "moe_topk": 2},
    "MiniMax": MOE,
    "Lfm2": {},
    "FlexOlmo": MOE,
    "VaultGemma": {"sliding_window": 4, "query_pre_attn_scalar": 4},
    "DiffLlama": {},
    "Phimoe": MOE,
    "Jamba": {
        **MOE,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "LongcatFlash": {
        **DEEP,
        "num_layers": 1,
        "ffn_hidden_size": 32,
        "expert_ffn_hidden_size": 16,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
    "Qwen3Next": {
        **MOE,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "Bamba": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 4,
        "mamba_chunk_size": 4,
        "attn_layer_indices": [1],
    },
}


def make(name, experts="eager", dtype=torch.float64, **changes):
    """A model in float64, the same on every rank. The grouped product of experts takes no float64."""
    kind = f"{name}Text" if name in {"Llama4", "Gemma3"} else name
    config = getattr(transformers, f"{kind}Config")(**{**TEXT, **CAUSAL[name], **changes})
    config._experts_implementation = experts
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # some start as zeros and ones, which hide what is wrong
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype))
    return model


def batch(rows=4):
    ids = torch.randint(3, 60, (rows, 8), generator=torch.Generator().manual_seed(2))
    attended = torch.ones_like(ids)
    attended[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": attended, "labels": ids}


class InFloat64(TorchFunctionMode):
    """Models calculate norms, scores and losses in float32, whatever their weights are; here they stay in float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {k: torch.float64 if value is torch.float32 else value for k, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def step(model, inputs):
    with InFloat64() if model.dtype is torch.float64 else nullcontext():
        loss = model(**inputs, use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def whole(t):
    return t.full_tensor() if isinstance(t, sw.MeshTensor) else t


MESHES = {"tp": ("tp",), "ep": ("ep",), "dp x tp": ("dp", "tp"), "dp x ep": ("dp", "ep"), "ep x tp": ("ep", "tp")}


def compare(name, how, rows=4, placed_by=st.distribute, **changes):
    """The largest difference of a loss and its gradients, relative, and the gradient that has it."""
    warnings.simplefilter("ignore")
    ranks = dist.get_world_size()
    expected, grads = step(make(name, **changes), batch(rows))
    names = MESHES[how]
    mesh = mesh_of((ranks,) if len(names) == 1 else (ranks // 2, 2), names)
    model = placed_by(make(name, **changes), mesh)
    loss, placed = step(model, st.place_batch(batch(rows), mesh))
    assert placed.keys() == grads.keys()
    gaps = {key: float((whole(placed[key]) - g).abs().max() / (g.abs().max() + 1e-9)) for key, g in grads.items()}
    gaps["loss"] = float((whole(loss) - expected).abs())
    return max((gap, key) for key, gap in gaps.items())
