"""The shelf ``private_torch.fake``: each function has a test that fails clearly when torch takes it away."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.private_torch import fake


def test_fake_tensors_have_a_device_and_no_data_and_may_go_into_foreach():
    from torch.utils import _foreach_utils

    with fake.fake_tensors():
        big = torch.empty(1 << 40)
        assert big.device.type == "cpu"
        assert type(big) in _foreach_utils._foreach_supported_types
        with pytest.raises(RuntimeError, match="_local_scalar_dense") as caught:
            big.sum().item()
        assert fake.is_unknowable(caught.value)
        with pytest.raises(RuntimeError, match="nonzero") as caught:
            big.nonzero()
        assert fake.is_unknowable(caught.value)
    assert FakeTensor not in _foreach_utils._foreach_supported_types
    assert not fake.is_unknowable(ValueError())


def test_a_process_can_be_one_rank_of_many_alone():
    dist.init_process_group("fake", store=fake.fake_store(), rank=3, world_size=1024)
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (3, 1024)
    finally:
        dist.destroy_process_group()


@torch.library.custom_op("private_torch_test::kept", mutates_args=())
def kept(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]


@kept.register_fake
def _(x):
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


def test_a_fake_kernel_that_asks_for_a_size_of_data_is_told_from_one_that_refuses():
    with pytest.raises(RuntimeError) as unknown:
        kept(torch.empty(3, device="meta"))
    assert fake.shape_needs_data(unknown.value)
    with pytest.raises(RuntimeError) as refused:
        torch.mm(torch.empty(2, 3, device="meta"), torch.empty(2, 3, device="meta"))
    assert not fake.shape_needs_data(refused.value)


def test_a_custom_op_without_a_fake_kernel_is_told_from_one_that_refuses():
    @torch.library.custom_op("private_torch_test::silent", mutates_args=())
    def silent(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    with pytest.raises(RuntimeError) as unknown:
        silent(torch.empty(3, device="meta"))
    assert fake.has_no_fake(unknown.value)
    with pytest.raises(RuntimeError) as refused:
        torch.mm(torch.empty(2, 3, device="meta"), torch.empty(2, 3, device="meta"))
    assert not fake.has_no_fake(refused.value)
