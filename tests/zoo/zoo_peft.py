"""Adapters of peft on a small Llama: frozen weights beside trained ones."""

from functools import partial

import peft
from zoo_transformers import GROUPED, TEXT, ids, model
from zoo_trial import Recipe

TARGETS = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
ADAPTERS = {
    "lora": ("LoraConfig", {**TARGETS, "r": 2, "lora_alpha": 4, "lora_dropout": 0.0}),
    "rslora": ("LoraConfig", {**TARGETS, "r": 2, "use_rslora": True}),
    "dora": ("LoraConfig", {**TARGETS, "r": 2, "use_dora": True}),
    "lora_embedding": ("LoraConfig", {"target_modules": ["embed_tokens", "o_proj"], "r": 2}),
    "adalora": ("AdaLoraConfig", {**TARGETS, "init_r": 4, "target_r": 2, "total_step": 10}),
    "ia3": ("IA3Config", {**TARGETS, "feedforward_modules": ["down_proj"]}),
    "loha": ("LoHaConfig", {**TARGETS, "r": 2}),
    "lokr": ("LoKrConfig", {**TARGETS, "r": 2}),
    "oft": ("OFTConfig", {**TARGETS, "oft_block_size": 4}),
    "vera": ("VeraConfig", {"target_modules": ["q_proj", "v_proj"], "r": 2}),
    "fourier": ("FourierFTConfig", {**TARGETS, "n_frequency": 8}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}),
    "p_tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM", "encoder_hidden_size": 8}),
    "layer_norms": ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
}


def made(config, options):
    base = model("Llama", "ForCausalLM", {**TEXT, **GROUPED, "use_cache": False, "num_hidden_layers": 1})
    inputs = ids()
    return peft.get_peft_model(base, getattr(peft, config)(**options)), inputs | {"labels": inputs["input_ids"]}


recipes = [Recipe(name, "peft", partial(made, *adapter)) for name, adapter in ADAPTERS.items()]
