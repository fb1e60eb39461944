"""The metas of a call's results, found on the meta device."""

import pytest
import torch

from shardwise.planning.results import output_metas


def _kept(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]


unknown = torch.library.custom_op("results_test::unknown", _kept, mutates_args=())
unknown.register_fake(lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size()))
silent = torch.library.custom_op("results_test::silent", _kept, mutates_args=())


@pytest.mark.parametrize("op", [unknown, silent], ids=["a size of data", "no fake kernel"])
def test_a_shape_that_depends_on_data_is_not_known(op):
    assert output_metas(op._opoverload, [torch.empty(3, device="meta")]) is None


def test_what_torch_refuses_is_raised():
    with pytest.raises(RuntimeError, match="mat1 and mat2|a and b must have same reduction dim"):
        output_metas(torch.ops.aten.mm.default, [torch.empty(2, 3, device="meta")] * 2)
