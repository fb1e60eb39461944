"""Bad input: its own error type, on every rank, before any collective, and the operands left as they were."""

from __future__ import annotations

import os
import warnings
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise import MeshTensor, Partial, Replicate, Shard, errors
from shardwise.comm.events import observe
from shardwise.engine.first_run import CHECK_STRIDES
from shardwise.testing import mesh


def on(layout, *shape, shape_of_mesh=(4,)):
    return sw.distribute_tensor(
        torch.arange(float(torch.Size(shape).numel())).reshape(shape), mesh(shape_of_mesh), layout
    )


def refused(case):
    """Run one bad call; what it raised, how many collectives it issued, and whether its operands changed."""
    operands, call = case()
    before = [t.to_local().clone() for t in operands]
    events = []
    with observe(events.append):
        try:
            call()
        except Exception as error:  # noqa: BLE001  # any type is reported and judged by the caller
            found = type(error).__name__, str(error)
        else:
            found = "nothing", ""
    unchanged = all(torch.equal(a, t.to_local()) for a, t in zip(before, operands, strict=True))
    return *found, len(events), unchanged


def shard_dim_out_of_range():
    x = on([Shard(0)], 4, 3)
    return [x], lambda: x.redistribute(placements=[Shard(2)])


def shard_dim_of_a_distributed_tensor():
    return [], lambda: sw.distribute_tensor(torch.ones(3), mesh((4,)), [Shard(1)])


def result_of_an_op():
    x = torch.ones(4, 3, requires_grad=True) * 2
    return [], lambda: sw.distribute_tensor(x, mesh((4,)), [Shard(0)])


def wrong_number_of_placements():
    x = on([Shard(0)], 4, 3)
    return [x], lambda: x.redistribute(placements=[Shard(0), Replicate()])


def unknown_reduction():
    return [], lambda: sw.distribute_tensor(torch.ones(3), mesh((4,)), [Partial("mean")])


def different_meshes():
    x, y = on([Shard(0)], 4, 3), on([Shard(0), Replicate()], 4, 3, shape_of_mesh=(2, 2))
    return [x, y], lambda: x + y


def redistribute_to_another_mesh():
    x = on([Shard(0)], 4, 3)
    return [x], lambda: x.redistribute(mesh((2, 2)), [Replicate(), Replicate()])


def another_device_type():
    return [], lambda: MeshTensor.from_local(
        torch.ones(3), init_device_mesh("cuda", (4,)) if torch.cuda.is_available() else FakeCudaMesh(), [Replicate()]
    )


class FakeCudaMesh:
    """Stands for a CUDA mesh on a machine without a GPU: the check reads the device type and nothing else."""

    device_type = "cuda"
    ndim = 1


def no_rule():
    x = on([Shard(0)], 4, 3)
    return [x], lambda: torch.ops.aten._values_copy.default(x.to(torch.int64))


def in_place_of_a_copy():
    x = on([Shard(0)], 4, 3).unfold(0, 2, 1)
    return [x], lambda: torch.ops.aten.exp_.default(x)


def view_across_ranks():
    x = on([Shard(1)], 4, 6)

    def view():
        with sw.sharing_views():
            x.view(3, 8)

    return [x], view


def item_of_many():
    x = on([Shard(0)], 4, 3)
    return [x], x.item


def float_of_many():
    x = on([Shard(0)], 4, 3)
    return [x], lambda: float(x)


def foreach_of_unequal_length():
    x, y = on([Shard(0)], 4, 3), on([Shard(0)], 4, 3)

    def call():
        # Under autograd torch itself checks foreach lists first, with an error of its own.
        with torch.inference_mode():
            torch._foreach_add_([x], [x, y])

    return [x, y], call


def fused_of_unequal_length():
    x, y = on([Shard(0)], 4, 3), on([Shard(0)], 4, 3)
    step = sw.ones((), device_mesh=mesh((4,)))
    options = {
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "weight_decay": 0.0,
        "eps": 1e-8,
        "amsgrad": False,
        "maximize": False,
    }
    return [x, y], lambda: torch._fused_adamw_([x, y], [x], [x, y], [x, y], [], [step, step], **options)


def plain_tensor():
    x = on([Shard(0)], 4, 3)

    def refused():
        with sw.plain("refuse"):
            return x + torch.ones(4, 3)

    return [x], refused


def local_that_does_not_fit():
    return [], lambda: MeshTensor.from_local(torch.ones(3, 3), mesh((4,)), [Shard(0)], shape=(4, 3))


def dlpack_of_a_part():
    x = on([Shard(0)], 4, 3)
    return [x], x.__dlpack__


def pattern_without_a_parameter():
    return [], lambda: sw.distribute_module(torch.nn.Linear(2, 2), mesh((4,)), {"weights": [Shard(0)]})


def mesh_dim_without_a_name():
    return [], lambda: sw.distribute_module(torch.nn.Linear(2, 2), mesh((4,)), {"weight": {"tp": Shard(0)}})


def sparse_tensor():
    return [], lambda: sw.distribute_tensor(torch.eye(4).to_sparse_csr(), mesh((4,)), [Shard(0)])


def sparse_part():
    return [], lambda: MeshTensor.from_local(torch.eye(4).to_sparse(), mesh((4,)), [Shard(0)])


def sparse_gradient():
    table, ids = on([Replicate()], 4, 3).requires_grad_(), on([Shard(0)], 4).long()
    return [table], torch.nn.functional.embedding(ids, table, sparse=True).sum(dtype=torch.float64).backward


def nested_tensor():
    return [], lambda: sw.distribute_tensor(torch.nested.nested_tensor([torch.ones(3)]), mesh((4,)), [Shard(0)])


def whole_by_an_unknown_op(run):
    x = on([Replicate()], 4, 4)

    def call():
        with sw.replicate_unknown(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(x)

    return [x], call


def sparse_result():
    return whole_by_an_unknown_op(torch.Tensor.to_sparse)


def sparse_rows_for_a_result():
    return whole_by_an_unknown_op(torch.Tensor.to_sparse_csr)


def sparse_result_where_every_run_is_checked():
    def run(x):
        with mock.patch.dict(os.environ, {CHECK_STRIDES: "1"}):
            x.to_sparse_csc()

    return whole_by_an_unknown_op(run)


def opaque_result():
    return whole_by_an_unknown_op(torch.Tensor.to_mkldnn)


def quantized_result():
    return whole_by_an_unknown_op(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8))


def sparse_operand():
    x = on([Shard(0)], 4, 4)
    return [x], lambda: x + torch.eye(4).to_sparse()


def dtensor():
    """Its part on each rank has the shape of the whole: taken for a plain tensor it would give wrong numbers."""
    return DTensor.from_local(torch.ones(4, 3), mesh((4,)), [Partial()], run_check=False)


def dtensor_in_a_list():
    x = on([Shard(0)], 4, 3)
    return [x], lambda: torch.cat([x, dtensor()])


def dtensor_in_a_stack():
    x = on([Replicate()], 4, 3)
    return [x], lambda: torch.stack([x, dtensor()])


def dtensor_in_a_foreach_op():
    x = on([Replicate()], 4, 3)
    return [x], lambda: torch._foreach_add_([x], [dtensor()])


def dtensor_that_is_clipped():
    x, d = on([Shard(0)], 4, 3).requires_grad_(), torch.nn.Parameter(dtensor())
    x.grad, d.grad = on([Shard(0)], 4, 3), dtensor()
    return [], lambda: torch.nn.utils.clip_grad_norm_([x, d], 1.0)


def dtensor_in_a_compiled_function():
    x = on([Replicate()], 4, 3)
    return [x], lambda: torch.compile(torch.stack, backend="eager")([x, dtensor()])


def operand_on_meta():
    x = on([Shard(0)], 4, 3)
    return [x], lambda: x + torch.ones(4, 3, device="meta")


def operand_on_meta_in_a_list():
    x = on([Shard(0)], 4, 3)
    return [x], lambda: torch.cat([x, torch.ones(4, 3, device="meta")])


def weight_that_was_forgotten_on_meta():
    x, weight = on([Shard(0)], 4, 3), sw.distribute_tensor(torch.ones(5, 3, device="meta"), mesh((4,)), [Replicate()])
    return [x], lambda: torch.nn.functional.linear(x, weight)


CASES = [
    (dtensor_in_a_list, errors.PlainTensorError, r"'tensors[1]' is a DTensor of shape (4, 3)"),
    (dtensor_in_a_stack, errors.PlainTensorError, "from_dtensor"),
    (dtensor_in_a_foreach_op, errors.PlainTensorError, "'other[0]' is a DTensor"),
    (dtensor_that_is_clipped, errors.PlainTensorError, "is a DTensor"),
    (dtensor_in_a_compiled_function, errors.PlainTensorError, "is a DTensor"),
    (operand_on_meta, errors.PlainTensorError, "on the meta device, which has no values"),
    (operand_on_meta_in_a_list, errors.PlainTensorError, "to_empty"),
    (weight_that_was_forgotten_on_meta, errors.DeviceMismatchError, "is on the meta device and has no values"),
    (nested_tensor, errors.LayoutError, "nested"),
    (sparse_result, errors.LayoutError, "torch.sparse_coo"),
    (sparse_rows_for_a_result, errors.LayoutError, "torch.sparse_csr"),
    (sparse_result_where_every_run_is_checked, errors.LayoutError, "torch.sparse_csc"),
    (opaque_result, errors.LayoutError, "torch._mkldnn"),
    (quantized_result, errors.LayoutError, "quantized"),
    (sparse_operand, errors.PlainTensorError, "to_dense()"),
    (sparse_gradient, errors.LayoutError, "sparse=False"),
    (sparse_tensor, errors.LayoutError, "torch.sparse_csr"),
    (sparse_part, errors.LayoutError, "torch.sparse_coo"),
    (shard_dim_out_of_range, errors.PlacementError, "there is no dim 2"),
    (shard_dim_of_a_distributed_tensor, errors.PlacementError, "there is no dim 1"),
    (result_of_an_op, errors.LeafError, "MulBackward0"),
    (wrong_number_of_placements, errors.PlacementCountError, "2 placements for a mesh of 1 dim"),
    (unknown_reduction, errors.PlacementError, "Partial"),
    (different_meshes, errors.MeshMismatchError, "'self'"),
    (redistribute_to_another_mesh, errors.MeshMismatchError, "full_tensor()"),
    (another_device_type, errors.DeviceMismatchError, "cuda"),
    (no_rule, errors.NoRuleError, "_values_copy"),
    (in_place_of_a_copy, errors.InPlaceError, "aten.unfold.default"),
    (view_across_ranks, errors.ViewError, "data from another rank"),
    (item_of_many, errors.ItemError, "12 elements"),
    (float_of_many, errors.ItemValueError, "12 elements"),
    (foreach_of_unequal_length, errors.ListLengthError, "self: 1, other: 2"),
    (fused_of_unequal_length, errors.ListLengthError, "grads: 1"),
    (plain_tensor, errors.PlainTensorError, "'other' is a Tensor of shape (4, 3)"),
    (local_that_does_not_fit, errors.LayoutError, "shape (1, 3)"),
    (dlpack_of_a_part, errors.LayoutError, "full_tensor()"),
    (pattern_without_a_parameter, errors.PlacementError, "'weights'"),
    (mesh_dim_without_a_name, errors.PlacementCountError, "'tp'"),
]


@pytest.mark.parametrize(("case", "kind", "part"), CASES, ids=[c.__name__ for c, _, _ in CASES])
def test_each_bad_call_has_its_own_error_on_every_rank(pool, case, kind, part):
    answers = pool.run(refused, case)
    for name, message, collectives, unchanged in answers:
        assert name == kind.__name__, message
        assert part in message
        assert collectives == 0
        assert unchanged
    assert len(answers) == 4


def test_placements_that_a_tensor_cannot_have_are_value_errors():
    assert issubclass(errors.PlacementError, ValueError)


def distributed_without_a_gradient():
    x = torch.ones(4, 3, requires_grad=True) * 2
    with torch.no_grad():
        y = sw.distribute_tensor(x, mesh((4,)), [Shard(0)])
    assert torch.equal(y.full_tensor(), x)
    part = MeshTensor.from_local(x, mesh((4,)), [Replicate()]).redistribute(placements=[Shard(0)])
    assert part.requires_grad
    assert not part.is_leaf


def test_results_of_ops_are_distributed_without_their_gradient_or_from_local(pool):
    pool.run(distributed_without_a_gradient)


def ranks_that_disagree():
    rank = torch.distributed.get_rank()
    try:
        sw.distribute_tensor(torch.ones(4 + rank % 2, 3), mesh((4,)), [Shard(0)])
    except errors.RankDisagreementError as error:
        return str(error)
    return ""


def test_ranks_that_pass_different_shapes_all_raise(pool):
    answers = pool.run(ranks_that_disagree)
    assert answers == [answers[0]] * 4
    assert "do not agree: ranks 0, 2: has f32[4,3] [S(0)]" in answers[0]
    assert "; ranks 1, 3: has f32[5,3] [S(0)]" in answers[0]


def _disagreement(make):
    try:
        make()
    except errors.RankDisagreementError as error:
        return str(error)
    return ""


def parts_that_disagree():
    """Per rank, what each call raises. The sizes are those of no other test: no rank knows such a layout yet."""
    rank, grid = torch.distributed.get_rank(), mesh((4,))
    odd = rank % 2
    calls = [
        lambda: MeshTensor.from_local(torch.ones(17 + odd, 3), grid, [Shard(0)]),
        lambda: MeshTensor.from_local(torch.ones(19, 13), grid, [Shard(odd)]),
        lambda: MeshTensor.from_local(torch.ones(23, 5, dtype=(torch.float32, torch.float64)[odd]), grid, [Shard(0)]),
        lambda: MeshTensor.from_local(torch.ones(29, 29).t() if odd else torch.ones(29, 29), grid, [Shard(0)]),
        lambda: MeshTensor.from_local(torch.ones(31, requires_grad=bool(odd)), grid, [Shard(0)], run_check=True),
        lambda: sw.distribute_tensor(torch.ones(8, 8), grid, [Shard(odd)]),
        lambda: sw.distribute_tensor(torch.ones(37, 8), grid, [Replicate() if odd else Shard(0)], src_data_rank=None),
        lambda: sw.distribute_tensor(torch.ones(8, 4, requires_grad=bool(odd)), grid, [Shard(0)]),
        lambda: MeshTensor.from_local(torch.ones(41, 3), grid, [Shard(0)], shape=(164, 3), stride=(3 + odd, 1)),
    ]
    raised = [_disagreement(call) for call in calls]
    assert MeshTensor.from_local(torch.ones(2, 3), grid, [Shard(0)]).sum().item() == 24
    return raised


def test_ranks_that_make_different_tensors_all_raise(pool):
    for raised in pool.run(parts_that_disagree):
        for text in raised:
            assert "do not agree" in text
    assert "on ranks 0, 2" in raised[0]
    assert "on ranks 1, 3" in raised[0]
    assert "Pass the global shape= where the parts" in raised[0]
    for text in (raised[6], raised[8]):  # the shape was passed, or there is no such argument
        assert "Pass the same global shape, placements and dtype" in text


def copies_that_differ():
    rank = torch.distributed.get_rank()
    try:
        MeshTensor.from_local(torch.full((3,), float(rank)), mesh((4,)), [Replicate()], run_check=True)
    except errors.RankDisagreementError as error:
        return str(error)
    return ""


def test_run_check_finds_copies_that_differ_on_every_rank(pool):
    assert all("differ between ranks" in answer for answer in pool.run(copies_that_differ))


def test_errors_carry_their_parts_and_survive_pickling():
    import pickle

    error = errors.NoRuleError(asked="run aten.x", found="no rule", do="Write one.", op="aten.x")
    twin = pickle.loads(pickle.dumps(error))
    assert (twin.asked, twin.found, twin.do, twin.op) == ("run aten.x", "no rule", "Write one.", "aten.x")
    assert str(twin) == "run aten.x: no rule. Write one."
    with pytest.raises(AttributeError, match="has no field 'mesh'"):
        _ = twin.mesh
