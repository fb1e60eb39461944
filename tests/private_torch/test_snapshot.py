"""The shelf ``private_torch.snapshot``: what a replaced op sends on reaches ``__torch_dispatch__`` in every release."""

import traceback
from contextlib import suppress

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.private_torch import dispatch, snapshot

seen = []


class Wrapper(torch.Tensor):
    """A subclass whose ops are written down and run on what it holds."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, requires_grad=held.requires_grad)

    def __init__(self, held):
        self.held = held.detach()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        seen.append(func)
        return func(*(a.held if isinstance(a, cls) else a for a in args), **(kwargs or {}))


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(func)
        return func(*args, **(kwargs or {}))


def called_from():
    return [frame.name for frame in traceback.extract_stack()]


@pytest.fixture(params=[True, False], ids=["asked for", "as this torch is"])
def replaced(request, monkeypatch):
    """``vander`` sent on by a kernel of ours."""
    if request.param:
        monkeypatch.setattr(snapshot, "_NEEDED", True)

    def run(below, args, kwargs):
        return below(*args, **kwargs)

    library = dispatch.put_above_autograd(torch.ops.aten.vander.default, run)
    seen.clear()
    yield
    del library


@pytest.mark.usefixtures("replaced")
@pytest.mark.parametrize("without_autograd", [False, True])
def test_a_subclass_is_reached(without_autograd):
    with torch.inference_mode(without_autograd):
        assert torch.vander(Wrapper(torch.tensor([1, 2])), 2).tolist() == [[1, 1], [2, 1]]
    assert seen


@pytest.mark.parametrize("replaced", [True], indirect=True, ids=["asked for"])
def test_it_is_taken_by_the_op_that_calls_back(replaced, monkeypatch):
    taken = []
    monkeypatch.setattr(Wrapper, "__torch_dispatch__", classmethod(lambda *_, **__: taken.append(called_from())))
    with suppress(Exception):  # nothing is returned
        torch.vander(Wrapper(torch.tensor([1, 2])), 2)
    assert "_call_back" in taken[0]


@pytest.mark.usefixtures("replaced")
def test_a_mode_is_reached_also_without_a_subclass():
    with Mode():
        assert torch.vander(torch.tensor([1, 2]), 2).tolist() == [[1, 1], [2, 1]]
    assert seen


@pytest.mark.usefixtures("replaced")
def test_an_error_is_raised_as_it_is():
    with pytest.raises(RuntimeError, match="x must be a one-dimensional tensor") as raised:
        torch.vander(Wrapper(torch.ones(2, 2)), 2)
    assert "shardwise_private" not in str(raised.value)
