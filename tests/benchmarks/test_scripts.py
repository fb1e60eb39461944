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


def measured(results, name, ours, date):
    machine = {"torch": "1", "python": "3", "system": "Linux x86_64", "cpu": "a processor", "cores": 2, "date": date}
    entry = {"work": "a step", "DTensor": "3x", "target": "\u2264 2x", "ours": ours, "met": True}
    (results / f"{name}.json").write_text(json.dumps({"machine": machine, "lines": [entry]}))


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
