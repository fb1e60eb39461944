"""``shardwise infer``: how samples are written, how ops are named, what is printed."""

import json

import pytest
import torch
from click.testing import CliRunner

from shardwise.cli import main
from shardwise.cli.sample_text import read_sample
from shardwise.discovery.process import use_registry
from shardwise.errors import CallError
from shardwise.kernel.registry import Registry
from shardwise.kernel.rule import Rule

BLACK_BOX = """
import torch

@torch.library.custom_op("acme_cli::blend", mutates_args=())
def blend(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w + 1

def samples():
    return [((torch.randn(8, 5), torch.randn(8, 5)), {})]
"""


def run(*arguments):
    return CliRunner().invoke(main, ["infer", *arguments])


def shape_of(value):
    return [shape_of(v) for v in value] if isinstance(value, list) else (value.dtype, tuple(value.shape))


# -- samples -----------------------------------------------------------------------------------------------------


def test_a_sample_is_written_as_a_call():
    args, kwargs = read_sample("f32[8,6], bf16[4], [f64[2, 3], f32[]], 1, -2.5, None, [1, -1], keepdim=True, dtype=f16")
    assert [shape_of(args[0]), shape_of(args[1]), shape_of(args[2])] == [
        (torch.float32, (8, 6)),
        (torch.bfloat16, (4,)),
        [(torch.float64, (2, 3)), (torch.float32, ())],
    ]
    assert args[3:] == [1, -2.5, None, [1, -1]]
    assert kwargs == {"keepdim": True, "dtype": torch.float16}


def test_floats_have_both_signs_and_tensors_differ():
    (x, y), _ = read_sample("f32[50], f32[50]")
    assert x.min() < 0 < x.max()
    assert not torch.equal(x, y)
    assert torch.equal(read_sample("f32[50]", seed=3)[0][0], read_sample("f32[50]", seed=3)[0][0])


def test_integers_may_be_indices():
    (_, i), _ = read_sample("f32[9,4], i64[100]")
    assert set(i.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [("i64[200] < 9", 0, 9), ("-3 <= i32[200] < 4", -3, 4), ("0 <= f32[200] < 1", 0, 1), ("f64[200] < 2", 0, 2)],
)
def test_values_in_a_range(text, low, high):
    ((x,), _) = read_sample(text)
    assert low <= x.min() < x.max() < high
    assert x.shape == (200,)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("f32[8", "not a list of arguments"),
        ("g32[8]", "'g32' is not a dtype"),
        ("f32[-1]", "sizes that are not numbers"),
        ("f32[n]", "sizes that are not numbers"),
        ("x + y", "neither a tensor nor a literal"),
        ("3 > i64[5]", "is not a range"),
        ("**f32[3]", "not a list of arguments"),
    ],
)
def test_samples_that_cannot_be_read(text, reason):
    with pytest.raises(CallError, match=reason):
        read_sample(text)


# -- the command -------------------------------------------------------------------------------------------------


@pytest.fixture
def black_box(tmp_path):
    file = tmp_path / "black_box_of_acme.py"
    file.write_text(BLACK_BOX)
    return str(file)


def test_a_black_box_in_a_file(black_box):
    samples = ("--samples", f"{black_box}:samples", "--sample", "f32[4,5,7], f32[4,5,7]")
    result = run("acme_cli::blend", "--import", black_box, *samples)
    assert result.exit_code == 0, result.output
    assert "sample 0: (f32[4,5,7], f32[4,5,7])" in result.output
    assert '"..., ... -> ..."' in result.output
    assert "register_fake" in result.output
    assert "the oracle accepts:" in result.output


def test_json_holds_all_that_was_found_and_a_rule_that_runs():
    result = run("aten._softmax", "--sample", "f32[8,7], 1, False", "--sample", "f32[8,7], 0, False", "--json")
    assert result.exit_code == 0, result.output
    (inferred,) = json.loads(result.stdout)
    assert inferred["op"] == "aten._softmax.default"
    rows = {row["row"]: row for row in inferred["rows"]}
    assert rows["[R] -> [R]"]["verdict"] == "all samples"
    assert rows["[S(0)] -> [S(0)]"] | {"ranks": []} == {
        "row": "[S(0)] -> [S(0)]",
        "inputs": "[S(0)]",
        "outputs": "[S(0)]",
        "operands": "n n",
        "verdict": "some samples",
        "holds_for": [0],
        "fails_for": [1],
        "ranks": [],
    }
    assert inferred["accepted"]
    assert inferred["cases"] > 5
    scope = {}
    exec(inferred["rule"], scope)  # noqa: S102  the text under test
    assert isinstance(scope["SOFTMAX"], Rule)


def test_the_table_says_for_which_samples():
    output = run("aten._softmax", "--sample", "f32[8,7], 1, False", "--sample", "f32[8,7], 0, False").output
    assert "some samples: 0; not 1" in output
    assert "return like(self, whole=(dim,))" in output


@pytest.mark.parametrize(
    ("name", "sample", "op"),
    [
        ("add", "f32[5,8], f32[5,8]", "aten.add.Tensor"),
        ("sum", "f32[5,8]", "aten.sum.default"),
        ("_foreach_neg", "[f32[5], f32[8]]", "aten._foreach_neg.default"),
    ],
)
def test_a_sample_chooses_among_overloads(name, sample, op):
    result = run(name, "--sample", sample, "--json")
    assert json.loads(result.stdout)[0]["op"] == op


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["aten.add"], "several of its overloads fit the call"),
        (["aten.mm"], "the op refuses every sample"),
        (["aten.mm", "--sample", "f32[8"], "CallError: read the sample"),
        (["aten.neg", "--samples", "no_such_file"], "does not name a function"),
        (["aten.native_dropout", "--sample", "f32[8], 0.5, True"], "it draws random numbers"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_mistakes_are_messages(arguments, message):
    result = run(*arguments)
    assert result.exit_code != 0
    assert message in " ".join(result.output.replace("│", " ").split())


def test_a_rule_that_the_oracle_refutes_fails_the_command(monkeypatch):
    wrong = 'einop("m n -> m n", partial=["max -> max"])'
    monkeypatch.setattr(
        "shardwise.testing.inference.fitting._Fitting.best",
        lambda self: __import__("shardwise.testing.inference.sources", fromlist=["_"]).from_function(
            self.op, [], [f"return {wrong}"], "Planted."
        ),
    )
    result = run("aten.neg", "--sample", "f32[8,5]")
    assert result.exit_code == 1
    assert "the oracle refutes the rule" in result.output


def test_an_op_that_torch_always_runs_as_others_is_told_so():
    result = run("linear", "--sample", "f32[4,3], f32[5,3]")
    assert "torch always runs aten.linear.default as other ops, before shardwise sees it" in result.output


@pytest.mark.slow
@pytest.mark.sample
def test_an_op_without_a_rule_that_runs_decomposed_is_told_so():
    with use_registry(Registry()):
        result = run("addmm", "--sample", "f32[4,5], f32[4,3], f32[3,5]")
    assert "Without a rule the op runs decomposed (torch's decomposition" in result.output
