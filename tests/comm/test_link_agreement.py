"""All ranks of a mesh cost moves by the same figures, whatever file each of them would find."""

import os
import platform
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
from shardwise.comm.events import observe
from shardwise.comm.link_agreement import agree_on_links, agree_to, forget
from shardwise.errors import LinksFileError, LinksFitError, LinksVersionError, WorkerError
from shardwise.kernel.dispatcher import clear_plans
from shardwise.kernel.mesh import AbstractMesh
from shardwise.planning import strategies
from shardwise.planning.cost import Connection, Link, Links, default_links, links_of, use_links
from shardwise.planning.link_file import Calibration, Site, show


def links(k, ndim=2):
    return Links((Connection.same(Link(1e-5 * k, 1e-6 * k, 1e9 * k)),) * ndim, 1e-6 * k, 1e10)


def entry(k, shape=(2, 2)):
    site = Site(shape, "cpu", platform.machine(), "gloo", (1,) * len(shape))
    return Calibration(site, links(k, len(shape)), "2.13.0", "2026-01-02T03:04:05+00:00")


@contextmanager
def reading(file):
    """On a rank: nothing is agreed yet, nothing is planned, and this is the file."""
    forget()
    clear_plans()
    os.environ["SHARDWISE_LINKS"] = file
    try:
        yield
    finally:
        os.environ["SHARDWISE_LINKS"] = "off"
        forget()


def agreed(shape, *files, order=None):
    """On a rank: what the mesh's ranks agree on when each has a file of its own."""
    mesh = init_device_mesh("cpu", shape) if order is None else DeviceMesh("cpu", order)
    with reading(files[dist.get_rank() % len(files)]):
        before = links_of(mesh)
        for _ in range(2):
            agree_on_links(mesh)
        return links_of(mesh) != before, links_of(mesh)


@pytest.fixture
def files(tmp_path):
    """A file per rank, each with other figures."""
    paths = [tmp_path / f"{k}.json" for k in range(1, 5)]
    for k, path in enumerate(paths, 1):
        path.write_text(show([entry(k)]))
    return [str(path) for path in paths]


def test_the_first_ranks_file_counts_for_all(pool, files):
    assert pool.run(agreed, (2, 2), *files) == [(True, links(1))] * 4


def test_a_mesh_that_counts_its_ranks_otherwise_has_another_first_rank(pool, files):
    def on_rank(*files):
        return agreed((2, 2), *files, order=[[3, 1], [0, 2]])

    assert pool.run(on_rank, *files) == [(True, links(4))] * 4


def test_mesh_dims_serve_a_mesh_of_another_shape(pool, files, tmp_path):
    (tmp_path / "both.json").write_text(show([entry(1), entry(5, (4,))]))
    assert pool.run(agreed, (4, 1), str(tmp_path / "both.json"))[0][1].mesh_dims[0] == links(5).mesh_dims[0]


@pytest.mark.parametrize("here", [["off"], ["off", "/nowhere"]])
def test_without_a_file_all_keep_the_defaults(pool, here):
    default = default_links(AbstractMesh((2, 2)))
    assert pool.run(agreed, (2, 2), *here) == [(False, default)] * 4


def test_what_a_program_set_goes_before_the_file(pool, files):
    def on_rank(files, mine):
        mesh = init_device_mesh("cpu", (2, 2))
        use_links(mesh, mine)
        try:
            return agreed((2, 2), *files)
        finally:
            use_links(mesh, None)

    assert pool.run(on_rank, files, links(9)) == [(False, links(9))] * 4


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (None, LinksFileError),
        ("notes", LinksFileError),
        ('{"version": 99}', LinksVersionError),
        (show([entry(1, (8,))]), LinksFitError),
        (show([]), LinksFitError),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_on_every_rank(pool, tmp_path, files, text, error):
    bad = tmp_path / "bad.json"
    if text is not None:
        bad.write_text(text)
    # The others have good files; it is the first rank's that counts.
    with pytest.raises(WorkerError) as caught:
        pool.run(agreed, (2, 2), str(bad), *files[1:])
    assert [failure.kind for failure in caught.value.errors] == [error.__name__] * 4
    assert all("bad.json" in failure.message for failure in caught.value.errors)


def test_a_folder_that_the_first_rank_cannot_look_into_is_an_error_of_all(pool):
    """Where no file is named, a rank looks whether the user's is there: an error of that left the others waiting."""

    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2))
        with reading(""):
            os.environ["XDG_CONFIG_HOME"] = "/" + "x" * 300 if dist.get_rank() == 0 else "/nowhere"
            try:
                agree_on_links(mesh)
            finally:
                del os.environ["XDG_CONFIG_HOME"]

    with pytest.raises(WorkerError) as caught:
        pool.run(on_rank)
    assert [failure.kind for failure in caught.value.errors] == ["LinksFileError"] * 4
    assert all("links.json: File name too long" in failure.message for failure in caught.value.errors)


def test_planning_without_ranks_asks_nobody():
    mesh = AbstractMesh((2, 2))
    agree_on_links(mesh)
    assert links_of(mesh) == default_links(mesh)


# -- when ------------------------------------------------------------------------------------------------------------


def first_uses(file):
    """On a rank: the figures in use after each way to put a tensor on a mesh, the collectives that observers saw, and
    how often the strategy of a first call was chosen.
    """
    seen, events, choices = [], [], []
    before = strategies.choose
    for put in (
        lambda mesh: sw.distribute_tensor(torch.ones(8, 8), mesh, [sw.Shard(0), sw.Shard(0)], src_data_rank=None),
        lambda mesh: sw.MeshTensor.from_local(torch.ones(2, 8), mesh, [sw.Shard(0), sw.Shard(0)]),
        lambda mesh: sw.ones(8, 8, device_mesh=mesh, placements=[sw.Shard(0), sw.Shard(0)]),
    ):
        mesh = init_device_mesh("cpu", (2, 2))
        with reading(file), observe(events.append):
            rows = put(mesh)
            seen.append(links_of(mesh))
        with reading(file):
            strategies.choose = lambda problem: choices.append(problem) or before(problem)
            try:
                rows @ rows
            finally:
                strategies.choose = before
            assert links_of(mesh) == seen[-1]
    return seen, len(events), len(choices)


def test_ranks_agree_where_a_tensor_is_first_put_on_a_mesh(pool, files):
    assert pool.run(first_uses, files[1]) == [([links(2)] * 3, 0, 3)] * 4


def plan_alone(file):
    mesh = init_device_mesh("cpu", (4,))
    with reading(file):
        whole = sw.distribute_tensor(torch.ones(8), mesh, [sw.Replicate()], src_data_rank=None)
        return (whole * 3).to_local().sum().item() if dist.get_rank() == 2 else None


def test_a_rank_may_plan_alone_on_a_mesh_that_was_met(pool):
    # To ask the others once more would hang.
    assert pool.run(plan_alone, "off", timeout=30.0) == [None, None, 24.0, None]


def redistribute_first(file):
    mesh = init_device_mesh("cpu", (2, 2))
    # Of a shape that no other test has: its way is not known yet.
    rows = sw.distribute_tensor(torch.ones(52, 4), mesh, [sw.Shard(0), sw.Shard(0)], src_data_rank=None)
    with reading(file):
        rows.full_tensor()
        return links_of(mesh)


def test_redistribution_agrees_too(pool, files):
    assert pool.run(redistribute_first, files[2]) == [links(3)] * 4


def test_a_mesh_of_fake_ranks_asks_nobody():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2))
        with reading("/nowhere"):
            agree_on_links(mesh)
            assert links_of(mesh) == default_links(mesh)
    finally:
        dist.destroy_process_group()


def told(mine):
    mesh = init_device_mesh("cpu", (4, 1))
    with reading("/nowhere"):
        agree_to(mesh, mine)
        agree_on_links(mesh)
        return links_of(mesh)


def test_figures_that_are_known_alike_need_no_asking(pool):
    assert pool.run(told, links(6)) == [links(6)] * 4
