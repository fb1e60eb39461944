"""The page on coming from DTensor: its examples run in a process of their own, as they make a process group; its table
of results is compared with what both libraries do.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional

import shardwise as sw
from shardwise.rule import show
from shardwise.testing import mesh

ROOT = Path(__file__).parents[2]
BRIDGE = ROOT / "plugins_contrib" / "shardwise-dtensor" / "src"
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.sample
def test_its_examples_run(tmp_path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(PYTHON.findall((ROOT / "docs" / "migration.md").read_text())))
    path = os.pathsep.join([str(BRIDGE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "1 rule, 1 op" in done.stdout
    assert "page.twice.default: exported" in done.stdout


# -- where results lie -------------------------------------------------------------------------------------------------

ROW = re.compile(r"^\| `(.+?)` \| (.+?) \| `?(.+?)`? \| `(.+?)` \|$", re.MULTILINE)
OPERAND = re.compile(r"`(\w+): (.+?)`")
PLACEMENTS = {
    "R": sw.Replicate(),
    "S(0)": sw.Shard(0),
    "S(1)": sw.Shard(1),
    "P(sum)": sw.Partial(),
}


def rows():
    page = (ROOT / "docs" / "migration.md").read_text()
    return ROW.findall(page.split("## Where results lie")[1].split("\n## ")[0])


def operands():
    draw = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(8, 12, generator=draw),
        "y": torch.randn(8, 12, generator=draw),
        "w": torch.randn(12, 16, generator=draw),
        "rows": torch.randint(8, (4,), generator=draw),
        "columns": torch.randint(12, (8, 3), generator=draw),
        "t": torch.randint(12, (8,), generator=draw),
    }


def lies(tensor):
    (placement,) = tensor.placements
    is_public = type(placement) in {sw.Shard, sw.Replicate, sw.Partial}
    return show(placement) if is_public else type(placement).__name__


def both(table):
    """Of each row what DTensor does and what happens here; numbers are compared with one device."""
    on = mesh((4,))
    found = []
    for call, given, _, _ in table:
        whole = operands()
        at = {name: [PLACEMENTS[text]] for name, text in OPERAND.findall(given)}
        run = lambda values, call=call: eval(call, {"torch": torch, "F": functional}, values)  # noqa: S307  # our page
        expected = run(whole)
        ours = run({name: sw.distribute_tensor(whole[name], on, at[name]) for name in at})
        if "empty" not in call:
            torch.testing.assert_close(ours.full_tensor(), expected)
        try:
            theirs = run({name: distribute_tensor(whole[name], on, at[name]) for name in at})
        except RuntimeError:
            found.append(("raises", lies(ours)))
        else:
            assert isinstance(theirs, DTensor)
            found.append((lies(theirs), lies(ours)))
    return found


def test_results_lie_where_the_table_says(pool):
    table = rows()
    assert len(table) == 23
    found = pool.run(both, table)[0]
    assert [(row[0], here) for row, (_, here) in zip(table, found, strict=True)] == [(row[0], row[3]) for row in table]
    if torch.__version__.startswith("2.13"):
        assert [(row[0], dtensor) for row, (dtensor, _) in zip(table, found, strict=True)] == [
            (row[0], row[2]) for row in table
        ]
    assert all(row[2] != row[3] for row in table)
