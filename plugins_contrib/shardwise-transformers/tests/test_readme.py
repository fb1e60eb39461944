"""The README's example runs on four ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_its_example_runs(tmp_path):
    script = tmp_path / "readme.py"
    script.write_text(re.search(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)[1])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    (printed,) = re.search("^It prints `(.*?)`", README.read_text(), re.MULTILINE).groups()
    assert printed in done.stdout
