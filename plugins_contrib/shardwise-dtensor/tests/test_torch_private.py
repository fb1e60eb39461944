"""One test per use of private torch API: when one fails, torch took away or changed what it names."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as torch_parallel

from shardwise import MeshTensor
from shardwise.rule import AbstractMesh
from shardwise_dtensor import torch_private

aten = torch.ops.aten
MESH = AbstractMesh((2, 3))


def spec(*placements):
    meta = torch_private.TensorMeta(torch.Size([8, 6]), (6, 1), torch.float32)
    return torch_private.DTensorSpec(torch_private.torch_mesh(MESH), placements, meta)


def test_the_propagator_has_the_tables_of_rules_and_keys():
    propagator = DTensor._op_dispatcher.sharding_propagator
    for name in ("op_strategy_funcs", "op_to_rules", "op_to_schema_info"):
        assert isinstance(getattr(propagator, name), dict), name
    assert len(torch_private._table("op_single_dim_strategy_funcs")) + len(propagator.op_strategy_funcs) > 100


def test_dtensor_tells_what_it_knows(kernels):
    assert torch_private.has_rule(aten.mm.default)
    assert torch_private.has_rule(aten.add.Tensor)
    assert not torch_private.has_rule(kernels.bridge.gated_norm.default)
    assert torch_private.has_handler(aten.argmax.default)
    assert not torch_private.has_handler(aten.mm.default)
    assert torch_private.rewrites_arguments(aten.view.default)
    assert not torch_private.rewrites_arguments(aten.mm.default)


def test_a_rule_is_put_by_the_public_function_and_taken_back_whole():
    tables = (*torch_private._RULES, *torch_private._KEYS)
    before = {name: torch_private._table(name).get(aten.add.Tensor) for name in tables}
    undo = torch_private.put_rule(aten.add.Tensor, lambda *args: [], 2, ["alpha"])
    try:
        found = torch_private._table("op_strategy_funcs")[aten.add.Tensor]
        assert found.func.__qualname__.startswith("register_sharding")
        assert aten.add.Tensor not in torch_private._table("op_single_dim_strategy_funcs")
        keyed = torch_private._table("op_to_schema_info")[aten.add.Tensor]
        assert (keyed.static_argnum, keyed.static_kwargkey, keyed.needs_pytree) == (2, ["alpha"], True)
    finally:
        undo()
    assert before == {name: torch_private._table(name).get(aten.add.Tensor) for name in tables}


def test_both_caches_of_choices_can_be_dropped():
    torch_private.forget_choices()
    assert DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_info().currsize == 0


@pytest.mark.parametrize(
    ("op", "by_type", "varying"),
    [
        (aten.mm.default, (), (None, ())),
        (aten._softmax.default, (), (1, ())),
        (aten.add.Tensor, ("alpha",), (None, ("alpha",))),
        (aten.cat.default, (), (1, ())),
        (aten.layer_norm.default, ("eps",), (1, ())),
        (aten.native_layer_norm.default, ("eps",), (1, ())),
        (aten.dropout.default, ("p",), (2, ())),
        (aten.dropout.default, (), (1, ())),
    ],
)
def test_the_schema_tells_which_arguments_vary(op, by_type, varying):
    assert torch_private.varying(op, frozenset(by_type)) == varying


def test_a_mesh_without_process_groups_serves_specs_strategies_and_costs():
    utils = pytest.importorskip("torch.distributed.tensor._ops.utils")
    made = torch_private.torch_mesh(MESH)
    assert isinstance(made, DeviceMesh)
    assert (tuple(made.shape), made.ndim, made.size(), made.size(1), made.device_type) == ((2, 3), 2, 6, 3, "cpu")
    assert made is torch_private.torch_mesh(AbstractMesh((2, 3)))
    assert not torch.distributed.is_initialized()
    there = torch_private.OpStrategy([torch_private.OpSpec(spec(Shard(0), Replicate()))])
    assert utils.generate_redistribute_costs(there, spec(Replicate(), Replicate()))[0] > 0
    assert torch_private.torch_mesh(made) is made


def test_op_schemas_and_answers_are_made_as_torch_makes_them():
    given = torch_private.OpSchema(aten.relu.default, (spec(Shard(0), Replicate()),), {})
    assert given.args_spec == (spec(Shard(0), Replicate()),)
    wrapped = torch_private.TupleStrategy([torch_private.OpStrategy([torch_private.OpSpec(given.args_spec[0])])])
    listed = torch_private.OpSchema(
        aten.cat.default, (wrapped,), {}, torch_private.RuntimeSchemaInfo(1, needs_pytree=True)
    )
    assert len(listed.args_strategy) == 1
    answer = torch_private.OutputSharding(given.args_spec[0], given, True)
    assert (answer.needs_redistribute, answer.use_val_from_redistribute_schema) == (True, False)
    assert isinstance(wrapped, torch_private.StrategyType)


def test_the_schema_of_an_op_is_at_hand():
    assert torch_private.schema_of(aten.mm.default).name == "aten::mm"


STYLE = "torch.distributed.tensor.parallel.style"


def test_torchs_styles_name_what_the_copies_replace():
    before = dict(vars(torch_parallel.style))
    copy = torch_private.second_copy(STYLE, DTensor=MeshTensor, distribute_module=None, distribute_tensor=None)
    assert copy.ColwiseParallel is not torch_parallel.ColwiseParallel
    for name in torch_parallel.style.__all__:
        methods = [m for m in vars(getattr(copy, name)).values() if hasattr(m, "__globals__")]
        assert methods
        assert all(m.__globals__["DTensor"] is MeshTensor for m in methods), name
    assert vars(torch_parallel.style) == before
    api = torch_private.second_copy("torch.distributed.tensor.parallel.api", ParallelStyle=int)
    assert api.parallelize_module.__globals__["ParallelStyle"] is int


def test_a_copy_says_what_torch_has_lost():
    with pytest.raises(ImportError, match=r"has no name Tensors, distribute_all, which shardwise-dtensor replaces"):
        torch_private.second_copy(STYLE, DTensor=MeshTensor, Tensors=None, distribute_all=None)
    with pytest.raises(ImportError, match=r"has no module torch\.distributed\.tensor\.parallel\.styles"):
        torch_private.second_copy(STYLE + "s", DTensor=MeshTensor)
