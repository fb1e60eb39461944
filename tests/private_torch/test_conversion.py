"""How ``module.to(...)`` replaces a parameter of a class."""

import pytest
import torch
from torch import nn

from shardwise.private_torch import conversion
from shardwise.private_torch.conversion import convert_through_data

ASKED = "is_traceable_wrapper_subclass"


class Wrapper(torch.Tensor):
    """To torch's module a tensor with inner tensors; it asks for nothing but the names."""

    def __tensor_flatten__(self): ...

    def __tensor_unflatten__(self): ...


@pytest.fixture(autouse=True)
def torchs_own(monkeypatch):
    monkeypatch.setattr(torch.nn.modules.module, ASKED, torch.utils._python_dispatch.is_traceable_wrapper_subclass)


def module_in_a_graph():
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(2).as_subclass(Wrapper))
    return module, (module.weight * module.weight).sum()


def test_torch_swaps_a_wrapper_and_cannot_in_a_graph():
    module, _alive = module_in_a_graph()
    with pytest.raises(RuntimeError, match="Couldn't swap"):
        module.double()


def test_a_class_is_converted_through_data():
    convert_through_data(Wrapper)
    module, _alive = module_in_a_graph()
    weight = module.weight
    module.double()
    assert module.weight is weight
    assert weight.dtype == torch.float64


def test_without_the_name_torch_goes_on(monkeypatch):
    monkeypatch.setattr(conversion, "find_part", lambda _name: None)
    before = torch.nn.modules.module.is_traceable_wrapper_subclass
    convert_through_data(Wrapper)
    assert torch.nn.modules.module.is_traceable_wrapper_subclass is before
