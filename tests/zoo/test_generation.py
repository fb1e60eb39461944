"""``generate()`` of transformers on a mesh gives the tokens of one device (``pytest -m "zoo and slow"``)."""

from __future__ import annotations

import warnings

import pytest
import torch
from zoo_judge import prepared
from zoo_packages import installed
from zoo_trial import LAYOUTS

import shardwise as sw
from shardwise import Replicate, Shard
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


def llama(transformers):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**TOKENS, **sizes, bos_token_id=1, num_attention_heads=4, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config)


def gpt2(transformers):
    config = transformers.GPT2Config(**TOKENS, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1)
    return transformers.GPT2LMHeadModel(config)


def t5(transformers):
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**TOKENS, **sizes, decoder_start_token_id=0))


def model_of(make):
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    return make(transformers).double().eval()


def generated(make, way, layout):
    warnings.simplefilter("ignore")
    ids = torch.randint(3, 64, (4, 7), generator=torch.Generator().manual_seed(1))
    attended = torch.ones_like(ids)
    for row, padding in ((1, 3), (3, 1)):
        ids[row, :padding] = attended[row, :padding] = 0
    one_device = model_of(make)
    torch.manual_seed(3)
    expected = one_device.generate(ids, attention_mask=attended, max_new_tokens=8, **WAYS[way])
    shape, places = LAYOUTS[layout]
    mesh = mesh_of(shape)
    model = model_of(make)
    sw.distribute_module(model, mesh, places(model))
    batch = [Shard(0), *[Replicate()] * (mesh.ndim - 1)]
    ids, attended = (sw.distribute_tensor(t, mesh, batch) for t in (ids, attended))
    torch.manual_seed(3)
    with sw.on(mesh):
        tokens = model.generate(ids, attention_mask=attended, max_new_tokens=8, **WAYS[way])
    assert torch.equal(tokens.full_tensor() if isinstance(tokens, sw.MeshTensor) else tokens, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [llama, gpt2, t5], ids=lambda make: make.__name__)
def test_tokens_are_those_of_one_device(pool, make, way, layout):
    prepared(pool, ["transformers"]).run(generated, make, way, layout, timeout=120)
