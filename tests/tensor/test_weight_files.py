"""A module on a mesh that saves itself: the function that writes gets whole tensors, others MeshTensors."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import shardwise as sw
from shardwise import MeshTensor, Replicate, Shard
from shardwise.errors import LayoutError, WorkerError
from shardwise.testing import mesh as mesh_of


class Saved(nn.Module):
    """Has the method of transformers, which asks for a state dict on every rank."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(3, 5)
        self.last.weight = self.first.weight
        self.register_buffer("seen", torch.arange(5))
        nn.init.constant_(self.first.bias, 2.0)
        nn.init.constant_(self.last.bias, 3.0)
        nn.init.constant_(self.first.weight, 4.0)

    def save_pretrained(self, asks=nn.Module.state_dict):
        return asks(self)

    def weights(self):
        return self.state_dict()


class Transformers(Saved):
    def save_pretrained(self, asks=nn.Module.state_dict):
        save_on_this_rank = dist.get_rank() == 0  # noqa: F841  # is read from outside
        return asks(self)


def placed(kind=Saved):
    return sw.distribute_module(kind(), mesh_of((2, 2)), {"*.weight": [Shard(0), Shard(1)], "seen": [Shard(0)] * 2})


def check_whole(state, prefix=""):
    expected = Saved().state_dict(prefix=prefix)
    assert list(state) == list(expected)
    for name, tensor in state.items():
        assert type(tensor) is torch.Tensor
        assert torch.equal(tensor, expected[name]), name
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    assert state[f"{prefix}first.weight"] is state[f"{prefix}last.weight"]


def whole_for_the_writer():
    model = placed()
    check_whole(model.save_pretrained())
    check_whole(copy.deepcopy(model).save_pretrained())
    # An outer module without the method, and one that has it too, may be the ones that were placed, or not.
    outer = nn.Module()
    outer.inner = model
    check_whole(Saved.save_pretrained(outer), "inner.")
    other = nn.Module()
    other.inner = Saved()
    sw.distribute_module(other, mesh_of((4,)), {"*.weight": [Shard(0)]})
    check_whole(other.inner.save_pretrained())
    check_whole(Saved.save_pretrained(other), "inner.")


def parts_for_others():
    model = placed()
    for state in (
        model.state_dict(),
        model.weights(),
        model.save_pretrained(get_model_state_dict),  # distributed checkpoints
    ):
        assert all(isinstance(tensor, MeshTensor) for tensor in state.values())
        assert state["first.weight"].placements == (Shard(0), Shard(1))
    assert model.first.weight is model.last.weight
    assert model.seen.placements == (Shard(0), Shard(0))
    assert model.load_state_dict(model.save_pretrained())
    assert pickle.dumps(model.state_dict())


def only_the_first_keeps():
    state = placed(Transformers).save_pretrained()
    if dist.get_rank() == 0:
        check_whole(state)
        return
    for name, tensor in Saved().state_dict().items():
        assert (state[name].shape, state[name].dtype) == (tensor.shape, tensor.dtype)
        assert state[name].untyped_storage().nbytes() == tensor.element_size()
    assert state["first.weight"] is state["last.weight"]


def remedy_of_the_refusal():
    model = placed()
    with pytest.raises(LayoutError, match="save_pretrained") as refused:
        model.state_dict()["first.weight"].untyped_storage()
    text = str(refused.value)
    whole = eval(text[text.index("{name") : text.index("}, made") + 1], {"model": model})  # noqa: S307  # the remedy, word for word
    expected = Saved().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in whole.items())
    assert all(type(tensor) is torch.Tensor for tensor in whole.values())


def test_a_function_that_writes_a_file_gets_whole_tensors(pool):
    pool.run(whole_for_the_writer)


def test_all_others_get_mesh_tensors(pool):
    pool.run(parts_for_others)


def test_a_rank_that_does_not_write_keeps_nothing(pool):
    pool.run(only_the_first_keeps)


def test_the_remedy_of_the_refusal_makes_whole_tensors(pool):
    pool.run(remedy_of_the_refusal)


def save_on_one_rank():
    model = placed()
    if dist.get_rank() == 0:
        model.save_pretrained()
    else:
        model.first.weight.sum().full_tensor()


def test_a_rank_that_saves_alone_is_told_so(pool):
    with pytest.raises(WorkerError) as caught:
        pool.run(save_on_one_rank)
    alone, *others = caught.value.errors
    assert alone.kind == "RankDisagreementError", alone
    assert "Call save_pretrained on every rank" in str(alone.error)
    assert {failure.kind for failure in others} == {"RankFailedError"}


def test_the_name_of_a_common_function_counts_in_its_package_only(pool):
    pool.run(common_names)


def common_names():
    model = placed()

    def save_model():
        return model.state_dict()

    assert all(isinstance(tensor, MeshTensor) for tensor in save_model().values())
    namespace = {"__name__": "safetensors.torch"}
    exec("def save_model(model):\n    return model.state_dict()", namespace)  # noqa: S102  # as of that package
    check_whole(namespace["save_model"](model))
    assert model.first.bias.placements == (Replicate(), Replicate())
