"""Slips in calls of public functions: each is an error of shardwise that names the argument and says what to do."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise import MeshTensor, Partial, Replicate, Shard
from shardwise.errors import ShardingError

T = torch.ones(8, 6)
FROM = MeshTensor.from_local


@contextmanager
def fake_mesh(size):
    """A mesh whose other ranks do not exist: a slip is found before anything is sent."""
    dist.init_process_group("fake", rank=0, world_size=size)
    try:
        yield init_device_mesh("cpu", (size,))
    finally:
        dist.destroy_process_group()


def linear():
    return nn.Linear(6, 8)


def module(m, *args, **kwargs):
    return sw.distribute_module(linear(), m, *args, **kwargs)


def of(call):
    """A call of a function of local tensors, on a tensor that is sharded."""
    return lambda m: call()(sw.distribute_tensor(T, m, [Shard(0)]))


def moved(**kwargs):
    return lambda m: sw.distribute_tensor(T, m, [Shard(0)]).redistribute(**kwargs)


def four(module, outputs, mesh, more):
    """A hook of too many arguments."""


S0 = [Shard(0)]
SLIPS = {
    # from_local
    "the local shape for the global one": (
        lambda m: FROM(T, m, S0, shape=(8, 6)),
        r"the shape= that was passed is that of the local tensor itself",
    ),
    "a global shape that differs where nothing is sharded": (
        lambda m: FROM(T, m, S0, shape=(32, 7)),
        r"no mesh dim shards dim 1, and shape= says that the whole tensor has 7 there",
    ),
    "a global shape that the parts do not make": (
        lambda m: FROM(T, m, S0, shape=(33, 6)),
        r"part has shape \(9, 6\): shape= \(33, 6\) is divided as torch.chunk does it",
    ),
    "a global shape of fewer dims": (
        lambda m: FROM(T, m, S0, shape=(32,)),
        r"shape= \(32,\) has 1 number, and the part",
    ),
    "a global shape of more dims": (lambda m: FROM(T, m, S0, shape=(32, 6, 1)), r"has 3 numbers, and the part 2 dims"),
    "a number for the shape": (lambda m: FROM(T, m, S0, shape=32), "'shape' is an int"),
    "text for the shape": (lambda m: FROM(T, m, S0, shape="32,6"), "'shape' is a str"),
    "a float in the shape": (lambda m: FROM(T, m, S0, shape=(32.0, 6)), r"'shape' has 32\.0"),
    "a negative shape": (lambda m: FROM(T, m, S0, shape=(-32, 6)), "'shape' has -32"),
    "None in the shape": (lambda m: FROM(T, m, S0, shape=(32, None)), "'shape' has None"),
    "a tensor for the shape": (lambda m: FROM(T, m, S0, shape=torch.ones(2)), "'shape' is a Tensor"),
    "a stride for one dim": (lambda m: FROM(T, m, S0, stride=(6,)), r"stride= \(6,\) has 1 number"),
    "a number for the stride": (lambda m: FROM(T, m, S0, stride=6), "'stride' is an int"),
    "text in the stride": (lambda m: FROM(T, m, S0, stride=("6", 1)), "'stride' has '6'"),
    "a negative stride": (lambda m: FROM(T, m, S0, stride=(-6, 1)), "'stride' has -6"),
    "text for run_check": (lambda m: FROM(T, m, S0, run_check="no"), "'run_check' is a str.*True or False"),
    "a MeshTensor for the part": (
        lambda m: FROM(sw.distribute_tensor(T, m, S0), m, S0),
        r"it is a MeshTensor \(8, 6\) \[S\(0\)\] already",
    ),
    "a list for the part": (lambda m: FROM([1.0], m, S0), "'local_tensor' is a list"),
    # redistribute
    "no placements": (moved(), "'placements' is None. Give one placement per mesh dim"),
    "text for forward_dtype": (moved(placements=[Replicate()], forward_dtype="bf16"), "'forward_dtype' is a str"),
    "a number for backward_dtype": (moved(placements=[Replicate()], backward_dtype=16), "'backward_dtype' is an int"),
    "text for async_op": (moved(placements=[Replicate()], async_op="no"), "'async_op' is a str"),
    "a number for a placement": (moved(placements=[1]), "it is an int, and not a placement"),
    "a placement before the mesh": (
        lambda m: sw.distribute_tensor(T, m, S0).redistribute(Replicate()),
        "'device_mesh' is a Replicate. Give the mesh before the placements, or name them: placements=",
    ),
    # distribute_tensor
    "a flag for the source": (lambda m: sw.distribute_tensor(T, m, S0, src_data_rank=True), "'src_data_rank' is True"),
    "the mesh and the placements in the wrong order": (
        lambda m: sw.distribute_tensor(T, S0, m),
        "Give the mesh before",
    ),
    "a mesh dim that there is not": (lambda m: sw.distribute_tensor(T, m, {"tp": S0[0]}), "by mesh dim 'tp'"),
    # distribute_module
    "0 for placements": (lambda m: module(m, {"weight": 0}), "place a tensor by 0: it is an int"),
    "None for placements": (lambda m: module(m, {"weight": None}), "place a tensor by None: it is"),
    "no placements in a list": (lambda m: module(m, {"weight": []}), "0 placements for a mesh of 1 dim"),
    "empty text for placements": (lambda m: module(m, {"weight": ""}), "place a tensor by '': it is a str"),
    "a number for the policy": (lambda m: module(m, communication=3), "'communication' is an int"),
    "a list for the policy": (lambda m: module(m, communication=["forbid"]), "'communication' is a list"),
    "text that is no policy": (lambda m: module(m, communication="forbid tp"), "'forbid tp' is not a policy. Write it"),
    "text for loose": (lambda m: module(m, loose="no"), "'loose' is a str"),
    "a partition of no arguments": (
        lambda m: module(m, lambda: None),
        r"'partition' is the function .*<lambda> that takes \(\). It is called as partition\(name, module, mesh\)",
    ),
    "an input_fn of no arguments": (lambda m: module(m, input_fn=lambda: None), r"input_fn\(module, inputs, mesh\) or"),
    "an output_fn of four": (lambda m: module(m, output_fn=four), r"output_fn\(outputs, mesh\)"),
    "another mesh, later": (
        lambda m: sw.distribute_module(module(m), fake_submesh(m)),
        "all its parameters and buffers lie on .* already, from an earlier call",
    ),
    "a mesh among the sizes": (lambda m: sw.zeros(4, m), r"'size' has a DeviceMesh. Name the mesh: device_mesh="),
    "a tensor among the sizes": (lambda m: sw.zeros(torch.tensor(3), device_mesh=m), "'size' has a Tensor"),
    "a number for the size of full": (lambda m: sw.full(4, 2.0, device_mesh=m), "'size' is an int.*as a tuple"),
    "a plain tensor for a DTensor": (lambda _: MeshTensor.from_dtensor(T), "'tensor' is a Tensor. Use distribute_ten"),
    # print: the first rank alone would raise
    "a path to print to": (lambda _: sw.print("x", file="log.txt"), "'file' is a str. Give an open file"),
    "a number between": (lambda _: sw.print("x", "y", sep=3), "'sep' is an int"),
    # replicas, prefetch
    "replicas of what is not on a mesh": (lambda _: sw.check_replicas(linear()), "nothing to compare.*distribute_mod"),
    "prefetch over a mesh": (lambda m: sw.prefetch(module(m, {"*": S0}), m), "'mesh_dim' is a DeviceMesh"),
    "prefetch over a dim that there is not": (lambda m: sw.prefetch(module(m, {"*": S0}), 7), "mesh has the dims 0"),
    "prefetch over a name that there is not": (
        lambda m: sw.prefetch(module(m, {"*": S0}), "pd"),
        "their mesh has the dims 0. Give the name or the number",
    ),
    "prefetch of names": (lambda m: sw.prefetch(module(m, {"*": S0}), 0, units=["0"]), "'units' is a str"),
    "prefetch of one module": (lambda m: sw.prefetch(module(m, {"*": S0}), 0, units=linear()), "'units' is a Linear"),
    "prefetch of a module of others": (
        lambda m: sw.prefetch(module(m, {"*": S0}), 0, units=[linear()]),
        "'units' has a Linear that is no part of the Linear",
    ),
    # local
    "a DTensor for local": (
        lambda m: sw.local(torch.neg, outputs=S0)(DTensor.from_local(T, m, S0, run_check=False)),
        r"with a DTensor among its arguments: it is a DTensor \(32, 6\)",
    ),
    "a number for the function": (lambda _: sw.local(3, outputs=S0), "'fn' is an int"),
    "text for the mesh": (lambda _: sw.local(torch.neg, outputs=S0, mesh="tp"), "'mesh' is a str"),
    "a number for shapes": (lambda _: sw.local(torch.neg, outputs=S0, shapes=8), "'shapes' is an int"),
    "text for shapes": (lambda _: sw.local(torch.neg, outputs=S0, shapes="8"), "'shapes' is a str"),
    "text for move": (lambda _: sw.local(torch.neg, outputs=S0, move="no"), "'move' is a str"),
    "a name that is no argument": (
        of(lambda: sw.local(lambda a: a, outputs=S0, inputs={"b": S0})),
        "inputs= names 'b'",
    ),
    "another shape than the parts": (
        of(lambda: sw.local(lambda a: a[:1], outputs=S0, shapes=(8, 6))),
        r"is divided as torch.chunk does it|part has shape",
    ),
    # factories, seeds, files
    "a negative size": (lambda m: sw.zeros((4, -4), device_mesh=m), "'size' has -4"),
    "a negative count": (lambda m: sw.randperm(-4, device_mesh=m), "'size' has -4"),
    "text for a dtype": (lambda m: sw.zeros(4, dtype="f32", device_mesh=m), "'dtype' is a str"),
    "a number for requires_grad": (lambda m: sw.zeros(4, requires_grad=1, device_mesh=m), "'requires_grad' is an int"),
    "a gradient of integers": (
        lambda m: sw.zeros(4, dtype=torch.int64, requires_grad=True, device_mesh=m),
        "only floating-point and complex tensors have gradients",
    ),
    "text to fill with": (lambda m: sw.full((4,), "x", device_mesh=m), "'fill_value' is a str"),
    "a tensor to fill with": (lambda m: sw.full((4,), T, device_mesh=m), "'fill_value' is a Tensor"),
    "uniform integers": (lambda m: sw.rand(4, device_mesh=m, dtype=torch.int64), "the dtype is torch.int64"),
    "bounds in the wrong order": (lambda m: sw.randint(5, 2, (4,), device_mesh=m), "no integer from 5 on and below 2"),
    "a flag for a seed": (lambda _: sw.manual_seed(True), "the seed is True"),
    "a seed of 70 bits": (lambda _: sw.manual_seed(1 << 70), "more than 64 bits"),
    "a list of what is saved": (lambda _: sw.checkpoint.save([T], "x", step=1), "'state' is a list"),
    "a module for a state": (lambda _: sw.checkpoint.save(linear(), "x", step=1), "'state' is a Linear"),
    "nothing to load into": (lambda _: sw.checkpoint.load(None, "x"), "'state' is None"),
    "text for the step": (lambda _: sw.checkpoint.load({}, "x", step="9"), "'step' is a str"),
    "a flag for the step": (lambda _: sw.checkpoint.load({}, "x", step=True), "'step' is True"),
    "text for verify": (lambda _: sw.checkpoint.load({}, "x", verify="no"), "'verify' is a str"),
    "a number for the group": (lambda _: sw.checkpoint.load({}, "x", process_group=3), "'process_group' is an int"),
    "a number for a file": (lambda _: sw.timeline(3).__enter__(), "'path' is an int"),
}


def fake_submesh(m):
    """Another mesh of the same ranks."""
    return init_device_mesh("cpu", (1, m.size()))


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_an_error_that_says_what_to_do(slip):
    call, words = SLIPS[slip]
    with fake_mesh(4) as m, pytest.raises(ShardingError, match=words) as raised:
        call(m)
    assert raised.value.do


REFUSED_FOR_A_MODULE = {
    "a policy": ({"communication": "never"}, "'never' is not what a policy does"),
    "placements of the last parameter": ({"partition": {"1.bias": [Shard(5)]}}, "place '1.bias' .* there is no dim 5"),
    "their number": ({"partition": {"1.bias": [Shard(0), Shard(0)]}}, "2 placements for a mesh of 1 dim"),
    "a mesh dim": ({"partition": {"1.bias": {"tp": Shard(0)}}}, "the dims of the mesh have no names"),
    "a buffer that has no parts": ({"partition": {"1.sparse": [Shard(0)]}}, "its layout is torch.sparse_coo"),
}


@pytest.mark.parametrize("refused", REFUSED_FOR_A_MODULE)
def test_a_module_that_is_refused_stays_as_it_was(refused):
    options, words = REFUSED_FOR_A_MODULE[refused]
    plain = nn.Sequential(linear(), nn.Linear(8, 6))
    plain[1].register_buffer("sparse", torch.eye(3).to_sparse())
    with fake_mesh(4) as m:
        with pytest.raises(ShardingError, match=words):
            sw.distribute_module(plain, m, **options)
        assert not any(isinstance(parameter, MeshTensor) for parameter in plain.parameters())
        placed = sw.distribute_module(plain, m, {"1.bias": [Shard(0)]})  # what is corrected is taken
        assert placed[1].bias.placements == (Shard(0),)


def test_what_is_right_still_is():
    with fake_mesh(4) as m:
        assert FROM(T, m, S0, shape=(32, 6), stride=(6, 1)).shape == (32, 6)
        assert FROM(T, m, S0, shape=[32, 6], run_check=False).shape == (32, 6)
        assert FROM(T, m, [Partial()]).shape == (8, 6)
        assert module(m, {"weight": {}}).weight.placements == (Replicate(),)
        assert isinstance(module(m, communication="forbid over 0 phases backward").weight, MeshTensor)
        assert module(m, input_fn=lambda _, values, __: values, output_fn=lambda out, _: out) is not None
        assert sw.full((4,), True, device_mesh=m).dtype is torch.bool
        assert sw.zeros(4, requires_grad=True, device_mesh=m).requires_grad
        assert sw.full((4,), torch.tensor(3.0), device_mesh=m).to_local().tolist() == [3.0] * 4
        assert sw.randn(4, dtype=torch.complex64, device_mesh=m).is_complex()
        assert sw.rand(4, dtype=torch.complex128, device_mesh=m, requires_grad=True).requires_grad


PLAN_SLIPS = {
    "a number for the program": ((3, (2,)), {}, "'program' is an int"),
    "a program of no arguments": ((lambda: 0, (2,)), {}, r"called as program\(mesh\)"),
    "a number for the mesh": ((len, 4), {}, "'mesh_shape' is an int"),
    "text for the mesh": ((len, "4"), {}, "'mesh_shape' is a str"),
    "None for the mesh": ((len, None), {}, "'mesh_shape' is None"),
    "a mesh of no dims": ((len, ()), {}, "'mesh_shape' has no sizes"),
    "a mesh of no ranks": ((len, (0,)), {}, "'mesh_shape' has the size 0"),
    "a mesh of a float": ((len, [4.0]), {}, r"'mesh_shape' has the size 4\.0"),
    "a mesh of text": ((len, ("4",)), {}, "'mesh_shape' has the size '4'"),
    "too many names": (
        (len, (4,), ("dp", "tp")),
        {},
        r"'mesh_names' is \('dp', 'tp'\), and the mesh has the sizes \(4,\)",
    ),
    "text for names": ((len, (4,), "tp"), {}, "'mesh_names' is a str"),
    "a name twice": ((len, (2, 2), ("tp", "tp")), {}, "Give 2 different names"),
    "a number for a name": ((len, (2, 2), ("tp", 3)), {}, "Give 2 different names"),
    "text for memory": ((len, (2,)), {"memory": "x"}, "'memory' is 'x'"),
    "negative memory": ((len, (2,)), {"memory": -5}, "'memory' is -5"),
    "a name of a file to keep": ((len, (2,)), {"keep": "no.plan"}, "'keep' is a str"),
    "a list of recipes": ((len, (2,)), {"recipes": ["no.plan"]}, "'recipes' is a list"),
    "a name of a recipe's file": ((len, (2,)), {"recipes": {"a": "no.plan"}}, r"recipes\['a'\]. is a str"),
    "a number that is fixed": ((len, (2,)), {"fixed": 3}, "with fixed=3"),
    "text that is fixed": ((len, (2,)), {"fixed": "parameters"}, "with fixed='parameters'"),
    "another device": ((len, (2,)), {"device": "gpu"}, "'device' is 'gpu'"),
    "text for wires": ((len, (2,)), {"wires": "nvlink"}, "'wires' is a str"),
    "loose without a plan": ((len, (2,)), {"loose": True}, "no plan to keep whose lines"),
    "text for prove": ((len, (2,)), {"prove": "x"}, "'prove' is a str"),
    "a number to tell": ((len, (2,)), {"tell": 3}, "'tell' is an int"),
}


@pytest.mark.parametrize("slip", PLAN_SLIPS)
def test_a_slip_in_a_plan_is_found_before_the_program_runs(slip):
    args, kwargs, words = PLAN_SLIPS[slip]
    with pytest.raises(ShardingError, match=words):
        sw.plan(*args, **kwargs)
