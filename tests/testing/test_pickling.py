"""What is sent to workers: ops by name, custom ops of modules that no worker can import by their parts."""

# ruff: noqa: ARG005  # a fake and a backward take what the op takes

import pickle
import sys

import cloudpickle
import pytest
import torch
from torch import Tensor
from torch.library import custom_op

from shardwise.errors import WorkerError
from shardwise.rule.authoring import rule
from shardwise.testing.pickling import _used_submodules, dumps_by_value, importable

aten = torch.ops.aten


@custom_op("kit_pickling::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2 * x


@custom_op("kit_pickling::bump", mutates_args={"x"})
def bump(x: Tensor) -> None:
    x.add_(1)


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, grad: 2 * grad, setup_context=lambda ctx, inputs, output: None)
RULE = rule(twice, "... -> ...")


@pytest.mark.parametrize(
    "op", [torch.ops, aten, aten.add, aten.add.Tensor, twice, torch.ops.kit_pickling.twice.default]
)
def test_an_op_comes_back_as_itself(op):
    assert pickle.loads(dumps_by_value(op)) is op


@pytest.mark.parametrize("constant", [torch.channels_last, torch.contiguous_format, torch.strided, torch.sparse_csr])
def test_constants_of_torch_are_found_in_torch(constant, monkeypatch):
    # pickle takes the first module that has a `torch` with such a constant.
    monkeypatch.setattr(sys, "modules", {__name__: sys.modules[__name__], **sys.modules})
    sent = dumps_by_value({"memory_format": [constant]})
    assert __name__.encode() not in sent
    assert pickle.loads(sent) == {"memory_format": [constant]}


def use_twice(op):
    x = torch.ones(2, requires_grad=True)
    (grad,) = torch.autograd.grad(op(x).sum(), x)
    meta = torch.ops.kit_pickling.twice(torch.empty(3, device="meta"))
    return op(x).tolist(), grad.tolist(), tuple(meta.shape)


def test_a_custom_op_of_a_test_module_works_in_a_worker(pool):
    assert pool.run(use_twice, twice) == [([2.0, 2.0], [2.0, 2.0], (3,))] * 4
    assert pool.run(use_twice, torch.ops.kit_pickling.twice.default) == [([2.0, 2.0], [2.0, 2.0], (3,))] * 4


def test_a_function_may_speak_of_ops_through_globals(pool):
    def bumped():
        x = torch.zeros(2)
        bump(x)
        torch.ops.kit_pickling.bump(x)
        return x.tolist(), torch.ops.aten.neg.default(x).tolist()

    assert pool.run(bumped)[0] == ([2.0, 2.0], [-2.0, -2.0])


def test_a_rule_of_a_test_module_travels(pool):
    assert pool.run(lambda: str(RULE)) == ["kit_pickling.twice.default: ... -> ..."] * 4


def test_an_op_that_no_worker_knows_is_named(pool):
    library = torch.library.Library("kit_pickling", "FRAGMENT")
    library.define("unknown(Tensor x) -> Tensor")
    with pytest.raises(WorkerError, match=r"use the op kit_pickling.unknown.default in a worker.*Import the module"):
        pool.run(str, torch.ops.kit_pickling.unknown.default)


def test_an_op_with_several_kernels_wants_a_module():
    @custom_op("kit_pickling::kernels", mutates_args=(), device_types="cpu")
    def kernels(x: Tensor) -> Tensor:
        return x.clone()

    with pytest.raises(WorkerError, match="Define the op in a module that can be imported"):
        dumps_by_value(kernels)


def uses_a_submodule():
    return torch.distributed.device_mesh.DeviceMesh, torch.nn.functional.relu, sys.modules


def uses_none():
    return torch.ones(2), "torch.distributed"


@pytest.mark.parametrize(
    "function", [uses_a_submodule, uses_none, test_an_op_that_no_worker_knows_is_named, dumps_by_value]
)
def test_the_submodules_that_a_function_uses_are_those_that_cloudpickle_finds(function):
    values = [function.__globals__.get(name) for name in function.__code__.co_names]
    expected = cloudpickle.cloudpickle._find_imported_submodules(function.__code__, values)
    assert {module.__name__ for module in _used_submodules(function.__code__, values)} == {m.__name__ for m in expected}
    assert bool(expected) == (function in (uses_a_submodule, test_an_op_that_no_worker_knows_is_named))


def test_cloudpickle_has_its_own_search_afterwards():
    search = cloudpickle.cloudpickle._find_imported_submodules
    with pytest.raises(TypeError):
        dumps_by_value([uses_none, sys._getframe()])
    assert cloudpickle.cloudpickle._find_imported_submodules is search is not _used_submodules


def test_a_cloudpickle_without_that_part_is_left_as_it_is(monkeypatch):
    monkeypatch.delattr(cloudpickle.cloudpickle, "_find_imported_submodules")
    with pytest.raises(NameError):  # the rest of this cloudpickle looks for it, and nothing was put there
        dumps_by_value(uses_none)


def test_what_a_fresh_process_can_import():
    assert importable("shardwise.testing.pool")
    assert importable("json")
    assert not importable(__name__)


def test_a_module_of_another_type_is_sent_by_name():
    def reads():
        return torch._dynamo.config

    assert pickle.loads(dumps_by_value(reads))() is torch._dynamo.config
    assert pickle.loads(dumps_by_value(torch._dynamo.config)) is torch._dynamo.config
