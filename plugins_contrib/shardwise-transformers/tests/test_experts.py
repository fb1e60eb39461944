"""Experts run where they are: the same numbers by each of transformers' implementations, and no weights are sent."""

import pytest
import torch

import shardwise as sw
import shardwise_transformers as st
from architectures import batch, compare, make, step
from shardwise.comm.events import observe
from shardwise.testing import mesh as mesh_of


@pytest.mark.parametrize(("name", "how"), [("Mixtral", "ep x tp"), ("GptOss", "dp x ep")])
def test_by_the_default_implementation_of_transformers(ranks, name, how):
    changes = {"experts": "grouped_mm", "dtype": torch.float32}  # it takes no float64
    for gap, where in ranks.run(lambda: compare(name, how, **changes), timeout=120):
        assert gap < 1e-4, where


def test_by_the_batched_implementation_of_transformers(ranks):
    for gap, where in ranks.run(lambda: compare("Mixtral", "ep x tp", experts="batched_mm"), timeout=120):
        assert gap < 1e-12, where


def sent(local_experts):
    """Bytes that a rank sends in one layer's step, where the experts are most of the weights."""
    sizes = {"num_hidden_layers": 1, "intermediate_size": 1024, "num_local_experts": 8}
    mesh = mesh_of((4,), ("ep",))
    model = sw.distribute_module(make("Mixtral", **sizes), mesh, st.expert_parallel(make("Mixtral", **sizes)))
    if local_experts:
        st.run_experts_locally(model, mesh)
    events = []
    with observe(events.append):
        step(model, st.place_batch(batch(), mesh))
    weights = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if ".experts." in name)
    return sum(event.nbytes for event in events), weights


def test_no_weights_are_sent(ranks):
    for bytes_sent, weights in ranks.run(sent, True):
        assert bytes_sent < weights / 10
    for bytes_sent, weights in ranks.run(sent, False):
        assert bytes_sent > weights / 10  # what the function above would see


def placed_names():
    mesh = mesh_of((4,), ("ep",))
    model = sw.distribute_module(make("Mixtral"), mesh, st.expert_parallel(make("Mixtral")))
    return st.run_experts_locally(model, mesh), st.run_experts_locally(model, mesh)


def test_which_experts_are_local(ranks):
    names = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    for first, second in ranks.run(placed_names):
        assert first == names
        assert second == []  # once is enough


def by_features(model, mesh):
    """Both matrices cut by outputs, which no sum of parts makes whole: left as they are."""
    return st.distribute(
        model,
        mesh,
        tp_plan={
            "model.layers.*.mlp.experts.gate_up_proj": "packed_colwise",
            "model.layers.*.mlp.experts.down_proj": "colwise",
        },
    )


def test_experts_that_lie_in_another_way(ranks):
    for gap, where in ranks.run(lambda: compare("Mixtral", "tp", placed_by=by_features), timeout=120):
        assert gap < 1e-12, where
