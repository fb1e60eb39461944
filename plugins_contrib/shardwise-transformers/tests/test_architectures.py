"""A training step of each architecture, placed by its own plans, is that of one device."""

import pytest
import transformers

from architectures import CAUSAL, MESHES, compare

TOLERANCE = 1e-12

EVERY_DAY = [
    ("Llama", "dp x tp"),
    ("Qwen3", "tp"),  # norms of heads
    ("Mixtral", "ep x tp"),  # whole experts, each cut
    ("Gemma3", "dp x tp"),
    ("Phi3", "tp"),  # packed queries, keys and values
    ("GptOss", "dp x ep"),  # transposed experts with biases
    ("DeepseekV3", "dp x tp"),  # latent attention, shared experts
    ("Llama4", "tp"),  # transposed packed experts
]
ALL = [
    (name, how)
    for name in CAUSAL
    for how in MESHES
    if "ep" not in how.split(" x ")
    or getattr(
        transformers, f"{'Llama4Text' if name == 'Llama4' else 'Gemma3Text' if name == 'Gemma3' else name}Config"
    ).base_model_ep_plan
]


@pytest.mark.parametrize(("name", "how"), EVERY_DAY)
def test_a_step_is_that_of_one_device(ranks, name, how):
    for gap, where in ranks.run(compare, name, how, timeout=120):
        assert gap < TOLERANCE, where


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how"), [("Mixtral", "ep"), ("GptOss", "ep")])
def test_experts_on_two_ranks(two_ranks, name, how):
    for gap, where in two_ranks.run(compare, name, how, timeout=120):
        assert gap < TOLERANCE, where


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how"), ALL)
def test_every_architecture_on_every_mesh(ranks, name, how):
    for gap, where in ranks.run(compare, name, how, timeout=120):
        assert gap < TOLERANCE, where


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUSAL)
def test_every_architecture_on_two_ranks(two_ranks, name):
    for gap, where in two_ranks.run(compare, name, "tp", timeout=120):
        assert gap < TOLERANCE, where


AWKWARD = {
    "one key head": ("Llama", "tp", {"num_key_value_heads": 1}),
    "heads that do not divide": (
        "Llama",
        "tp",
        {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3},
    ),
    "a vocabulary that does not divide": ("Llama", "tp", {"vocab_size": 61}),
    "tied embeddings": ("Llama", "dp x tp", {"tie_word_embeddings": True, "vocab_size": 63}),
    "features that do not divide": ("Phi3", "tp", {"intermediate_size": 42}),
    "packed experts that do not divide": ("Mixtral", "dp x tp", {"intermediate_size": 25}),
    "experts that do not divide": ("Mixtral", "ep", {"num_local_experts": 5}),
    "fewer experts than ranks": ("Mixtral", "ep", {"num_local_experts": 3}),
    "rows that do not divide": ("Mixtral", "dp x ep", {"rows": 3}),
}


RARE = ["heads that do not divide", "packed experts that do not divide", "fewer experts than ranks"]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in RARE else []) for case in AWKWARD]
)
def test_sizes_that_do_not_divide(ranks, case):
    name, how, changes = AWKWARD[case]
    for gap, where in ranks.run(lambda: compare(name, how, **changes), timeout=120):
        assert gap < TOLERANCE, where
