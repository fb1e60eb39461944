"""The page on coming from DTensor: its examples run in a process of their own, as they make a process group."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BRIDGE = ROOT / "plugins_contrib" / "shardwise-dtensor" / "src"
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.sample
def test_its_examples_run(tmp_path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(PYTHON.findall((ROOT / "docs" / "migration.md").read_text())))
    path = os.pathsep.join([str(BRIDGE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "1 rules, 1 ops" in done.stdout
    assert "page.twice.default: exported" in done.stdout
