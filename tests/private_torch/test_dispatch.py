"""The shelf ``private_torch.dispatch``: each function has a test that fails clearly when torch takes it away."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from attrs import frozen

from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import REPLICATE
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.private_torch import dispatch

aten = torch.ops.aten


@frozen
class Holder:
    tensor_meta: TensorMeta


class Wrapper(torch.Tensor):
    __torch_function__ = dispatch.disabled_torch_function
    seen: ClassVar[list] = []

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)


@pytest.mark.parametrize("make", [dispatch.new_wrapper, dispatch._portable_wrapper], ids=["fast", "portable"])
def test_a_wrapper_has_the_global_meta_and_the_local_tensor(make):
    local = torch.ones(2, 3, dtype=torch.bfloat16)
    spec = TensorSpec(AbstractMesh((2,)), [REPLICATE], TensorMeta((4, 3), (1, 4), torch.bfloat16))
    wrapper = make(Wrapper, local, spec, False)
    assert type(wrapper) is Wrapper
    assert (wrapper.shape, wrapper.stride(), wrapper.dtype, wrapper.device) == (
        (4, 3),
        (1, 4),
        torch.bfloat16,
        local.device,
    )
    assert wrapper._local_tensor is local
    assert wrapper._spec is spec
    assert not wrapper.requires_grad
    assert make(Wrapper, local, spec, True).requires_grad


def test_torch_function_is_off_and_torch_dispatch_is_on():
    wrapper = dispatch.new_wrapper(Wrapper, torch.ones(2), Holder(TensorMeta.of(torch.ones(2))), False)
    Wrapper.seen.clear()
    torch.neg(wrapper)
    assert Wrapper.seen == [aten.neg.default]


def test_a_backward_pass_is_known_from_inside():
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: seen.append(dispatch.in_backward()))
    x.sum().backward()
    assert seen == [True]
    assert not dispatch.in_backward()


def test_a_hook_knows_the_leaf_that_gets_its_gradient():
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: seen.append(dispatch.leaf_to_accumulate()))
    y = x * 2
    y.register_hook(lambda _: seen.append(dispatch.leaf_to_accumulate()))
    y.sum().backward(inputs=[x])
    assert seen[0] is None
    assert seen[1] is x
    torch.autograd.grad((x * 2).sum(), [x])
    assert seen[2] is None
    assert dispatch.leaf_to_accumulate() is None


def test_the_version_of_a_tensor_counts_its_writes():
    x = torch.ones(3)
    before = dispatch.version_of(x)
    x[:2].add_(1)
    assert dispatch.version_of(x) > before


def test_a_tensor_can_stand_in_for_a_parameter():
    module = torch.nn.Linear(2, 3)
    weight, whole = module.weight, torch.ones(3, 2)
    dispatch.swap_parameter(module, "weight", whole)
    assert module.weight is whole
    assert torch.equal(module(torch.ones(2)), torch.full((3,), 2.0) + module.bias)
    dispatch.swap_parameter(module, "weight", weight)
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]
    assert module.weight is weight


def test_foreach_is_offered_for_the_class_by_default():
    class Offered(torch.Tensor):
        pass

    dispatch.support_foreach(Offered)
    dispatch.support_foreach(Offered)
    from torch.optim.optimizer import _foreach_supported_types as of_optimizers
    from torch.utils._foreach_utils import _foreach_supported_types as of_clipping

    assert of_optimizers.count(Offered) == of_clipping.count(Offered) == 1


def test_the_recorder_sees_ops_with_their_arguments():
    x = torch.ones(2)
    ((op, args, kwargs),) = dispatch.recorded_ops(torch.add, (x, 2), {"alpha": 3})
    assert (op, args[0] is x, args[1], kwargs) == (aten.add.Tensor, True, 2, {"alpha": 3})


def _nudge(x: torch.Tensor) -> torch.Tensor:
    return x + 1


nudge = torch.library.custom_op("private_torch_test::nudge", _nudge, mutates_args=())


@pytest.mark.parametrize("op", [aten.neg.default, torch.ops.private_torch_test.nudge.default], ids=str)
def test_a_handler_is_called_as_long_as_its_library_lives(op):
    wrapper = dispatch.new_wrapper(Wrapper, torch.ones(2), Holder(TensorMeta.of(torch.ones(2))), False)
    for answer in ("first", "second"):
        library = dispatch.put_before_dispatch(op, Wrapper, lambda *_, found=answer, **__: torch.tensor(len(found)))
        assert int(op(wrapper)) == len(answer)
        del library
    Wrapper.seen.clear()
    op(wrapper)
    assert Wrapper.seen == [op]


def test_a_backward_op_knows_its_forward_call():
    seen = []
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        result = torch.ones(2, requires_grad=True).cos()
    result.grad_fn.register_prehook(lambda _: seen.append(dispatch.forward_traceback()))
    result.sum().backward()
    (lines,) = seen
    assert any("test_a_backward_op_knows_its_forward_call" in line for line in lines)
    assert dispatch.forward_traceback() == []


def test_a_composite_op_can_be_taken_over_above_autograd_for_subclasses_alone():
    wrapper = dispatch.new_wrapper(Wrapper, torch.ones(2), Holder(TensorMeta.of(torch.ones(2))), False)
    seen, stand_in = [], torch.zeros(3)

    def run(below, args, kwargs):
        seen.append((args[1], kwargs, below(torch.ones(2), args[1]).shape))
        return stand_in

    library = dispatch.put_above_autograd(aten.vander.default, run)
    torch.vander(torch.ones(2), 2)
    assert seen == []
    assert torch.equal(torch.vander(wrapper, 2), stand_in)
    assert seen == [(2, {}, (2, 2))]
    del library


def test_memory_has_an_identity_also_without_data():
    for x in (torch.ones(4), torch.ones(4, device="meta")):
        assert dispatch.memory_of(x[1:]) == dispatch.memory_of(x)
        assert dispatch.memory_of(x.clone()) != dispatch.memory_of(x)


@pytest.fixture
def lent(monkeypatch):
    """What was asked for with memory of a Wrapper."""
    monkeypatch.setattr(torch.Tensor, "data", torch.Tensor.data, raising=False)
    for module in (torch, torch.utils.dlpack):
        monkeypatch.setattr(module, "to_dlpack", module.to_dlpack)
    asked = []

    def refuse(tensor, what):
        asked.append((type(tensor), what.partition(" ")[0]))
        raise ValueError("no memory")

    dispatch.guard_memory(Wrapper, refuse)
    return asked


def test_memory_of_a_wrapper_is_not_lent(lent):
    wrapper = dispatch.new_wrapper(Wrapper, torch.ones(2), Holder(TensorMeta.of(torch.ones(2))), False)
    plain = torch.zeros(2)
    for lend in (lambda: setattr(plain, "data", wrapper), lambda: setattr(torch.nn.Parameter(plain), "data", wrapper)):
        with pytest.raises(ValueError, match="no memory"):
            lend()
    for to_dlpack in (torch.to_dlpack, torch.utils.dlpack.to_dlpack):
        with pytest.raises(ValueError, match="no memory"):
            to_dlpack(wrapper)
    assert lent == [(Wrapper, "set")] * 2 + [(Wrapper, "make")] * 2


def test_other_tensors_keep_torchs_data(lent):
    x, y = torch.zeros(2, requires_grad=True), torch.ones(3)
    assert not x.data.requires_grad
    assert x.data.data_ptr() == x.data_ptr()
    x.data = y
    assert torch.equal(x, y)
    assert x.is_leaf
    with pytest.raises(RuntimeError, match="not allowed"):
        del x.data
    with pytest.raises(TypeError):
        x.data = 1
    assert torch.equal(torch.from_dlpack(torch.to_dlpack(y)), y)
    assert dispatch.get_data(y).data_ptr() == y.data_ptr()
    dispatch.set_data(y, torch.zeros(2))
    assert y.shape == (2,)
    assert lent == []


def test_data_reaches_torch_function_as_before(lent):
    class Seen(torch.Tensor):
        names: ClassVar[list] = []

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.names.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.zeros(2).as_subclass(Seen)
    assert type(x.data) is Seen
    x.data = torch.ones(2)
    assert Seen.names == ["__get__", "__set__"]
    assert torch.Tensor.data.__get__ == torch.Tensor.data.__get__
    with torch.device("cpu"):  # a mode that sees functions
        x.data = torch.zeros(2)
        assert torch.equal(x.data, torch.zeros(2))


def test_data_is_compiled_as_before(lent):
    def step(x, y):
        x.data = y * 2
        return x.data + 1

    x = torch.zeros(2)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, torch.ones(2)), torch.full((2,), 3.0))
    assert torch.equal(x, torch.full((2,), 2.0))


def test_a_class_with_items_is_no_sequence_to_c_code():
    class Indexed(torch.Tensor):
        def __getitem__(self, index):
            return super().__getitem__(index)

    one = torch.tensor(2.0).as_subclass(Indexed)
    with pytest.raises(TypeError, match="0-d"):
        torch.tensor([one, 1.0])
    dispatch.hide_items(Indexed)
    assert torch.tensor([one, 1.0]).tolist() == [2, 1]
    assert torch.ones(3).as_subclass(Indexed)[1:].shape == (2,)


def test_tensors_of_vmap_are_told_from_others():
    seen = []
    torch.vmap(lambda t: seen.append(dispatch.is_batched(t)) or t)(torch.ones(2))
    torch.autograd.functional.jacobian(lambda t: t * 2, torch.ones(2), vectorize=True)
    assert seen == [True]
    assert not dispatch.is_batched(torch.ones(2))
    assert not dispatch.is_batched(None)


def test_a_function_that_torch_calls_is_left_out_of_graphs():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append({n.target for n in graph.graph.nodes if n.op == "call_method"})
        return graph.forward

    def part(x):
        return x.cos()

    def kernel(x):
        return x.sin() + part(x)

    library = torch.library.Library("shardwise_left_out", "FRAGMENT")
    library.define("both(Tensor x) -> Tensor")
    library.impl("both", kernel, "CPU")

    def program(x):
        return torch.ops.shardwise_left_out.both(x.exp()) + 1  # no fake, so the graph ends before it

    for left_out in (False, True):
        torch._dynamo.reset()
        graphs.clear()
        if left_out:
            dispatch.leave_out_of_graphs(kernel)
        x = torch.ones(3)
        torch.testing.assert_close(torch.compile(program, backend=backend)(x), x.exp().sin() + x.exp().cos() + 1)
        compiled = set().union(*graphs)
        assert compiled == ({"exp"} if left_out else {"exp", "sin", "cos"})


def test_a_running_node_has_a_name():
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: seen.append(dispatch.name_of_running_node()))
    y = x * 2
    y.register_hook(lambda _: seen.append(dispatch.name_of_running_node()))
    y.sum().backward()
    assert seen == ["MulBackward0", "torch::autograd::AccumulateGrad"]
    assert dispatch.name_of_running_node() == ""
