"""Plans of transformers written from placements: round trips, and run by transformers' own tensor parallelism."""

import random
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import shardwise as sw
import shardwise_transformers as st
from architectures import CAUSAL, InFloat64, batch, make, step
from shardwise import Partial, Replicate, Shard
from shardwise.testing import mesh as mesh_of


@pytest.mark.parametrize("name", CAUSAL)
def test_the_model_s_own_plan_comes_back(name):
    model = make(name)
    for own, read, write in (
        (model.tp_plan, st.tensor_parallel, st.to_tp_plan),
        (model.ep_plan, st.expert_parallel, st.to_ep_plan),
    ):
        if own:
            partition = read(model)
            written = write(model, partition)
            assert written.items() <= own.items()
            assert read(model, plan=written) == partition


def linear_and_embedding_layers(model):
    """One name per layer with ``*`` for its number."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            found[".".join("*" if part.isdigit() else part for part in name.split("."))] = module
    return found


def random_partition(model, seed):
    chance, partition = random.Random(seed), {}  # noqa: S311  # chance, no secret
    for name, module in linear_and_embedding_layers(model).items():
        place = chance.choice([None, Shard(0), Shard(1)])
        if place is not None:
            partition[f"{name}.weight"] = {"tp": place}
            if place == Shard(0) and getattr(module, "bias", None) is not None:
                partition[f"{name}.bias"] = {"tp": place}
    return partition


@pytest.mark.parametrize("seed", range(20))
def test_any_cut_of_its_layers_comes_back(seed):
    model = make(["Llama", "Qwen2", "Phi3", "GPTNeoX"][seed % 4])
    partition = random_partition(model, seed)
    assert st.tensor_parallel(model, plan=st.to_tp_plan(model, partition)) == partition


def test_placements_of_a_placed_model(ranks):
    def written():
        model = make("Mixtral")
        expected = model.tp_plan, model.ep_plan
        st.distribute(model, mesh_of((2, 2), ("ep", "tp")))
        assert (st.to_tp_plan(model), st.to_ep_plan(model)) == expected

    ranks.run(written)


def by_transformers(name, plan):
    """Loss and gradients of a model placed by transformers' own machinery, on DTensors."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    warnings.simplefilter("ignore")
    expected, grads = step(make(name), batch())
    model = make(name)
    apply_tensor_parallelism(model, mesh_of((dist.get_world_size(),)), model._expand_parallel_plan(plan))
    with InFloat64():
        loss = model(**batch(), use_cache=False).loss
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-9, atol=1e-9)
    for key, parameter in model.named_parameters():
        grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        torch.testing.assert_close(grad, grads[key], rtol=1e-9, atol=1e-9)


PARTITIONS = {
    "some": {"*.q_proj.weight": {"tp": Shard(0)}, "*.down_proj.weight": {"tp": Shard(1)}},
    "embedding by features": {"*embed_tokens.weight": {"tp": Shard(1)}, "*.o_proj.weight": {"tp": Shard(1)}},
    "a whole MLP": {
        "*.mlp.gate_proj.weight": {"tp": Shard(0)},
        "*.mlp.up_proj.weight": {"tp": Shard(0)},
        "*.mlp.down_proj.weight": {"tp": Shard(1)},
    },
}


@pytest.mark.parametrize("partition", PARTITIONS)
def test_transformers_runs_what_is_written(ranks, partition):
    plan = st.to_tp_plan(make("Llama"), PARTITIONS[partition])
    ranks.run(by_transformers, "Llama", plan, timeout=120)


def test_an_mlp_as_the_model_says_keeps_its_words():
    plan = st.to_tp_plan(make("Llama"), PARTITIONS["a whole MLP"])
    assert plan["model.layers.*.mlp.up_proj"] == "colwise"
    assert plan["model.layers.*.self_attn.q_proj"] == "replicate"


REFUSED = {
    "a norm": ({"model.norm.weight": {"tp": Shard(0)}}, r"S\(0\) of 'model.norm.weight'.*LlamaRMSNorm"),
    "a partial weight": ({"lm_head.weight": {"tp": Partial()}}, r"P\(sum\) of 'lm_head.weight'"),
    "one layer": ({"model.layers.0.mlp.up_proj.weight": {"tp": Shard(0)}}, "another layer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_style_says(case):
    partition, message = REFUSED[case]
    with pytest.raises(st.PlacementStyleError, match=message) as caught:
        st.to_tp_plan(make("Llama"), partition)
    assert caught.value.parameter.rpartition(".")[2] == "weight"


def test_whole_experts_are_for_the_other_plan():
    with pytest.raises(st.PlacementStyleError, match="to_ep_plan"):
        st.to_tp_plan(make("Mixtral"), {"*.experts.*": {"tp": Shard(0)}})


def test_a_model_that_is_not_placed(ranks):
    with pytest.raises(st.ModelPlanError, match="plain tensor"):
        st.to_tp_plan(make("Llama"))

    def on_another_mesh():
        model = make("Llama")
        sw.distribute_module(model, mesh_of((4,), ("dp",)), {"*": {"dp": Replicate()}})
        with pytest.raises(st.ModelPlanError, match="no such dim"):
            st.to_tp_plan(model)

    ranks.run(on_another_mesh)
