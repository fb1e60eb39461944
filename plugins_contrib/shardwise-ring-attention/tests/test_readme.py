"""The README's example runs under torchrun and prints what the page shows."""

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def block(language, starting=""):
    return re.search(rf"^```{language}\n({re.escape(starting)}.*?)^```", README, re.MULTILINE | re.DOTALL)[1]


def test_the_example_prints_what_the_page_shows(tmp_path):
    script = tmp_path / "context.py"
    script.write_text(block("python"))
    command, _, shown = block("console", "$ torchrun").partition("\n")
    assert command == "$ torchrun --nproc-per-node 4 context.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run([*torchrun, str(script)], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    versions = re.compile(r"shardwise-ring-attention \S+\)")
    assert versions.sub("", done.stdout) == versions.sub("", shown)
