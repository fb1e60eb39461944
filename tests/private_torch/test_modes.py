"""The shelf ``private_torch.modes``: each function has a test that fails clearly when torch takes it away."""

from __future__ import annotations

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shardwise.private_torch import modes


def test_inside_a_mode_a_block_can_run_torch_for_real():
    with FakeTensorMode():
        assert isinstance(torch.ones(2), FakeTensor)
        with modes.outside_modes():
            real = torch.ones(2)
            assert real.tolist() == [1, 1]
        assert isinstance(torch.ones(2), FakeTensor)
    assert type(real) is torch.Tensor


def test_a_block_outside_modes_is_outside_the_dispatcher_for_python_kernels():
    # Kernels of collectives that run with the GIL held and threads of gloo that want it locked each other out.
    assert not modes.is_python_dispatched()
    with enable_python_dispatcher():
        assert modes.is_python_dispatched()
        with modes.outside_modes():
            assert not modes.is_python_dispatched()
        assert modes.is_python_dispatched()
