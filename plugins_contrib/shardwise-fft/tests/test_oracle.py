"""The rules before the oracle: every row and combinations of rows, on simulated ranks."""

import pytest
import torch

from shardwise.rule import like, rule_from
from shardwise.testing import RuleRefuted, check_rule
from shardwise_fft import rules
from shardwise_fft.samples import SAMPLES

aten = torch.ops.aten


@pytest.mark.parametrize("rule", [*rules.RULES, *rules.TRANSPOSING], ids=str)
def test_rules_are_right(rule):
    report = check_rule(rule, SAMPLES, cases=200)
    assert not report.unsampled
    assert not report.unexercised
    assert report.cases >= 400


@pytest.mark.parametrize("rule", rules.RULES, ids=str)
def test_three_mesh_dims(rule):
    report = check_rule(rule, SAMPLES, cases=80, meshes=[(2, 2, 2), (3, 2, 2)], seed=3)
    assert report.cases >= 160


def test_transforms_of_shards_alone_are_refused():
    @rule_from(aten._fft_c2c.default)
    def careless(self):
        return like(self)

    with pytest.raises(RuleRefuted, match="elements differ"):
        check_rule(careless, SAMPLES)
