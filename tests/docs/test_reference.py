"""The reference is what the docstrings say, and says something of every name."""

import re

from reference_page import MODULES, PAGE, page


def test_the_reference_is_up_to_date():
    assert PAGE.read_text() == page(), "run nox -s reference"


def test_every_name_is_described():
    entries = re.split(r"^### `", PAGE.read_text(), flags=re.MULTILINE)[1:]
    empty = [
        entry.partition("`")[0] for entry in entries if not re.search(r"[A-Za-z]{3,}.*\.", entry.partition("\n")[2])
    ]
    assert not empty
    assert len(entries) > 100
    assert all(f"\n## {module}\n" in PAGE.read_text() for module in MODULES)
