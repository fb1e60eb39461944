"""The parts of the demo, each by itself: options, data, model, comparison, report."""

import json
import math
from collections import Counter
from io import StringIO

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from shardwise.cli import main
from shardwise.demo import command
from shardwise.demo.comparison import LOSS_TOLERANCE, compare
from shardwise.demo.data import batches, corpus
from shardwise.demo.model import build
from shardwise.demo.observation import CollectiveUse, Observed, OperatorUse
from shardwise.demo.report import as_json, print_report
from shardwise.demo.run import RunResult
from shardwise.demo.settings import RunSettings
from shardwise.demo.training import Step, train

SMALL = RunSettings(steps=20, layers=1, width=16, heads=2, context=16, batch=4, learning_rate=1e-2)


def test_the_corpus_is_real_and_the_batches_are_deterministic():
    assert len(corpus()) > 1_000_000
    first, again = list(batches(SMALL)), list(batches(SMALL))
    assert len(first) == SMALL.steps
    for (ids, targets), (same_ids, _) in zip(first, again, strict=True):
        assert ids.shape == targets.shape == (4, 16)
        assert torch.equal(ids, same_ids)
        assert torch.equal(ids[:, 1:], targets[:, :-1])


def test_the_model_is_causal():
    model = build(SMALL)
    ids, _ = next(batches(SMALL))
    changed = ids.clone()
    changed[:, -1] += 1
    before, after = model(ids), model(changed)
    assert before.shape == (4, 16, 256)
    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


def test_training_lowers_the_loss_and_tells_every_step():
    calls = []
    steps = train(build(SMALL), batches(SMALL), SMALL, lambda batch: batch, calls.append)
    assert calls == steps
    assert [step.number for step in steps] == list(range(1, 21))
    assert steps[0].loss > math.log(256) - 0.5
    assert steps[-1].loss < steps[0].loss - 1


def steps_with(*losses):
    return [Step(number, loss, 1.0, 0.5) for number, loss in enumerate(losses, start=1)]


def test_equal_runs_agree():
    run = (steps_with(3.0, 2.0), {"weight": torch.ones(3)})
    comparison = compare(SMALL, run, run)
    assert comparison.agrees
    assert [difference.value for difference in comparison.differences] == [0, 0, 0]


def test_the_largest_difference_names_its_place():
    mesh = (steps_with(3.0, 2.0), {"a": torch.ones(3), "b": torch.tensor([1.0, 2.0])})
    single = (steps_with(3.0, 2.0 - 2 * LOSS_TOLERANCE), {"a": torch.ones(3), "b": torch.tensor([1.0, 2.5])})
    comparison = compare(SMALL, mesh, single)
    loss, norm, parameter = comparison.differences
    assert not comparison.agrees
    assert (loss.where, loss.within) == ("step 2", False)
    assert norm.within
    assert (parameter.where, parameter.value) == ("b", 0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_a_number_never_agrees(bad):
    mesh = (steps_with(3.0, bad, 2.0), {"a": torch.ones(1)})
    single = (steps_with(3.0, 2.5, 2.0), {"a": torch.ones(1)})
    comparison = compare(SMALL, mesh, single)
    assert comparison.differences[0].where == "step 2"
    assert not comparison.agrees


def outcome(parameter=1.0):
    use = OperatorUse("shardwise-matmul", "aten.mm.default", "[S(0), R], [R, S(1)] -> [S(0), S(1)]")
    reduction = CollectiveUse("all_reduce", (0, 1), 4)
    mesh = (steps_with(3.0, 2.0), {"weight": torch.tensor([parameter])})
    single = (steps_with(3.0, 2.0), {"weight": torch.ones(1)})
    return RunResult(
        SMALL,
        "gloo",
        mesh[0],
        single[0],
        Observed(Counter({use: 1234}), Counter({reduction: 7}), Counter({reduction: 56789})),
        compare(SMALL, mesh, single),
        learned="30 calls, 20 decisions",
    )


def test_the_report_shows_operators_collectives_and_the_verdict():
    out = StringIO()
    print_report(outcome(), Console(file=out, width=140))
    for text in ("[S(0), R], [R, S(1)] -> [S(0), S(1)]", "1,234", "all_reduce", "dp, tp", "56,789", "agree over 20"):
        assert text in out.getvalue()


def test_the_json_report():
    report = json.loads(json.dumps(as_json(outcome())))
    assert report["agrees"] is True
    assert report["settings"]["mesh"] == [2, 2]
    assert report["mesh"]["losses"] == [3.0, 2.0]
    assert report["operators"] == [
        {
            "plugin": "shardwise-matmul",
            "operator": "aten.mm.default",
            "strategy": "[S(0), R], [R, S(1)] -> [S(0), S(1)]",
            "times": 1234,
        }
    ]
    assert report["collectives"] == [
        {"kind": "all_reduce", "mesh_dims": [0, 1], "group_size": 4, "times": 7, "bytes": 56789}
    ]


@pytest.mark.parametrize(("parameter", "code", "text"), [(1.0, 0, "agree"), (1.5, 1, "DIFFER")])
def test_the_exit_code_is_the_verdict(monkeypatch, parameter, code, text):
    monkeypatch.setattr(command, "_run_locally", lambda *_: outcome(parameter))
    result = CliRunner().invoke(main, ["demo"])
    assert result.exit_code == code
    assert text in result.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--mesh", "2x"], "'2x' is not a mesh"),
        (["--mesh", "2x2x2"], "'2x2x2' is not a mesh"),
        (["--mesh", "0"], "'0' is not a mesh"),
        (["--width", "30", "--heads", "4"], "--width 30 does not divide into --heads 4"),
        (["--steps", "0"], "0 is not in the range x>=1"),
    ],
)
def test_options_that_make_no_sense(arguments, text):
    result = CliRunner().invoke(main, ["demo", *arguments])
    assert result.exit_code == 2
    assert text in result.output
