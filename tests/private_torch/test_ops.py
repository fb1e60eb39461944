"""The shelf ``private_torch.ops``: each function has a test that fails clearly when torch takes it away."""

from __future__ import annotations

import torch
from attrs import evolve
from torch.fx.experimental.proxy_tensor import make_fx

from shardwise.private_torch import dispatch, ops

aten = torch.ops.aten


def test_the_schema_of_an_op_is_readable():
    schema = ops.schema_of(aten.mm.default)
    assert [a.name for a in schema.arguments] == ["self", "mat2"]
    assert len(schema.returns) == 1


def test_the_direct_call_computes_what_the_op_does():
    x = torch.randn(3, 4)
    assert torch.equal(ops.direct_call(aten.mul.Tensor)(x, x), x * x)
    assert torch.equal(ops.direct_call(aten.sum.dim_IntList)(x, [1], keepdim=True), x.sum(1, keepdim=True))


def test_an_operator_of_higher_order_asks_a_table_by_class():
    class Marked(torch.Tensor):
        """A subclass that takes part in dispatch."""

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("an operator of higher order does not come here")

        __torch_function__ = torch._C._disabled_torch_function_impl

    class Applied(ops.HigherOrderOperator):
        """An operator that takes a function."""

        def __call__(self, *args):
            return super().__call__(*args)

    operator = Applied("private_torch_test_applied")
    assert isinstance(torch.ops.higher_order.flex_attention, ops.HigherOrderOperator)
    assert not isinstance(aten.mm.default, ops.HigherOrderOperator)
    ops.for_class(operator, Marked, lambda *args: ("taken", len(args)))
    with torch._C._AutoDispatchBelowAutograd():
        assert operator(torch.Tensor._make_wrapper_subclass(Marked, (2,)), len) == ("taken", 2)


def test_functions_of_control_flow_and_their_operators_are_found():
    for name in ("cond", "while_loop", "scan", "map", "associative_scan"):
        assert ops.control_flow(name).__name__ == name
        assert ops.control_flow(name).__closure__ is None  # else shardwise leaves the function as it is
    assert ops.control_flow("cond") is torch.cond
    assert ops.control_flow("surely_not") is None
    assert {"cond", "scan", "map_impl", "foreach_map"} <= {op.name() for op in ops.higher_order_operators()}


def test_composite_ops_are_told_from_others():
    assert ops.is_composite(aten.linear.default)
    assert not ops.is_composite(aten.mm.default)


def test_the_namespaces_of_bindings_exist():
    assert None not in ops.binding_namespaces()


# -- custom ops --------------------------------------------------------------------------------------------------


def _bump(x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
    return x + by


bump = torch.library.custom_op("private_torch_test::bump", _bump, mutates_args=())


def test_a_custom_op_stands_for_its_overload_and_the_reverse():
    overload = torch.ops.private_torch_test.bump.default
    assert ops.overload_of(bump) is overload
    assert ops.overload_of(torch.ops.private_torch_test.bump) is overload
    assert ops.overload_of(aten.add) is None
    assert ops.overload_of(torch.add) is None
    assert ops.custom_op_of(overload) is bump
    assert ops.custom_op_of(aten.add.Tensor) is None
    assert ops.known_custom_op("private_torch_test::bump") is bump
    assert ops.known_custom_op("private_torch_test::none") is None


def test_an_op_is_found_by_the_name_that_torch_prints():
    for op in (aten.mm.default, aten.add.Tensor, torch.ops.private_torch_test.bump.default):
        assert ops.op_named(op.name()) is op
    for name in ("aten::no_such_op", "no_such_library::op", "aten::mm.no_such_overload"):
        assert ops.op_named(name) is None


def test_a_custom_op_is_made_again_from_its_parts():
    source = torch.library.custom_op("private_torch_test::source", _bump, mutates_args=())
    source.register_fake(lambda x, *_: torch.empty_like(x))
    source.register_autograd(lambda *given: (5 * given[-1], None))
    parts = ops.parts_of(source)
    assert (parts.name, parts.written, parts.module) == ("private_torch_test::source", (), __name__)
    copy = ops.make_custom_op(evolve(parts, name="private_torch_test::copy"))
    x = torch.ones(2, requires_grad=True)
    copy(x, 2.0).sum().backward()
    assert x.grad.tolist() == [5, 5]
    assert torch.ops.private_torch_test.copy(torch.empty(3, device="meta")).shape == (3,)


def test_parts_of_an_op_with_several_kernels_have_no_kernel():
    custom = torch.library.custom_op("private_torch_test::kernels", _bump, mutates_args=(), device_types="cpu")
    assert ops.parts_of(custom).kernel is None


def test_every_op_can_be_watched_and_taken_apart():
    seen = []

    def run(op, args, kwargs):
        seen.append(op)
        return op(*args, **kwargs)

    with dispatch.watching(run, ops.is_composite), torch.inference_mode():
        result = torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3))
    assert torch.equal(result, torch.full((2, 4), 3.0))
    assert seen[-1] is aten.mm.default
    assert aten.linear.default not in seen


def test_torch_decomposes_by_a_python_function_or_a_composite_kernel():
    decomposition = ops.python_decomposition(aten.addcmul.default)
    assert torch.equal(decomposition(torch.ones(2), torch.ones(2), torch.ones(2)), torch.full((2,), 2.0))
    assert ops.python_decomposition(torch.ops.prims.exp.default) is not None
    assert ops.python_decomposition(aten.mm.default) is None
    kernel = ops.composite_kernel(aten._foreach_neg.default)
    assert torch.equal(kernel([torch.ones(2)])[0], -torch.ones(2))
    assert ops.composite_kernel(aten.mm.default) is None


def test_a_written_form_leads_to_its_functional_one():
    pairs = {
        aten.add_.Tensor: aten.add.Tensor,
        aten.add.out: aten.add.Tensor,
        aten.max.dim_max: aten.max.dim,
        aten.sum.IntList_out: aten.sum.dim_IntList,
        aten.transpose_.default: aten.transpose.int,
        aten._foreach_add_.List: aten._foreach_add.List,
        aten.mm.default: None,
    }
    assert {op: ops.functional_of(op) for op in pairs} == pairs


def test_tags_say_what_draws_and_what_is_a_view_in_place():
    assert ops.draws(aten.bernoulli.default)
    assert not ops.draws(aten.mul.Tensor)
    assert ops.is_view_in_place(aten.squeeze_.dim)
    assert not ops.is_view_in_place(aten.mul_.Tensor)


def test_an_op_made_of_others_may_be_opened():
    opened = ops.composite_kernel(aten.rand.default)
    (op, *_), *_ = dispatch.recorded_ops(lambda: opened([3]), (), {})[-1:]
    assert op is aten.uniform_.default
    assert ops.composite_kernel(aten.uniform_.default) is None


def test_a_composite_kernel_runs_below_modes_for_functions():
    """Under such a mode torch would call the op itself."""
    kernel, both = ops.composite_kernel(aten._is_all_true.default), torch.tensor([True, True])
    called = []

    def run(op, args, kwargs):
        called.append(op)
        return op(*args, **kwargs)

    with torch.device("cpu"), dispatch.watching(run, lambda _: False):
        assert kernel(both)
    assert called[0] is aten.all.default
    assert ops.composite_kernel(torch.ops.private_torch_test.bump.default) is None


def test_an_op_is_defined_by_its_schema():
    op = ops.define_op(
        "tests_defined::twice(Tensor x, SymInt[] sizes) -> Tensor",
        lambda x, _sizes: x * 2,
        lambda x, _sizes: x.new_empty(x.shape),
    )
    assert torch.equal(op(torch.ones(2), [1]), torch.full((2,), 2.0))
    assert op(torch.ones(2, device="meta"), [1]).is_meta
    assert str(make_fx(lambda x: op(x, [1]), tracing_mode="fake")(torch.ones(2)).code).count("tests_defined.twice") == 1
