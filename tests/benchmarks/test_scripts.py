"""The benchmarks run: each script once, on next to nothing. What they measure is no test's business."""

import json
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
