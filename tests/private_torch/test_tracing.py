"""The shelf ``private_torch.tracing``: each function has a test that fails clearly when torch takes it away."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from shardwise.private_torch import fake, tracing

aten = torch.ops.aten


def test_stand_ins_of_a_traced_graph_are_told_from_tensors():
    assert not tracing.is_traced(torch.ones(2))
    assert not tracing.is_traced(torch.nn.Parameter(torch.ones(2)))
    with FakeTensorMode():
        assert tracing.is_traced(torch.ones(2))


def test_an_assertion_looks_at_the_value_when_it_runs():
    tracing.assert_when_run(torch.tensor(True), "it is")
    with pytest.raises(RuntimeError, match="it is not"):
        tracing.assert_when_run(torch.tensor(False), "it is not")
    with FakeTensorMode():
        tracing.assert_when_run(torch.zeros((), dtype=torch.bool), "not looked at")


def test_while_rehearsing_fake_tensors_are_what_a_program_runs_on():
    with fake.fake_tensors():
        x = torch.ones(2)
        assert tracing.is_traced(x)
        with fake.rehearsing():
            assert fake.is_rehearsing()
            assert tracing.is_without_data(x)
            assert not tracing.is_traced(x)
        assert not fake.is_rehearsing()
    assert not tracing.is_without_data(torch.ones(2))


def test_the_call_that_describes_a_tensor_is_told_from_others():
    class Asked(torch.Tensor):
        def untyped_storage(self):
            seen.append(tracing.is_describing(inspect.currentframe().f_back))
            return super().untyped_storage()

    seen = []
    tensor = torch.ones(2).as_subclass(Asked)
    tensor.untyped_storage()
    FakeTensorMode().from_tensor(tensor)
    assert seen[0] is False
    assert any(seen)
    assert not tracing.is_describing(None)


def test_graphs_are_seen_as_they_go_to_a_compiler():
    torch._dynamo.reset()
    seen = []
    x = torch.ones(2, requires_grad=True)
    torch.compile(lambda t: (t * 3).sum(), backend=tracing.seeing_graphs(seen.append))(x).backward()
    assert x.grad.tolist() == [3, 3]
    assert len(seen) == 2
    assert any(node.target is aten.mul.Tensor for node in seen[0].graph.nodes)


def test_an_ordinary_tensor_answers_for_the_one_class_that_takes_plain_tangents(monkeypatch):
    """Torch asks the gradient for the expected class; None says that it has no answer."""
    name = "__coerce_same_metadata_as_tangent__"
    monkeypatch.setattr(torch.Tensor, name, None, raising=False)
    tracing.take_plain_tangents(torch.nn.Parameter, lambda tensor, metadata: (tensor, metadata))
    grad = torch.zeros(2)
    assert getattr(grad, name)("layout", torch.nn.Parameter) == (grad, "layout")
    assert getattr(grad, name)("layout", FakeTensor) is None
    from torch._functorch._aot_autograd import runtime_wrappers

    assert name in inspect.getsource(runtime_wrappers)


def test_a_function_that_is_called_while_a_graph_is_made_is_marked_as_torch_does():
    def one():
        return None

    def two():
        return None

    torch.compiler.assume_constant_result(one)
    tracing.constant_in_graphs(two)
    assert vars(one) == vars(two)


def test_the_graph_that_is_made_is_one_object_for_forward_and_backward():
    seen = []

    def backend(module, _):
        seen.append(tracing.graph_that_is_made())
        return module

    assert tracing.graph_that_is_made() is None
    torch._dynamo.reset()
    torch.compile(lambda x: x * 2, backend=backend)(torch.ones(2))
    assert seen[0] is not None
    assert tracing.graph_that_is_made() is None


class Whole(torch.Tensor):
    """A tensor class of which a graph may record ops whole."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return cls(func(*(t.inner if isinstance(t, cls) else t for t in args)))


def test_make_fx_takes_tensors_of_a_class_as_constants(monkeypatch):
    from torch.fx.experimental import proxy_tensor

    monkeypatch.setattr(proxy_tensor, "proxy_call", proxy_tensor.proxy_call)
    constant, one, two = Whole(torch.full((2,), 3.0)), Whole(torch.ones(2)), Whole(torch.full((2,), 2.0))
    baked = make_fx(lambda x: constant.neg() * x)(one)
    assert baked(two).inner.tolist() == [-3.0, -3.0], "torch takes this by itself now: record_constants is not needed"
    refused = []
    tracing.record_constants(Whole, refused.append)
    graph = make_fx(lambda x: constant.neg() * x)(one)
    assert graph(two).inner.tolist() == [-6.0, -6.0]
    assert not refused
