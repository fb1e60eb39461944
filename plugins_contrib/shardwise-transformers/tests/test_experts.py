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


def adapted(model, mesh):
    """An adapter puts a parametrization in place of a tensor that was placed; the experts then run on whole tensors."""
    st.distribute(model, mesh)
    for layer in model.model.layers:
        experts = layer.mlp.experts
        torch.nn.utils.parametrize.register_parametrization(experts, "down_proj", torch.nn.Identity())
    return model


def losses(how):
    mesh = mesh_of((4,), (how,))
    with torch.no_grad():
        expected, actual = (
            model(**st.place_batch(batch(), mesh)).loss.full_tensor()
            for model in (st.distribute(make("Mixtral"), mesh), adapted(make("Mixtral"), mesh))
        )
    return float(expected), float(actual)


@pytest.mark.parametrize("how", ["ep", "tp"])
def test_experts_whose_tensors_are_parametrized(ranks, how):
    for expected, actual in ranks.run(losses, how, timeout=120):
        assert actual == pytest.approx(expected, rel=1e-6)


def on_one_dim(model, mesh):
    return st.distribute(model, mesh, ep="tp")


def test_both_plans_on_one_mesh_dim(ranks):
    for gap, where in ranks.run(lambda: compare("Mixtral", "tp", placed_by=on_one_dim), timeout=120):
        assert gap < 1e-12, where

    def placements():
        experts = on_one_dim(make("Mixtral"), mesh_of((4,), ("tp",))).model.layers[0].mlp.experts
        return [str(p.placements[0]) for p in experts.parameters()]

    assert ranks.run(placements)[0] == ["S(0)", "S(0)"]
