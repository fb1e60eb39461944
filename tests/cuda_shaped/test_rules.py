"""The samples of every rule on a mesh of CUDA devices, without one: the same results as on CPUs, and no way off the
device but what docs/cuda.md lists.
"""

import oracle_rules
import pytest
import torch
from attrs import evolve
from described import empty, rows_of
from shaped_rules import gather_samples, outcomes

from shardwise import Shard
from shardwise.kernel.signature import op_name

# What a warm call of these ops reads from the device or brings to it; docs/cuda.md says why.
LEAVES = {
    "aten._local_scalar_dense.default": "reads",
    "aten.allclose.default": "reads",
    "aten.as_strided_copy.default": "not pinned",
    "aten.as_strided_copy.out": "not pinned",
    "aten.bernoulli.Tensor": "not pinned",
    "aten.bernoulli.default": "not pinned",
    "aten.bernoulli_.Tensor": "not pinned",
    "aten.equal.default": "reads",
    "aten.multinomial.default": "not pinned",
    "aten.normal.Tensor_Tensor": "not pinned",
    "aten.normal.Tensor_float": "not pinned",
    "aten.normal.float_Tensor": "not pinned",
    "aten.repeat_interleave.Tensor": "reads",
    "aten.rrelu_with_noise.default": "not pinned",
    "aten.rrelu_with_noise_.default": "not pinned",
}
# Ops whose results on CUDA have other shapes than on CPUs, or that take other layouts there.
OTHERWISE = {
    "aten._batch_norm_no_update.default",
    "aten._embedding_bag.default",  # no positions of maxima for sums and means
    "aten._embedding_bag_forward_only.default",
    "aten._grouped_mm.default",  # on the CPU torch has no shapes for it
    "aten.log_sigmoid_forward.default",
    "aten.log_sigmoid_forward.output",  # CUDA leaves the buffer as it is, and torch's shapes resize it
    "aten._native_batch_norm_legit_no_training.default",
    "aten._scaled_mm.default",
    "aten._scaled_mm_v2.default",
    "aten._thnn_fused_lstm_cell.default",  # on the CPU torch has no shapes for it without biases
}
# Of these, the ops whose parts without data are not what their specs say.
UNLIKE_SPECS = {
    "aten.log_sigmoid_forward.output",
}
NO_SHAPES = "NotImplementedError"  # an op whose results torch computes on zeros, which needs its kernel


def all_rules():
    for package in oracle_rules.first_party():
        rules, error = oracle_rules.rules_of(package)
        assert error is None
        for rule in rules:
            for op in rule.ops:
                yield package.origin.plugin, op, rule


def compare(chosen, samples, placed):
    rules = [(plugin, evolve(rule, ops=(op,))) for plugin, op, rule in chosen]
    gather_samples(rules)
    cpu, cuda = (outcomes(rules, device, samples, placed) for device in ("cpu", "cuda"))
    assert cuda
    assert cpu.keys() == cuda.keys()
    wrong = [line for key, there in cuda.items() for line in differences(key, cpu[key], there)]
    assert not wrong, "\n".join(wrong)
    assert any(there.result and isinstance(there.result[0], tuple) for there in cuda.values())


def differences(key, here, there):
    name = op_name(key[0])
    if there.result[:1] == (NO_SHAPES,):
        return
    shaped = [[r[:2] if isinstance(r, tuple) else r for r in outcome.result] for outcome in (here, there)]
    raised = isinstance(there.result[:1] and there.result[0], str)
    if name not in OTHERWISE and (shaped[0][:1] != shaped[1][:1] if raised else shaped[0] != shaped[1]):
        yield f"{key}: on CPU {here.result}, on CUDA {there.result}"
    if name not in UNLIKE_SPECS and not all(on_device for *_, on_device in there.result if not raised):
        yield f"{key}: a part is not on the device, or not what its spec says: {there.result}"
    for wait in there.waits:
        if LEAVES.get(name, " never ") not in wait:
            yield f"{key}: {wait}"


def test_log_sigmoid_keeps_its_shards_though_cuda_keeps_nothing_for_the_backward():
    chosen = [one for one in all_rules() if op_name(one[1]).startswith("aten.log_sigmoid")]
    rules = [(plugin, evolve(rule, ops=(op,))) for plugin, op, rule in chosen]
    gather_samples(rules)
    found = outcomes(rules, "cuda", 1, (1,))
    (out, buffer) = next(o.result for key, o in found.items() if op_name(key[0]) == "aten.log_sigmoid_forward.default")
    assert out == ("torch.float32", (8, 6), "(Shard(dim=0),)", True)
    assert buffer == ("torch.float32", (0,), "(Replicate(),)", True)


X, INDICES = empty(4, 3, 6, 6), empty(4, dtype=torch.long)
NO_EMPTY_SHARD = {
    "_upsample_bilinear2d_aa.default": (X, [3, 3], False, None, None),
    "_upsample_bicubic2d_aa_backward.default": (X, [6, 6], [4, 3, 9, 9], False, None, None),
    "_masked_softmax.default": (X, empty(4, 3, 6, 6, dtype=torch.bool), 3, 2),
    "embedding_dense_backward.default": (empty(4, 3), INDICES, 8, -1, True),
    "split_with_sizes_copy.out": (X, [2, 4], 3),
}


@pytest.mark.parametrize("name", NO_EMPTY_SHARD)
def test_kernels_that_fail_on_an_empty_shard_get_none(name):
    """Seen on an H200: an invalid launch, memory that is not there, a division by zero that ends the process."""
    packet, _, overload = name.partition(".")
    args = NO_EMPTY_SHARD[name]
    outs = {"out": [empty(4, 3, 6, 2), empty(4, 3, 6, 4)]} if overload == "out" else {}
    listed = rows_of(getattr(getattr(torch.ops.aten, packet), overload), *args, **outs)
    sharded = [row for row in listed if isinstance(row.inputs[0], Shard)]
    assert sharded
    for row in sharded:
        assert (0, row.inputs[0].dim) in row.nonempty


def test_rules_of_kernels_that_cuda_has_alone():
    words = ("cudnn", "flash_attention.", "efficient_attention.")
    compare([one for one in all_rules() if any(word in op_name(one[1]) for word in words)], 1, (1,))


@pytest.mark.slow
@pytest.mark.sample
def test_some_samples_of_every_rule():
    compare(list(all_rules())[::14], 1, (1,))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_samples_of_every_rule():
    compare(list(all_rules()), 1, (0, 1))
