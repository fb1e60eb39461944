"""The figures on the page that compares are those of the pages that are made of measurements."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "comparison.md").read_text()


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_models_that_train():
    heads, row = re.search(
        r"^(\| package \| models .*)\n\|[-| ]*\n(?:.*\n)*?(\| all \|.*)$",
        (DOCS / "models.md").read_text(),
        re.MULTILINE,
    ).groups()
    counts = dict(zip(cells(heads), cells(row), strict=True))
    theirs = f"{counts['DTensor dp x tp']} on dp x tp, {counts['DTensor fsdp']} with sharded parameters"
    assert counts["dp x tp"] == counts["fsdp"]
    assert f"| {theirs} | {counts['fsdp']} on both |" in PAGE


def test_operators():
    rows = re.findall(
        r"^\| \S+ \| (\w+) \| shardwise \| .*\(([\d.]+ %)\)", (DOCS / "operators.md").read_text(), re.MULTILINE
    )
    shares = {(direction, share) for direction, share in rows}
    assert len(shares) == 2
    for direction, share in shares:
        assert f"{share} {direction}" in PAGE
