"""The pages: links lead somewhere, examples compile, and the README's example runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@by_page
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target


@by_page
def test_examples_compile(page):
    for number, example in enumerate(PYTHON.findall(page.read_text())):
        compile(example, f"{page.name} example {number}", "exec")


def test_the_readme_example_runs(tmp_path):
    (example,) = PYTHON.findall((ROOT / "README.md").read_text())
    script = tmp_path / "example.py"
    script.write_text(example)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run([*torchrun, str(script)], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("MeshTensor") == 10
