"""The page on rehearsals: its large example prints what is shown."""

import re
import shlex

import pytest
from click.testing import CliRunner

from shardwise.cli import main


@pytest.mark.slow
@pytest.mark.sample
def test_the_large_example_prints_what_is_shown(docs, monkeypatch):
    monkeypatch.setenv("SHARDWISE_LEARN", "auto")  # as a reader has it
    (block,) = [b for b in docs.blocks(docs.ROOT / "docs" / "rehearse.md") if b.how.startswith("not run")]
    ((command, shown),) = docs.commands(block.text)
    result = CliRunner().invoke(main, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    assert docs.squeezed(shown) == docs.squeezed(result.output)


@pytest.mark.slow
@pytest.mark.sample
def test_without_the_redistributions_the_program_keeps_what_is_said(docs):
    text = " ".join((docs.ROOT / "docs" / "rehearse.md").read_text().split())
    program, kept = re.search(r"the same command with `(\S+)` shows (\S+ GiB) kept", text).groups()
    result = CliRunner().invoke(main, ["rehearse", program, "--mesh", "8x16x8", "--names", "pod,tp,dp"])
    assert f"kept by forward for backward {kept}" in " ".join(docs.squeezed(result.output))
