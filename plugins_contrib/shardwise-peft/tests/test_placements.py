"""Where the weights of adapters lie, what it saves, and what is refused."""

import peft
import pytest
import torch
from torch import nn

import shardwise as sw
import shardwise_peft as sp
from adapted import LLAMA_PLAN, ROW, adapted, base, ids, loss_of, placed_base, two_by_two
from shardwise import Replicate, Shard
from shardwise.comm.events import observe
from shardwise.errors import LayoutError, PlacementError
from shardwise.testing import mesh as mesh_of

WHOLE, CUT_0, CUT_1 = (Replicate(), Replicate()), (Replicate(), Shard(0)), (Replicate(), Shard(1))


def placements_of(model, layer):
    return {
        name.rpartition(f"{layer}.")[2]: parameter.placements
        for name, parameter in model.named_parameters()
        if f".{layer}." in name
    }


def of_llama():
    dora = sp.place_adapters(adapted(placed_base(), "dora"))
    assert placements_of(dora, "q_proj") == {
        "base_layer.weight": CUT_0,
        "lora_A.default.weight": WHOLE,
        "lora_B.default.weight": CUT_0,
        "lora_magnitude_vector.default.weight": CUT_0,
    }
    assert placements_of(dora, "o_proj") == {
        "base_layer.weight": CUT_1,
        "lora_A.default.weight": CUT_1,
        "lora_B.default.weight": WHOLE,
        "lora_magnitude_vector.default.weight": WHOLE,
    }
    embedding = sp.place_adapters(adapted(placed_base(), "embedding"))
    assert placements_of(embedding, "embed_tokens") == {
        "base_layer.weight": CUT_0,  # rows of the table, which are the inputs
        "lora_embedding_A.default": CUT_1,
        "lora_embedding_B.default": WHOLE,
    }


def test_of_a_llama(ranks):
    ranks.run(of_llama, timeout=120)


def of_others():
    mesh = mesh_of((2, 2), ("dp", "tp"))
    model = nn.ModuleDict({"conv": nn.Conv2d(4, 6, 3), "grouped": nn.Conv2d(4, 6, 3, groups=2), "out": nn.Linear(4, 6)})
    config = peft.LoraConfig(r=2, target_modules=["conv", "grouped", "out"], lora_bias=True)
    partition = {"conv.*": {"tp": Shard(0)}, "grouped.weight": {"tp": Shard(1)}, "out.*": {"dp": Shard(0)}}
    placed = sp.distribute(peft.get_peft_model(model, config), mesh, partition)
    assert placements_of(placed, "conv")["lora_A.default.weight"] == WHOLE
    assert placements_of(placed, "conv")["lora_B.default.weight"] == CUT_0
    assert placements_of(placed, "conv")["lora_B.default.bias"] == CUT_0
    assert placements_of(placed, "grouped")["lora_A.default.weight"] == WHOLE
    assert placements_of(placed, "out")["lora_B.default.bias"] == (Shard(0), Replicate())


def test_of_convolutions_and_biases(ranks):
    ranks.run(of_others)


def sent_forward(model):
    """What the adapters add to what one layer's forward pass sends."""
    events = []
    tokens = ids(two_by_two())
    with torch.no_grad():
        loss_of(model, tokens)
        with observe(events.append):
            loss_of(model, tokens)
    return sum(event.nbytes for event in events)


def sent():
    followed = sp.place_adapters(adapted(placed_base()))
    whole = sw.distribute_module(adapted(placed_base()), two_by_two(), {"*.lora_A.*": [Replicate(), Replicate()]})
    return sent_forward(followed), sent_forward(whole)


def test_following_sends_less_than_whole_adapters(ranks):
    for followed, whole in ranks.run(sent, timeout=120):
        assert followed <= whole


def refusals():
    with pytest.raises(sp.AdapterError, match="none of its weights is placed"):
        sp.place_adapters(adapted(base()))
    with pytest.raises(sp.AdapterPlanError, match=r"'\*\.queries\.weight' of a PeftModel.*q_proj\.weight"):
        sp.distribute(adapted(base()), two_by_two(), {"*.queries.weight": ROW})
    other = sp.distribute(adapted(base()), two_by_two(), LLAMA_PLAN)
    with torch.no_grad():
        layer = other.base_model.model.model.layers[0].self_attn.q_proj
        layer.lora_B["default"].weight = nn.Parameter(
            layer.lora_B["default"].weight.redistribute(placements=[Replicate(), Replicate()])
        )
    ((name, (lies, follows)),) = sp.misplaced(other).items()
    assert name.endswith("q_proj.lora_B.default.weight")
    assert (lies, follows) == (WHOLE, CUT_0)
    with pytest.raises(PlacementError, match=r"q_proj\.lora_B.*already"):
        sp.place_adapters(other)


def test_what_is_refused(ranks):
    ranks.run(refusals, timeout=120)


def decomposed(kind):
    """Initialisations that take the base weight apart, in float32, which they need."""
    tokens = ids(two_by_two())
    expected = adapted(base().float(), init_lora_weights=kind)(input_ids=ids(), labels=ids()).loss
    model = sp.distribute(adapted(base().float(), init_lora_weights=kind), two_by_two(), LLAMA_PLAN)
    assert sp.misplaced(model) == {}
    torch.testing.assert_close(model(input_ids=tokens, labels=tokens).loss.full_tensor(), expected)
    placed = sw.distribute_module(base().float(), two_by_two(), LLAMA_PLAN)
    with pytest.raises(LayoutError, match="plain tensor"):
        adapted(placed, init_lora_weights=kind)


@pytest.mark.parametrize("kind", ["pissa", "olora"])
def test_initialisations_that_decompose_want_the_adapters_first(ranks, kind):
    ranks.run(decomposed, kind, timeout=120)
