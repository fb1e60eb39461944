"""Denoisers and autoencoders of diffusers from small configs."""

import diffusers
import torch
from zoo_trial import BATCH, Recipe

recipes: list[Recipe] = []


def recipe(fn):
    recipes.append(Recipe(fn.__name__, "diffusers", fn))
    return fn


def image(channels=3, size=8):
    return torch.randn(BATCH, channels, size, size)


def times():
    return torch.randint(0, 100, (BATCH,))


@recipe
def unet_2d():
    model = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return model, {"sample": image(), "timestep": times()}


@recipe
def unet_2d_condition():
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=4,
        cross_attention_dim=12,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    return model, {"sample": image(4), "timestep": times(), "encoder_hidden_states": torch.randn(BATCH, 5, 12)}


@recipe
def dit():
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        norm_num_groups=4,
        num_embeds_ada_norm=10,
    )
    labels = torch.randint(0, 10, (BATCH,))
    return model, {"hidden_states": image(4), "timestep": times(), "class_labels": labels}


@recipe
def pixart():
    model = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=8,
        cross_attention_dim=16,
        caption_channels=12,
        norm_num_groups=4,
        use_additional_conditions=False,
    )
    return model, {"hidden_states": image(4), "timestep": times(), "encoder_hidden_states": torch.randn(BATCH, 5, 12)}


@recipe
def stable_diffusion_3():
    model = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        caption_projection_dim=16,
        pooled_projection_dim=10,
        out_channels=4,
        pos_embed_max_size=8,
    )
    return model, {
        "hidden_states": image(4),
        "timestep": times(),
        "encoder_hidden_states": torch.randn(BATCH, 5, 12),
        "pooled_projections": torch.randn(BATCH, 10),
    }


@recipe
def flux():
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        pooled_projection_dim=10,
        axes_dims_rope=(2, 2, 4),
    )
    return model, {
        "hidden_states": torch.randn(BATCH, 16, 4),
        "encoder_hidden_states": torch.randn(BATCH, 5, 12),
        "pooled_projections": torch.randn(BATCH, 10),
        "timestep": torch.rand(BATCH),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.randn(5, 3),
    }


@recipe
def autoencoder_kl():
    model = diffusers.AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        latent_channels=2,
        sample_size=8,
    )
    return model, {"sample": image()}


@recipe
def vector_quantized():
    model = diffusers.VQModel(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        latent_channels=3,
        num_vq_embeddings=16,
    )
    return model, {"sample": image()}


@recipe
def prior():
    model = diffusers.PriorTransformer(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        embedding_dim=12,
        num_embeddings=5,
        additional_embeddings=4,
    )
    return model, {
        "hidden_states": torch.randn(BATCH, 12),
        "timestep": times(),
        "proj_embedding": torch.randn(BATCH, 12),
        "encoder_hidden_states": torch.randn(BATCH, 5, 12),
    }


@recipe
def wan():
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=12,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    return model, {
        "hidden_states": torch.randn(BATCH, 4, 2, 4, 4),
        "timestep": times(),
        "encoder_hidden_states": torch.randn(BATCH, 5, 12),
    }


@recipe
def cog_video():
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        time_embed_dim=4,
        text_embed_dim=12,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=9,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=5,
    )
    return model, {
        "hidden_states": torch.randn(BATCH, 3, 4, 8, 8),
        "timestep": times(),
        "encoder_hidden_states": torch.randn(BATCH, 5, 12),
    }


@recipe
def stable_diffusion_xl():
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=(2, 4),
        cross_attention_dim=12,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=80,
    )
    return model, {
        "sample": image(4),
        "timestep": times(),
        "encoder_hidden_states": torch.randn(BATCH, 5, 12),
        "added_cond_kwargs": {"time_ids": torch.randn(BATCH, 6), "text_embeds": torch.randn(BATCH, 32)},
    }


@recipe
def hunyuan_video():
    """Masks the padded tokens of its text, whose number differs between rows."""
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=1,
        patch_size_t=1,
        guidance_embeds=True,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(2, 4, 4),
    )
    return model, {
        "hidden_states": torch.randn(BATCH, 4, 1, 4, 4),
        "timestep": times(),
        "pooled_projections": torch.randn(BATCH, 8),
        "encoder_hidden_states": torch.randn(BATCH, 5, 16),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]),
        "guidance": times(),
    }
