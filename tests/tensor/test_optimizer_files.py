"""States of optimizers in the files that training loops of other packages write: whole there, placed when loaded."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import shardwise as sw
from shardwise import MeshTensor, Shard
from shardwise.errors import WorkerError
from shardwise.testing import mesh as mesh_of

SAVERS = {
    "transformers.trainer": "_save_optimizer_and_scheduler",
    "accelerate.checkpointing": "save_accelerator_state",
    "lightning.pytorch.trainer.connectors.checkpoint_connector": "dump_checkpoint",
    "pytorch_lightning.trainer.connectors.checkpoint_connector": "dump_checkpoint",
    "lightning.fabric.strategies.strategy": "save_checkpoint",
    "lightning_fabric.strategies.strategy": "save_checkpoint",
    "ignite.handlers.checkpoint": "_setup_checkpoint",
}
OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "SGD": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, 0.1),
    "Adagrad": torch.optim.Adagrad,  # its states are there before the first step
}
MESHES = {(2, 2): (4,), (4,): (2, 2)}  # where a state is saved, and where it is loaded


def asked_by(module, name, optimizer):
    """The state dict that such a function of a package gets."""
    namespace = {"__name__": module}
    exec(f"def {name}(optimizer):\n    return optimizer.state_dict()", namespace)  # noqa: S102  # as of that package
    return namespace[name](optimizer)


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def trained(shape, make, steps, state=None, model=None, late=False):
    """A model, its optimizer after some steps, on a mesh where there is a ``shape``. A state is loaded before them, or
    after the first one.
    """
    model = model or model_of()
    if shape is not None:
        sw.distribute_module(model, mesh_of(shape), {"*.weight": [Shard(0), Shard(1)][: len(shape)]})
    optimizer = make(model.parameters())
    if state is not None and not late:
        optimizer.load_state_dict(state)
    for step in range(steps):
        x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6) * (step + 1)
        model(x).square().sum().backward()
        if late and not step:
            whole = copy.deepcopy(model.state_dict())
            optimizer.step()
            model.load_state_dict(whole)
            optimizer.load_state_dict(state)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole_values(model):
    return [p.full_tensor() if isinstance(p, MeshTensor) else p for p in model.parameters()]


def states_of(optimizer):
    return [(name, value) for state in optimizer.state.values() for name, value in state.items()]


def saved_and_loaded(shape, name, late):
    make = OPTIMIZERS[name]
    alone, of_alone = trained(None, make, 2)
    model, optimizer = trained(shape, make, 2)
    before = [value for _, value in states_of(optimizer)]
    states = [asked_by(module, function, optimizer) for module, function in SAVERS.items()]
    expected = of_alone.state_dict()
    for state in states:
        assert state["param_groups"] == expected["param_groups"]
        for key, of_one in expected["state"].items():
            for part, value in of_one.items():
                found = state["state"][key][part]
                assert not isinstance(found, MeshTensor), part
                torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-12)
                if isinstance(found, torch.Tensor):
                    assert found.untyped_storage().nbytes() == found.numel() * found.element_size()
    assert all(now is then for (_, now), then in zip(states_of(optimizer), before, strict=True))

    # Each goes on from what was saved, in a program of its own, and on another mesh.
    model, optimizer = trained(MESHES[shape], make, 3, states[0], copy.deepcopy(alone), late)
    alone, of_alone = trained(None, make, 3, copy.deepcopy(expected), copy.deepcopy(alone), late)
    for here, there in zip(whole_values(model), whole_values(alone), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-12)
    for parameter, state in optimizer.state.items():
        for part, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                assert isinstance(value, MeshTensor), part
                assert value.placements == parameter.placements


@pytest.mark.parametrize("late", [False, True], ids=["before a step", "after a step"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_what_a_training_loop_saves_is_that_of_one_device_and_goes_on_as_there(pool, shape, name, late):
    pool.run(saved_and_loaded, shape, name, late)


def other_states_on_one_rank(late):
    _, of_alone = trained(None, torch.optim.AdamW, 2)
    state = of_alone.state_dict()
    if dist.get_rank() == 1:
        state["state"][2]["exp_avg"] += 1
    trained((4,), torch.optim.AdamW, 2, state, late=late)


@pytest.mark.parametrize("late", [False, True], ids=["before a step", "after a step"])
def test_states_that_differ_are_not_those_of_the_first_rank_in_silence(pool, late):
    with pytest.raises(WorkerError) as caught:
        pool.run(other_states_on_one_rank, late)
    assert [failure.kind for failure in caught.value.errors] == ["RankDisagreementError"] * 4


def parts_for_others():
    model, optimizer = trained((2, 2), torch.optim.AdamW, 1)
    (module, name), *_ = SAVERS.items()
    for state in (optimizer.state_dict(), asked_by(module, "save", optimizer), asked_by("mine", name, optimizer)):
        assert isinstance(state["state"][0]["exp_avg"], MeshTensor)
    state = get_optimizer_state_dict(model, optimizer)
    assert isinstance(state["state"]["0.weight"]["exp_avg"], MeshTensor)
    again = copy.deepcopy(optimizer)
    again.step()
    assert not isinstance(asked_by(module, name, again)["state"][0]["exp_avg"], MeshTensor)


def test_all_others_get_mesh_tensors(pool):
    pool.run(parts_for_others)


def saves_alone():
    _, optimizer = trained((4,), torch.optim.AdamW, 1)
    if dist.get_rank() == 0:
        asked_by("accelerate.checkpointing", "save_accelerator_state", optimizer)
    else:
        optimizer.param_groups[0]["params"][0].sum().full_tensor()


def test_a_rank_that_saves_alone_is_told_so(pool):
    with pytest.raises(WorkerError, match="Call save_accelerator_state on every rank") as caught:
        pool.run(saves_alone)
    assert [failure.kind for failure in caught.value.errors] == ["RankDisagreementError", *["RankFailedError"] * 3]
