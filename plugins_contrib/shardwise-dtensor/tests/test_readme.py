"""The README's examples run, in order, in a process of their own, as they make a process group."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_its_examples_run(tmp_path):
    script = tmp_path / "readme.py"
    script.write_text("\n".join(re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "acme.gate.default: exported" in done.stdout
