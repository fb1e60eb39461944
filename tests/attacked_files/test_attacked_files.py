"""Files from others, attacked: each is an error that names the file, or means what it meant; nothing else happens."""

import json
import shutil
import traceback
import zlib
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from attrs import evolve
from mutations import drawing, misplaced, mutated, watched
from torch import nn

from shardwise import Replicate, Shard, checkpoint
from shardwise.checkpoint.decisions import read_decisions
from shardwise.checkpoint.folder import Checkpoint
from shardwise.engine.decided import in_force
from shardwise.errors import CheckpointError, LinksError, LockFileError, PlanError, ShardingError
from shardwise.planning.cost import Connection, Link, Links
from shardwise.planning.link_file import Calibration, Site, read, show
from shardwise.program.decisions import Decision, Decisions
from shardwise.program.lock_file import parse, read_lock
from shardwise.program.plan_file import Line, PlanFile
from shardwise.program.step_plan import StepPlan, read_plan

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled",
    "ignore::DeprecationWarning",
    "ignore::shardwise.errors.RulesWarning",  # a list of rules that lost one means what it says
)

EVERY_DAY = 100
MANY = [
    pytest.param(EVERY_DAY, id="everyday"),
    pytest.param(10_000, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
]


@contextmanager
def outcome_of(kind, folder, file, what):
    """Yields a list that gets the error. Another error than one of that kind, with the file's name, is a failure."""
    raised = []
    try:
        with watched(folder):
            yield raised
    except ShardingError as error:
        raised.append(error)
        trace = traceback.format_exc()
    if raised:
        (error,) = raised
        assert isinstance(error, kind), f"{what}: {trace}"
        assert type(error) not in (ShardingError, CheckpointError), f"{what}: {trace}"
        assert file in str(error), f"{what}: does not name {file}: {error}"
        assert len(str(error)) < 3000, f"{what}: {len(str(error))} letters"


# -- links files ---------------------------------------------------------------------------------------------------


def _calibrations(k):
    link = Link(1e-5 * k, 1e-6, 1e9)
    links = Links((Connection.same(link), Connection.same(link)), 4e-6, 7e11, Connection.same(link))
    entry = Calibration(Site((2, 4), "cuda", "A100", "nccl", (2, 1), 2), links, "2.13.0", "2026-01-02T03:04:05+00:00")
    return (entry, evolve(entry, site=evolve(entry.site, device="H100")))


def damaged(seed, path, text, other):
    """Write a file with bytes changed, or with something else in its place; gives what was done."""
    rng = drawing(seed)
    path.parent.mkdir()
    path.write_bytes(text)
    if seed % 25 == 0:
        return misplaced(rng, path)
    what, data = mutated(rng, text, [other])
    path.write_bytes(data)
    return what


@pytest.mark.parametrize("number", MANY)
def test_links_files(tmp_path, number):
    good, refused = _calibrations(1), 0
    text, other = show(good).encode(), show(_calibrations(2)).encode()
    for seed in range(number):
        path = tmp_path / "in" / "links.json"
        what = damaged(seed, path, text, other)
        with outcome_of(LinksError, tmp_path, path.name, f"seed {seed}, {what}") as raised:
            found = read(path)
            # A user may link a file; a whole other file is another file of links.
            assert found == good or (what == "spliced" and path.read_bytes() == other), f"seed {seed}, {what}"
        refused += bool(raised)
        shutil.rmtree(path.parent)
    assert refused > number * 0.8


# -- plans ---------------------------------------------------------------------------------------------------------


def _plan(k):
    line = Line("blocks.*", "aten.mm.default", "forward", {"tp": "R"}, "0.1 ms cheaper", 32 + k)
    file = PlanFile(
        "train.py:step",
        ("dp", "tp"),
        (2, 4),
        "defaults",
        {"milliseconds": 1.5, "bytes": 1 << 20},
        {"blocks.*.weight": {"tp": "S(0)"}, "*": {}},
        {"tokens": {"dp": "S(0)"}},
        (line,),
        (evolve(line, operand="mat2", phase="backward"),),
        {"forward": ("all_gather tp 32 times",), "backward": ()},
    )
    places = (Shard(0), Replicate())
    decision = Decision((places, None), (places, None), (places,), ((Replicate(), Shard(1)),))
    return StepPlan(file, Decisions((2, 4), {7 + k: (decision,)}, {8: (decision,)}, 4, frozenset({3})))


@pytest.mark.parametrize("number", MANY)
def test_plans(tmp_path, number):
    good, refused = _plan(0), 0
    folders = [tmp_path / "good", tmp_path / "other"]
    for folder, plan in zip(folders, (good, _plan(1)), strict=True):
        folder.mkdir()
        plan.save(folder / "a.plan")
    names = ("a.plan", "a.plan.decisions.json")
    for seed in range(number):
        rng, name = drawing(seed), names[seed % 2]
        folder = tmp_path / "in" / "it"
        shutil.copytree(folders[0], folder)
        if seed % 25 == 0:
            what = misplaced(rng, folder / name)
        else:
            what, data = mutated(rng, (folder / name).read_bytes(), [(folders[1] / name).read_bytes()])
            (folder / name).write_bytes(data)
        with outcome_of(PlanError, tmp_path, "a.plan", f"seed {seed}, {name}, {what}") as raised:
            found = read_plan(folder / "a.plan")
            # Reasons and figures may be edited; what a run does by the plan may not.
            assert found.file.digest == good.file.digest
            assert found.decisions.fingerprint == good.decisions.fingerprint
            found.file.text()
        refused += bool(raised)
        shutil.rmtree(tmp_path / "in")
    assert refused > number * 0.6


# -- lockfiles of communication --------------------------------------------------------------------------------------

LOCKS = Path(__file__).parents[1] / "tools" / "locks"


@pytest.mark.parametrize("number", MANY)
def test_lockfiles(tmp_path, number):
    """A name may be edited, and is then another one: a comparison shows it. What is read is a whole lockfile."""
    text, other = ((LOCKS / name).read_bytes() for name in ("demo.lock", "seven_billion.lock"))
    refused = 0
    for seed in range(number):
        path = tmp_path / "in" / "communication.lock"
        what = damaged(seed, path, text, other)
        with outcome_of(LockFileError, tmp_path, "communication.lock", f"seed {seed}, {what}") as raised:
            found = read_lock(path)
            assert parse(found.text(), "") == found
        refused += bool(raised)
        shutil.rmtree(tmp_path / "in")
    assert refused > number * 0.6


# -- checkpoints ---------------------------------------------------------------------------------------------------


def _state(seed, *, trained):
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if trained:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    more = {"tensor": torch.randn(4), "list": [1, torch.randn(2)], "name": f"run {seed}", "counts": (seed, 2.5)}
    return {"model": model, "optimizer": optimizer, "more": more}


def _bits(value):
    """All that a state is, as plain values."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, tuple(value.shape), value.detach().reshape(-1).tolist())
    if isinstance(value, (nn.Module, torch.optim.Optimizer)):
        return _bits(value.state_dict())
    if isinstance(value, dict):
        return {key: _bits(inner) for key, inner in value.items()}
    return [_bits(inner) for inner in value] if isinstance(value, (list, tuple)) else value


@cache
def _saved(kind, seed):
    """The bytes of a checkpoint's files."""
    import tempfile

    state = _state(seed, trained=True)
    with tempfile.TemporaryDirectory() as folder:
        if kind == "ours":
            path = checkpoint.save(state, folder, step=seed).path
        else:
            path = Path(folder) / "torch"
            content = {"model": state["model"].state_dict(), "more": state["more"]}
            dcp.save(content, checkpoint_id=path)
        return {file.name: file.read_bytes() for file in path.iterdir()}


def _write(folder, files):
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def _resealed(files):
    """With checksums that hold: what an attacker writes, and what a disk cannot."""
    contents = json.loads(files["checkpoint.json"])
    contents["files"] = {n: [len(d), zlib.crc32(d)] for n, d in files.items() if n != "checkpoint.json"}
    return {**files, "checkpoint.json": json.dumps(contents).encode()}


@pytest.mark.parametrize("kind", ["ours", "resealed", "torch"])
@pytest.mark.parametrize("number", MANY)
def test_checkpoints(tmp_path, kind, number):
    files, others = (_saved("torch" if kind == "torch" else "ours", seed) for seed in (1, 2))
    if kind == "resealed":
        files = {**files, "decisions.json": json.dumps(_plan(0).decisions.as_json()).encode()}
        files = _resealed(files)
    folder = tmp_path / "in" / ("it" if kind == "torch" else "step-00000001")
    names = [name for name in sorted(files) if not (kind == "resealed" and name == "checkpoint.json")]
    state = _state(3, trained=False)
    if kind == "torch":
        del state["optimizer"]
    _write(folder, files)
    checkpoint.load(state, folder)
    good, refused = _bits(state), 0
    for seed in range(number):
        rng, name = drawing(seed), names[seed % len(names)]
        _write(folder, files)
        if seed % 20 == 0:
            what = misplaced(rng, folder / name)
        else:
            what, data = mutated(rng, files[name], [others.get(name, b"")])
            _write(folder, _resealed({**files, name: data}) if kind == "resealed" else {**files, name: data})
        state = _state(4, trained=True)
        if kind == "torch":
            del state["optimizer"]
        before, changed = _bits(state), f"seed {seed}, {name}, {what}"
        with outcome_of(CheckpointError, folder, folder.name, changed) as raised:
            checkpoint.load(state, folder)
            if name == "decisions.json":
                read_decisions(Checkpoint(1, 0, folder))
        if raised and name != "decisions.json":
            assert _bits(state) == before, f"{changed}: loaded in part"
        elif not raised and kind == "ours":
            assert _bits(state) == good, changed
        refused += bool(raised)
    assert refused > number * (0.75 if kind == "ours" else 0.4)
    assert not Path("attacked").exists()
    assert in_force.decisions is None
