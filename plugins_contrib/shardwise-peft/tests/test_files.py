"""Files of adapters: the bytes of one device, and loaded into a placed model."""

from pathlib import Path

import peft
import pytest
import torch
import torch.distributed as dist

import shardwise_peft as sp
from adapted import adapted, assert_same, base, ids, lora, loss_of, placed_base, plan_for, trained, two_by_two, whole

WEIGHTS = "adapter_model.safetensors"


def bytes_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(Path(folder).rglob("*.safetensors"))}


def made(name):
    """Placed first, but for DoRA's magnitudes: norms that the mesh computes differ in their last bit."""
    if "dora" in name:
        return sp.distribute(adapted(base(name), name), two_by_two(), plan_for(name))
    return sp.place_adapters(adapted(placed_base(name), name))


def saved(name, folder):
    expected, model = adapted(base(name), name), made(name)
    for either in (expected, model):
        torch.manual_seed(6)
        either.add_adapter("other", lora("gpt2" if name == "gpt2" else "rslora", r=2))
    sp.place_adapters(model)
    if dist.get_rank() == 0:
        expected.save_pretrained(f"{folder}/one")
    sp.save(model, f"{folder}/mesh")
    dist.barrier()
    assert bytes_of(f"{folder}/mesh") == bytes_of(f"{folder}/one")
    assert bytes_of(f"{folder}/mesh").keys() == {WEIGHTS, f"other/{WEIGHTS}"}


@pytest.mark.parametrize("name", ["lora", "dora", "embedding", "saved module", "gpt2"])
def test_the_bytes_are_those_of_one_device(ranks, tmp_path, name):
    ranks.run(saved, name, str(tmp_path), timeout=120)


def loaded(folder):
    model = sp.place_adapters(adapted(placed_base()))
    trained(model, ids(two_by_two()), steps=1)
    sp.save(model, folder, selected_adapters=["default"])
    again = sp.load(placed_base(), folder, is_trainable=True, autocast_adapter_dtype=False)
    assert sp.misplaced(again) == {}
    assert torch.equal(whole(loss_of(again, ids(two_by_two()))), whole(loss_of(model, ids(two_by_two()))))
    again.load_adapter(folder, "second", autocast_adapter_dtype=False)
    assert {places for places, _ in sp.misplaced(again).values()} == {None}
    sp.place_adapters(again)
    again.set_adapter("second")
    assert torch.equal(whole(loss_of(again, ids(two_by_two()))), whole(loss_of(model, ids(two_by_two()))))
    one = peft.PeftModel.from_pretrained(base(), folder, autocast_adapter_dtype=False)
    one_of_mesh = sp.load(placed_base(), folder, autocast_adapter_dtype=False)
    assert_same(one_of_mesh, one)


def test_they_are_loaded_into_a_placed_model_and_on_one_device(ranks, tmp_path):
    ranks.run(loaded, str(tmp_path), timeout=120)


def loaded_over(folder):
    """``set_peft_model_state_dict`` into adapters that are placed already."""
    import peft
    from safetensors.torch import load_file

    model = sp.place_adapters(adapted(placed_base()))
    sp.save(model, folder)
    other = sp.place_adapters(adapted(placed_base()))
    trained(other, ids(two_by_two()), steps=1)
    peft.set_peft_model_state_dict(other, load_file(f"{folder}/{WEIGHTS}"))
    assert sp.misplaced(other) == {}
    assert torch.equal(whole(loss_of(other, ids(two_by_two()))), whole(loss_of(model, ids(two_by_two()))))


def test_they_are_loaded_over_placed_adapters(ranks, tmp_path):
    ranks.run(loaded_over, str(tmp_path), timeout=120)
