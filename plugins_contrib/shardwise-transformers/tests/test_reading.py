"""The plans of models as patterns of placements, and what is refused."""

import pytest
from torch import nn

import shardwise_transformers as st
from architectures import CAUSAL, make
from shardwise import Replicate, Shard
from shardwise.tensor.patterns import check_patterns
from shardwise_transformers.names import generic, patterns_for


def test_a_llama():
    column, row = {"tp": Shard(0)}, {"tp": Shard(1)}
    assert st.tensor_parallel(make("Llama")) == {
        "model.embed_tokens.weight": column,
        "model.layers.*.self_attn.q_proj.weight": column,
        "model.layers.*.self_attn.k_proj.weight": column,
        "model.layers.*.self_attn.v_proj.weight": column,
        "model.layers.*.self_attn.o_proj.weight": row,
        "model.layers.*.mlp.gate_proj.weight": column,
        "model.layers.*.mlp.up_proj.weight": column,
        "model.layers.*.mlp.down_proj.weight": row,
        "lm_head.weight": column,
    }


def test_the_experts_of_a_mixtral():
    assert st.expert_parallel(make("Mixtral"), "experts") == {
        "model.layers.*.mlp.experts.gate_up_proj": {"experts": Shard(0)},
        "model.layers.*.mlp.experts.down_proj": {"experts": Shard(0)},
    }
    plan = st.tensor_parallel(make("Mixtral"))
    assert str(plan["model.layers.*.mlp.experts.gate_up_proj"]["tp"]) == "_S(1, 2)"  # gate and up, each cut
    assert plan["model.layers.*.mlp.experts.down_proj"] == {"tp": Shard(2)}


def test_a_bias_after_a_row_is_whole():
    plan = st.tensor_parallel(make("Starcoder2"))
    assert plan["model.layers.*.mlp.c_fc.bias"] == {"tp": Shard(0)}
    assert not any("c_proj.bias" in pattern for pattern in plan)


@pytest.mark.parametrize("name", CAUSAL)
def test_every_pattern_has_an_effect(name):
    model = make(name)
    names = [key for key, _ in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]]
    for kind in ("tp_plan", "ep_plan"):
        if getattr(model, kind):
            read = st.tensor_parallel if kind == "tp_plan" else st.expert_parallel
            check_patterns(name, read(model), names)


def test_a_pattern_that_takes_too_much_is_written_out():
    wanted = {"a.0.up": 1, "a.1.up": 1, "a.0.b.up": 0, "c": 2}
    assert patterns_for(wanted, 0) == {"a.0.up": 1, "a.1.up": 1, "c": 2}
    assert patterns_for({**wanted, "a.0.b.up": 1}, 0) == {"a.*.up": 1, "c": 2}


def test_generic_names():
    assert generic("layers.10.mlp.experts.3.w1") == "layers.*.mlp.experts.*.w1"
    assert generic("layers.3") == "layers.*"
    assert generic("w1.weight") == "w1.weight"


def test_a_plan_of_the_program():
    plan = st.tensor_parallel(make("Llama"), plan={"model.layers.*.mlp.up_proj": "colwise"})
    assert plan == {"model.layers.*.mlp.up_proj.weight": {"tp": Shard(0)}}


def test_a_style_of_the_program():
    styles = {"inputs": lambda _, ndim: Shard(1) if ndim == 2 else Replicate()}
    plan = st.tensor_parallel(make("Qwen2"), plan={"model.layers.*.self_attn.q_proj": "inputs"}, styles=styles)
    assert plan == {"model.layers.*.self_attn.q_proj.weight": {"tp": Shard(1)}}


def test_an_unknown_style():
    with pytest.raises(st.StyleError, match=r"'model\.layers\.\*\.mlp\.up_proj': 'columns'.*styles=") as caught:
        st.tensor_parallel(make("Llama"), plan={"model.layers.*.mlp.up_proj": "columns"})
    assert (caught.value.style, caught.value.pattern) == ("columns", "model.layers.*.mlp.up_proj")


def test_a_name_that_is_not_there():
    with pytest.raises(st.ModelPlanError, match=r"'layers\.\*\.mlp\.up_proj': 'colwise'.*no module"):
        st.tensor_parallel(make("Llama"), plan={"layers.*.mlp.up_proj": "colwise"})


def test_no_plan():
    with pytest.raises(st.ModelPlanError, match="ep_plan of a LlamaForCausalLM: it has none"):
        st.expert_parallel(make("Llama"))
    with pytest.raises(st.ModelPlanError, match="tp_plan of a Linear"):
        st.tensor_parallel(nn.Linear(2, 2))


def test_a_plan_that_cuts_nothing():
    with pytest.raises(st.ModelPlanError, match="no parameter is cut"):
        st.tensor_parallel(make("Llama"), plan={"model.norm": "replicate"})


def test_a_mesh_without_the_dims(pool):
    def refused():
        from shardwise.testing import mesh as mesh_of

        with pytest.raises(st.ModelPlanError, match="the mesh has the dims dp"):
            st.distribute(nn.Linear(2, 2), mesh_of((4,), ("dp",)))
        with pytest.raises(st.ModelPlanError, match=r"'data'.*the mesh has the dims dp"):
            st.place_batch({}, mesh_of((4,), ("dp",)), "data")

    pool.run(refused)
