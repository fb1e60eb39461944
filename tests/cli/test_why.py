"""``shardwise why``: which rule holds and why, and what would change it."""

import json

import torch
from click.testing import CliRunner

from shardwise.cli import main
from shardwise.discovery.process import override
from shardwise.rule import rule


def why(*arguments, exit_code=0):
    result = CliRunner().invoke(main, ["why", *arguments])
    assert result.exit_code == exit_code, result.output
    return result.output


def told(*arguments, exit_code=0):
    return json.loads(why(*arguments, "--json", exit_code=exit_code))


# -- answers -------------------------------------------------------------------------------------------------------


def test_the_only_rule():
    (facts,) = told("aten.mm.default")
    assert facts["reason"] == "the only rule"
    assert (facts["winner"]["plugin"], facts["winner"]["rule"]) == ("shardwise-matmul", "m k, k n -> m n")
    assert "products.py:" in facts["winner"]["source"]
    assert facts["losers"] == []
    output = why("aten.mm.default")
    assert "because  the only rule" in output
    assert "shardwise-matmul (shardwise " in output


def test_a_packet_has_an_answer_per_overload_with_a_rule():
    assert [facts["op"] for facts in told("add")] == [
        "aten.add.Scalar",
        "aten.add.Scalar_out",
        "aten.add.Tensor",
        "aten.add.out",
    ]


def test_the_rival_and_what_would_choose_it(install, source):
    install("acme-kernels", source("mm", "R, R -> R", ', replaces="shardwise"'))
    (facts,) = told("aten.mm.default")
    assert facts["winner"]["plugin"] == "acme-kernels"
    assert facts["reason"] == "it declares replaces='shardwise'"
    (loser,) = facts["losers"]
    assert (loser["plugin"], loser["reason"]) == ("shardwise-matmul", "replaced by acme-kernels 1.0")
    assert loser["to_choose_it"]["environment"] == 'SHARDWISE_PREFER="aten.mm.default=shardwise-matmul"'
    output = why("aten.mm.default")
    assert "lost by" in output
    assert 'SHARDWISE_PREFER="aten.mm.default=shardwise-matmul"' in output
    assert "[tool.shardwise.prefer]" in output


def test_what_it_says_to_set_changes_the_answer(install, source, monkeypatch):
    install("acme-kernels", source("mm", "R, R -> R", ', replaces="shardwise"'))
    monkeypatch.setenv("SHARDWISE_PREFER", "aten.mm.default=shardwise-matmul")
    (facts,) = told("aten.mm.default")
    assert facts["winner"]["plugin"] == "shardwise-matmul"
    assert facts["settings"] == ["prefer aten.mm.default = shardwise-matmul, from SHARDWISE_PREFER"]
    assert "from SHARDWISE_PREFER" in why("aten.mm.default")


def test_a_blocked_plugin_is_told_beside_the_answer(install, source, monkeypatch):
    install("acme-kernels", source("mm", "R, R -> R", ', replaces="shardwise"'))
    monkeypatch.setenv("SHARDWISE_DISABLE_PLUGINS", "acme-kernels")
    (facts,) = told("aten.mm.default")
    assert facts["winner"]["plugin"] == "shardwise-matmul"
    assert facts["settings"] == ["acme-kernels 1.0 is not asked: in SHARDWISE_DISABLE_PLUGINS"]


def test_a_conflict_exits_with_1(install, source):
    install("acme-kernels", source())
    install("bolt-kernels", source())
    (facts,) = told("_copy_from_and_resize", exit_code=1)
    assert facts["winner"] is None
    assert {loser["plugin"] for loser in facts["losers"]} == {"acme-kernels", "bolt-kernels"}
    output = why("_copy_from_and_resize", exit_code=1)
    assert "no rule holds: nothing says which one holds" in output
    assert 'SHARDWISE_PREFER="aten._copy_from_and_resize.default=bolt-kernels"' in output


# -- no answer -----------------------------------------------------------------------------------------------------


def test_an_op_without_a_rule_names_what_is_close_and_what_failed(install):
    install("acme-broken", "raise OSError('no libacme.so')")
    output = why("aten._copy_from_and_resize", exit_code=1)
    assert "no plugin has a rule for aten._copy_from_and_resize.default" in output
    assert "Possible cause: acme-broken 1.0: failed, OSError: no libacme.so" in output


def test_a_blocked_plugin_is_a_possible_cause(install, source, monkeypatch):
    install("acme-kernels", source())
    monkeypatch.setenv("SHARDWISE_DISABLE_PLUGINS", "acme-kernels")
    assert "acme-kernels 1.0: blocked, in SHARDWISE_DISABLE_PLUGINS" in why("_copy_from_and_resize", exit_code=1)


def test_an_unknown_op_names_close_ones():
    output = why("aten.adaptive_avg_pol2d", exit_code=1)
    assert "find the op 'aten.adaptive_avg_pol2d': torch knows no such op; close to it, with rules: " in output
    assert "aten._adaptive_avg_pool2d" in output
    assert "softmax" in why("softmx", exit_code=1)


def test_an_op_that_torch_writes_by_others_says_so():
    assert "torch writes it in terms of other ops" in why("aten.linalg_cond", exit_code=1)


def test_broken_settings_are_told_beside_the_answer(fresh, monkeypatch):
    monkeypatch.setenv("SHARDWISE_STRICT", "perhaps")
    output = why("aten.mm.default", exit_code=1)
    assert "Programs cannot look up a rule now: read SHARDWISE_STRICT" in output
    assert "shardwise-matmul" in output


def test_a_disabled_plugin_that_has_the_op_is_named(fresh, monkeypatch):
    monkeypatch.setenv("SHARDWISE_DISABLE_PLUGINS", "shardwise-linalg,shardwise-conv")
    fresh()
    output = why("aten._linalg_svd", exit_code=1)
    assert "Enable shardwise-linalg, which has a rule for aten._linalg_svd" in output
    assert "blocked: in SHARDWISE_DISABLE_PLUGINS" in output
    assert "Enable shardwise-conv" not in output


def test_a_disabled_plugin_that_has_a_rival_is_told_from_one_that_has_none(fresh, monkeypatch):
    monkeypatch.setenv("SHARDWISE_DISABLE_PLUGINS", "shardwise-linalg")
    fresh()
    (facts,) = told("aten.mm.default")
    assert facts["settings"] == [
        f"{facts['not_loaded'][0].partition(':')[0]} is not asked: in SHARDWISE_DISABLE_PLUGINS"
    ]
    with override(rule(torch.ops.aten._linalg_svd.default, "R -> R, R, R")):
        (facts,) = told("aten._linalg_svd.default")
    assert "which has a rule for it, is not asked" in facts["settings"][0]


LATER = """
    from shardwise.hookspecs import hookimpl

    @hookimpl
    def shardwise_register(registry):
        registry.add_later("why_acme::op", "acme_why_rules:OP")
"""


def test_an_op_whose_library_is_not_imported_is_told_from_one_that_nobody_knows(install, tmp_path):
    site = install("acme-kernels", LATER)
    output = why("why_acme::op", exit_code=1)
    assert "acme-kernels has a rule for it, and no library that is imported has the op" in output
    assert "--import MODULE_OR_FILE" in output
    (site / "acme_why_rules.py").write_text(
        "import torch\nfrom shardwise.rule import rule\nOP = rule(torch.ops.why_acme.op.default, 'R -> R')\n"
    )
    (tmp_path / "acme_library.py").write_text(
        "import torch\nLIBRARY = torch.library.Library('why_acme', 'DEF')\nLIBRARY.define('op(Tensor x) -> Tensor')\n"
    )
    (facts,) = told("why_acme::op", "--import", str(tmp_path / "acme_library.py"))
    assert (facts["winner"]["plugin"], facts["winner"]["rule"]) == ("acme-kernels", "R -> R")


def test_a_form_that_only_copies_an_op_without_a_rule_is_no_way_to_run_it(monkeypatch, fresh):
    monkeypatch.setenv("SHARDWISE_PLUGINS", "shardwise-spectral")
    fresh()
    assert "decomposed" not in why("aten.mm", exit_code=1)
    assert "decomposed (torch's decomposition, aten.silu.default and a copy)" in why("aten.silu", exit_code=1)
