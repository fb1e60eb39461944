"""The oracle with the kernels of a device finds what it finds without: here the device is the CPU itself."""

import pytest
import torch
from on_card import kernels_of
from test_oracle import RULES, judged

from shardwise.rule import Flow, rule_from
from shardwise.testing import check_rule

aten = torch.ops.aten
SOME = (
    "views-transpose",
    "norm-native_batch_norm.",
    "optim-_fused_adam_",
    "random-bernoulli",
    "embedding-_embedding_bag",
)


@pytest.mark.parametrize(("plugin", "rule"), [p for p in RULES if p.id.startswith(SOME)])
def test_rules_are_accepted(plugin, rule):
    """Views, written statistics, lists, draws, results that depend on the device."""
    with kernels_of("cpu") as kernels:
        report = judged(plugin, rule, cases=5)
    assert not report.refuted
    assert kernels.ran or "transpose" in str(rule.ops)
    assert not kernels.without


@rule_from([aten.cumsum.default, aten.add_.Tensor])
def WRONG(call):  # as in a plugin
    names = [f"d{i}" for i in range(call.operands[0].ndim)]
    return Flow([names] * len(call.operand_names), [names])


def test_a_wrong_row_is_refuted():
    samples = {
        aten.cumsum.default: lambda: [((torch.rand(8, 3), 0), {})],
        aten.add_.Tensor: lambda: [((torch.rand(8, 3), torch.rand(8, 3)), {})],
    }
    with kernels_of("cpu"):
        report = check_rule(WRONG, samples, keep_going=True, cases=40)
    assert {refuted.op for refuted in report.refuted} == {"aten.cumsum.default"}
