"""The metas of a call's results, found on the meta device."""

import pytest
import torch

from shardwise.planning.results import output_metas


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
