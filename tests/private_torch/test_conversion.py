"""How ``module.to(...)`` and parametrizations replace a parameter of a class."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from shardwise.private_torch import conversion
from shardwise.private_torch.conversion import convert_through_data, parametrize_through

ASKED = "is_traceable_wrapper_subclass"
SETS = "_maybe_set"


class Wrapper(torch.Tensor):
    """To torch's module a tensor with inner tensors; it asks for nothing but the names."""

    def __tensor_flatten__(self): ...

    def __tensor_unflatten__(self): ...


@pytest.fixture(autouse=True)
def torchs_own(monkeypatch):
    monkeypatch.setattr(torch.nn.modules.module, ASKED, torch.utils._python_dispatch.is_traceable_wrapper_subclass)
    monkeypatch.setattr(parametrize, SETS, getattr(parametrize, SETS))  # so that it is undone


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


class Itself(nn.Module):
    """It has no inverse, so the parameter itself is what it is made of."""

    def forward(self, x):
        return x


def test_torch_swaps_a_parametrized_wrapper_and_cannot_in_a_graph():
    module, _alive = module_in_a_graph()
    with pytest.raises(RuntimeError, match="Expected use_count"):
        parametrize.register_parametrization(module, "weight", Itself(), unsafe=True)


def test_a_class_is_given_what_a_parametrization_sets():
    given = []
    parametrize_through(Wrapper, lambda tensor, values: given.append((tensor, values)))
    module, _alive = module_in_a_graph()
    weight = module.weight
    parametrize.register_parametrization(module, "weight", Itself(), unsafe=True)
    assert [tuple(map(id, pair)) for pair in given] == [(id(weight), id(weight))]
    module.parametrizations.weight.original.sum().backward()


def test_a_program_that_asks_for_swaps_gets_them():
    parametrize_through(Wrapper, pytest.fail)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module = module_in_a_graph()[0]
        parametrize.register_parametrization(module, "weight", Itself(), unsafe=True)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_without_the_name_parametrizations_go_on_to_swap(monkeypatch):
    before = getattr(parametrize, SETS)
    monkeypatch.setattr(conversion, "find_part", lambda _name: None)
    parametrize_through(Wrapper, pytest.fail)
    assert getattr(parametrize, SETS) is before
