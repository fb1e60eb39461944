"""What CONTRIBUTING.md names is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_files_that_it_names_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:tests|core|plugins|docs)/[\w/.]+)(?:::(\w+))?", text)
    assert len(named) > 10
    assert {path for path, _ in named if not (ROOT / path).exists()} == {"plugins/shardwise_x/"}  # stands for any
    assert not [f"{path}::{test}" for path, test in named if test and f"def {test}" not in (ROOT / path).read_text()]
