"""The shelf ``private_torch.sizes``: each function has a test that fails clearly when torch takes it away."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from shardwise.private_torch import modes, sizes, tracing


def symbols(*numbers):
    """Sizes that are symbols, of tensors without data."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    whole = mode.from_tensor(
        torch.empty(numbers), symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC] * len(numbers))
    )
    return whole, whole.shape


def test_what_a_symbol_stands_for():
    _, (n, m) = symbols(8, 6)
    assert (sizes.hint_of(n), sizes.hint_of(2 * n + m)) == (8, 22)
    assert sizes.same_symbol(n, n)
    assert not sizes.same_symbol(n, m)
    assert not sizes.same_symbol(n, 8)
    assert sizes.is_known(2 * n % n == 0)
    assert not sizes.is_known(n % 4 == 0)
    assert sizes.settled(n) is n
    assert n == 8
    assert type(sizes.settled(n)) is int


def test_a_size_that_data_decides_has_a_guess_and_no_number():
    _, (n, _) = symbols(8, 6)
    selected = n.node.shape_env.create_unbacked_symint()
    assert sizes.guess_of(n) == 8
    assert sizes.guess_of(selected) == sizes.guess_of(selected) > 1
    assert sizes.guess_of(3 * selected) == 3 * sizes.guess_of(selected)
    assert sizes.is_open(selected)
    with pytest.raises(sizes.NoNumberError):
        sizes.hint_of(selected)


@pytest.fixture
def formulas_written(monkeypatch):
    from torch.fx.experimental import proxy_tensor

    monkeypatch.setattr(proxy_tensor, "_build_proxy_for_sym_expr", proxy_tensor._build_proxy_for_sym_expr)
    sizes.write_formulas()


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.usefixtures("formulas_written")
def test_formulas_with_powers_are_written_into_a_graph(told):
    """Torch writes none of them."""

    def program(x):
        size = x.shape[0]
        with modes.outside_modes():
            formulas = size * size, 3 * size**3 + size, (size * size + 1) // 2
        if told:
            sizes.make_known(formulas)
        return [x.new_zeros(n) for n in formulas]

    graph = make_fx(program, tracing_mode="symbolic")(torch.ones(6))
    assert [len(y) for y in graph(torch.ones(4))] == [16, 196, 8]


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.usefixtures("formulas_written")
def test_a_product_of_three_sizes_is_written_into_a_graph(told):
    """Torch writes one call of `operator.mul` with three operands, of which the graph's code reads two."""

    def program(x):
        with modes.outside_modes():
            product = x.shape[0] * x.shape[1] * x.shape[2]
            largest = 2 * torch.sym_max(torch.sym_max(x.shape[0], x.shape[1]), x.shape[2])
            all_in_all = x.shape[0] + x.shape[1] + x.shape[2] + 1
        if told:
            sizes.make_known([product, largest, all_in_all])
        return [x.new_zeros(n) for n in (product, product // 2, largest, all_in_all)]

    graph = make_fx(program, tracing_mode="symbolic")(torch.ones(2, 3, 4))
    assert [len(y) for y in graph(torch.ones(3, 4, 5))] == [60, 30, 10, 13]
    assert not any("nary" in str(node.target) for node in graph.graph.nodes)  # what Inductor does not know


def test_a_part_whose_sizes_are_left_open():
    part = torch.empty(3, 2)
    torch._dynamo.mark_dynamic(part, 0)
    assert not sizes.varies(part)
    sizes.let_vary(part, range(2))
    assert sizes.varies(part)
    assert not sizes.varies(part.detach())
    seen = []

    def backend(graph, _):
        traced = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        seen.extend(any(map(sizes.is_open, t.shape)) for t in traced if isinstance(t, torch.Tensor))
        assert tracing.is_compiled_now()
        return graph.forward

    torch.compile(lambda t: t + 1, backend=backend)(part)
    assert seen == [True]
    assert not tracing.is_compiled_now()


def test_tensors_of_other_sizes_in_one_trace():
    whole, (n, m) = symbols(8, 6)
    assert not any(map(sizes.is_open, (n, 8)))
    result = tracing.retraced(whole, (n // 2, m), (m, 1))
    assert sizes.same_symbol(result.shape[0], n // 2)
    with tracing.without_data(whole):
        assert tracing.is_traced(torch.empty(3))
    sizes.make_known(whole.shape)  # nothing writes a graph here
