"""A small Llama and a small GPT-2 with adapters, on one device and on a mesh."""

import warnings

import peft
import torch
import transformers
from torch.overrides import TorchFunctionMode

import shardwise as sw
from shardwise import MeshTensor, Replicate, Shard
from shardwise.testing import mesh as mesh_of

transformers.logging.set_verbosity_error()
warnings.simplefilter("ignore")

COLUMN, ROW = {"tp": Shard(0)}, {"tp": Shard(1)}
LLAMA_PLAN = {
    "*embed_tokens.weight": COLUMN,
    "*.q_proj.weight": COLUMN,
    "*.k_proj.weight": COLUMN,
    "*.v_proj.weight": COLUMN,
    "*.o_proj.weight": ROW,
    "*.up_proj.weight": COLUMN,
    "*.down_proj.weight": ROW,
    "lm_head.weight": COLUMN,
}
GPT2_PLAN = {"*.c_attn.weight": ROW, "*.c_attn.bias": COLUMN, "*.c_proj.weight": COLUMN}  # Conv1D keeps [in, out]

TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
WITHOUT_ZEROS = {"r": 3, "lora_alpha": 6, "init_lora_weights": False}
ADAPTERS = {
    "lora": {"target_modules": TARGETS},
    "rslora": {"target_modules": TARGETS, "use_rslora": True},
    "dora": {"target_modules": TARGETS, "use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "o_proj"]},
    "embedding dora": {"target_modules": ["embed_tokens", "o_proj"], "use_dora": True},
    "saved module": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "parameters": {"target_modules": [], "target_parameters": ["model.layers.0.self_attn.q_proj.weight"]},
    "tokens": {"target_modules": ["v_proj"], "trainable_token_indices": [3, 4]},
    "gpt2": {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
}


def is_gpt2(name):
    return name == "gpt2"


def base(name="lora"):
    """The same on every rank, in float64."""
    torch.manual_seed(0)
    tokens = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if is_gpt2(name):
        sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16}
        dropouts = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**tokens, **sizes, **dropouts)).double()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 16}
    config = transformers.LlamaConfig(**tokens, **sizes, num_attention_heads=4, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config).double()


def plan_for(name):
    return GPT2_PLAN if is_gpt2(name) else LLAMA_PLAN


def lora(name="lora", **changes):
    return peft.LoraConfig(**{**WITHOUT_ZEROS, **ADAPTERS[name], **changes})


def adapted(model, name="lora", **changes):
    """With the adapters that one device draws."""
    torch.manual_seed(5)
    return peft.get_peft_model(model, lora(name, **changes), autocast_adapter_dtype=False)


def two_by_two():
    return mesh_of((2, 2), ("dp", "tp"))


def placed_base(name="lora"):
    return sw.distribute_module(base(name), two_by_two(), plan_for(name))


class InFloat64(TorchFunctionMode):
    """Models calculate norms, scores and losses in float32, whatever their weights are; here they stay in float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {k: torch.float64 if value is torch.float32 else value for k, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def ids(mesh=None):
    tokens = torch.randint(3, 61, (4, 8), generator=torch.Generator().manual_seed(2))
    return tokens if mesh is None else sw.distribute_tensor(tokens, mesh, [Shard(0), Replicate()])


def loss_of(model, tokens):
    with InFloat64():
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def trained(model, tokens, steps=2):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
    return loss.detach()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, MeshTensor) else tensor


def assert_same(model, expected):
    """All parameters of both, by name."""
    mine, theirs = dict(model.named_parameters()), dict(expected.named_parameters())
    assert mine.keys() == theirs.keys()
    for name, parameter in theirs.items():
        torch.testing.assert_close(whole(mine[name].detach()), parameter.detach(), rtol=1e-9, atol=1e-11)
