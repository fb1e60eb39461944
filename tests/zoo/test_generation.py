"""``generate()`` of transformers on a mesh gives the tokens of one device (``pytest -m "zoo and slow"``)."""

from __future__ import annotations

import warnings

import pytest
import torch
from zoo_judge import prepared
from zoo_packages import installed
from zoo_trial import LAYOUTS

import shardwise as sw
from shardwise.testing import mesh as mesh_of

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.slow,
    pytest.mark.skipif("transformers" not in installed(), reason="needs transformers: pip install -e '.[zoo]'"),
]

WAYS = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "without a cache": {"do_sample": False, "use_cache": False},
    "sampled": {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8},
    "penalties": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}
TOKENS = {"vocab_size": 64, "eos_token_id": 2, "pad_token_id": 0}


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SIZES, "num_key_value_heads": 2, "bos_token_id": 1, "max_position_embeddings": 64}


def text(before=()):
    """Tokens padded on the left, after some that no row pads."""
    ids = torch.randint(3, 60, (4, 7), generator=torch.Generator().manual_seed(1))
    attended = torch.ones_like(ids)
    for row, padding in ((1, 3), (3, 1)):
        ids[row, :padding] = attended[row, :padding] = 0
    first = torch.tensor([before] * 4, dtype=ids.dtype).reshape(4, -1)
    return {"input_ids": torch.cat([first, ids], 1), "attention_mask": torch.cat([torch.ones_like(first), attended], 1)}


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def llama(transformers):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TOKENS, **GROUPED)), text()


def gpt2(transformers):
    config = transformers.GPT2Config(**TOKENS, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1)
    return transformers.GPT2LMHeadModel(config), text()


def t5(transformers):
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**TOKENS, **sizes, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config), text()


def whisper(transformers):
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {"layers": 1, "attention_heads": 4, "ffn_dim": 32}.items()
    }
    lengths = {"max_source_positions": 16, "max_target_positions": 32}
    special = {"decoder_start_token_id": 1, "bos_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None}
    config = transformers.WhisperConfig(**TOKENS, **sides, **lengths, **special, d_model=16, num_mel_bins=8)
    return transformers.WhisperForConditionalGeneration(config), {"input_features": numbers(4, 8, 32)}


def qwen2_vl(transformers):
    """Sees an image of 4 x 4 patches, which are four tokens of the text."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    sees = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 4, "patch_size": 4}
    of_text = {**TOKENS, **GROUPED, "rope_parameters": rope}
    image = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
    config = transformers.Qwen2VLConfig(text_config=of_text, vision_config=sees, **image)
    inputs = text(before=[62, 60, 60, 60, 60, 63]) | {
        "pixel_values": numbers(4 * 16, 2 * 3 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 4),
    }
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == 60).long()
    model = transformers.Qwen2VLForConditionalGeneration(config)
    model.generation_config.suppress_tokens = list(image.values())  # a model that was not trained would write them
    return model, inputs


def mamba(transformers):
    config = transformers.MambaConfig(**TOKENS, hidden_size=16, num_hidden_layers=2, state_size=4, bos_token_id=1)
    return transformers.MambaForCausalLM(config), text()


def model_of(make):
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model, inputs = make(transformers)
    return model.double().eval(), inputs


def generated(make, way, layout):
    warnings.simplefilter("ignore")
    one_device, inputs = model_of(make)
    torch.manual_seed(3)
    expected = one_device.generate(**inputs, max_new_tokens=8, **WAYS[way])
    lies = LAYOUTS[layout]
    mesh = mesh_of(lies.mesh_shape)
    model, _ = model_of(make)
    places = lies.places(model, lies.mesh_shape[-1])
    sw.distribute_module(model, mesh, {name: lies.placements(place) for name, place in places.items()})
    inputs = {name: sw.distribute_tensor(t, mesh, lies.batch_placements(t)) for name, t in inputs.items()}
    torch.manual_seed(3)
    with sw.on(mesh):
        tokens = model.generate(**inputs, max_new_tokens=8, **WAYS[way])
    assert torch.equal(tokens.full_tensor() if isinstance(tokens, sw.MeshTensor) else tokens, expected)


MODELS = [llama, gpt2, t5, whisper, qwen2_vl, mamba]


@pytest.mark.parametrize("layout", ["dp x tp", "fsdp"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_tokens_are_those_of_one_device(pool, make, way, layout):
    prepared(pool, ["transformers"]).run(generated, make, way, layout, timeout=120)
