"""The shelf ``private_torch.tracing``: each function has a test that fails clearly when torch takes it away."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from shardwise.private_torch import fake, tracing

aten = torch.ops.aten


def test_inside_a_mode_a_block_can_run_torch_for_real():
    with FakeTensorMode():
        assert isinstance(torch.ones(2), FakeTensor)
        with tracing.outside_modes():
            real = torch.ones(2)
            assert real.tolist() == [1, 1]
        assert isinstance(torch.ones(2), FakeTensor)
    assert type(real) is torch.Tensor


def test_a_block_outside_modes_is_outside_the_dispatcher_for_python_kernels():
    # Kernels of collectives that run with the GIL held and threads of gloo that want it locked each other out.
    assert not tracing.is_python_dispatched()
    with enable_python_dispatcher():
        assert tracing.is_python_dispatched()
        with tracing.outside_modes():
            assert not tracing.is_python_dispatched()
        assert tracing.is_python_dispatched()


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


def symbols(*numbers):
    """Sizes that are symbols, of tensors without data."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    whole = mode.from_tensor(
        torch.empty(numbers), symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC] * len(numbers))
    )
    return whole, whole.shape


def test_what_a_symbol_stands_for():
    _, (n, m) = symbols(8, 6)
    assert (tracing.hint_of(n), tracing.hint_of(2 * n + m)) == (8, 22)
    assert tracing.same_symbol(n, n)
    assert not tracing.same_symbol(n, m)
    assert not tracing.same_symbol(n, 8)
    assert tracing.is_known(2 * n % n == 0)
    assert not tracing.is_known(n % 4 == 0)
    assert tracing.settled(n) is n
    assert n == 8
    assert type(tracing.settled(n)) is int


def test_a_size_that_data_decides_has_a_guess_and_no_number():
    _, (n, _) = symbols(8, 6)
    selected = n.node.shape_env.create_unbacked_symint()
    assert tracing.guess_of(n) == 8
    assert tracing.guess_of(selected) == tracing.guess_of(selected) > 1
    assert tracing.guess_of(3 * selected) == 3 * tracing.guess_of(selected)
    assert tracing.is_open(selected)
    with pytest.raises(tracing.NoNumberError):
        tracing.hint_of(selected)


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


def test_tensors_of_other_sizes_in_one_trace():
    whole, (n, m) = symbols(8, 6)
    assert not any(map(tracing.is_open, (n, 8)))
    result = tracing.retraced(whole, (n // 2, m), (m, 1))
    assert tracing.same_symbol(result.shape[0], n // 2)
    with tracing.without_data(whole):
        assert tracing.is_traced(torch.empty(3))
    tracing.make_known(whole.shape)  # nothing writes a graph here


def test_formulas_with_powers_are_written_into_a_graph():
    def program(x):
        size = x.shape[0]
        with tracing.outside_modes():
            formulas = size * size, 3 * size**3 + size, (size * size + 1) // 2
        tracing.make_known(formulas)
        return [x.new_zeros(n) for n in formulas]

    graph = make_fx(program, tracing_mode="symbolic")(torch.ones(6))
    assert [len(y) for y in graph(torch.ones(4))] == [16, 196, 8]


@pytest.mark.parametrize("told", [False, True])
def test_a_product_of_three_sizes_is_written_into_a_graph(told, monkeypatch):
    """Torch writes one call of `operator.mul` with three operands, of which the graph's code reads two."""
    from torch.fx.experimental import proxy_tensor

    monkeypatch.setattr(proxy_tensor, "_build_proxy_for_sym_expr", proxy_tensor._build_proxy_for_sym_expr)
    tracing.write_products_in_pairs()

    def program(x):
        with tracing.outside_modes():
            product = x.shape[0] * x.shape[1] * x.shape[2]
            largest = 2 * torch.sym_max(torch.sym_max(x.shape[0], x.shape[1]), x.shape[2])
        if told:
            tracing.make_known([product, largest])
        return x.new_zeros(product), x.new_zeros(product // 2), x.new_zeros(largest)

    graph = make_fx(program, tracing_mode="symbolic")(torch.ones(2, 3, 4))
    assert [len(y) for y in graph(torch.ones(3, 4, 5))] == [60, 30, 10]
    assert not any("nary" in str(node.target) for node in graph.graph.nodes)  # what Inductor does not know


def test_a_part_whose_sizes_are_left_open():
    part = torch.empty(3, 2)
    torch._dynamo.mark_dynamic(part, 0)
    assert not tracing.varies(part)
    tracing.let_vary(part, range(2))
    assert tracing.varies(part)
    assert not tracing.varies(part.detach())
    seen = []

    def backend(graph, _):
        traced = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        seen.extend(any(map(tracing.is_open, t.shape)) for t in traced if isinstance(t, torch.Tensor))
        assert tracing.is_compiled_now()
        return graph.forward

    torch.compile(lambda t: t + 1, backend=backend)(part)
    assert seen == [True]
    assert not tracing.is_compiled_now()


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
