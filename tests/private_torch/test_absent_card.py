"""A CUDA device that is not there: what it answers, and that it leaves no trace."""

from __future__ import annotations

import pytest
import torch

from shardwise.errors import CallError
from shardwise.private_torch import absent_card, absent_cuda
from shardwise.private_torch.fake import fake_tensors, has_cuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")


@pytest.fixture
def on_card():
    with fake_tensors(), absent_card.as_on("cuda"):
        yield


def test_autograd_takes_fake_cuda_tensors(on_card):
    x = torch.randn(3, requires_grad=True)
    (x * 2 + x.sin()).sum().backward()
    assert x.grad.device == torch.device("cuda", 0)
    layer = torch.nn.Linear(3, 4)
    layer(x).sum().backward()
    assert layer.weight.grad.shape == (4, 3)


def test_an_error_in_a_backward_pass_is_raised(on_card):
    """With a guard that asks Python while an exception is on its way, the process would end."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, _grad):
            return torch.ops.aten._linalg_det.default(torch.empty(2, 3))[0]  # no square matrix

    with pytest.raises(RuntimeError):
        Fails.apply(torch.randn(3, requires_grad=True)).sum().backward()


def test_torch_answers_for_the_card(on_card):
    assert torch.cuda.is_available()
    assert not has_cuda()
    assert torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.get_device_properties(0).total_memory == 80 << 30
    assert torch.cuda.is_bf16_supported()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_event(torch.cuda.Event())
    assert torch.amp.GradScaler("cuda").is_enabled()


def test_the_generator_has_a_seed_and_a_philox_offset(on_card):
    torch.manual_seed(7)
    assert torch.cuda.initial_seed() == 7
    state = torch.cuda.get_rng_state()
    assert state.dtype is torch.uint8
    assert len(state) == 16
    torch.cuda.set_rng_state(state)
    with torch.random.fork_rng(devices=[0]):
        torch.cuda.manual_seed(8)


def test_nothing_is_left_behind():
    names = ("is_available", "current_stream", "get_rng_state", "synchronize", "Stream")
    before = {name: getattr(torch.cuda, name) for name in names}
    attention = torch.ops.aten.scaled_dot_product_attention.default
    with fake_tensors(), absent_card.as_on("cuda"):
        torch.randn(2, requires_grad=True).sum().backward()
    assert before == {name: getattr(torch.cuda, name) for name in names}
    assert not torch.cuda.is_available()
    assert torch._C._get_accelerator().type == "cpu"
    assert torch._C.DispatchKey.CompositeImplicitAutograd not in attention.py_kernels
    assert torch.get_default_device() == torch.device("cpu")
    assert torch.is_grad_enabled()
    x = torch.randn(2, requires_grad=True)
    x.sum().backward()
    assert torch.equal(x.grad, torch.ones(2))


def test_a_torch_without_a_place_for_it_says_so(monkeypatch):
    absent_cuda._answering_hooks.cache_clear()
    monkeypatch.setattr(absent_cuda, "_HOOKS", "no_such_function")
    absent_cuda._hooks.cache_clear()
    try:
        with pytest.raises(CallError, match="no place for a stand-in") as caught, absent_card.as_on("cuda"):
            pass
        assert "device='cpu'" in caught.value.do
    finally:
        monkeypatch.undo()
        absent_cuda._hooks.cache_clear()
        absent_cuda._answering_hooks.cache_clear()
