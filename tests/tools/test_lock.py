"""Lockfiles of programs: the same bytes in every process, and those of the demo and of 7 billion parameters hold."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from shardwise.demo.large import placed_step, seven_billion
from shardwise.demo.step import step as demo_step
from shardwise.program.lock_changes import difference_text
from shardwise.program.lock_file import read_lock
from shardwise.tools.lock import is_ci, lock_step, save_lock

LOCKS = Path(__file__).with_name("locks")
SMALL = partial(placed_step, layers=3, width=16, heads=4, context=8, batch=8, places_activations=False)
FREE = "from functools import partial; from shardwise.demo.large import placed_step as p; from shardwise.tools.lock "
FREE += "import lock_step; s = partial(p, layers=3, width=16, heads=4, context=8, batch=8, places_activations=False); "
FREE += "print(lock_step(s, (2, 2), ('dp', 'tp'), name='small').lock.text(), end='')"


def differences(name, now):
    return list(difference_text(read_lock(LOCKS / name), now.lock, now.line_of))


def test_the_lock_of_the_demo_holds():
    """`shardwise lock shardwise.demo.step:step --mesh 2x2 --names dp,tp --out tests/tools/locks/demo.lock` wrote it."""
    assert not differences("demo.lock", lock_step(demo_step, (2, 2), ("dp", "tp"), name="shardwise.demo.step:step"))


@pytest.mark.slow
@pytest.mark.sample
def test_the_lock_of_seven_billion_parameters_holds():
    """As above, of shardwise.demo.large:seven_billion with --mesh 8x16x8 --names pod,tp,dp."""
    name = "shardwise.demo.large:seven_billion"
    assert not differences("seven_billion.lock", lock_step(seven_billion, (8, 16, 8), ("pod", "tp", "dp"), name=name))


@pytest.mark.slow
@pytest.mark.sample
def test_every_process_writes_the_same_bytes(tmp_path):
    here = lock_step(SMALL, (2, 2), ("dp", "tp"), name="small").lock.text()
    again = lock_step(SMALL, (2, 2), ("dp", "tp"), name="small").lock.text()
    running = [
        subprocess.Popen(
            [sys.executable, "-c", FREE],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            cwd=tmp_path if seed == "1" else None,
            stdout=subprocess.PIPE,
        )
        for seed in ("1", "2")
    ]
    texts = [process.communicate(timeout=120)[0].decode() for process in running]
    assert [again, *texts] == [here] * 3


def test_layers_that_send_the_same_are_one_row():
    modules = {
        line.split()[4] for line in lock_step(SMALL, (2, 2), ("dp", "tp")).lock.text().splitlines() if "tp  " in line
    }
    assert any(module.startswith("model.blocks.{0-2}.") for module in modules)


def test_a_lock_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    lock = lock_step(SMALL, (2, 2), ("dp", "tp")).lock
    path = tmp_path / "a.lock"
    path.write_text("before")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        save_lock(lock, path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.lock"]
    assert path.read_text() == "before"


@pytest.mark.parametrize(
    ("value", "is_set"), [(None, False), ("", False), ("0", False), ("False", False), ("true", True)]
)
def test_what_ci_means(value, is_set):
    assert is_ci({} if value is None else {"CI": value}) is is_set
