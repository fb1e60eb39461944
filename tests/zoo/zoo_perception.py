"""Models of transformers that see, hear, or look ahead, from small configs: each with a part that the others lack."""

import torch
import transformers
from zoo_trial import BATCH, Recipe

recipes: list[Recipe] = []

RESNET = {
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "out_features": ["stage2", "stage3", "stage4"],
}
SWIN = {
    "image_size": 64,
    "patch_size": 4,
    "embed_dim": 8,
    "depths": [1, 1, 1, 1],
    "num_heads": [1, 2, 2, 4],
    "window_size": 4,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}


def recipe(fn):
    recipes.append(Recipe(fn.__name__, "transformers", fn))
    return fn


def image(size=32):
    return torch.randn(BATCH, 3, size, size)


def ids(length=8):
    return torch.randint(3, 48, (BATCH, length))


@recipe
def rt_detr():
    """Attention at sampled points, and anchors that it keeps for the process."""
    config = transformers.RTDetrConfig(
        backbone_config=transformers.RTDetrResNetConfig(**RESNET),
        encoder_hidden_dim=32,
        encoder_in_channels=[8, 16, 16],
        encoder_ffn_dim=32,
        encoder_attention_heads=4,
        d_model=32,
        decoder_in_channels=[32, 32, 32],
        decoder_ffn_dim=32,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_n_points=2,
        num_queries=6,
        num_denoising=0,
        num_labels=3,
        anchor_image_size=None,
    )
    return transformers.RTDetrForObjectDetection(config), {"pixel_values": image(64)}


@recipe
def mask2former():
    config = transformers.Mask2FormerConfig(
        backbone_config=transformers.SwinConfig(**SWIN),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=32,
        dim_feedforward=32,
        encoder_layers=1,
        decoder_layers=3,
        num_attention_heads=4,
        num_queries=5,
    )
    return transformers.Mask2FormerModel(config), {"pixel_values": image(64)}


@recipe
def dinov3():
    """Keeps the coordinates of its patches for the process."""
    config = transformers.DINOv3ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_register_tokens=2,
    )
    return transformers.DINOv3ViTModel(config), {"pixel_values": image()}


@recipe
def vjepa2():
    config = transformers.VJEPA2Config(
        patch_size=8,
        crop_size=16,
        frames_per_clip=4,
        tubelet_size=2,
        hidden_size=24,
        num_attention_heads=2,
        num_hidden_layers=2,
        mlp_ratio=2.0,
        pred_hidden_size=24,
        pred_num_attention_heads=2,
        pred_num_hidden_layers=1,
        num_pooler_layers=1,
    )
    inputs = {"pixel_values_videos": torch.randn(BATCH, 4, 3, 16, 16), "labels": torch.randint(0, 2, (BATCH,))}
    return transformers.VJEPA2ForVideoClassification(config), inputs


@recipe
def qwen2_vl():
    """Text and an image of 4 x 4 patches, which are four of its tokens."""
    config = transformers.Qwen2VLConfig(
        text_config={
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        },
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4},
        image_token_id=60,
        video_token_id=61,
        vision_start_token_id=62,
        vision_end_token_id=63,
    )
    seen = torch.tensor([[62, 60, 60, 60, 60, 63]] * BATCH)
    tokens = torch.cat([seen, ids()], 1)
    inputs = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": torch.randn(16 * BATCH, 2 * 3 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH),
        "mm_token_type_ids": (tokens == 60).long(),
        "labels": tokens,
        "use_cache": False,
    }
    return transformers.Qwen2VLForConditionalGeneration(config), inputs


@recipe
def encodec():
    """Convolutions with parametrized weights, an LSTM and quantized residuals."""
    config = transformers.EncodecConfig(
        num_filters=4,
        hidden_size=8,
        codebook_dim=8,
        codebook_size=16,
        upsampling_ratios=[4, 2],
        target_bandwidths=[1.5],
        sampling_rate=1600,
        num_lstm_layers=1,
    )
    return transformers.EncodecModel(config), {"input_values": torch.randn(BATCH, 1, 64)}


@recipe
def speech_t5():
    """Text to a spectrogram, with a guided attention loss."""
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {"layers": 1, "attention_heads": 4, "ffn_dim": 32}.items()
    }
    config = transformers.SpeechT5Config(
        **sides,
        vocab_size=48,
        hidden_size=32,
        num_mel_bins=8,
        speech_decoder_prenet_units=16,
        speech_decoder_postnet_units=16,
        speech_decoder_postnet_layers=2,
        speaker_embedding_dim=16,
        positional_dropout=0.0,
        speech_decoder_prenet_dropout=0.0,
    )
    inputs = {
        "input_ids": ids(),
        "attention_mask": torch.ones(BATCH, 8, dtype=torch.long),
        "labels": torch.randn(BATCH, 12, 8),
        "speaker_embeddings": torch.randn(BATCH, 16),
    }
    return transformers.SpeechT5ForTextToSpeech(config), inputs


@recipe
def time_series():
    """Scales its values, and its loss is that of a distribution."""
    config = transformers.TimeSeriesTransformerConfig(
        prediction_length=4,
        context_length=12,
        lags_sequence=[1, 2, 3],
        num_time_features=1,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
    )
    inputs = {
        "past_values": torch.randn(BATCH, 15),
        "past_time_features": torch.randn(BATCH, 15, 1),
        "past_observed_mask": torch.ones(BATCH, 15),
        "future_values": torch.randn(BATCH, 4),
        "future_time_features": torch.randn(BATCH, 4, 1),
    }
    return transformers.TimeSeriesTransformerForPrediction(config), inputs


@recipe
def reformer():
    """Sorts its tokens into buckets by hashes."""
    config = transformers.ReformerConfig(
        vocab_size=48,
        hidden_size=16,
        num_attention_heads=2,
        attention_head_size=8,
        feed_forward_size=32,
        attn_layers=["local", "lsh"],
        axial_pos_shape=[4, 4],
        axial_pos_embds_dim=[8, 8],
        local_attn_chunk_length=4,
        lsh_attn_chunk_length=4,
        num_buckets=2,
        num_hashes=1,
        is_decoder=False,
        hash_seed=0,
        max_position_embeddings=16,
    )
    tokens = ids(16)
    return transformers.ReformerForMaskedLM(config), {"input_ids": tokens, "labels": tokens}
