"""Random programs of the whole registry, on random meshes and placements, against one device.

Which programs come is decided by their seeds. A long run is cut into slices, so that one that was stopped goes on where
it was: ``pytest -m slow tests/programs/test_programs.py -k 6-ranks-slice-3``.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import made_programs
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from shardwise.testing.programs import draw
from shardwise.testing.strategies import mesh_shapes

SLICE = 250
SLICES = int(os.environ.get("SHARDWISE_PROGRAM_SLICES", "8"))
"""Slices of the long run, of 250 programs each, for each number of ranks."""

LONG = [
    pytest.param(ranks, number, id=f"{ranks}-ranks-slice-{number}") for ranks in (4, 6, 8) for number in range(SLICES)
]


def check_seeds(pool, seeds):
    """Check the programs of these seeds; most calls must have run, or the programs say nothing."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        try:
            counts += made_programs.check(pool, made_programs.drawn_program(pool.world_size, seed)).counts
        except AssertionError as error:
            raise AssertionError(f"the program of seed {seed} on {pool.world_size} ranks: {error}") from None
    calls = sum(times for what, times in counts.items() if what.startswith("call "))
    assert counts["call ran"] > 0.6 * calls, counts
    return counts


def test_programs_compute_what_one_device_does(pool):
    check_seeds(pool, range(5))


@pytest.mark.slow
@pytest.mark.sample
def test_a_fixed_sample_of_programs(pool):
    counts = check_seeds(pool, range(1000, 1200))
    assert counts["gradients compared"] > 30


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "number"), LONG)
def test_many_programs(pool_of, ranks, number):
    start = 1_000_000 * ranks + SLICE * number
    check_seeds(pool_of(ranks), range(start, start + SLICE))


# hypothesis remembers what went wrong and tries it first; programs are shrunk by our own means, which know what a
# program is.
@pytest.mark.slow
@settings(
    max_examples=1000,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(shape=mesh_shapes(ranks=4), seed=st.integers(0, 2**32 - 1))
def test_programs_that_hypothesis_draws(pool, shape, seed):
    rng = random.Random(seed)  # noqa: S311  # chance, no secret
    made_programs.check(pool, draw(made_programs.catalogue(), rng, shape))
