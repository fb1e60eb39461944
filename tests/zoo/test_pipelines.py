"""A pipeline of diffusers on a mesh gives the images of one device, as NumPy arrays and as pictures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from zoo_packages import declare_torchvision, installed

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.testing import mesh as mesh_of

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.slow,
    pytest.mark.sample,
    pytest.mark.skipif("diffusers" not in installed(), reason="needs diffusers: pip install -e '.[zoo]'"),
]


def pipeline():
    declare_torchvision()
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    made = DDPMPipeline(model, DDPMScheduler(num_train_timesteps=10))
    made.set_progress_bar_config(disable=True)
    return made


def images(made, kind):
    torch.manual_seed(3)
    return np.stack([np.asarray(image) for image in made(batch_size=2, num_inference_steps=3, output_type=kind).images])


def images_of_a_mesh(kind):
    mesh, made = mesh_of((2, 2)), pipeline()
    sw.distribute_module(made.unet, mesh, {"*conv*.weight": [Replicate(), Shard(0)]})
    with sw.on(mesh):
        return images(made, kind)


@pytest.mark.parametrize(("kind", "tolerance"), [("np", 1e-5), ("pil", 1)])
def test_a_pipeline_gives_the_images_of_one_device(pool, kind, tolerance):
    expected = images(pipeline(), kind)
    for found in pool.run(images_of_a_mesh, kind, timeout=240):
        assert found.shape == expected.shape == (2, 8, 8, 3)
        np.testing.assert_allclose(found.astype(float), expected.astype(float), rtol=0, atol=tolerance)
