"""The oracle over every registered rule of the first-party plugins."""

from collections import Counter

import oracle_rules
import pytest
from attrs import evolve

from shardwise.kernel.signature import signature
from shardwise.testing.oracle import check_rule

# Cases per op in the everyday run: every row comes at least once, the rest is a seeded choice.
EVERYDAY = 10


def _rules():
    for package in oracle_rules.first_party():
        plugin = package.origin.plugin
        rules, error = oracle_rules.rules_of(package)
        if error is not None:
            yield pytest.param(plugin, error, id=f"{plugin.removeprefix('shardwise-')}-loads")
        for rule in rules:
            yield pytest.param(plugin, rule, id=oracle_rules.rule_id(plugin, rule))


RULES = list(_rules())


def judged(plugin, rule, **options):
    if isinstance(rule, Exception):
        raise rule
    samples, stand_ins = (oracle_rules.declared(plugin, what) for what in ("SAMPLES", "STAND_INS"))
    return check_rule(rule, samples, stand_ins=stand_ins, keep_going=True, **options)


# Ops of one rule that are judged every day, or one of each form: its rows are the same for all of them. The sample
# judges the others.
OPS = 2


def everyday_ops(rule):
    """One of each form, functional, in-place and out=, and where there is one form a second op of it."""
    turns = Counter()
    ranked = []
    for op in rule.ops:
        form = {arg.kwarg_only for arg in signature(op).args if arg.written}
        ranked.append((turns[frozenset(form)], op))
        turns[frozenset(form)] += 1
    return [op for _, op in sorted(ranked, key=lambda one: one[0])[: max(OPS, len(turns))]]


def other_ops(rule):
    everyday = everyday_ops(rule)
    return [op for op in rule.ops if op not in everyday]


def rules_with(ops_of):
    """The rules with some of their ops; those that have none of these are left out."""
    params = []
    for param in RULES:
        plugin, rule = param.values
        ops = () if isinstance(rule, Exception) else tuple(ops_of(rule))
        if ops:
            params.append(pytest.param(plugin, evolve(rule, ops=ops), id=param.id))
        elif isinstance(rule, Exception):
            params.append(param)
    return params


@pytest.mark.parametrize(("plugin", "rule"), rules_with(everyday_ops))
def test_the_oracle_accepts(plugin, rule, record):
    report = judged(plugin, rule, cases=EVERYDAY)
    record(plugin, report)
    assert not report.refuted, "\n\n".join(map(str, report.refuted))
    left_out = oracle_rules.declared(plugin, "UNSAMPLED")
    assert set(report.unsampled) <= set(map(str, left_out)), "these ops need samples, or a reason in UNSAMPLED"


@pytest.mark.slow
@pytest.mark.sample(cases=30)
@pytest.mark.parametrize(("plugin", "rule"), rules_with(other_ops))
def test_the_oracle_accepts_the_other_ops(plugin, rule, record):
    report = judged(plugin, rule, cases=EVERYDAY)
    record(plugin, report)
    assert not report.refuted, "\n\n".join(map(str, report.refuted))
    left_out = oracle_rules.declared(plugin, "UNSAMPLED")
    assert set(report.unsampled) <= set(map(str, left_out)), "these ops need samples, or a reason in UNSAMPLED"


@pytest.mark.slow
@pytest.mark.parametrize(("plugin", "rule"), RULES)
def test_the_oracle_accepts_all_cases(plugin, rule, record):
    report = judged(plugin, rule)
    record(plugin, report)
    assert not report.refuted, "\n\n".join(map(str, report.refuted))


# A fixed part of the slow run: the rules that have a lowering, with more cases than every day.
SAMPLE = 60
LOWERED = [p for p in RULES if getattr(p.values[1], "lowering", None) is not None]


@pytest.mark.slow
@pytest.mark.sample(cases=30)
@pytest.mark.parametrize(("plugin", "rule"), LOWERED)
def test_the_oracle_accepts_a_fixed_sample(plugin, rule, record):
    report = judged(plugin, rule, cases=SAMPLE, seed=1)
    record(plugin, report)
    assert not report.refuted, "\n\n".join(map(str, report.refuted))
