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
