"""Each private name of torch that the project uses still does what it is used for."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from shardwise import private_torch
from shardwise.errors import MeshMismatchError
from shardwise.placements import REPLICATE
from shardwise.spec import AbstractMesh, TensorMeta, TensorSpec

aten = torch.ops.aten


@frozen
class Holder:
    tensor_meta: TensorMeta


class Wrapper(torch.Tensor):
    __torch_function__ = private_torch.disabled_torch_function
    seen: ClassVar[list] = []

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)


@pytest.mark.parametrize("make", [private_torch.new_wrapper, private_torch._portable_wrapper], ids=["fast", "portable"])
def test_a_wrapper_has_the_global_meta_and_the_local_tensor(make):
    local = torch.ones(2, 3, dtype=torch.bfloat16)
    spec = TensorSpec(AbstractMesh((2,)), [REPLICATE], TensorMeta((4, 3), (1, 4), torch.bfloat16))
    made = make(Wrapper, local, spec, False)
    assert type(made) is Wrapper
    assert (made.shape, made.stride(), made.dtype, made.device) == ((4, 3), (1, 4), torch.bfloat16, local.device)
    assert made._local_tensor is local
    assert made._spec is spec
    assert not made.requires_grad
    assert make(Wrapper, local, spec, True).requires_grad


def test_torch_function_is_off_and_torch_dispatch_is_on():
    made = private_torch.new_wrapper(Wrapper, torch.ones(2), Holder(TensorMeta.of(torch.ones(2))), False)
    Wrapper.seen.clear()
    torch.neg(made)
    assert Wrapper.seen == [aten.neg.default]


def test_the_schema_of_an_op_is_readable():
    schema = private_torch.schema_of(aten.mm.default)
    assert [a.name for a in schema.arguments] == ["self", "mat2"]
    assert len(schema.returns) == 1


def test_the_direct_call_computes_what_the_op_does():
    x = torch.randn(3, 4)
    assert torch.equal(private_torch.direct_call(aten.mul.Tensor)(x, x), x * x)
    assert torch.equal(private_torch.direct_call(aten.sum.dim_IntList)(x, [1], keepdim=True), x.sum(1, keepdim=True))


def test_composite_ops_are_told_from_others():
    assert private_torch.is_composite(aten.linear.default)
    assert not private_torch.is_composite(aten.mm.default)


def test_a_backward_pass_is_known_from_inside():
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: seen.append(private_torch.in_backward()))
    x.sum().backward()
    assert seen == [True]
    assert not private_torch.in_backward()


def test_the_version_of_a_tensor_counts_its_writes():
    x = torch.ones(3)
    before = private_torch.version_of(x)
    x[:2].add_(1)
    assert private_torch.version_of(x) > before


def test_a_tensor_can_stand_in_for_a_parameter():
    module = torch.nn.Linear(2, 3)
    weight, whole = module.weight, torch.ones(3, 2)
    private_torch.swap_parameter(module, "weight", whole)
    assert module.weight is whole
    assert torch.equal(module(torch.ones(2)), torch.full((3,), 2.0) + module.bias)
    private_torch.swap_parameter(module, "weight", weight)
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]
    assert module.weight is weight


def test_without_a_mesh_in_force_the_error_says_what_to_do():
    with pytest.raises(MeshMismatchError, match="Pass device_mesh="):
        private_torch.current_mesh()


def entered_mesh(shape):
    mesh = init_device_mesh("cpu", shape)
    with mesh:
        return private_torch.current_mesh() == mesh


def test_the_mesh_in_force_is_found(pool):
    assert pool.run(entered_mesh, (2, 2)) == [True] * 4


def test_foreach_is_offered_for_the_class_by_default():
    class Offered(torch.Tensor):
        pass

    private_torch.support_foreach(Offered)
    private_torch.support_foreach(Offered)
    from torch.optim.optimizer import _foreach_supported_types as of_optimizers
    from torch.utils._foreach_utils import _foreach_supported_types as of_clipping

    assert of_optimizers.count(Offered) == of_clipping.count(Offered) == 1


def test_the_recorder_sees_ops_with_their_arguments():
    x = torch.ones(2)
    ((op, args, kwargs),) = private_torch.recorded_ops(torch.add, (x, 2), {"alpha": 3})
    assert (op, args[0] is x, args[1], kwargs) == (aten.add.Tensor, True, 2, {"alpha": 3})


def test_the_namespaces_of_bindings_exist():
    assert None not in private_torch.binding_namespaces()


def test_inside_a_mode_a_block_can_run_torch_for_real():
    with FakeTensorMode():
        assert isinstance(torch.ones(2), FakeTensor)
        with private_torch.outside_modes():
            real = torch.ones(2)
            assert real.tolist() == [1, 1]
        assert isinstance(torch.ones(2), FakeTensor)
    assert type(real) is torch.Tensor


def test_a_block_outside_modes_is_outside_the_dispatcher_for_python_kernels():
    # Kernels of collectives that run with the GIL held and threads of gloo that want it locked each other out.
    assert not private_torch.is_python_dispatched()
    with enable_python_dispatcher():
        assert private_torch.is_python_dispatched()
        with private_torch.outside_modes():
            assert not private_torch.is_python_dispatched()
        assert private_torch.is_python_dispatched()


def test_stand_ins_of_a_traced_graph_are_told_from_tensors():
    assert not private_torch.is_traced(torch.ones(2))
    assert not private_torch.is_traced(torch.nn.Parameter(torch.ones(2)))
    with FakeTensorMode():
        assert private_torch.is_traced(torch.ones(2))


def test_an_assertion_looks_at_the_value_when_it_runs():
    private_torch.assert_when_run(torch.tensor(True), "it is")
    with pytest.raises(RuntimeError, match="it is not"):
        private_torch.assert_when_run(torch.tensor(False), "it is not")
    with FakeTensorMode():
        private_torch.assert_when_run(torch.zeros((), dtype=torch.bool), "not looked at")


def collectives_of_a_graph():
    group, rank = dist.group.WORLD, float(dist.get_rank())
    mine = torch.tensor([rank, rank + 10])
    return (
        private_torch.graph_all_gather(mine, 4, group).tolist(),
        private_torch.graph_all_reduce(mine, "sum", group).tolist(),
        private_torch.graph_reduce_scatter(torch.arange(4.0) + rank, "sum", 4, group).tolist(),
        private_torch.graph_all_to_all(torch.arange(4.0) + 10 * rank, [1] * 4, [1] * 4, group).tolist(),
        mine.tolist(),
    )


def test_collectives_of_a_graph_do_what_their_names_say(pool):
    found = pool.run(collectives_of_a_graph)
    assert [f[0] for f in found] == [[0, 10, 1, 11, 2, 12, 3, 13]] * 4
    assert [f[1] for f in found] == [[6, 46]] * 4
    assert [f[2] for f in found] == [[4 * i + 6] for i in range(4)]
    assert [f[3] for f in found] == [[i, 10 + i, 20 + i, 30 + i] for i in range(4)]
    assert [f[4] for f in found] == [[i, i + 10] for i in range(4)]


# -- custom ops --------------------------------------------------------------------------------------------------


def _bump(x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
    return x + by


bump = torch.library.custom_op("private_torch_test::bump", _bump, mutates_args=())


def test_a_custom_op_stands_for_its_overload_and_the_reverse():
    overload = torch.ops.private_torch_test.bump.default
    assert private_torch.overload_of(bump) is overload
    assert private_torch.overload_of(torch.ops.private_torch_test.bump) is overload
    assert private_torch.overload_of(aten.add) is None
    assert private_torch.overload_of(torch.add) is None
    assert private_torch.custom_op_of(overload) is bump
    assert private_torch.custom_op_of(aten.add.Tensor) is None
    assert private_torch.known_custom_op("private_torch_test::bump") is bump
    assert private_torch.known_custom_op("private_torch_test::none") is None


def test_a_custom_op_is_made_again_from_its_parts():
    source = torch.library.custom_op("private_torch_test::source", _bump, mutates_args=())
    source.register_fake(lambda x, *_: torch.empty_like(x))
    source.register_autograd(lambda *given: (5 * given[-1], None))
    parts = private_torch.parts_of(source)
    assert (parts.name, parts.written, parts.module) == ("private_torch_test::source", (), __name__)
    made = private_torch.make_custom_op(evolve(parts, name="private_torch_test::copy"))
    x = torch.ones(2, requires_grad=True)
    made(x, 2.0).sum().backward()
    assert x.grad.tolist() == [5, 5]
    assert torch.ops.private_torch_test.copy(torch.empty(3, device="meta")).shape == (3,)


def test_parts_of_an_op_with_several_kernels_have_no_kernel():
    made = torch.library.custom_op("private_torch_test::kernels", _bump, mutates_args=(), device_types="cpu")
    assert private_torch.parts_of(made).kernel is None


@pytest.mark.parametrize("op", [aten.neg.default, torch.ops.private_torch_test.bump.default], ids=str)
def test_a_handler_is_called_as_long_as_its_library_lives(op):
    made = private_torch.new_wrapper(Wrapper, torch.ones(2), Holder(TensorMeta.of(torch.ones(2))), False)
    for answer in ("first", "second"):
        library = private_torch.put_before_dispatch(
            op, Wrapper, lambda *_, found=answer, **__: torch.tensor(len(found))
        )
        assert int(op(made)) == len(answer)
        del library
    Wrapper.seen.clear()
    op(made)
    assert Wrapper.seen == [op]


def test_every_op_can_be_watched_and_taken_apart():
    seen = []

    def run(op, args, kwargs):
        seen.append(op)
        return op(*args, **kwargs)

    with private_torch.watching(run, private_torch.is_composite), torch.inference_mode():
        found = torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3))
    assert torch.equal(found, torch.full((2, 4), 3.0))
    assert seen[-1] is aten.mm.default
    assert aten.linear.default not in seen


def test_fake_tensors_have_a_device_and_no_data_and_may_go_into_foreach():
    from torch.utils import _foreach_utils

    with private_torch.fake_tensors():
        big = torch.empty(1 << 40)
        assert big.device.type == "cpu"
        assert type(big) in _foreach_utils._foreach_supported_types
        with pytest.raises(RuntimeError, match="_local_scalar_dense") as caught:
            big.sum().item()
        assert private_torch.is_unknowable(caught.value)
        with pytest.raises(RuntimeError, match="nonzero") as caught:
            big.nonzero()
        assert private_torch.is_unknowable(caught.value)
    assert FakeTensor not in _foreach_utils._foreach_supported_types
    assert not private_torch.is_unknowable(ValueError())


def test_a_backward_op_knows_its_forward_call():
    seen = []
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        found = torch.ones(2, requires_grad=True).cos()
    found.grad_fn.register_prehook(lambda _: seen.append(private_torch.forward_traceback()))
    found.sum().backward()
    (lines,) = seen
    assert any("test_a_backward_op_knows_its_forward_call" in line for line in lines)
    assert private_torch.forward_traceback() == []


def test_torch_decomposes_by_a_python_function_or_a_composite_kernel():
    found = private_torch.python_decomposition(aten.addcmul.default)
    assert torch.equal(found(torch.ones(2), torch.ones(2), torch.ones(2)), torch.full((2,), 2.0))
    assert private_torch.python_decomposition(torch.ops.prims.exp.default) is not None
    assert private_torch.python_decomposition(aten.mm.default) is None
    kernel = private_torch.composite_kernel(aten._foreach_neg.default)
    assert torch.equal(kernel([torch.ones(2)])[0], -torch.ones(2))
    assert private_torch.composite_kernel(aten.mm.default) is None


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
    assert {op: private_torch.functional_of(op) for op in pairs} == pairs


def test_tags_say_what_draws_and_what_is_a_view_in_place():
    assert private_torch.draws(aten.bernoulli.default)
    assert not private_torch.draws(aten.mul.Tensor)
    assert private_torch.is_view_in_place(aten.squeeze_.dim)
    assert not private_torch.is_view_in_place(aten.mul_.Tensor)


def test_a_composite_op_can_be_taken_over_above_autograd_for_subclasses_alone():
    made = private_torch.new_wrapper(Wrapper, torch.ones(2), Holder(TensorMeta.of(torch.ones(2))), False)
    seen, stand_in = [], torch.zeros(3)

    def run(below, args, kwargs):
        seen.append((args[1], kwargs, below(torch.ones(2), args[1]).shape))
        return stand_in

    library = private_torch.put_above_autograd(aten.vander.default, run)
    torch.vander(torch.ones(2), 2)
    assert seen == []
    assert torch.equal(torch.vander(made, 2), stand_in)
    assert seen == [(2, {}, (2, 2))]
    del library


def test_while_rehearsing_fake_tensors_are_what_a_program_runs_on():
    with private_torch.fake_tensors():
        x = torch.ones(2)
        assert private_torch.is_traced(x)
        with private_torch.rehearsing():
            assert private_torch.is_rehearsing()
            assert private_torch.is_without_data(x)
            assert not private_torch.is_traced(x)
        assert not private_torch.is_rehearsing()
    assert not private_torch.is_without_data(torch.ones(2))


def test_memory_has_an_identity_also_without_data():
    for x in (torch.ones(4), torch.ones(4, device="meta")):
        assert private_torch.memory_of(x[1:]) == private_torch.memory_of(x)
        assert private_torch.memory_of(x.clone()) != private_torch.memory_of(x)


def test_a_process_can_be_one_rank_of_many_alone():
    dist.init_process_group("fake", store=private_torch.fake_store(), rank=3, world_size=1024)
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (3, 1024)
    finally:
        dist.destroy_process_group()


def test_the_functions_on_state_dicts_are_wrapped_where_torch_takes_them_from():
    from torch.distributed import _state_dict_utils as ours
    from torch.distributed.checkpoint import state_dict as taker

    for name in ("_gather_state_dict", "_distribute_state_dict", "_broadcast_state_dict"):
        assert getattr(taker, name) is getattr(ours, name)
        assert getattr(taker, name).__wrapped__.__module__ == ours.__name__
    # What is wrapped are their first two arguments and three options of the first.
    assert ours._gather_state_dict({"a": [1]}, pg=None, cpu_offload=False, ranks_only=()) == {"a": [1]}


def test_an_op_made_of_others_may_be_opened():
    opened = private_torch.composite_kernel(aten.rand.default)
    (op, *_), *_ = private_torch.recorded_ops(lambda: opened([3]), (), {})[-1:]
    assert op is aten.uniform_.default
    assert private_torch.composite_kernel(aten.uniform_.default) is None


def symbols(*numbers):
    """Sizes that are symbols, of tensors without data."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    whole = mode.from_tensor(
        torch.empty(numbers), symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC] * len(numbers))
    )
    return whole, whole.shape


def test_what_a_symbol_stands_for():
    _, (n, m) = symbols(8, 6)
    assert (private_torch.hint_of(n), private_torch.hint_of(2 * n + m)) == (8, 22)
    assert private_torch.same_symbol(n, n)
    assert not private_torch.same_symbol(n, m)
    assert not private_torch.same_symbol(n, 8)
    assert private_torch.is_known(2 * n % n == 0)
    assert not private_torch.is_known(n % 4 == 0)
    assert private_torch.settled(n) is n
    assert n == 8
    assert type(private_torch.settled(n)) is int


def test_tensors_of_other_sizes_in_one_trace():
    whole, (n, m) = symbols(8, 6)
    assert not any(map(private_torch.is_open, (n, 8)))
    found = private_torch.retraced(whole, (n // 2, m), (m, 1))
    assert private_torch.same_symbol(found.shape[0], n // 2)
    with private_torch.without_data(whole):
        assert private_torch.is_traced(torch.empty(3))
    private_torch.make_known(whole.shape)  # nothing writes a graph here


def test_a_part_whose_sizes_are_left_open():
    part = torch.empty(3, 2)
    torch._dynamo.mark_dynamic(part, 0)
    private_torch.let_vary(part, range(2))
    seen = []

    def backend(graph, _):
        traced = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        seen.extend(any(map(private_torch.is_open, t.shape)) for t in traced if isinstance(t, torch.Tensor))
        assert private_torch.is_compiled_now()
        return graph.forward

    torch.compile(lambda t: t + 1, backend=backend)(part)
    assert seen == [True]
    assert not private_torch.is_compiled_now()


def test_graphs_are_seen_as_they_go_to_a_compiler():
    torch._dynamo.reset()
    seen = []
    x = torch.ones(2, requires_grad=True)
    torch.compile(lambda t: (t * 3).sum(), backend=private_torch.seeing_graphs(seen.append))(x).backward()
    assert x.grad.tolist() == [3, 3]
    assert len(seen) == 2
    assert any(node.target is aten.mul.Tensor for node in seen[0].graph.nodes)
