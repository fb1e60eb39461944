"""The examples of the pages about rules run as they stand, each page in one piece."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["rules.md", "lowerings.md", "oracle.md", "infer.md", "dispatch.md", "plugins.md"])
def test_the_examples_run(page):
    scope = {}
    for number, example in enumerate(PYTHON.findall((DOCS / page).read_text())):
        exec(compile(example, f"{page} example {number}", "exec"), scope)  # noqa: S102  # the text under test
