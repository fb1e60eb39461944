"""The rule table in the documentation is what the registry says."""

from pathlib import Path

import pytest
import torch

from shardwise.cli.rules import rule_table
from shardwise.discovery.process import default_registry

PAGE = Path(__file__).parents[2] / "docs" / "rule-table.md"


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="each torch has its own set of ops")
def test_the_rule_table_is_up_to_date():
    assert PAGE.read_text().endswith(rule_table(default_registry())), "run nox -s rule_table"
