"""The style ``sequence_parallel``: norms that work on a part of the sequence."""

import shardwise_transformers as st
from architectures import batch, compare, make, step
from shardwise import Replicate, Shard
from shardwise.testing import mesh as mesh_of


def with_norms(model, mesh):
    plan = {**model.tp_plan, "model.layers.*.input_layernorm": "sequence_parallel", "model.norm": "sequence_parallel"}
    return st.distribute(model, mesh, tp_plan=plan)


def test_a_step_is_that_of_one_device(ranks):
    for gap, where in ranks.run(lambda: compare("Llama", "dp x tp", placed_by=with_norms), timeout=120):
        assert gap < 1e-12, where


def inside():
    mesh = mesh_of((2, 2), ("dp", "tp"))
    model = with_norms(make("Llama"), mesh)
    seen = []
    norms = (model.model.layers[1].input_layernorm, model.model.layers[1].post_attention_layernorm)
    for norm in norms:
        norm.register_forward_hook(lambda _module, args, output: seen.append((args[0].placements, output.placements)))
    step(model, st.place_batch(batch(), mesh))
    assert norms[0].weight.placements == (Replicate(), Replicate())
    return seen


def test_only_these_norms_see_a_part(ranks):
    part = (Shard(0), Shard(1))
    for of_style, other in ranks.run(inside, timeout=120):
        assert of_style == (part, part)
        assert other[0] != part
