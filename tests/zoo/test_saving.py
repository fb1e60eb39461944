"""Models of other people save themselves on a mesh as on one device: the same bytes, which load again."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
import torch.distributed as dist
from torch import nn
from zoo_packages import declare_torchvision

import shardwise as sw
from shardwise import Shard
from shardwise.testing import mesh as mesh_of

pytestmark = [pytest.mark.zoo, pytest.mark.slow, pytest.mark.sample]
SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def llama(**options):
    declare_torchvision()
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **options))


def mixtral():
    declare_torchvision()
    import transformers

    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=2))


def unet():
    declare_torchvision()
    import diffusers

    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
    return diffusers.UNet2DModel(8, layers_per_block=1, block_out_channels=(8,), norm_num_groups=4, **blocks)


def adapted():
    declare_torchvision()
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2, modules_to_save=["lm_head"])
    return peft.get_peft_model(llama(), config)


def save_pretrained(model, folder, **options):
    model.save_pretrained(folder, **options)


def save_of_the_first(model, folder, **options):
    model.save_pretrained(folder, is_main_process=not dist.is_initialized() or dist.get_rank() == 0, **options)


def save_model(model, folder):
    from safetensors.torch import save_model

    save_model(model, f"{folder}/model.safetensors")


def save_by_accelerate(model, folder):
    declare_torchvision()
    import accelerate

    accelerate.Accelerator(cpu=True).save_model(model, folder)


def tied():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6))
    model[1].weight = model[0].weight
    return model


CASES = {
    "transformers": ("transformers", llama, save_pretrained, {}),
    "transformers, tied": ("transformers", lambda: llama(tie_word_embeddings=True), save_pretrained, {}),
    "transformers, several files": ("transformers", llama, save_pretrained, {"max_shard_size": "8KB"}),
    "transformers, experts": ("transformers", mixtral, save_pretrained, {}),
    "transformers, the first rank": ("transformers", llama, save_of_the_first, {}),
    "diffusers": ("diffusers", unet, save_pretrained, {}),
    "diffusers, the first rank": ("diffusers", unet, save_of_the_first, {"max_shard_size": "8KB"}),
    "peft": ("peft", adapted, save_pretrained, {}),
    "peft, the first rank": ("peft", adapted, save_of_the_first, {}),
    "safetensors": ("safetensors", tied, save_model, {}),
    "accelerate": ("accelerate", llama, save_by_accelerate, {}),
}


def bytes_of(folder):
    """By file; of a configuration what it says, because the order of a set is another in each process."""
    paths = [path for path in sorted(Path(folder).iterdir()) if path.suffix != ".md"]
    return {p.name: in_order(json.loads(p.read_text())) if p.suffix == ".json" else p.read_bytes() for p in paths}


def in_order(value):
    if isinstance(value, dict):
        return {key: in_order(part) for key, part in value.items()}
    return sorted(map(str, value)) if isinstance(value, list) else value


def saved(name, folder):
    _, make, save, options = CASES[name]
    torch.manual_seed(0)
    model = make()
    sw.distribute_module(model, mesh_of((4,)), {"*.weight": [Shard(0)]})  # some sizes are uneven
    save(model, folder, **options)
    dist.barrier()
    assert all(isinstance(tensor, sw.MeshTensor) for tensor in model.state_dict().values())


# peft asks for a name that transformers no longer wants.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", CASES)
def test_the_bytes_are_those_of_one_device(pool, tmp_path, name):
    package, make, save, options = CASES[name]
    if find_spec(package) is None:
        pytest.skip(f"needs {package}: pip install -e '.[zoo]'")
    one, mesh = Path(mkdtemp(dir=tmp_path)), Path(mkdtemp(dir=tmp_path))
    torch.manual_seed(0)
    save(make(), str(one), **options)
    pool.run(saved, name, str(mesh), timeout=120)
    assert bytes_of(mesh) == bytes_of(one)


def saved_and_loaded(folder):
    mesh, expected = mesh_of((2, 2)), llama()
    model = sw.distribute_module(llama(), mesh, {"*proj.weight": [Shard(0), Shard(1)]})
    with torch.no_grad():
        for parameter in (*model.parameters(), *expected.parameters()):
            parameter.mul_(1.5)
    model.save_pretrained(folder)
    dist.barrier()
    again = sw.distribute_module(type(model).from_pretrained(folder), mesh, {"*proj.weight": [Shard(1), Shard(0)]})
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        logits = again(sw.distribute_tensor(ids, mesh)).logits
        torch.testing.assert_close(logits.full_tensor(), expected(ids).logits)
    again.load_state_dict(llama().state_dict())
    with torch.no_grad():
        logits = again(sw.distribute_tensor(ids, mesh)).logits
        torch.testing.assert_close(logits.full_tensor(), llama()(ids).logits)


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers: pip install -e '.[zoo]'")
def test_what_was_saved_loads_and_is_placed_again(pool, tmp_path):
    pool.run(saved_and_loaded, str(tmp_path), timeout=120)
