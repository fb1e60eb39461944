"""Calibration on real ranks: what is measured is the same everywhere, is kept, and costs what is executed."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.comm.events import observe
from shardwise.comm.link_agreement import forget
from shardwise.comm.redistribute import runner
from shardwise.errors import LinksFileError, LinksFitError, WorkerError
from shardwise.kernel.placements import parse_placement
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.cost import KINDS, links_of
from shardwise.planning.link_file import parse
from shardwise.planning.path import shortest_path
from shardwise.testing import mesh
from shardwise.tools.calibrate import calibrate, time_redistributions, typical_pairs

SMALL = {"largest": 1 << 15, "rounds": 1}


def measured(shape, path=None):
    device_mesh = init_device_mesh("cpu", shape)
    heard = []
    try:
        calibration = calibrate(device_mesh, path, **SMALL, save=path is not None, tell=lambda *how: heard.append(how))
        return calibration, links_of(device_mesh), heard
    finally:
        forget()


@pytest.mark.parametrize("shape", [(4,), (2, 2), (2, 1, 2)])
def test_all_ranks_have_the_same_figures_and_use_them(pool, shape):
    results = pool.run(measured, shape)
    calibration, in_use, heard = results[0]
    assert [(c, used) for c, used, _ in results] == [(calibration, in_use)] * 4
    assert in_use == calibration.links
    assert (calibration.site.mesh_shape, calibration.site.backend) == (shape, "gloo")
    assert calibration.site.total_hosts == 1
    assert calibration.torch == torch.__version__
    assert (calibration.links.whole is None) == (shape == (4,))
    assert [done for done, _ in heard] == list(range(1, heard[-1][1] + 1))


def test_the_first_rank_keeps_the_figures(pool, tmp_path):
    path = tmp_path / "links.json"
    results = pool.run(measured, (2, 2), str(path))
    assert parse(path.read_text(), str(path)) == (results[0][0],)


def test_figures_that_cannot_be_kept_are_an_error_on_every_rank(pool, tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(WorkerError) as caught:
        pool.run(measured, (2, 2), str(tmp_path / "notes"))
    assert [failure.kind for failure in caught.value.errors] == [LinksFileError.__name__] * 4


def test_mesh_dims_through_one_hosts_memory_share_their_figures(pool):
    first, second = pool.run(measured, (2, 2))[0][1].mesh_dims
    assert first == second


def test_one_rank_has_nothing_to_measure():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(LinksFitError, match="one rank"):
            sw.calibrate(init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()


def test_calibrate_is_public():
    assert sw.calibrate is calibrate
    with pytest.raises(AttributeError, match="callibrate"):
        sw.callibrate  # noqa: B018  # asked for on purpose


def tried():
    device_mesh = mesh((2, 2))
    return [
        ([s.kind for s in trial.planned.steps], trial.predicted, trial.seconds)
        for trial in time_redistributions(device_mesh, typical_pairs(device_mesh, 4096), rounds=1)
    ]


def test_redistributions_are_held_against_the_model(pool):
    results = pool.run(tried)
    assert all(result == results[0] for result in results)
    assert {kind for kinds, *_ in results[0] for kind in kinds} >= {"all_gather", "all_to_all", "slice"}
    assert all(predicted > 0 and seconds > 0 for _, predicted, seconds in results[0])


# -- the estimate is the sum of what is executed ---------------------------------------------------------------------

CASES = [
    ((4,), "P(sum)", "R"),
    ((4,), "P(max)", "R"),
    ((4,), "P(avg)", "S(1)"),
    ((4,), "S(0)", "R"),
    ((4,), "S(1)", "S(0)"),
    ((4,), "R", "S(0)"),
    ((2, 2), "P(sum) P(sum)", "R R"),
    ((2, 2), "P(sum) P(sum)", "S(0) R"),
    ((2, 2), "S(0) S(0)", "R R"),
    ((2, 2), "S(0) S(1)", "S(1) S(0)"),
    ((2, 2), "S(0) P(sum)", "S(1) S(1)"),
    ((2, 2), "R S(0)", "P(sum) R"),
    ((2, 1, 2), "S(0) S(0) S(0)", "S(1) R S(1)"),
    ((2, 1, 2), "P(sum) R S(0)", "R S(1) S(0)"),
]


def executed(shape, size, src, dst):
    """The steps of a redistribution, and the collectives that running it issues, as this rank sees them."""
    device_mesh, meta = mesh(shape), TensorMeta.contiguous(size, torch.float32)
    before, after = (TensorSpec(device_mesh, [parse_placement(w) for w in words.split()], meta) for words in (src, dst))
    local = torch.ones(before.local_shape())
    runner(before, after)(local)  # groups are made
    events = []
    with observe(events.append):
        runner(before, after)(local)
    return shortest_path(before, after), events


def bytes_of_inputs(step, mesh_shape):
    """The bytes that a rank with the largest shards sends in a step, from the bytes that the step is costed by."""
    n = math.prod(mesh_shape[m] for m in step.mesh_dims)
    return step.nbytes * (n if step.kind in ("reduce_scatter", "all_to_all") else 1)


@pytest.mark.parametrize("size", [(64, 64), (512, 256)])
@pytest.mark.parametrize(("shape", "src", "dst"), CASES)
def test_what_is_costed_is_what_is_executed(pool, shape, size, src, dst):
    for planned, events in pool.run(executed, shape, size, src, dst):
        steps = [step for step in planned.steps if step.kind in KINDS]
        assert [(e.kind, e.mesh_dims) for e in events] == [(s.kind, s.mesh_dims) for s in steps]
        assert [e.nbytes for e in events] == [bytes_of_inputs(step, shape) for step in steps]
        assert planned.cost == pytest.approx(sum(step.cost for step in planned.steps))


@pytest.mark.parametrize(("shape", "src", "dst"), CASES)
def test_uneven_shards_are_costed_by_the_largest(pool, shape, src, dst):
    results = pool.run(executed, shape, (37, 29), src, dst)
    for planned, events in results:
        steps = [step for step in planned.steps if step.kind in KINDS]
        assert [(e.kind, e.mesh_dims) for e in events] == [(s.kind, s.mesh_dims) for s in steps]
        assert all(e.nbytes <= bytes_of_inputs(step, shape) for e, step in zip(events, steps, strict=True))
