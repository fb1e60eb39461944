"""The benchmarks run: each script once, on next to nothing. What they measure is no test's business."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPTS = sorted(path.stem for path in HERE.glob("bench_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_and_leaves_its_lines(name, tmp_path):
    pytest.importorskip("matplotlib", reason="the benchmarks need the extra `bench`")
    command = [sys.executable, str(HERE / "run.py"), "--only", name, "--quick", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / f"{name}.json").read_text())["lines"]


PART = """## CPU

torch 1, Python 3, Linux x86_64, a processor, 2 cores, 2026-01-01

| work | DTensor | target | ours, measured | | command |
|---|---|---|---|---|---|
| an op | 1 | \u2264 0.5 | 0.40 | met | `bench_dispatch.py` |
| a step | 3x | \u2264 2x | 1.9x | met | `bench_step.py` |
"""


def measured(results, name, ours, date, **more):
    machine = {"torch": "1", "python": "3", "system": "Linux x86_64", "cpu": "a processor", "cores": 2, "date": date}
    entry = {"work": "a step", "DTensor": "3x", "target": "\u2264 2x", "ours": ours, "met": True}
    (results / f"{name}.json").write_text(json.dumps({"machine": machine, "lines": [entry], **more}))


def test_a_script_that_is_measured_again_leaves_the_lines_of_the_others(tmp_path):
    generated = runpy.run_path(str(HERE / "run.py"))["generated"]
    measured(tmp_path, "bench_step", "1.8x", "2026-02-02")
    once = generated(tmp_path, PART)
    assert "| 0.40 | met | `bench_dispatch.py` |" in once
    assert "| 1.8x | met | `bench_step.py` |" in once
    assert "1.9x" not in once
    assert "2026-01-01: bench_dispatch.\n" in once.replace(".  ", ".")
    assert "2026-02-02: bench_step.\n" in once.replace(".  ", ".")
    assert generated(tmp_path, once) == once
    measured(tmp_path, "bench_dispatch", "0.30", "2026-02-02")
    assert "2 cores, 2026-02-02\n" in generated(tmp_path, once)


def test_what_was_measured_on_cards_has_a_part_of_its_own_and_stays(tmp_path):
    generated = runpy.run_path(str(HERE / "run.py"))["generated"]
    before = generated(tmp_path, PART)
    assert "no figure on this page was taken on a card" in before
    measured(tmp_path, "bench_card", "1.2x", "2026-03-03", cards=["a card", "a card"])
    once = generated(tmp_path, before)
    cpu, _, cards = once.partition("## CUDA")
    assert "bench_card" not in cpu
    assert "`bench_step.py`" in cpu
    assert "2 x a card, a processor, 2 cores, 2026-03-03\n" in cards
    assert "| 1.2x | met | `bench_card.py` |" in cards
    assert "not measured" not in cards.lower()
    (tmp_path / "bench_card.json").unlink()
    measured(tmp_path, "bench_step", "1.8x", "2026-02-02")
    again = generated(tmp_path, once)
    assert again.partition("## CUDA")[2] == cards
    assert "| 1.8x | met | `bench_step.py` |" in again
    measured(tmp_path, "bench_card", "9x", "2026-03-04", cards=[])  # on a CPU, which shows that the script works
    assert generated(tmp_path, again) == again


def test_a_part_of_the_card_script_that_fails_leaves_its_error(monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    card = runpy.run_path(str(HERE / "bench_card.py"))
    settings = card["RunSettings"](mesh=(1,), layers=2, width=64)
    rows = [
        {"part": "ops", "what": "failed", "errors": {"shardwise": "RuntimeError: no"}},
        {"part": "step", "what": "a step", "shardwise": 3.0, "DTensor": 4.0, "plain": 2.0},
        {"part": "compile", "what": "forward and backward", "plain": 1.0, "errors": {"shardwise": "KeyError: 'a'"}},
    ]
    ops, step, compiled = card["lines"](rows, settings, 1)
    assert (ops["ours"], ops["met"]) == ("failed: RuntimeError: no", False)
    assert (step["ours"], step["DTensor"], step["met"]) == ("1.50x plain", "2.00x plain", False)
    assert (compiled["ours"], compiled["met"]) == ("shardwise failed: KeyError: 'a'", False)
