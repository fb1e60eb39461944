"""Where results lie, what is sent for it, and what may be asked for instead."""

import re
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.comm.events import observe
from shardwise.discovery.process import default_registry
from shardwise.kernel import dispatcher
from shardwise.testing import mesh

README = Path(__file__).parents[1] / "README.md"
F = torch.fft


def placed(tensor):
    return [p.dim if isinstance(p, Shard) else None for p in tensor.placements]


def collectives(run):
    """What a run issues when it is not the first: then ranks agree on plans and groups."""
    run()
    found = []
    with observe(found.append):
        run()
    return found


def moved(run):
    """How many collectives of a run move shards, agreements on values aside, and the bytes that this rank gives away.

    Where pieces are uneven the bytes are right for the mean of all ranks, which is what they receive, too.
    """
    shares = {"all_to_all": lambda n: (n - 1) / n, "all_gather": lambda n: n - 1}
    found = [e for e in collectives(run) if e.kind in shares]
    return len(found), sum(e.nbytes * shares[e.kind](e.group_size) for e in found)


def grid(*layout, shape=(16, 16, 16), dtype=torch.complex128, on=(2, 2)):
    x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    return x, sw.distribute_tensor(x, mesh(on), [Replicate() if d is None else Shard(d) for d in layout])


# -- as it lay ---------------------------------------------------------------------------------------------------


def kept():
    _, x = grid(0, 1)
    spectra = [F.fftn(x), F.fft(x, dim=0), F.fft(x, dim=2), F.rfftn(x.real), F.irfftn(x)]
    halved = F.rfft(x.real.redistribute(placements=[Shard(0), Shard(2)]))
    single = F.rfft(sw.distribute_tensor(torch.ones(8), mesh((4,)), [Shard(0)]))
    return [placed(s) for s in spectra], placed(halved), placed(single)


def test_a_result_lies_as_its_operand_but_for_half_spectra_that_would_be_cut(pool):
    assert pool.run(kept)[0] == ([[0, 1]] * 5, [0, 0], [None])


# -- in place of the transformed dim -----------------------------------------------------------------------------


def into_given():
    whole, x = grid(0, 1)
    _, out = grid(1, 2)
    _, wanted = moved(lambda: F.fftn(x, out=out))
    _, usual = moved(lambda: F.fftn(x))
    shard = out.to_local().nbytes
    return placed(out), torch.allclose(out.full_tensor(), F.fftn(whole)), wanted / shard, usual / shard


def test_out_chooses_the_layout_and_halves_what_is_sent(pool):
    assert pool.run(into_given) == [([1, 2], True, 1.0, 2.0)] * 4


def transpose():
    from shardwise_fft.rules import TRANSPOSING  # rules are not sent to workers

    return default_registry().override(*TRANSPOSING)


def transposed(layout, on):
    undo = transpose()
    try:
        whole, x = grid(*layout, on=on)
        y = F.fftn(x.requires_grad_())
        back = F.ifftn(y)
        back.abs().square().sum().backward()
        right = torch.allclose(y.full_tensor(), F.fftn(whole)) and torch.allclose(back.full_tensor(), whole)
        return placed(y), placed(back), right and torch.allclose(x.grad.full_tensor(), 2 * whole)
    finally:
        undo()


@pytest.mark.parametrize(
    ("layout", "on", "there"), [([0], (4,), [1]), ([2], (4,), [0]), ([0, 1], (2, 2), [1, 2]), ([2, 0], (2, 2), [0, 1])]
)
def test_transposing_rules_go_round_and_come_back(pool, layout, on, there):
    assert pool.run(transposed, layout, on) == [(there, layout, True)] * 4


# -- what is sent --------------------------------------------------------------------------------------------------


def steps_of(x, dims):
    plans = []
    with dispatcher.observe(plans.append):
        F.fftn(x, dim=dims)
    return plans[0].names


def test_the_rows_taken_can_be_seen(pool):
    def rows():
        return steps_of(grid(0, 1)[1], (0, 2))

    assert pool.run(rows)[0] == ("transform 0", "shard d1")


def readme(*examples):
    """The names that examples of the README define, one behind the other."""
    program = {"__name__": "poisson"}
    found = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(found) == 3
    for example in examples:
        exec(found[example], program)  # noqa: S102  our own page
    return program


# Per call: the function, its operand's shape, layout and mesh, whether the rules transpose, and the bytes that a rank
# sends in each all-to-all. A shard of a cube is 2048 bytes, of a real one 1024, of half its spectrum (5 of 8) 1280;
# a gather sends a shard per rank. Nobody asks what comes.
CUBE = (8, 8, 8)
EXCHANGES = {
    "whole": (F.fft, CUBE, [0, 1], (2, 2), False, []),
    "swap": (F.fftn, CUBE, [0], (4,), True, [2048]),
    "swap of two mesh dims": (F.fftn, CUBE, [0, 0], (2, 2), True, [2048]),
    "pencils": (F.fftn, CUBE, [0, 1], (2, 2), True, [2048] * 2),
    "pencils there and back": (F.fftn, CUBE, [0, 1], (2, 2), False, [2048] * 4),
    "along": (F.fft, CUBE, [2], (4,), False, [2048] * 2),
    "along two mesh dims": (F.fft, CUBE, [2, 2], (2, 2), False, [2048] * 2),
    "four steps": (F.fft, (64,), [0], (4,), False, [256] * 3),
    "four steps on two mesh dims": (F.fft, (64,), [0, 0], (2, 2), False, [256] * 3),
    "gathered": (F.rfft, (64,), [0], (4,), False, [4 * 128]),
    "half a spectrum": (lambda x: F.rfftn(x.real), CUBE, [2], (4,), False, [1024, 1280]),
}


def exchanged(run, shape, layout, on, transposing):
    undo = transpose() if transposing else lambda: None
    try:
        x = grid(*layout, shape=shape, on=on)[1]
        x = x.real if run is F.rfft else x
        return [(e.kind, e.nbytes) for e in collectives(lambda: run(x))]
    finally:
        undo()


def all_exchanged():
    return {name: exchanged(*call) for name, (*call, _) in EXCHANGES.items()}


def test_an_exchange_is_one_collective(pool):
    expected = {name: [("all_to_all", n) for n in nbytes] for name, (*_, nbytes) in EXCHANGES.items()}
    assert pool.run(all_exchanged)[0] == expected


def poisson(transposing):
    program = readme(0, 2) if transposing else readme(0)
    try:
        _, f = program["exact"](64)
        x = sw.distribute_tensor(f, mesh((2, 2)), [Shard(0), Shard(1)])
        return program["main"](), moved(lambda: program["solve"](x)), moved(x.full_tensor)
    finally:
        program.get("undo", lambda: None)()


@pytest.mark.parametrize(("transposing", "exchanges", "mean"), [(False, 8, 2162688), (True, 4, 1081344)])
def test_the_readme_solves_its_equation(pool, transposing, exchanges, mean):
    errors, sent, gathered = zip(*pool.run(poisson, transposing), strict=True)
    assert max(errors) < 1e-13
    assert [count for count, _ in sent] == [exchanges] * 4
    assert sum(nbytes for _, nbytes in sent) == 4 * mean
    assert gathered == ((2, 3 * 64**3 * 8 / 4),) * 4


def readme_spectrum():
    whole, x = grid(0, 1)
    y = readme(0, 1)["spectrum_of"](x)
    return placed(y), torch.allclose(y.full_tensor(), F.fftn(whole))


def test_the_readme_names_a_layout(pool):
    assert pool.run(readme_spectrum) == [([1, 2], True)] * 4
