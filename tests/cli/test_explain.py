"""``shardwise explain``: what is typed, what is shown, and what is refused."""

import json
import re

import pytest
import torch
from click.testing import CliRunner

from shardwise.cli import main
from shardwise.cli.call_text import find_op, parse_operand
from shardwise.errors import CallError, PlacementCountError, PlacementError
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import Partial, Replicate, Shard
from shardwise.kernel.signature import op_name
from shardwise.planning.cost import Connection, Link, Links, default_links, links_of
from shardwise.planning.link_file import Calibration, Site, show

MM = ("--mesh", "2x2", "--input", "f32[8,16] S(0),R", "--input", "f32[16,32] S(1),S(0)")


def run(*arguments):
    return CliRunner().invoke(main, ["explain", *arguments])


def explained(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


# -- a product on a 2x2 mesh -----------------------------------------------------------------------------------------


def test_a_product_as_a_person_reads_it():
    output = run("aten.mm", *MM).output
    assert "aten.mm.default on mesh 2x2 (cpu)" in output
    assert "rule   m k, k n -> m n" in output
    assert "costs  defaults for one host" in output
    assert "shardwise-matmul" in output
    assert "products.py:" in output
    (chosen,) = [line for line in output.splitlines() if line.endswith("taken")]
    assert " ".join(chosen.split()) == "> shard n | shard k R,S(1) S(1),S(0) S(1),P(sum) self 62.1 62.1 taken"
    assert "+2.4 µs for mat2" in output
    assert "on mesh dim 1: mat2 is S(0) there; to make it partial only puts communication off" in output
    (gather,) = [line for line in output.splitlines() if "all_gather" in line]
    assert " ".join(gather.split()) == "1 self all_gather 0 2 128 S(0),S(1) R,S(1) 60.1"
    assert not any(line.endswith(" ") for line in output.splitlines())


def test_a_product_fits_a_terminal_of_120_columns(monkeypatch):
    lines = run("aten.mm", *MM).output.splitlines()
    assert max(map(len, lines)) <= 120


def test_a_product_as_a_program_reads_it():
    explanation = explained("mm", *MM)
    (decision,) = explanation["decisions"]
    strategies = decision["strategies"]
    assert [s["taken"] for s in strategies] == [True] + [False] * 23
    assert [s["cost"] for s in strategies] == sorted(s["cost"] for s in strategies)
    assert strategies[0]["inputs"] == [["R", "S(1)"], ["S(1)", "S(0)"]]
    assert strategies[0]["cost"] == sum(strategies[0]["costs"])
    assert decision["legal"] == 24
    assert explanation["collectives"] == [
        {"kind": "all_gather", "mesh_dims": [0], "ranks": 2, "bytes": 128, "purpose": "self"}
    ]
    assert [step["kind"] for step in explanation["moves"][0]["steps"]] == ["slice", "all_gather"]
    assert explanation["results"] == [{"meta": "f32[8,32]", "placements": ["S(1)", "P(sum)"]}]
    assert explanation["rule"]["plugin"] == "shardwise-matmul"


def test_top_says_how_many_are_listed():
    assert "24 legal strategies among 64 combinations of rows, the 3 cheapest" in run("mm", *MM, "--top", "3").output
    assert "24 legal strategies among 64 combinations of rows, cheapest first" in run("mm", *MM, "--top", "0").output


def test_devices_and_wires_decide_the_costs():
    by = {words: explained("mm", *MM, *words)["decisions"][0]["strategies"][0]["cost"] for words in (
        (), ("--device", "cuda"), ("--wires", "ethernet,loopback"),
    )}  # fmt: skip
    assert by["--device", "cuda"] < by[()]
    mesh = AbstractMesh((2, 2))
    assert links_of(mesh) == default_links(mesh), "the wires are for one explanation"
    assert "give one per mesh dim" in run("mm", *MM, "--wires", "ethernet").output
    assert "there is no 'string'" in run("mm", *MM, "--wires", "string,string").output


def test_measured_figures_decide_the_costs(tmp_path):
    path = tmp_path / "links.json"
    slow = Connection.same(Link(start=1.0, latency=1.0, bandwidth=1e3))
    site = Site((2, 2), "cpu", "x86_64", "gloo", (1, 1))
    path.write_text(show([Calibration(site, Links((slow, slow), 1e-6, 1e9), "2.13", "2026-01-01")]))
    explanation = explained("mm", *MM, "--links", str(path))
    assert explanation["decisions"][0]["strategies"][0]["cost"] > 1
    assert "measured on 2x2 cpu" in explanation["figures"]
    three = explained(
        "mm", "--mesh", "2x2x2", "--input", "f32[8,8] S(0),R,R", "--input", "f32[8,8] S(1),R,R", "--links", str(path)
    )
    assert three["decisions"][0]["strategies"][0]["cost"] > 1
    other = run("mm", "--mesh", "3", "--input", "f32[8,8] R", "--input", "f32[8,8] R", "--links", str(path))
    assert "LinksFitError" in other.output


# -- other kinds of call ---------------------------------------------------------------------------------------------


def test_lists_are_given_by_name():
    explanation = explained("cat", "--mesh", "4", "--input", "tensors: f32[4] S(0)", "--input", "tensors: f32[2] R")
    assert [i["name"] for i in explanation["inputs"]] == ["tensors[0]", "tensors[1]"]
    assert [c["kind"] for c in explanation["collectives"]] == ["all_gather"]
    one_by_one = run(
        "_foreach_add.List", "--mesh", "2", "--input", "self: f32[8] S(0)", "--input", "other: f32[8] R",
        "--input", "self: f32[4] R", "--input", "other: f32[4] R",
    )  # fmt: skip
    assert "list position 0" in one_by_one.output
    assert "list position 1" in one_by_one.output


def test_absent_operands_and_static_arguments():
    explanation = explained(
        "native_layer_norm", "--mesh", "2", "--input", "f32[8,16] S(0)", "--arg", "normalized_shape=[16]",
        "--input", "bias: -", "--arg", "eps=1e-5",
    )  # fmt: skip
    assert [i["meta"] for i in explanation["inputs"]] == ["f32[8,16]", None, None]
    assert explanation["arguments"] == {"normalized_shape": [16], "eps": 1e-5}
    cast = explained("_to_copy", "--mesh", "2", "--input", "f32[8] S(0)", "--arg", "dtype=bf16")
    assert cast["results"] == [{"meta": "bf16[8]", "placements": ["S(0)"]}]
    scaled = explained("mul.Tensor", "--mesh", "2", "--input", "f32[8] S(0)", "--arg", "other=2")
    assert scaled["results"] == [{"meta": "f32[8]", "placements": ["S(0)"]}]


def test_a_lowering_tells_what_it_issues():
    explanation = explained("linalg_vector_norm", "--mesh", "4", "--input", "f32[8,8] S(0)")
    assert [(c["kind"], c["purpose"]) for c in explanation["collectives"]] == [("all_reduce", "lowering")]


PLUGIN = """
import torch
from shardwise.discovery.process import default_registry
from shardwise.rule import rule

library = torch.library.Library("acme", "DEF")
library.define("kernel(Tensor x, Tensor? bias=None) -> Tensor")
library.impl("kernel", lambda x, bias=None: x.clone(), "Meta")
default_registry().override(rule(torch.ops.acme.kernel.default, "m n, n -> m n"))
"""


def test_an_op_that_a_module_defines(tmp_path, monkeypatch):
    (tmp_path / "acme_explained.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    output = run("acme::kernel", "--import", "acme_explained", "--mesh", "2", "--input", "f32[4,4] S(0)").output
    assert "acme.kernel.default on mesh 2" in output
    assert "acme_explained.py:9" in output


# -- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "dtype", "shape", "placements"),
    [
        ("f32[8,16] S(0),R", None, torch.float32, (8, 16), (Shard(0), Replicate())),
        ("x: bf16[8] P, P(avg)", "x", torch.bfloat16, (8,), (Partial("sum"), Partial("avg"))),
        ("float64[] R,P(max)", None, torch.float64, (), (Replicate(), Partial("max"))),
        ("i64[3] [S(0), R]", None, torch.int64, (3,), (Shard(0), Replicate())),
        ("bool[3]Shard(0),Replicate()", None, torch.bool, (3,), (Shard(0), Replicate())),
        ("c64[3] Shard(dim=0),Partial()", None, torch.complex64, (3,), (Shard(0), Partial("sum"))),
        ("u8[3] Partial('max'),R", None, torch.uint8, (3,), (Partial("max"), Replicate())),
    ],
)
def test_operands_are_read(text, name, dtype, shape, placements):
    operand = parse_operand(text, AbstractMesh((2, 2)))
    assert operand.name == name
    assert (operand.spec.dtype, tuple(operand.spec.shape), operand.spec.placements) == (dtype, shape, placements)


def test_strides_are_read():
    mesh = AbstractMesh((2,))
    assert parse_operand("f32[8,16] strides(1,8) S(0)", mesh).spec.stride == (1, 8)
    assert parse_operand("f32[8,16] S(0)", mesh).spec.stride == (16, 1)
    assert parse_operand("-", mesh).spec is None
    with pytest.raises(CallError, match="1 stride for 2 dims"):
        parse_operand("f32[8,16] strides(1) S(0)", mesh)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("f33[8] R", CallError),
        ("f32(8) R", CallError),
        ("", CallError),
        ("f32[8] Q", PlacementError),
        ("f32[8] S(1)", PlacementError),
        ("f32[8] R,R", PlacementCountError),
        ("f32[8]", PlacementCountError),
    ],
)
def test_what_is_no_operand_is_refused(text, kind):
    with pytest.raises(kind, match=re.escape(f"read the operand {text!r}: ")):
        parse_operand(text, AbstractMesh((2,)))


def test_the_operands_choose_among_overloads():
    mesh = AbstractMesh((2,))
    pair = [parse_operand("f32[8,8] R", mesh)] * 2
    assert op_name(find_op("add", pair, {})) == "aten.add.Tensor"
    assert op_name(find_op("sum", pair[:1], {"dim": "[0]"})) == "aten.sum.dim_IntList"


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("add", "--mesh", "2"), "aten.add.Scalar: aten::add.Scalar(Tensor self, Scalar other"),
        (("mm", "--mesh", "2"), "'self', 'mat2' must be given. Its schema is aten::mm(Tensor self, Tensor mat2)"),
        (("mm", "--mesh", "2", "--input", "x: f32[8,8] R"), "has no argument 'x'"),
        (("mm", "--mesh", "2", *["--input", "f32[8,8] R"] * 3), "it is given 3 operands, 1 more than it takes"),
        (("mm", "--mesh", "2", *["--input", "self: f32[8,8] R"] * 2), "'self' is given twice"),
        (("mm", "--mesh", "2", "--input", "f32[8,8] R", "--input", "f32[4,4] R"), "torch refuses it"),
        (("sum", "--mesh", "2", "--input", "f32[8] R", "--arg", "dim"), "it is not name=value"),
        (("sum", "--mesh", "2", "--input", "f32[8] R", "--arg", "dtype=f33"), "neither a Python literal nor a dtype"),
        (("mmm", "--mesh", "2"), "torch knows no such op; close to it, with rules: "),
        (("_foreach_add.List", "--mesh", "2", "--input", "f32[8] R"), "must be given"),
        (("kron", "--mesh", "2", *["--input", "f32[8,8] R"] * 2), "torch runs it as"),
    ],
)
def test_refusals_are_messages(arguments, found):
    result = run(*arguments)
    assert result.exit_code == 1
    assert found in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("mesh", ["", "0", "2x", "two", "-2"])
def test_what_is_no_mesh_is_refused(mesh):
    result = run("mm", f"--mesh={mesh}")
    assert result.exit_code == 2
    assert "is not a mesh" in result.output
