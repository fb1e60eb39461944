"""Random training programs under learn(): the ranks decide alike, and the numbers are those of one device."""

import random
import re

import pytest
import torch
import torch.distributed as dist
from drawn_training import PLANTED, STEPS, draw, made, places, planting, train

import shardwise as sw
from shardwise.engine import decided
from shardwise.errors import RankDisagreementError
from shardwise.testing import mesh

TIGHT = {"rtol": 1e-9, "atol": 1e-11}


def spreading(training, m):
    """Puts a batch on the mesh."""
    at = places(training.inputs)
    return lambda x: sw.distribute_tensor(
        x, m, [p if p.is_replicate() or p.dim < x.ndim else places("R")[0] for p in at]
    )


def learned(seed, expected):
    """Train the program of a seed under learn() and compare; per step the decisions, and the calls they knew."""
    training = draw(seed)
    m = mesh(training.mesh)
    model = made(training)
    sw.distribute_module(model, m, {name: places(of) for name, of in training.placements.items()})
    steps = []

    def end_of_step():
        in_force = decided.in_force
        decisions = in_force.decisions
        fingerprint = None if decisions is None else decisions.fingerprint
        steps.append((fingerprint, in_force.known, in_force.unknown, here.rounds))

    with sw.learn() as here:
        losses, gradients = train(training, model, spreading(training, m), None, end_of_step)
    torch.testing.assert_close([loss.full_tensor() for loss in losses], expected[0], **TIGHT)
    for step, (mine, whole) in enumerate(zip(gradients, expected[1], strict=True)):
        assert mine.keys() == whole.keys()
        for name, gradient in mine.items():
            torch.testing.assert_close(
                gradient.full_tensor(), whole[name], **TIGHT, msg=lambda m, n=name, s=step: f"{n}, step {s}: {m}"
            )
    return steps


def check(pool, seed):
    training = draw(seed)
    expected = train(training, made(training))
    try:
        ranks = pool.run(learned, seed, expected)
    except Exception as error:
        error.add_note(str(training))
        raise
    assert all(steps == ranks[0] for steps in ranks), f"{training}\n{ranks}"
    return ranks[0]


SAMPLE = [pytest.mark.slow, pytest.mark.sample]
EVERYDAY = (42,)
SAMPLED = (3, 6, 7, 14, 19, 40, 49, 50, 54, 76, 102, 131, 225, 229)
#: Beyond the first hundred: with the sizes of a later batch, strided shards of a decision have no equal pieces.
STRIDED = (102, 131, 225, 229)


def _marked(seed):
    """One program is for every day: one that is learned within a second."""
    if seed in EVERYDAY:
        return seed
    return pytest.param(seed, marks=SAMPLE if seed in SAMPLED else pytest.mark.slow)


@pytest.mark.parametrize("seed", [*map(_marked, [*range(100), *STRIDED])])
def test_a_random_program_is_learned_alike_on_all_ranks(pool, seed):
    steps = check(pool, seed)
    assert len(steps) == STEPS
    assert all(fingerprint is not None for fingerprint, *_ in steps), steps
    # The first step is learned, and the second one runs by it.
    assert steps[1][1] > 0, steps


# -- planted differences -----------------------------------------------------------------------------------------


def disagreeing(seed, kind, place, planted_rank, rounds):
    """What a rank raises when one of them runs something else in a step that is recorded, after so many others."""
    training = draw(seed)
    m = mesh(training.mesh)
    model = made(training)
    sw.distribute_module(model, m, {name: places(of) for name, of in training.placements.items()})
    here = sw.learn()

    def is_planted():
        return dist.get_rank() == planted_rank and here.rounds == rounds and here.records

    with here:
        try:
            train(training, model, spreading(training, m), planting(kind, place, is_planted, m))
        except RankDisagreementError as error:
            return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("seed", [*map(_marked, range(40, 60))])
def test_a_planted_difference_is_named_by_all_ranks(pool, seed):
    rng = random.Random(seed)  # noqa: S311  # chance, no secret
    training = draw(seed)
    for kind in rng.sample(sorted(PLANTED), 4):
        rank, place = rng.randrange(4), rng.randrange(len(training.layers))
        # In a step that runs by decisions another call may communicate. A read never does.
        rounds = rng.randrange(2) if kind == "another read" else 0
        messages = pool.run(disagreeing, seed, kind, place, rank, rounds)
        where = f"{kind} on rank {rank} behind layer {place}, {training}\n{messages}"
        if rounds and set(messages) == {"nothing was raised"}:
            continue  # the program is known after one step
        numbers = {re.search(r"first that differs is number (\d+)", message)[1] for message in messages}
        assert len(numbers) == 1, where
        assert PLANTED[kind][2] in messages[rank], where
        assert len({message for r, message in enumerate(messages) if r != rank}) == 1, where
        assert messages[rank] != messages[rank - 1], where
