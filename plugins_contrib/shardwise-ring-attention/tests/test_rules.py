"""The rules: what the plugin brings, which rows they have, and the judgement of the oracle."""

import ast
from pathlib import Path

import pytest
from attrs import evolve

from shardwise import Replicate, Shard
from shardwise.discovery.process import default_registry
from shardwise.planning.strategies import strategies_of
from shardwise.rule import AbstractMesh, OpSchema, RuntimeSchemaInfo, TensorMeta, TensorSpec, show_all
from shardwise.testing import check_rule
from shardwise_ring_attention import rules
from shardwise_ring_attention.samples import FOR_CPU, SAMPLES, SIZES, made, operands

MESHES = ((4,), (2, 2), (2, 3), (2, 2, 2))


def test_the_plugin_supplies_attention_in_place_of_what_comes_with_shardwise():
    registry = default_registry()
    for rule in rules.RULES:
        for op in rule.ops:
            assert registry.lookup(op).origin.distribution == "shardwise-ring-attention", op
            assert [e.origin.plugin for e in registry.find(op)].count("shardwise-matmul") == 1


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def test_it_imports_only_what_plugins_may():
    allowed = {f"shardwise.{name}" for name in ("errors", "hookspecs", "rule")}
    # Sample calls are for the test kit, and no program imports them.
    files = [path for path in sorted(Path(rules.__file__).parent.glob("*.py")) if not path.name.startswith("sample")]
    assert len(files) > 5
    for path in files:
        asked = {name for name in imports(path) if name.split(".")[0] == "shardwise"}
        assert asked <= allowed, path


def schema(op, sizes, **named):
    """A call of a forward op on a mesh of four."""
    mesh = AbstractMesh((4,))
    specs = [TensorSpec(mesh, (Shard(2),), TensorMeta.of(x)) for x in operands(sizes)]
    values = [*specs, named.get("dropout_p", 0.0), named.get("is_causal", False), named.get("attn_mask"), None]
    rule = default_registry().lookup(op).rule
    return OpSchema(op, tuple(values), RuntimeSchemaInfo.of(op, rule.static))


def row_names(op, sizes, **named):
    return [s.names[0] for s in strategies_of(default_registry(), schema(op, sizes, **named)).strategies]


def test_the_ring_is_taken_where_all_three_are_sharded_and_moves_nothing():
    for causal in (False, True):
        best = strategies_of(default_registry(), schema(FOR_CPU, SIZES[0], is_causal=causal)).strategies[0]
        assert best.names == ("ring of q s",)
        assert best.cost == 0
        assert best.lowered
        assert [show_all(spec.placements) for spec in best.output_specs] == ["[S(2)]", "[S(2)]"]


def test_rows():
    assert set(row_names(FOR_CPU, SIZES[0])) >= {"shard b", "shard h", "shard q", "ring of q s", "shard s", "R"}
    mask = TensorSpec(AbstractMesh((4,)), (Replicate(),), TensorMeta.of(made(16, 16)))
    assert not {"ring of q s", "shard s"} & set(row_names(FOR_CPU, SIZES[0], attn_mask=mask))
    assert row_names(FOR_CPU, SIZES[0], dropout_p=0.5) == ["R"]


@pytest.mark.parametrize("op", SAMPLES, ids=lambda op: str(op).removeprefix("aten._scaled_dot_product_"))
def test_the_oracle_finds_no_row_wrong(op):
    (rule,) = [rule for rule in rules.RULES if op in rule.ops]
    report = check_rule(evolve(rule, ops=(op,)), SAMPLES, meshes=MESHES, cases=500)
    assert report.ops == 1
    assert report.cases >= 500
    assert not report.unexercised
    assert not report.unsampled
