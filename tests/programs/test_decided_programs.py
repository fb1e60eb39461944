"""Random programs by random plans, against one device: the planner may choose what no single op would choose."""

import made_programs
import pytest
from decided_programs import check_decided, replay_decided, with_ends

from shardwise.testing.programs.replay import replay


def check_seeds(pool, seeds):
    for seed in seeds:
        program = made_programs.drawn_program(pool.world_size, seed)
        try:
            check_decided(pool, program, seed)
        except Exception as error:
            pool.close()
            raise AssertionError(f"the program of seed {seed}: {error}") from error


def layouts(pool, program, run, *args):
    """Where the first rank holds the results of each line."""
    everything = [list(line.names) for line in program.lines]
    outcomes = pool.run(run, program, everything, *args)[0]
    return [held.placements for o in outcomes for _, held in sorted(o.values.items())]


def test_decisions_by_chance_change_where_results_lie(pool):
    for seed in range(5, 45):  # some steps have no plan: they go on as before
        program = with_ends(made_programs.drawn_program(pool.world_size, seed))
        plain, decided = (layouts(pool, program, run, *more) for run, more in ((replay, ()), (replay_by, (seed,))))
        assert len(plain) == len(decided)
        if plain != decided:
            return
    pytest.fail("no decision changes a layout")


def replay_by(program, watched, seed):
    return replay_decided(program, watched, seed=seed)


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.timeout(600)
def test_a_fixed_sample_of_decided_programs(pool):
    check_seeds(pool, range(40))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(4))
def test_many_decided_programs(pool, number):
    check_seeds(pool, range(500 * number, 500 * (number + 1)))
