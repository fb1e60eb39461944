"""Masks of several kinds of layers are made in one order on all ranks, or nothing is sent."""

from types import SimpleNamespace

import pytest
import torch

import shardwise_transformers as st
from architectures import make
from shardwise.testing import mesh as mesh_of

CONFIG = "config"


def generates_or_says_why():
    import warnings

    import torch.distributed as dist

    warnings.simplefilter("ignore")
    orders = [None] * 4
    dist.all_gather_object(orders, tuple({"full_attention", "sliding_attention"}))
    mesh = mesh_of((2, 2), ("dp", "tp"))
    model = st.distribute(make("Gemma2").eval(), mesh)
    ids = torch.arange(12).view(3, 4) + 5
    options = {"do_sample": False, "max_new_tokens": 3, "cache_implementation": "static"}
    if len(set(orders)) > 1:
        with pytest.raises(st.ModelPlanError, match="PYTHONHASHSEED"):
            st.generate(model, ids, mesh, **options)
        return False
    expected = make("Gemma2").eval().generate(ids, **options)
    assert torch.equal(st.generate(model, ids, mesh, **options), expected)
    return True


@pytest.mark.slow
def test_of_several_kinds_of_layers(ranks):
    ran = ranks.run(generates_or_says_why, timeout=120)
    assert len(set(ran)) == 1


def hides_an_order():
    from shardwise_transformers import order

    names = ["full_attention", "sliding_attention"]

    kinds = SimpleNamespace(layer_types=names)
    model = torch.nn.Linear(1, 1)
    # By a text, since cloudpickle takes the name for a module of torch.distributed.
    setattr(model, CONFIG, kinds)

    class Turned(set):
        def __iter__(self):
            return iter(sorted(set.__iter__(self), reverse=torch.distributed.get_rank() > 1))

    order.set = Turned
    mesh = mesh_of((2, 2), ("dp", "tp"))
    try:
        with pytest.raises(st.ModelPlanError, match="full_attention, sliding_attention"):
            order.agree_on_order(model, mesh)
        kinds.layer_types = names[:1]
        order.agree_on_order(model, mesh)
    finally:
        del order.set


def test_orders_that_differ_are_refused_on_every_rank(ranks):
    ranks.run(hides_an_order)
