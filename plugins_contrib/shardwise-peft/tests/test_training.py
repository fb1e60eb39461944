"""Two AdamW steps of adapters on a mesh are those of one device, whatever was first, the adapters or the mesh."""

import peft
import pytest
import torch

import shardwise_peft as sp
from adapted import (
    ADAPTERS,
    adapted,
    assert_same,
    base,
    ids,
    lora,
    loss_of,
    placed_base,
    plan_for,
    trained,
    two_by_two,
    whole,
)
from shardwise import MeshTensor


def made(name, order):
    if order == "mesh first":
        return sp.place_adapters(adapted(placed_base(name), name))
    return sp.distribute(adapted(base(name), name), two_by_two(), plan_for(name))


def two_steps(name, order):
    expected = adapted(base(name), name)
    model = made(name, order)
    assert sp.misplaced(model) == {}
    assert_same(model, expected)
    loss = trained(model, ids(two_by_two()))
    torch.testing.assert_close(whole(loss), trained(expected, ids()), rtol=1e-9, atol=1e-11)
    assert_same(model, expected)
    assert all(isinstance(p, MeshTensor) for p in model.parameters())
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        n for n, p in expected.named_parameters() if p.requires_grad
    }


@pytest.mark.parametrize("order", ["mesh first", "adapters first"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_two_steps_are_those_of_one_device(ranks, name, order):
    ranks.run(two_steps, name, order, timeout=120)


def by_mode(model, tokens):
    """The loss of each way to use adapters, then the merged base."""
    losses = {"on": loss_of(model, tokens)}
    with model.disable_adapter():
        losses["off"] = loss_of(model, tokens)
    model.add_adapter("other", lora("rslora", r=2))
    if isinstance(tokens, MeshTensor):
        sp.place_adapters(model)
        assert sp.misplaced(model) == {}
    model.set_adapter("other")
    losses["other"] = loss_of(model, tokens)
    model.add_weighted_adapter(["default", "other"], [0.5, 0.25], "both", combination_type="cat")
    model.set_adapter("both")
    losses["both"] = loss_of(model, tokens)
    model.merge_adapter()
    losses["merged"] = loss_of(model, tokens)
    model.unmerge_adapter()
    losses["unmerged"] = loss_of(model, tokens)
    model.delete_adapter("both")
    model.set_adapter("default")
    return {name: float(whole(loss.detach())) for name, loss in losses.items()}, model.merge_and_unload()


def modes(name):
    one_device = adapted(base(), name)
    torch.manual_seed(7)
    expected, merged = by_mode(one_device, ids())
    model = sp.place_adapters(adapted(placed_base(), name))
    torch.manual_seed(7)
    losses, merged_on_mesh = by_mode(model, ids(two_by_two()))
    assert losses == pytest.approx(expected, rel=1e-9)
    assert len({round(loss, 9) for loss in expected.values()}) == 4  # "both" is that of merged and unmerged
    assert not isinstance(merged_on_mesh, peft.PeftModel)
    assert_same(merged_on_mesh, merged)
    before = dict(placed_base().named_parameters())
    for key, parameter in merged_on_mesh.named_parameters():
        assert parameter.placements == before[key].placements


@pytest.mark.parametrize("name", ["lora", "dora"])
def test_several_adapters_disabled_merged_and_unmerged(ranks, name):
    ranks.run(modes, name, timeout=120)
