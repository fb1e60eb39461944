"""The file of measured figures: what is written is read, and only a file for the mesh at hand is used."""

import json

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import LinksFileError, LinksVersionError
from shardwise.planning.cost import Connection, Link, Links
from shardwise.planning.link_file import Calibration, Site, chosen_file, links_for, parse, show, store


def connection(k):
    return Connection(*(Link(1e-5 * k, 1e-6 * k, 1e9 * k * j) for j in (1, 2, 3, 4)))


SITE = Site((2, 4), "cuda", "A100", "nccl", (2, 1), 2)
LINKS = Links((connection(1), connection(2)), 4e-6, 7e11, connection(3))
ENTRY = Calibration(SITE, LINKS, "2.13.0", "2026-01-02T03:04:05+00:00")

figures = st.floats(1e-9, 1e15, allow_nan=False)
links = st.builds(Link, figures, figures, figures)
connections = st.builds(Connection, *[links] * 4)


@given(st.tuples(connections, connections), figures, figures, st.none() | connections)
def test_what_is_shown_is_read_to_the_bit(mesh_dims, start, bandwidth, whole):
    entry = evolve(ENTRY, links=Links(mesh_dims, start, bandwidth, whole))
    assert parse(show([entry, ENTRY]), "here") == (entry, ENTRY)


def test_a_file_keeps_one_entry_per_kind_of_mesh(tmp_path):
    path = tmp_path / "deep" / "links.json"
    other = evolve(ENTRY, site=evolve(SITE, device="H100"))
    newer = evolve(ENTRY, date="2026-02-03T04:05:06+00:00")
    for entry in (ENTRY, other, newer):
        store(entry, path)
    assert parse(path.read_text(), "here") == (newer, other)
    assert list(path.parent.iterdir()) == [path]


# -- which figures a mesh takes -------------------------------------------------------------------------------------


def test_an_entry_serves_the_meshes_that_lie_as_it_does():
    assert links_for([ENTRY], SITE) == LINKS


@pytest.mark.parametrize("change", [{"device": "H100"}, {"backend": "gloo"}, {"device_type": "cpu"}])
def test_an_entry_of_other_devices_serves_no_mesh(change):
    assert links_for([ENTRY], evolve(SITE, **change)) is None


def test_mesh_dims_serve_meshes_of_another_shape():
    links = links_for([ENTRY], Site((4, 1, 2), "cuda", "A100", "nccl", (1, 1, 2), 2))
    assert (links.mesh_dims[0], links.mesh_dims[2]) == (connection(2), connection(1))
    assert (links.memory_bandwidth, links.whole) == (7e11, None)


@pytest.mark.parametrize(("shape", "hosts"), [((2, 8), (2, 1)), ((4,), (4,)), ((2,), (1,)), ((3, 4), (2, 1))])
def test_a_mesh_takes_all_its_figures_from_measurements_or_none(shape, hosts):
    assert links_for([ENTRY], Site(shape, "cuda", "A100", "nccl", hosts, max(hosts))) is None


def test_the_first_of_equal_entries_wins():
    later = evolve(ENTRY, site=evolve(SITE, mesh_shape=(4,), hosts=(1,), total_hosts=1))
    later = evolve(later, links=Links((connection(7),), 1e-6, 1e9))
    wanted = Site((4, 4), "cuda", "A100", "nccl", (1, 1))
    assert links_for([ENTRY, later], wanted).mesh_dims == (connection(2),) * 2
    assert links_for([later, ENTRY], wanted).mesh_dims == (connection(7),) * 2


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "{}", '{"version": 2}', '{"version": 2, "meshes": [{}]}', '{"version": 2, "meshes": [7]}'],
)
def test_what_is_no_such_file_is_refused(text):
    with pytest.raises(LinksFileError, match=r"here.*shardwise calibrate"):
        parse(text, "here")


@pytest.mark.parametrize("figure", [0, -1.0, "fast", None, float("nan"), float("inf")])
def test_figures_that_are_none_are_refused(figure):
    content = json.loads(show([ENTRY]))
    del content["digest"]
    content["meshes"][0]["mesh_dims"][0]["all_gather"]["bandwidth"] = figure
    with pytest.raises(LinksFileError, match="here"):
        parse(json.dumps(content), "here")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("mesh_dims",), []),
        (("mesh_dims",), {}),
        (("mesh_dims",), ""),
        (("mesh_dims", 0, "size"), 10**40),
        (("hosts",), 1 << 63),
        (("local", "cache_bytes"), 10**4000),
        (("device",), "\ud800"),
        (("device",), "a" * 100_000),
    ],
    ids=["none", "table", "text", "size", "hosts", "bytes", "letter", "long"],
)
def test_values_that_no_mesh_has_are_refused(place, value):
    content = json.loads(show([ENTRY]))
    del content["digest"]
    inner = content["meshes"][0]
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(LinksFileError, match="here") as caught:
        parse(json.dumps(content), "here")
    assert len(str(caught.value).encode()) < 1000


@pytest.mark.parametrize("version", [1, 99])
def test_a_file_of_another_version_is_refused_as_that(version):
    # Version 1 had no figures of operations and caches: planning a step by its figures would be wrong.
    with pytest.raises(LinksVersionError, match=f"version {version}") as caught:
        parse(json.dumps({"version": version, "meshes": "who knows"}), "here")
    assert caught.value.version == version


def test_a_file_that_is_none_is_not_overwritten(tmp_path):
    path = tmp_path / "notes.json"
    path.write_text("my notes")
    with pytest.raises(LinksFileError):
        store(ENTRY, path)
    assert path.read_text() == "my notes"


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "flat").write_text("")
    with pytest.raises(LinksFileError, match="flat"):
        store(ENTRY, tmp_path / "flat" / "links.json")


# -- which file -----------------------------------------------------------------------------------------------------


def test_the_environment_names_the_file(monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDWISE_LINKS", str(tmp_path / "mine.json"))
    assert chosen_file() == (tmp_path / "mine.json", True)
    monkeypatch.setenv("SHARDWISE_LINKS", "off")
    assert chosen_file() == (None, True)


def test_by_default_the_file_is_the_users(monkeypatch, tmp_path):
    monkeypatch.delenv("SHARDWISE_LINKS")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path, named = chosen_file()
    assert not named
    assert path.name == "links.json"
