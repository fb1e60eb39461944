"""The fixture ``communication_lock``: a test fails where its step sends something else than its lockfile says."""

from __future__ import annotations

import pytest

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.tools.lock import lock_step

pytest_plugins = ["pytester"]

TEST = """
import pytest
import shardwise as sw
from shardwise import Replicate, Shard

def step(mesh):
    x = sw.ones((4, 8), device_mesh=mesh, placements=[Replicate(), Shard(0)])
    x.redistribute(placements=[Replicate(), Replicate()])

@pytest.mark.parametrize("shape", ["two by four"])
def test_sends(communication_lock, shape):
    communication_lock(step, {"dp": 2, "tp": 4}, budgets=["tp forward 1MiB"])
"""
LOCK = "test_train.test_sends_two_by_four.lock"


def step(mesh):
    sw.ones((4, 8), device_mesh=mesh, placements=[Shard(0)]).redistribute(placements=[Replicate()])


@pytest.fixture(scope="module")
def _imported():
    """What a rehearsal imports is there: pytester forgets what a run imports, and torch's libraries are made once."""
    lock_step(step, (2,))


@pytest.fixture
def run(_imported, pytester):
    pytester.makepyfile(test_train=TEST)

    def call(*args):
        return pytester.runpytest_inprocess("-p", "shardwise.testing.pytest_plugin", "-p", "no:xdist", *args)

    return call


def edit(pytester, old, new):
    path = pytester.path / "test_train.py"
    path.write_text(path.read_text().replace(old, new))


def test_a_lockfile_is_written_only_where_it_is_asked_for(run, pytester, monkeypatch):
    run().stdout.fnmatch_lines([f"*there is no {LOCK} beside the test: write it with `pytest --update-locks`*"])
    assert not (pytester.path / LOCK).exists()
    monkeypatch.setenv("CI", "1")
    run("--update-locks").stdout.fnmatch_lines([f"*{LOCK} is not written: CI is set*"])
    assert not (pytester.path / LOCK).exists()
    monkeypatch.delenv("CI")
    run("--update-locks").assert_outcomes(passed=1)
    text = (pytester.path / LOCK).read_text()
    assert "program  test_train.py::test_sends[two by four]\n" in text
    assert str(pytester.path) not in text
    run().assert_outcomes(passed=1)


def test_a_test_fails_with_the_difference(run, pytester):
    run("--update-locks")
    edit(pytester, "(4, 8)", "(4, 16)")
    result = run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            f"*{LOCK} does not hold.",
            "*grown:",
            "*forward all_gather over tp at (no module): 1 x, 32 B before, 1 x, 64 B now | redistribute | *",
            "* test_train.py:7",
        ]
    )


def test_tests_of_one_name_in_two_classes_have_two_lockfiles(run, pytester):
    text = (
        TEST.partition("@pytest")[0]
        + """
class TestHere:
    def test_it(self, communication_lock):
        communication_lock(step, {"dp": 2, "tp": 4})

class TestThere:
    def test_it(self, communication_lock):
        communication_lock(step, {"dp": 4, "tp": 2})
"""
    )
    (pytester.path / "test_train.py").write_text(text)
    run("--update-locks").assert_outcomes(passed=2)
    assert sorted(path.name for path in pytester.path.glob("*.lock")) == [
        "test_train.TestHere_test_it.lock",
        "test_train.TestThere_test_it.lock",
    ]
    run().assert_outcomes(passed=2)


def test_two_tests_whose_names_differ_by_signs_alone_do_not_write_one_file(run, pytester):
    edit(pytester, '["two by four"]', '["two by four", "two.by.four"]')
    result = run("--update-locks")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines([f"*{LOCK} is of *test_sends?two by four?: give this test another name*"])
    assert "test_sends[two by four]" in (pytester.path / LOCK).read_text()


def test_a_lockfile_that_cannot_be_written_fails_the_test(run, pytester):
    (pytester.path / LOCK).mkdir()
    run("--update-locks").stdout.fnmatch_lines([f"*Failed: {LOCK} cannot be written: it is not a file*"])
    edit(pytester, "budgets=", f"name={'a' * 300!r}, budgets=")
    run("--update-locks").stdout.fnmatch_lines(["*Failed: *.lock cannot be written: File name too long*"])
    run().stdout.fnmatch_lines(["*Failed: *.lock cannot be read: File name too long*"])


def test_a_budget_fails_the_test(run, pytester):
    edit(pytester, "1MiB", "16")
    run("--update-locks").stdout.fnmatch_lines(["*over the budget tp forward 16 B: 32 B, most of it from*"])
    assert not (pytester.path / LOCK).exists()


def test_one_budget_may_be_a_text(run, pytester):
    edit(pytester, 'budgets=["tp forward 1MiB"]', 'budgets="tp forward 1B"')
    run("--update-locks").stdout.fnmatch_lines(["*over the budget tp forward 1 B*"])


def test_two_steps_of_a_test_do_not_write_one_file(run, pytester):
    edit(pytester, '"tp": 4}, budgets', '"tp": 2})\n    communication_lock(step, {"dp": 2, "tp": 4}, budgets')
    run("--update-locks").stdout.fnmatch_lines([f"*two steps of this test write {LOCK}: give each a name=*"])


def test_a_text_in_place_of_the_function_is_told_so(run, pytester):
    edit(pytester, "communication_lock(step,", 'communication_lock("train.py:step",')
    run("--update-locks").stdout.fnmatch_lines(["*Give the function itself: communication_lock(step, mesh)*"])


def test_a_lockfile_of_nonsense_fails_the_test(run, pytester):
    (pytester.path / LOCK).write_text("nonsense")
    run().stdout.fnmatch_lines(["*LockFileError: read the lockfile *: line 1: it is not a lockfile of communication*"])


def test_a_learned_step_is_asked_for_by_name(run, pytester):
    edit(pytester, '"tp": 4}, budgets', '"tp": 4}, learned=True, budgets')
    run("--update-locks").stdout.fnmatch_lines(["*PlanError: learn a step: the program ran no op on a mesh*"])
    edit(pytester, "x.redistribute(", "(x * 2).redistribute(")
    run("--update-locks").assert_outcomes(passed=1)
    written = [path.read_text() for path in pytester.path.rglob("*.lock")]
    assert written
    assert all("plan     learned\n" in text for text in written)
