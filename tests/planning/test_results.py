"""The metas of a call's results, found on the meta device."""

import pytest
import torch

from shardwise import Replicate, Shard
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.results import forget_metas, output_metas


def _kept(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]


unknown = torch.library.custom_op("results_test::unknown", _kept, mutates_args=())
unknown.register_fake(lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size()))


OPS = {
    "a fake kernel that asks": torch.ops.results_test.unknown.default,
    "no fake kernel": torch.ops.aten.nonzero.default,
}


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_a_shape_that_depends_on_data_is_not_known(op):
    assert output_metas(op, [torch.empty(3, device="meta")]) is None


def test_what_torch_refuses_is_raised():
    with pytest.raises(RuntimeError, match=r"mat1 and mat2|a and b must have same reduction dim"):
        output_metas(torch.ops.aten.mm.default, [torch.empty(2, 3, device="meta")] * 2)


def runs_on_meta(op, *calls):
    """How often the op runs on the meta device for these calls, from a fresh start."""
    runs = []

    def counted(*args, **kwargs):
        runs.append(args)
        return op(*args, **kwargs)

    forget_metas()
    found = [output_metas(op, call, counted) for call in calls]
    return len(runs), found


def spec(shape, *placements, dtype=torch.float32):
    return TensorSpec(AbstractMesh((2,)), placements or (Replicate(),), TensorMeta.contiguous(shape, dtype))


def test_calls_whose_operands_lie_elsewhere_have_the_same_results():
    mul = torch.ops.aten.mul.Tensor
    runs, (one, other) = runs_on_meta(mul, [spec((4, 6), Shard(0)), spec((6,))], [spec((4, 6)), spec((6,), Shard(0))])
    assert runs == 1
    assert one is other == (TensorMeta.contiguous((4, 6), torch.float32),)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(1, 1.0, id="an integer and a float"),
        pytest.param(1, True, id="an integer and a boolean"),
        pytest.param(0.0, -0.0, id="zeros of both signs"),
        pytest.param(1.0, 1 + 0j, id="a float and a complex number"),
    ],
)
def test_numbers_that_are_equal_may_have_other_results(one, other):
    mul = torch.ops.aten.mul.Scalar
    assert runs_on_meta(mul, [spec((2,), dtype=torch.int64), one], [spec((2,), dtype=torch.int64), other])[0] == 2


def test_results_follow_the_default_dtype():
    divide, operands = torch.ops.aten.div.Tensor, [spec((2,), dtype=torch.int64)] * 2
    (before,) = output_metas(divide, operands)
    torch.set_default_dtype(torch.float64)
    try:
        (after,) = output_metas(divide, operands)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (before.dtype, after.dtype) == (torch.float32, torch.float64)


def test_nan_is_one_argument_and_a_fill_value_of_it_is_not_kept_anew():
    full = torch.ops.aten.full_like.default
    call = [spec((2,)), float("nan"), None, None, None, None, None]
    assert runs_on_meta(full, call, list(call))[0] == 1
