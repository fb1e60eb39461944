"""Models of transformers from small configs."""

from functools import partial

import torch
import transformers
import zoo_perception
from zoo_trial import BATCH, Recipe

transformers.logging.set_verbosity_error()

TEXT = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 4}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
PAIR = {
    "vocab_size": 48,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5 = {
    "vocab_size": 48,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 32,
    "num_layers": 2,
    "num_decoder_layers": 1,
    "num_heads": 4,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
IMAGE = {
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_labels": 3,
}
STAGES = {"num_channels": 3, "num_labels": 3, "image_size": 32}

LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "num_key_value_heads": 4,
}

CAUSAL = {
    "Llama": GROUPED,
    "Mistral": {**GROUPED, "sliding_window": 4},
    "Qwen2": GROUPED,
    "Qwen3": GROUPED,
    "Gemma": GROUPED,
    "Gemma2": {**GROUPED, "sliding_window": 4, "query_pre_attn_scalar": 4},
    "Phi": ROPE,
    "Phi3": {},
    "StableLm": {**GROUPED, **ROPE},
    "Starcoder2": GROUPED,
    "Olmo": GROUPED,
    "Olmo2": GROUPED,
    "Cohere": GROUPED,
    "Granite": GROUPED,
    "GPTNeoX": {},
    "Helium": GROUPED,
    "Glm": {**GROUPED, **ROPE},
    "Nemotron": {**GROUPED, **ROPE},
    "SmolLM3": GROUPED,
    "Mixtral": {**GROUPED, **MOE},
    "Qwen2Moe": {**GROUPED, **MOE, "shared_expert_intermediate_size": 16},
    "Olmoe": {**GROUPED, **MOE},
    "Mamba": {"state_size": 4},
    "Mamba2": {"state_size": 4, "num_heads": 8, "head_dim": 4, "n_groups": 2, "chunk_size": 4},
    "FalconMamba": {"state_size": 4},
    "RecurrentGemma": {"num_key_value_heads": 1, "attention_window_size": 4, "num_hidden_layers": 3, "lru_width": 16},
    "Rwkv": {"attention_hidden_size": 16, "context_length": 32},
    "Falcon": {"alibi": False, "new_decoder_architecture": False},
    "Bloom": {"n_layer": 2, "n_head": 4},
    "Mpt": {"d_model": 16, "n_heads": 4, "n_layers": 2, "max_seq_len": 32},
    "OPT": {"ffn_dim": 32, "word_embed_proj_dim": 16},
    "GPTNeo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    "GPTJ": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "rotary_dim": 4},
    "CodeGen": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "rotary_dim": 4},
    "GPTBigCode": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "BioGpt": {},
    "Persimmon": ROPE,
    "JetMoe": {**MOE, "kv_channels": 4, "num_key_value_heads": 2},
    "Ernie4_5": GROUPED,
    "KimiLinear": {
        **MOE,
        **LATENT,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
        "linear_attn_config": {
            "full_attn_layers": [2],
            "kda_layers": [1],
            "num_heads": 2,
            "head_dim": 4,
            "short_conv_kernel_size": 4,
        },
        "n_group": 1,
        "topk_group": 1,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "LongcatFlash": {
        **MOE,
        **LATENT,
        "head_dim": 4,
        "num_layers": 1,
        "ffn_hidden_size": 32,
        "expert_ffn_hidden_size": 16,
        "n_routed_experts": 4,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
    "NemotronH": {
        **GROUPED,
        **MOE,
        "mamba_num_heads": 8,
        "mamba_head_dim": 4,
        "ssm_state_size": 4,
        "n_groups": 1,
        "chunk_size": 4,
        "layers_block_type": ["mamba", "attention", "moe"],
        "num_hidden_layers": 3,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
    },
    "Zamba2": {
        "mamba_d_state": 4,
        "chunk_size": 4,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "hybrid", "hybrid"],
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "n_mamba_heads": 8,
        "mamba_headdim": 4,
        "mamba_ngroups": 1,
        "attention_head_dim": 8,
        "num_key_value_heads": 4,
        "num_mem_blocks": 1,
        "adapter_rank": 4,
        "use_mem_eff_path": False,
    },
    "GraniteMoeHybrid": {
        **GROUPED,
        **MOE,
        "mamba_n_heads": 8,
        "mamba_d_head": 4,
        "mamba_n_groups": 1,
        "mamba_d_state": 4,
        "mamba_chunk_size": 4,
        "mamba_expand": 2,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 16,
    },
}
MASKED = {
    "Bert": {},
    "Roberta": {"max_position_embeddings": 40},
    "Electra": {"embedding_size": 8},
    "DistilBert": {"dim": 16, "n_heads": 4, "n_layers": 2, "hidden_dim": 32},
    "Albert": {"embedding_size": 8},
    "Deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "DebertaV2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4},
    "MPNet": {},
    "ConvBert": {"embedding_size": 16, "head_ratio": 2, "conv_kernel_size": 3},
    "Longformer": {"attention_window": 4},
    "BigBird": {"attention_type": "original_full"},
    "RoFormer": {"embedding_size": 16},
    "MobileBert": {"embedding_size": 16, "true_hidden_size": 8, "intra_bottleneck_size": 8},
    "SqueezeBert": {"embedding_size": 16, "q_groups": 2, "k_groups": 2, "v_groups": 2, "post_attention_groups": 1},
    "FNet": {"tpu_short_seq_length": 8},
    "Ernie": {},
    "RemBert": {"input_embedding_size": 8, "output_embedding_size": 8},
    "MegatronBert": {},
    "Yoso": {"use_expectation": True},
    "Camembert": {"max_position_embeddings": 40},
    "ModernBert": {"global_attn_every_n_layers": 2, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2},
    "IBert": {"max_position_embeddings": 40},
    "Esm": {"max_position_embeddings": 40, "position_embedding_type": "rotary", "mask_token_id": 3},
}
SEQ2SEQ = {
    "T5": T5,
    "UMT5": T5,
    "SwitchTransformers": {**T5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "LongT5": {**T5, "local_radius": 3},
    "Bart": PAIR,
    "MBart": PAIR,
    "Pegasus": PAIR,
    "Marian": PAIR,
    "Blenderbot": PAIR,
    "BlenderbotSmall": PAIR,
    "PLBart": PAIR,
    "M2M100": PAIR,
    "LED": {
        **PAIR,
        "attention_window": 4,
        "max_encoder_position_embeddings": 32,
        "max_decoder_position_embeddings": 32,
    },
    "ProphetNet": {
        "vocab_size": 48,
        "hidden_size": 16,
        "num_encoder_layers": 1,
        "num_decoder_layers": 1,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "max_position_embeddings": 32,
        "ngram": 2,
        "num_buckets": 4,
        "disable_ngram_loss": False,
    },
}
CLASSIFIED = {
    "ViT": IMAGE,
    "DeiT": IMAGE,
    "Beit": {**IMAGE, "use_relative_position_bias": True},
    "Dinov2": {**IMAGE, "mlp_ratio": 2},
    "ViTMSN": IMAGE,
    "Swin": {**STAGES, "patch_size": 4, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 4], "window_size": 2},
    "Swinv2": {**STAGES, "patch_size": 4, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 4], "window_size": 2},
    "ConvNext": {**STAGES, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
    "ConvNextV2": {**STAGES, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
    "ResNet": {**STAGES, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    "RegNet": {**STAGES, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
    "Bit": {**STAGES, "embedding_size": 32, "hidden_sizes": [32, 32], "depths": [1, 1], "num_groups": 8},
    "MobileNetV1": {**STAGES, "depth_multiplier": 0.25},
    "MobileNetV2": {**STAGES, "depth_multiplier": 0.25},
    "MobileViT": {
        **STAGES,
        "hidden_sizes": [8, 12, 16],
        "neck_hidden_sizes": [4, 8, 8, 12, 12, 16, 32],
        "num_attention_heads": 2,
        "patch_size": 2,
    },
    "Segformer": {
        **STAGES,
        "hidden_sizes": [8, 8, 16, 16],
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 2, 2, 4],
        "decoder_hidden_size": 8,
    },
    "PoolFormer": {**STAGES, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
    "Levit": {
        **STAGES,
        "image_size": 64,
        "hidden_sizes": [16, 16, 16],
        "num_attention_heads": [2, 2, 2],
        "depths": [1, 1, 1],
        "key_dim": [4, 4, 4],
        "attention_ratio": [2, 2, 2],
        "mlp_ratio": [2, 2, 2],
    },
    "Cvt": {**STAGES, "embed_dim": [8, 8, 16], "num_heads": [1, 2, 4], "depth": [1, 1, 1]},
    "FocalNet": {
        **STAGES,
        "patch_size": 4,
        "embed_dim": 8,
        "depths": [1, 1],
        "hidden_sizes": [8, 16],
        "focal_levels": [2, 2],
        "focal_windows": [3, 3],
    },
    "Pvt": {**STAGES, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]},
    "PvtV2": {**STAGES, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]},
    "Hiera": {
        **STAGES,
        "image_size": [32, 32],
        "embed_dim": 8,
        "depths": [1, 1],
        "num_heads": [1, 2],
        "num_query_pool": 1,
    },
    "EfficientNet": {**STAGES, "width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
}
VIDEO = {
    "VideoMAE": {**IMAGE, "num_frames": 4, "tubelet_size": 2},
    "Timesformer": {**IMAGE, "num_frames": 4},
    "Vivit": {**IMAGE, "num_frames": 4, "tubelet_size": [2, 8, 8]},
}
SPEECH = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": (8, 8),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    "num_feat_extract_layers": 2,
    "pad_token_id": 0,
}
WAVES = {"Wav2Vec2": {}, "Hubert": {}, "WavLM": {"num_buckets": 8}, "UniSpeech": {}, "SEW": {"squeeze_factor": 2}}


def ids(length=8):
    tokens = torch.randint(3, 48, (BATCH, length))
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def model(name, head, config):
    values = getattr(transformers, f"{name}Config")(**config)
    values._experts_implementation = "eager"  # the grouped product takes no float64
    return getattr(transformers, f"{name}{head}")(values)


def causal(name, extra):
    inputs = ids()
    if name == "Rwkv":
        del inputs["attention_mask"]
    return model(name, "ForCausalLM", {**TEXT, **extra, "use_cache": False}), inputs | {"labels": inputs["input_ids"]}


def masked(name, extra):
    inputs = ids()
    if name == "FNet":
        del inputs["attention_mask"]
    return model(name, "ForMaskedLM", {**TEXT, **extra}), inputs | {"labels": inputs["input_ids"]}


def seq2seq(name, config):
    head = "MTModel" if name == "Marian" else "ForConditionalGeneration"
    return model(name, head, {**config, "use_cache": False}), ids() | {"labels": torch.randint(3, 48, (BATCH, 6))}


def classified(name, config):
    size = config["image_size"]
    size = size if isinstance(size, int) else size[0]
    inputs = {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(0, 3, (BATCH,))}
    return model(name, "ForImageClassification", config), inputs


def video(name, config):
    inputs = {"pixel_values": torch.randn(BATCH, 4, 3, 32, 32), "labels": torch.randint(0, 3, (BATCH,))}
    return model(name, "ForVideoClassification", config), inputs


def speech(name, extra):
    return model(name, "ForCTC", {**SPEECH, **extra}), {
        "input_values": torch.randn(BATCH, 400),
        "labels": torch.randint(1, 20, (BATCH, 3)),
    }


recipes = [Recipe(name, "transformers", partial(causal, name, extra)) for name, extra in CAUSAL.items()]
recipes += [Recipe(name, "transformers", partial(masked, name, extra)) for name, extra in MASKED.items()]
recipes += [Recipe(name, "transformers", partial(seq2seq, name, config)) for name, config in SEQ2SEQ.items()]
recipes += [Recipe(name, "transformers", partial(classified, name, config)) for name, config in CLASSIFIED.items()]
recipes += [Recipe(name, "transformers", partial(video, name, config)) for name, config in VIDEO.items()]
recipes += [Recipe(name, "transformers", partial(speech, name, extra)) for name, extra in WAVES.items()]
recipes += zoo_perception.recipes


def recipe(fn):
    recipes.append(Recipe(fn.__name__, "transformers", fn))
    return fn


@recipe
def gpt2():
    inputs = ids()
    config = transformers.GPT2Config(vocab_size=48, n_embd=16, n_layer=2, n_head=4, n_positions=32, bos_token_id=1)
    return transformers.GPT2LMHeadModel(config), inputs | {"labels": inputs["input_ids"]}


@recipe
def xlnet():
    inputs = ids()
    config = transformers.XLNetConfig(vocab_size=48, d_model=16, n_layer=2, n_head=4, d_inner=32)
    return transformers.XLNetLMHeadModel(config), inputs | {"labels": inputs["input_ids"]}


@recipe
def whisper():
    config = transformers.WhisperConfig(
        **PAIR, num_mel_bins=8, max_source_positions=16, max_target_positions=16, suppress_tokens=None, use_cache=False
    )
    inputs = {"input_features": torch.randn(BATCH, 8, 32), "labels": torch.randint(3, 48, (BATCH, 5))}
    return transformers.WhisperForConditionalGeneration(config), inputs


@recipe
def clip():
    text = {**TEXT, "eos_token_id": 2}
    config = transformers.CLIPConfig(text_config=text, vision_config=IMAGE, projection_dim=8)
    inputs = ids() | {"pixel_values": torch.randn(BATCH, 3, 32, 32), "return_loss": True}
    return transformers.CLIPModel(config), inputs


@recipe
def siglip():
    config = transformers.SiglipConfig(text_config=TEXT, vision_config=IMAGE)
    inputs = {"input_ids": ids()["input_ids"], "pixel_values": torch.randn(BATCH, 3, 32, 32), "return_loss": True}
    return transformers.SiglipModel(config), inputs


@recipe
def vilt():
    config = transformers.ViltConfig(**{**TEXT, **IMAGE, "max_image_length": -1})
    return transformers.ViltModel(config), ids() | {"pixel_values": torch.randn(BATCH, 3, 32, 32)}


@recipe
def audio_spectrogram():
    config = transformers.ASTConfig(**{**IMAGE, "num_mel_bins": 16, "max_length": 32})
    inputs = {"input_values": torch.randn(BATCH, 32, 16), "labels": torch.randint(0, 3, (BATCH,))}
    return transformers.ASTForAudioClassification(config), inputs


@recipe
def decision():
    config = transformers.DecisionTransformerConfig(state_dim=5, act_dim=3, hidden_size=16, n_layer=2, n_head=4)
    inputs = {
        "states": torch.randn(BATCH, 4, 5),
        "actions": torch.randn(BATCH, 4, 3),
        "rewards": torch.randn(BATCH, 4, 1),
        "returns_to_go": torch.randn(BATCH, 4, 1),
        "timesteps": torch.arange(4).repeat(BATCH, 1),
        "attention_mask": torch.ones(BATCH, 4),
    }
    return transformers.DecisionTransformerModel(config), inputs


@recipe
def patch_tst():
    config = transformers.PatchTSTConfig(
        num_input_channels=2,
        context_length=16,
        patch_length=4,
        patch_stride=4,
        d_model=16,
        num_attention_heads=4,
        num_hidden_layers=2,
        ffn_dim=32,
        prediction_length=4,
    )
    inputs = {"past_values": torch.randn(BATCH, 16, 2), "future_values": torch.randn(BATCH, 4, 2)}
    return transformers.PatchTSTForPrediction(config), inputs


@recipe
def patch_ts_mixer():
    config = transformers.PatchTSMixerConfig(
        context_length=16,
        patch_length=4,
        patch_stride=4,
        num_input_channels=2,
        d_model=8,
        num_layers=2,
        prediction_length=4,
    )
    inputs = {"past_values": torch.randn(BATCH, 16, 2), "future_values": torch.randn(BATCH, 4, 2)}
    return transformers.PatchTSMixerForPrediction(config), inputs


@recipe
def perceiver():
    config = transformers.PerceiverConfig(
        vocab_size=48,
        num_latents=4,
        d_latents=16,
        d_model=16,
        num_blocks=1,
        num_self_attends_per_block=2,
        num_self_attention_heads=4,
        num_cross_attention_heads=4,
        max_position_embeddings=8,
    )
    inputs = ids()
    return transformers.PerceiverForMaskedLM(config), {
        "inputs": inputs["input_ids"],
        "attention_mask": inputs["attention_mask"],
        "labels": inputs["input_ids"],
    }


@recipe
def vit_mae():
    config = transformers.ViTMAEConfig(
        **IMAGE, decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=4, mask_ratio=0.5
    )
    inputs = {"pixel_values": torch.randn(BATCH, 3, 32, 32), "noise": torch.rand(BATCH, 16)}
    return transformers.ViTMAEForPreTraining(config), inputs
