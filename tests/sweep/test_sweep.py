"""The sweep sees what it is there for, and a fixed sample of it passes."""

import json
import random

import pytest
from attrs import evolve
from click.testing import CliRunner
from database import BACKWARD, FORWARD, IN_PLACE, entries, family_of, has
from libraries import LIBRARIES
from run import main, measure
from trial import Trial, check

from shardwise.testing import WorkerPool

TRIAL = Trial("add", "shardwise", (4,), FORWARD, limit=2, draws=1, seed="0")
SOUND = ("pass", "no rule", "refused", "no sample")


def check_with_a_wrong_number(trial):
    from libraries import LIBRARIES

    right = LIBRARIES["shardwise"]
    LIBRARIES["wrong"] = evolve(right, distribute=lambda whole, *where: right.distribute(whole + 1, *where))
    return check(evolve(trial, library="wrong"))


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD, IN_PLACE])
def test_a_wrong_number_is_seen(pool, direction):
    trial = evolve(TRIAL, name="mul", direction=direction)
    assert {case[0] for case in pool.run(check_with_a_wrong_number, trial)[0]} == {"wrong"}
    assert {case[0] for case in pool.run(check, trial)[0]} == {"pass"}


@pytest.mark.slow
@pytest.mark.sample
def test_an_operator_that_is_only_slow_is_no_hang():
    (entry,) = entries("^mul$")
    with WorkerPool(4) as pool:
        assert measure(pool, entry, evolve(TRIAL, name="mul"), waits=(0.001, 100)).outcome == "pass"
        assert measure(pool, entry, evolve(TRIAL, name="mul"), waits=(0.001, 0.001)).outcome == "hang"


def drawn(count):
    chosen = random.Random(20).sample([e for e in entries() if has(e.record, BACKWARD)], count)  # noqa: S311
    return [e.name for e in chosen]


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_no_operator_of_a_fixed_sample_gives_a_wrong_number(pool, shape):
    names = set(drawn(12))
    for entry in entries():
        if entry.name in names:
            line = measure(pool, entry, evolve(TRIAL, name=entry.name, shape=shape, direction=BACKWARD))
            assert line.outcome in SOUND, line


@pytest.mark.slow
@pytest.mark.sample
def test_a_gradient_that_rounding_decides_is_judged_in_double_precision(pool):
    """In float32 one placement of this sample is 0.02 away, in float64 4e-11: 4e5 roundings in both."""
    (entry,) = entries("^pca_lowrank$")
    line = measure(pool, entry, evolve(TRIAL, name=entry.name, shape=(2, 2), direction=BACKWARD, limit=8, draws=3))
    assert (line.outcome, line.passed) == ("pass", line.cases)


@pytest.mark.slow
@pytest.mark.sample
def test_every_operator_has_a_name_of_its_own_and_a_family():
    names = [e.name for e in entries()]
    assert len(set(names)) == len(names) > 700
    assert family_of("_foreach_add") == "foreach"
    assert family_of("linalg.svd") == "linear algebra"
    assert set(LIBRARIES) == {"shardwise", "dtensor"}


@pytest.mark.slow
@pytest.mark.sample
def test_the_command_takes_its_options(tmp_path):
    path = tmp_path / "lines.json"
    options = [
        "--only",
        "^neg$",
        "--mesh",
        "2x2",
        "--direction",
        FORWARD,
        "--samples",
        "1",
        "--draws",
        "1",
        "--partial",
    ]
    outcome = CliRunner().invoke(main, [*options, "--json", str(path)])
    assert outcome.exit_code == 0, outcome.output
    assert [line["outcome"] for line in json.loads(path.read_text())] == ["pass"]
