"""Arguments of another kind than a public function takes: an error that names the argument and says what to give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise import MeshTensor, Replicate, Shard, errors
from shardwise.kernel.arguments import kind_of
from shardwise.testing import mesh as mesh_of


def mesh():
    return mesh_of((dist.get_world_size(),))


def whole():
    return torch.arange(32.0).reshape(8, 4)


def on_mesh():
    return sw.distribute_tensor(whole(), mesh(), [Shard(0)])


def enter(context):
    with context:
        pass


# What is called, the error, and a part of what it says.
CALLS = {
    "mesh first": (lambda: sw.distribute_tensor(mesh(), whole(), [Shard(0)]), "'tensor' is a DeviceMesh"),
    "placements second": (lambda: sw.distribute_tensor(whole(), [Shard(0)], mesh()), "placements=..."),
    "a shape as mesh": (lambda: sw.distribute_tensor(whole(), (2,), [Shard(0)]), 'init_device_mesh("cpu", (2,))'),
    "an array": (lambda: sw.distribute_tensor(np.ones((4, 4)), mesh(), [Shard(0)]), "'tensor' is an ndarray"),
    "a list": (lambda: sw.distribute_tensor([1, 2], mesh(), [Shard(0)]), "torch.as_tensor"),
    "a module as tensor": (lambda: sw.distribute_tensor(nn.ReLU(), mesh(), [Shard(0)]), "Use distribute_module"),
    "a source off the mesh": (
        lambda: sw.distribute_tensor(whole(), mesh(), [Shard(0)], src_data_rank=7),
        "'src_data_rank' is 7. Give the coordinate",
    ),
    "a local array": (lambda: MeshTensor.from_local(np.ones(4), mesh(), [Shard(0)]), "'local_tensor' is an ndarray"),
    "a list as mesh": (lambda: on_mesh().redistribute([Replicate()]), "name them: placements="),
    "a factory on a name": (lambda: sw.zeros(4, device_mesh="tp"), "mesh['tp']"),
    "a tensor as module": (lambda: sw.distribute_module(whole(), mesh(), {}), "Use distribute_tensor"),
    "a class as module": (lambda: sw.distribute_module(nn.Linear, mesh(), {}), "Linear(...)"),
    "a number as pattern": (lambda: sw.distribute_module(nn.ReLU(), mesh(), {0: [Shard(0)]}), "patterns on names"),
    "a function before": (
        lambda: sw.distribute_module(nn.Linear(4, 4), mesh(), {}, input_fn=3),
        "'input_fn' is an int. Pass a function",
    ),
    "a number for a plan": (lambda: sw.distribute_module(nn.Linear(4, 4), mesh(), 3), "'partition' is an int"),
    "randint of one number": (lambda: sw.randint(10, device_mesh=mesh()), "it has 1 argument, not two or three"),
    "randint of four numbers": (lambda: sw.randint(1, 2, 3, (4,), device_mesh=mesh()), "it has 4 arguments"),
    "randint of a size as a number": (lambda: sw.randint(10, 3, device_mesh=mesh()), "'size' is an int"),
    "randint of a broken bound": (lambda: sw.randint(0, 1.5, (3,), device_mesh=mesh()), "'high' is a float"),
    "randint of a low in words": (lambda: sw.randint("0", 5, (3,), device_mesh=mesh()), "'low' is a str"),
    "a size in words": (lambda: sw.zeros("8", device_mesh=mesh()), "'size' has a str"),
    "a folder by number": (lambda: sw.checkpoint.save({}, 3, step=1), "'directory' is an int"),
    "a step in words": (lambda: sw.checkpoint.save({}, "here", step="first"), "'step' is a str"),
    "load from nothing": (lambda: sw.checkpoint.load({}, None), "'directory' is None"),
    "the latest of nothing": (lambda: sw.checkpoint.latest(3), "'directory' is an int"),
    "a rule that is none": (lambda: sw.testing.check_rule(3), "'rule' is an int"),
    "infer a packet": (lambda: sw.testing.infer(torch.ops.aten.add), "'op' is an OpOverloadPacket"),
    "a mesh of a number": (lambda: mesh_of(3), "'shape' is an int"),
    "a sample of a number": (lambda: sw.testing.made(3), "'shape' is an int"),
    "on a name": (lambda: enter(sw.on("tp")), "'device_mesh' is a str"),
    "no mesh to measure": (lambda: sw.calibrate(None), "'mesh' is None"),
    "replicas of a tensor": (lambda: sw.check_replicas(on_mesh()), "'model' is a MeshTensor"),
    "steps in words": (lambda: sw.check_replicas(nn.Linear(2, 2), every="3"), "'every' is a str"),
    "prefetch a tensor": (lambda: sw.prefetch(on_mesh(), "tp"), "'module' is a MeshTensor"),
    "a share in words": (lambda: enter(sw.verify("0.1")), "'share' is a str"),
    "a seed in words": (lambda: sw.manual_seed("a"), "'a', and not a whole number"),
    "a seed with a fraction": (lambda: sw.manual_seed(1.5), "1.5, and not a whole number"),
    "an op in words": (lambda: sw.explain("aten.mm", on_mesh()), "torch.ops.aten.mm.default"),
    # The text "no" is true in Python: it switched these on.
    "learn no": (lambda: sw.learn("no"), "'enabled' is a str. Give True or False"),
    "replicate no": (lambda: enter(sw.replicate_unknown("no")), "'enabled' is a str"),
    "share no": (lambda: enter(sw.sharing_views("no")), "'required' is a str"),
}


def refused(name):
    with pytest.raises(errors.ArgumentError) as caught:
        CALLS[name][0]()
    return str(caught.value), isinstance(caught.value, TypeError)


@pytest.mark.parametrize("name", CALLS)
def test_each_wrong_argument_is_named(ranks, name):
    for message, is_type_error in ranks.run(refused, name):
        assert is_type_error
        assert CALLS[name][1] in message


def test_values_are_described_as_people_would():
    assert kind_of((1, 2)) == "a tuple"
    assert kind_of(3) == "an int"
    assert kind_of(None) == "None"
    assert kind_of(Shard) == "the class Shard"
    assert kind_of(whole) == "the function whole"
    assert kind_of(torch.ops.aten.mm) == "an OpOverloadPacket"


# -- placements and patterns ----------------------------------------------------------------------------------------


def message_of(call):
    with pytest.raises(errors.ShardingError) as caught:
        call()
    return str(caught.value)


def what_placements_say():
    linear = nn.Sequential(nn.Linear(4, 8))
    return {
        "class": message_of(lambda: sw.distribute_tensor(whole(), mesh(), [Shard])),
        "text": message_of(lambda: sw.distribute_tensor(whole(), mesh(), ["S(0)"])),
        "number": message_of(lambda: sw.distribute_tensor(whole(), mesh(), 0)),
        "module": message_of(lambda: sw.distribute_module(linear, mesh(), {"0": [Shard(0)]})),
        "regex": message_of(lambda: sw.distribute_module(linear, mesh(), {r"0\.weight$": [Shard(0)]})),
        "other": message_of(lambda: sw.distribute_module(linear, mesh(), {"layers.*": [Shard(0)]})),
        "collective": message_of(lambda: dist.all_reduce(on_mesh())),
    }


def test_placements_and_patterns_say_what_they_were_given(ranks):
    for said in ranks.run(what_placements_say):
        assert "it is the class Shard, and not a placement" in said["class"]
        assert "it is a str, and not a placement" in said["text"]
        assert "it is an int, and not a placement" in said["number"]
        assert "'0' is a module: write '0.weight', or '0.*' for all that it has" in said["module"]
        assert "no regular expressions" in said["regex"]
        assert "Correct the pattern" in said["other"]
        assert "x.redistribute(placements=...)" in said["collective"]
        assert "plugin" not in said["collective"]


# -- names of the package -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "where"),
    [("DTensor", "shardwise.MeshTensor"), ("save", "checkpoint.save"), ("from_local", "MeshTensor.from_local")],
)
def test_names_of_torch_lead_to_those_of_the_package(name, where):
    with pytest.raises(AttributeError, match=f"no attribute {name!r}: .*{where}"):
        getattr(sw, name)


def test_a_misspelt_name_can_be_corrected_by_python():
    with pytest.raises(AttributeError, match="no attribute 'Shrad'") as caught:
        sw.Shrad  # noqa: B018  # the look-up is what is tested
    # With these, tracebacks of Python say: Did you mean: 'Shard'?
    assert (caught.value.name, caught.value.obj) == ("Shrad", sw)
