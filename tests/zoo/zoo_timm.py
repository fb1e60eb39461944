"""Models of timm: its own tiny ones, and families made small."""

from functools import partial

import timm
import torch
from timm.models import mlp_mixer
from timm.models.convmixer import ConvMixer
from timm.models.metaformer import MetaFormer
from zoo_trial import BATCH, Recipe

TINY = [name for name in timm.list_models("test_*") if "ntk" not in name]

SMALL = {
    "deit_tiny_distilled_patch16_224": {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 4, "patch_size": 8},
    "eva02_tiny_patch14_224": {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 4, "patch_size": 8},
    "cait_xxs24_224": {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 4, "patch_size": 8},
    "xcit_nano_12_p16_224": {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 4},
    "pvt_v2_b0": {"depths": (1, 1, 1, 1), "embed_dims": (8, 8, 16, 16), "num_heads": (1, 2, 2, 4)},
    "swin_tiny_patch4_window7_224": {
        "img_size": 32,
        "window_size": 2,
        "embed_dim": 8,
        "depths": (1, 2),
        "num_heads": (2, 4),
    },
    "maxvit_pico_rw_256": {"img_size": 64},
    "lcnet_035": {},
    "tinynet_e": {},
    "mobilenetv3_small_050": {},
    "ghostnet_050": {},
    "efficientvit_b0": {},
    "fastvit_t8": {},
    "repghostnet_050": {},
    "coatnet_pico_rw_224": {"img_size": 64},
    "visformer_tiny": {"img_size": 64},
    "twins_svt_small": {"img_size": 64, "embed_dims": (8, 8, 16, 16), "depths": (1, 1, 1, 1)},
    "starnet_s1": {},
}


def made(name, options):
    # timm makes its weights with draws below its own initializers, so the batch comes after the model
    model = timm.create_model(name, pretrained=False, num_classes=6, **options)
    size = options.get("img_size", 64)
    if "img_size" not in options and "fixed_input_size" in model.pretrained_cfg:
        size = model.pretrained_cfg["input_size"][-1]
    return model, (torch.randn(BATCH, 3, size, size),)


def mlp(block):
    model = mlp_mixer.MlpMixer(6, img_size=32, patch_size=8, num_blocks=2, embed_dim=16, block_layer=block)
    return model, (torch.randn(BATCH, 3, 32, 32),)


def convmixer():
    return ConvMixer(8, 2, kernel_size=3, patch_size=4, num_classes=6), (torch.randn(BATCH, 3, 32, 32),)


def poolformer():
    return MetaFormer(num_classes=6, depths=(1, 1), dims=(8, 16)), (torch.randn(BATCH, 3, 32, 32),)


recipes = [Recipe(name, "timm", partial(made, name, {})) for name in TINY]
recipes += [Recipe(name, "timm", partial(made, name, options)) for name, options in SMALL.items()]
recipes += [
    Recipe("mlp_mixer", "timm", partial(mlp, mlp_mixer.MixerBlock)),
    Recipe("res_mlp", "timm", partial(mlp, mlp_mixer.ResBlock)),
    Recipe("convmixer", "timm", convmixer),
    Recipe("poolformer", "timm", poolformer),
]
