"""``generate`` gives the tokens of one device."""

import pytest
import torch

import shardwise_transformers as st
from architectures import make
from shardwise.testing import mesh as mesh_of

WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "static cache": {"cache_implementation": "static"},
    "without a cache": {"use_cache": False},
    "sampled": {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8},
}
# Attention of Gemma2 is eager: in float64 its mask overflows the float32 of its softmax where a padded row sees
# nothing, on one device as well, so that its tokens say nothing.
MODELS = {"Llama": ("dp", "tp"), "Mixtral": ("ep", "tp"), "Qwen3": ("dp", "tp"), "Phi3": ("dp", "tp")}


def prompts(rows):
    ids = torch.randint(3, 60, (rows, 7), generator=torch.Generator().manual_seed(1))
    attended = torch.ones_like(ids)
    for row, padding in ((1, 3), (2, 1)):
        ids[row, :padding] = attended[row, :padding] = 0
    return ids, attended


def generated(name, way, rows):
    import warnings

    warnings.simplefilter("ignore")
    ids, attended = prompts(rows)
    options = {"do_sample": False, "max_new_tokens": 6, "attention_mask": attended, **WAYS[way]}
    one_device = make(name).eval()
    torch.manual_seed(3)
    expected = one_device.generate(ids, **options)
    mesh = mesh_of((2, 2), MODELS[name])
    model = st.distribute(make(name).eval(), mesh)
    torch.manual_seed(3)
    tokens = st.generate(model, ids, mesh, **options)
    assert type(tokens) is torch.Tensor
    assert torch.equal(tokens, expected)
    assert tokens.shape[1] > ids.shape[1]


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_one_device(ranks, way):
    ranks.run(generated, "Llama", way, 4, timeout=120)


def test_of_experts(ranks):
    ranks.run(generated, "Mixtral", "greedy", 4, timeout=120)


def test_of_prompts_that_do_not_divide(ranks):
    ranks.run(generated, "Llama", "greedy", 3, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_other_models(ranks, name, way):
    ranks.run(generated, name, way, 3, timeout=120)
