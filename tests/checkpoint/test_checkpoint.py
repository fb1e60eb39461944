"""Checkpoints: what each rank writes, moves between meshes and layouts, other programs' files, and interruptions."""

import copy
import json
import math
import os
import pickle
import shutil
import signal
import threading
import time
from itertools import chain, count
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, reject
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from shardwise import MeshTensor, Partial, Replicate, Shard, checkpoint
from shardwise.checkpoint import folder
from shardwise.checkpoint.decisions import read_decisions
from shardwise.comm.events import observe
from shardwise.engine import decided
from shardwise.errors import (
    CheckpointDtypeError,
    CheckpointError,
    CheckpointFileError,
    CheckpointKeyError,
    CheckpointShapeError,
    CheckpointStepError,
    CheckpointValueError,
    LayoutError,
    PlacementError,
    RankDisagreementError,
    WorkerError,
)
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import is_strided, shard_dim, strided_shard
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.program.decisions import Decision, Decisions
from shardwise.tensor.dcp_chunks import chunks_of
from shardwise.testing import mesh
from shardwise.testing.pool import WorkerPool

SINGLE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


# -- chunks ------------------------------------------------------------------------------------------------------


@st.composite
def specs(draw):
    shape = draw(st.lists(st.integers(0, 7), max_size=3))
    mesh_shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    choices = [Replicate(), *map(Shard, range(len(shape)))]
    choices += [strided_shard(d, f) for d, n in enumerate(shape) for f in (2, 3) if n % f == 0]
    placements = [draw(st.sampled_from(choices)) for _ in mesh_shape]
    try:
        return TensorSpec(AbstractMesh(mesh_shape), placements, TensorMeta.contiguous(shape, torch.float32))
    except PlacementError:  # a mesh dim cuts the pieces of a strided shard
        return reject()


@given(specs())
def test_the_chunks_of_all_ranks_tile_the_tensor_once(spec):
    chunks = [chunks_of(spec, coordinate) for coordinate in spec.mesh.coordinates()]
    # A checkpoint takes chunks that start at one place for copies of one chunk.
    by_offset = {}
    for chunk in chain(*chunks):
        assert by_offset.setdefault(tuple(chunk.offsets), tuple(chunk.sizes)) == tuple(chunk.sizes)
    times = torch.zeros(spec.shape, dtype=torch.int64)
    for offsets, sizes in by_offset.items():
        times[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    assert torch.equal(times, torch.ones_like(times))
    for coordinate, of_rank in zip(spec.mesh.coordinates(), chunks, strict=True):
        if of_rank:
            assert sum(math.prod(chunk.sizes) for chunk in of_rank) == math.prod(spec.local_shape(coordinate))
            assert len(of_rank) == 1 or spec.is_strided


def test_an_empty_shard_does_not_hide_its_neighbour():
    # The last shard of the first half is empty and starts where the second half does.
    spec = TensorSpec(AbstractMesh((2, 4)), [Shard(0), Shard(0)], TensorMeta.contiguous((5,), torch.float32))
    assert spec.local_shape_and_offset((0, 3)) == ((0,), (3,))
    assert chunks_of(spec, (0, 3)) == []
    (chunk,) = chunks_of(spec, (1, 0))
    assert tuple(chunk.sizes) == (1,)


def test_a_partial_tensor_is_refused():
    spec = TensorSpec(AbstractMesh((2, 2)), [Partial(), Shard(0)], TensorMeta.contiguous((4,), torch.float32))
    with pytest.raises(LayoutError, match=r"partial \(sum on mesh dim 0\).*redistribute"):
        chunks_of(spec, (0, 0))


# -- a model and its optimizer, to another mesh ------------------------------------------------------------------

TENSOR_PARALLEL = {"0.*": [Shard(0)], "2.weight": [Shard(1)]}
DATA_SHARDED = {"*": [Shard(0)]}
TWICE_SHARDED = {"*": [Shard(0), Shard(0)]}
ROWS_AND_COPIES = {"*.weight": [Replicate(), Shard(1)]}


class Run:
    """A model that is trained on random numbers, on a mesh or on one device."""

    def __init__(self, mesh_shape=None, plan=None, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(7, 10), nn.ReLU(), nn.Linear(10, 3))
        self.mesh = None if mesh_shape is None else mesh(mesh_shape)
        if self.mesh is not None:
            sw.distribute_module(self.model, self.mesh, plan, src_data_rank=None)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, **options)

    def state(self, **more):
        return {"model": self.model, "optimizer": self.optimizer, "run": {"done": 0, "name": "x"}, **more}

    def steps(self, first, number):
        losses = []
        for step in range(first, first + number):
            batch = torch.randn(8, 7, generator=torch.Generator().manual_seed(step))
            sharded = batch if self.mesh is None else sw.distribute_tensor(batch, self.mesh, src_data_rank=None)
            loss = self.model(sharded).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach().item())
        return losses


def save_run(directory, mesh_shape, plan, options):
    run = Run(mesh_shape, plan, **options)
    run.steps(0, 3)
    state = run.state()
    state["run"]["done"] = 3
    saved = checkpoint.save(state, directory, step=3)
    assert saved == checkpoint.latest(directory)
    return run.steps(3, 3)


def load_run(directory, mesh_shape, plan, options):
    run = Run(mesh_shape, plan, **options)
    state = run.state()
    checkpoint.load(state, directory)
    assert state["run"] == {"done": 3, "name": "x"}
    return run.steps(3, 3)


def load_on_two(directory):
    two = DeviceMesh("cpu", [0, 1])  # all ranks make it
    if dist.get_rank() > 1:
        return None
    run = Run()
    sw.distribute_module(run.model, two, DATA_SHARDED, src_data_rank=None)
    run.mesh, run.optimizer = two, torch.optim.AdamW(run.model.parameters(), lr=0.01, fused=True)
    checkpoint.load(run.state(), directory, process_group=two.get_group())
    return run.steps(3, 3)


@pytest.mark.slow
@pytest.mark.sample
def test_four_ranks_to_two_and_to_one(pool, tmp_path):
    went_on = pool.run(save_run, tmp_path, (4,), TENSOR_PARALLEL, {"fused": True})[0]
    single = Run(fused=True)
    single.steps(0, 3)
    expected = single.steps(3, 3)
    assert went_on == pytest.approx(expected, rel=1e-5)
    assert pool.run(load_on_two, tmp_path)[1] == pytest.approx(expected, rel=1e-5)
    assert pool.run(load_run, tmp_path, (2, 2), TWICE_SHARDED, {"fused": True})[3] == pytest.approx(expected, rel=1e-5)
    back = load_run(tmp_path, None, None, {"fused": True})
    assert back == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True, "amsgrad": True}], ids=str)
@pytest.mark.parametrize(
    ("mesh_shape", "plan"), [((4,), DATA_SHARDED), ((2, 2), TWICE_SHARDED), ((1, 4), ROWS_AND_COPIES), ((4,), {})]
)
def test_any_optimizer_between_layouts(pool, tmp_path, options, mesh_shape, plan):
    pool.run(save_run, tmp_path, (2, 2), {"*.weight": [Shard(1), Shard(0)]}, options)
    single = Run(**options)
    single.steps(0, 3)
    answer = pool.run(load_run, tmp_path, mesh_shape, plan, options)[0]
    assert answer == pytest.approx(single.steps(3, 3), rel=1e-5)


# -- torch's own functions on MeshTensors ------------------------------------------------------------------------

SHAPES = {"even": (8, 4), "uneven": (7, 5), "few": (1, 3), "none": (0, 3), "one": (), "long": (9,)}


def numbers(shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


def tensors(mesh_shape, layout, make=numbers):
    def fit(shape):
        strided = [p for p in layout if is_strided([p])]
        if any(p.dim >= len(shape) or shape[p.dim] % p.split_factor for p in strided):
            return [Replicate()] * len(layout)
        return [p if (d := shard_dim(p)) is None or d < len(shape) else Replicate() for p in layout]

    where = mesh(mesh_shape)
    return {n: sw.distribute_tensor(make(s), where, fit(s), src_data_rank=None) for n, s in SHAPES.items()}


def move(directory, before, after, as_dtensors):
    state = tensors(*before)
    given = {n: t.to_dtensor() for n, t in state.items()} if "before" in as_dtensors else state
    dcp.save(given, checkpoint_id=directory)
    later = tensors(*after, make=torch.zeros)
    adopted = {n: t.to_dtensor() for n, t in later.items()} if "after" in as_dtensors else later
    dcp.load(adopted, checkpoint_id=directory)
    for name, shape in SHAPES.items():
        assert torch.equal(later[name].full_tensor(), numbers(shape)), name


LAYOUTS = [
    ((4,), [Shard(0)]),
    ((4,), [Replicate()]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [Shard(0), Shard(0)]),
    ((2, 2), [Replicate(), Shard(1)]),
    ((1, 2, 2), [Shard(0), Replicate(), Shard(0)]),
    ((2, 2), [strided_shard(0, 2), Shard(0)]),  # as FSDP lays a tensor-parallel weight
]
MOVES = [(a, LAYOUTS[(i + 1) % len(LAYOUTS)]) for i, a in enumerate(LAYOUTS)]


@pytest.mark.slow
@pytest.mark.parametrize("as_dtensors", ["", "before", "after"])
@pytest.mark.parametrize(("before", "after"), MOVES, ids=str)
def test_torch_moves_mesh_tensors_and_dtensors(pool, tmp_path, before, after, as_dtensors):
    pool.run(move, tmp_path, before, after, as_dtensors)


# A rank's part of these has several pieces, which DTensor does not save.
IN_PIECES = [
    ((4,), [strided_shard(0, 2)]),
    ((2, 2), [strided_shard(0, 4), Shard(1)]),
    ((2, 2), [Shard(0), strided_shard(1, 2)]),
]


@pytest.mark.parametrize("layout", IN_PIECES, ids=str)
@pytest.mark.parametrize("other", [((2, 2), [Shard(1), Replicate()]), IN_PIECES[1]], ids=str)
def test_parts_of_several_pieces_are_saved_and_loaded(pool, tmp_path, layout, other):
    pool.run(move, tmp_path, layout, other, "")
    pool.run(move, tmp_path / "back", other, layout, "")


def saved_once(directory):
    state = {
        "copies": sw.distribute_tensor(numbers((64, 4)), mesh((2, 2)), [Replicate(), Replicate()]),
        "half": sw.distribute_tensor(numbers((64, 4)), mesh((2, 2)), [Replicate(), Shard(0)]),
        "other": sw.distribute_tensor(numbers((64, 4)), mesh((2, 2)), [Shard(0), Replicate()]),
    }
    dcp.save(state, checkpoint_id=directory)
    # Async: what is written after the call must not show.
    future = dcp.async_save(state, checkpoint_id=directory / "later")
    for tensor in state.values():
        tensor.zero_()
    future.result()
    dcp.load(state, checkpoint_id=directory / "later")
    assert all(torch.equal(t.full_tensor(), numbers((64, 4))) for t in state.values())
    flying = {"x": state["half"].redistribute(placements=[Shard(1), Replicate()], async_op=True)}
    dcp.async_save(flying, checkpoint_id=directory / "flying").result()
    dcp.load(state_x := {"x": state["other"]}, checkpoint_id=directory / "flying")
    assert torch.equal(state_x["x"].full_tensor(), numbers((64, 4)))
    with pytest.raises(dcp.api.CheckpointException, match="it is partial"):
        dcp.save({"p": MeshTensor.from_local(torch.ones(2), mesh((4,)), [Partial()])}, checkpoint_id=directory / "p")


def test_copies_are_saved_once_and_async_saves_are_of_the_moment(pool, tmp_path):
    pool.run(saved_once, tmp_path)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    chunks = {name: len(saved.chunks) for name, saved in metadata.state_dict_metadata.items()}
    assert chunks == {"copies": 1, "half": 2, "other": 2}
    writers = {place.relative_path for place in metadata.storage_data.values()}
    assert len(writers) == 4, "the work is spread over the ranks"


def whole_states(options):
    """full_state_dict, cpu_offload and broadcast_from_rank0 of torch's functions."""
    run, single = Run((4,), TENSOR_PARALLEL, **options), Run(**options)
    run.steps(0, 3), single.steps(0, 3)
    wanted = get_state_dict(single.model, single.optimizer)
    whole = get_state_dict(run.model, run.optimizer, options=StateDictOptions(full_state_dict=True))
    assert_alike(whole, wanted)
    offloaded = StateDictOptions(full_state_dict=True, cpu_offload=True)
    on_first = get_state_dict(run.model, run.optimizer, options=offloaded)
    if dist.get_rank() == 0:
        assert_alike(on_first, wanted)
    else:
        assert on_first == ({}, {})
    expected = single.steps(3, 2)
    for from_first in (False, True):
        other = Run((2, 2), TWICE_SHARDED, **options)
        how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_first)
        model, optimizer = copy.deepcopy(whole) if not from_first or dist.get_rank() == 0 else ({}, {})
        set_model_state_dict(other.model, model, options=how)
        set_optimizer_state_dict(other.model, other.optimizer, optimizer, options=how)
        assert other.steps(3, 2) == pytest.approx(expected, rel=1e-5)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(run.model, run.optimizer, options=flat)
    set_optimizer_state_dict(run.model, run.optimizer, state, options=flat)
    assert run.steps(3, 2) == pytest.approx(expected, rel=1e-5)


def assert_alike(states, wanted):
    (model, optimizer), (single, single_optimizer) = states, wanted
    torch.testing.assert_close(dict(model), dict(single))
    torch.testing.assert_close(optimizer["state"], single_optimizer["state"])
    assert optimizer["param_groups"] == single_optimizer["param_groups"]


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=str)
def test_the_options_of_torchs_state_dicts(pool, options):
    pool.run(whole_states, options)


def files_of_one_rank(directory):
    rank = dist.get_rank()
    torch.save(sw.distribute_tensor(numbers((8, 4)), mesh((4,)), [Shard(0)]), directory / f"{rank}.pt")
    dist.barrier()
    torch.load(directory / f"{rank}.pt", weights_only=True)
    with pytest.raises(LayoutError, match="holds one rank's part"):
        torch.load(directory / f"{(rank + 1) % 4}.pt", weights_only=True)


def test_a_file_of_one_ranks_part_is_refused_on_another_rank(pool, tmp_path):
    pool.run(files_of_one_rank, tmp_path)


# -- one process: plain programs, safety and errors --------------------------------------------------------------


@SINGLE
def test_torch_reads_what_was_saved_and_is_read(tmp_path):
    run = Run()
    run.steps(0, 2)
    saved = checkpoint.save(run.state(), tmp_path / "ours", step=2)
    model, optimizer = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": model, "optimizer": optimizer, "run": {"done": 2, "name": "x"}}, checkpoint_id=tmp_path / "own")
    expected = copy.deepcopy(run).steps(2, 2)
    for path in (saved.path, tmp_path / "own"):
        other = Run()
        model, optimizer = get_state_dict(other.model, other.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        set_optimizer_state_dict(other.model, other.optimizer, optimizer)
        again = Run()
        checkpoint.load(again.state(), path)
        assert other.steps(2, 2) == again.steps(2, 2) == expected


def test_everything_in_a_checkpoint_loads_with_weights_only(tmp_path):
    run = Run()
    run.steps(0, 2)
    path = checkpoint.save(run.state(random=torch.get_rng_state(), notes=["a", (1, 2.5), None]), tmp_path, step=2).path
    whole = tmp_path / "whole.pt"
    dcp_to_torch_save(path, whole)
    loaded = torch.load(whole, weights_only=True)
    assert torch.equal(loaded["model"]["0.weight"], run.model[0].weight)
    assert loaded["notes"] == ["a", (1, 2.5), None]


class Planted:
    """Runs when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@SINGLE
def test_a_checkpoint_cannot_run_code(tmp_path):
    ran = tmp_path / "ran"
    dcp.save({"x": torch.ones(2), "v": Planted(ran)}, checkpoint_id=tmp_path / "value")
    with pytest.raises(CheckpointError, match=r"[Ww]eights.?only"):
        checkpoint.load({"x": torch.zeros(2), "v": None}, tmp_path / "value")
    dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "list")
    metadata = pickle.loads((tmp_path / "list/.metadata").read_bytes())
    metadata.planner_data = {"x": Planted(ran)}
    (tmp_path / "list/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointFileError, match="which is not part of a list of tensors"):
        checkpoint.load({"x": torch.zeros(2)}, tmp_path / "list")
    assert not ran.exists()


@SINGLE
def test_a_checkpoint_of_an_unknown_format_is_refused(tmp_path):
    checkpoint.save({"n": 1}, tmp_path, step=1)
    last = checkpoint.save({"n": 2}, tmp_path, step=2).path / "checkpoint.json"
    last.write_text(last.read_text().replace('"format": 1', '"format": 99'))
    for options in ({}, {"step": 2}, {"verify": False}):
        with pytest.raises(CheckpointFileError, match=r"has format 99, and this version .* reads format 1"):
            checkpoint.load({"n": 0}, tmp_path, **options)
    with pytest.raises(CheckpointFileError, match="format 99"):
        checkpoint.load({"n": 0}, last.parent, verify=False)
    with pytest.raises(CheckpointFileError, match="format 99"):
        checkpoint.save({"n": 3}, tmp_path, step=3)
    state = {"n": 0}
    checkpoint.load(state, tmp_path, step=1)
    assert state == {"n": 1}


@SINGLE
@pytest.mark.parametrize("name", ["../secret.distcp", "/etc/passwd", "a/../../b", "..\\secret"])
def test_a_checkpoint_reads_no_file_outside_of_its_folder(tmp_path, name):
    dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "it")
    metadata = pickle.loads((tmp_path / "it/.metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = name
    (tmp_path / "it/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointFileError, match="which is outside of the folder"):
        checkpoint.load({"x": torch.zeros(2)}, tmp_path / "it")
    saved = checkpoint.save({"x": torch.ones(2)}, tmp_path / "ours", step=1).path / "checkpoint.json"
    contents = json.loads(saved.read_text())
    contents["files"][name] = [0, 0]
    saved.write_text(json.dumps(contents))
    with pytest.raises(CheckpointFileError, match="which is outside of the folder"):
        checkpoint.load({"x": torch.zeros(2)}, saved.parent)


def test_what_cannot_come_back_is_not_saved(tmp_path):
    for state, error in [
        ({"v": Planted(tmp_path / "ran")}, "'v', a Planted.*weights_only=True"),
        ({"a": {"b": {3: 1}}}, "a.b: it has the key 3"),
    ]:
        with pytest.raises(CheckpointValueError, match=error):
            checkpoint.save(state, tmp_path, step=1)
    with pytest.raises(CheckpointKeyError, match="no module of the state has all its parameters"):
        checkpoint.save({"optimizer": Run().optimizer}, tmp_path, step=1)
    assert folder.checkpoints_in(tmp_path) == []


def test_what_does_not_fit_says_what_was_asked_and_found(tmp_path):
    checkpoint.save({"a": torch.ones(3), "n": 5}, tmp_path, step=1)
    for state, kind, message in [
        ({"b": torch.ones(3), "c": 1}, CheckpointKeyError, r"'b' \(and 1 more\): the checkpoint does not have it"),
        ({"a": torch.ones(4)}, CheckpointShapeError, r"tensor of \(4,\).*one of shape \(3,\)"),
        ({"a": torch.ones(3).double()}, CheckpointDtypeError, r"torch.float64: the checkpoint has torch.float32"),
        ({"n": torch.ones(3)}, CheckpointShapeError, "has a value that is not a tensor"),
        ({"a": 3}, CheckpointShapeError, "has a tensor of that name"),
    ]:
        with pytest.raises(kind, match=message):
            checkpoint.load(state, tmp_path)
    run = Run()
    with pytest.raises(CheckpointKeyError, match="no state of an optimizer under that name; it has a, n"):
        checkpoint.load(run.state(), tmp_path)
    with pytest.raises(CheckpointFileError, match="steps that are there: 1"):
        checkpoint.load({"n": 0}, tmp_path, step=7)
    with pytest.raises(CheckpointFileError, match=r"none\. Save one there first"):
        checkpoint.load({"n": 0}, tmp_path / "nowhere")
    groups = torch.optim.SGD([{"params": [p]} for p in run.model.parameters()], lr=0.1)
    checkpoint.save(run.state(), tmp_path / "one", step=1)
    with pytest.raises(CheckpointKeyError, match=r"groups of \[1, 1, 1, 1\] parameters.*groups of \[4\]"):
        checkpoint.load({"model": run.model, "optimizer": groups}, tmp_path / "one")


class Refusing:
    """Has a state, and takes none."""

    def state_dict(self):
        return {"position": 1}

    def load_state_dict(self, _):
        raise ValueError("this loader is of another data set")


def test_an_object_that_refuses_its_state_leaves_modules_and_optimizers_as_they_were(tmp_path):
    run = Run()
    run.steps(0, 2)
    checkpoint.save(run.state(data=Refusing()), tmp_path, step=2)
    other = Run()
    other.steps(5, 1)
    before = copy.deepcopy((other.model.state_dict(), other.optimizer.state_dict()))
    with pytest.raises(CheckpointError, match="ValueError: this loader is of another data set"):
        checkpoint.load(other.state(data=Refusing()), tmp_path)
    torch.testing.assert_close(other.model.state_dict(), before[0], rtol=0, atol=0)
    torch.testing.assert_close(other.optimizer.state_dict()["state"], before[1]["state"], rtol=0, atol=0)


def test_what_a_state_holds_stays_the_same_objects(tmp_path):
    state = {"deep": {"tensor": torch.ones(2), "list": [torch.zeros(1), 3]}, "plain": [1, 2]}
    checkpoint.save(state, tmp_path, step=1)
    again = {"deep": {"tensor": torch.zeros(2), "list": [torch.ones(1), 4]}, "plain": [0, 0]}
    deep, tensor, inner = again["deep"], again["deep"]["tensor"], again["deep"]["list"]
    checkpoint.load(again, tmp_path)
    assert again["deep"] is deep
    assert deep["tensor"] is tensor
    assert deep["list"] is inner
    assert (tensor.tolist(), inner[0].tolist(), inner[1], again["plain"]) == ([1, 1], [0], 3, [1, 2])


def test_the_last_ones_are_kept_and_steps_only_go_on(tmp_path):
    for step in (1, 2, 2, 5):
        saved = checkpoint.save({"n": step}, tmp_path, step=step)
    assert [c.path.name for c in folder.checkpoints_in(tmp_path)] == ["step-00000002.1", "step-00000005"]
    assert checkpoint.latest(tmp_path) == saved
    with pytest.raises(CheckpointStepError, match="there is a checkpoint of step 5"):
        checkpoint.save({"n": 4}, tmp_path, step=4)
    with pytest.raises(CheckpointStepError, match="steps count from 0"):
        checkpoint.save({"n": 4}, tmp_path, step=-1)
    assert checkpoint.save({"n": 6}, tmp_path / "one", step=6, keep=0) == checkpoint.latest(tmp_path / "one")
    state = {"n": 0}
    assert checkpoint.load(state, tmp_path, step=2).again == 1
    assert state == {"n": 2}


def test_a_damaged_checkpoint_is_noticed(tmp_path):
    for step in (1, 2):
        checkpoint.save({"x": torch.full((4,), float(step))}, tmp_path, step=step)
    file = tmp_path / "step-00000002/__0_0.distcp"
    good = file.read_bytes()
    at = good.index(torch.full((4,), 2.0).numpy().tobytes())
    file.write_bytes(good[: at + 2] + b"\x01" + good[at + 3 :])
    state = {"x": torch.zeros(4)}
    with pytest.raises(CheckpointFileError, match="its checksum differs"):
        checkpoint.load(state, tmp_path)
    file.write_bytes(good[:-1])
    with pytest.raises(CheckpointFileError, match="bytes instead of"):
        checkpoint.load(state, tmp_path, step=2)
    assert checkpoint.load(state, tmp_path).step == 1, "the last good one"
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000009")
    (tmp_path / "step-00000009/checkpoint.json").write_text("{")
    assert checkpoint.latest(tmp_path).step == 1


# -- ranks that fail, disagree or die ----------------------------------------------------------------------------


def one_rank_fails(directory):
    rank = dist.get_rank()
    x = sw.distribute_tensor(numbers((8,)), mesh((4,)), [Shard(0)])
    with pytest.raises(RankDisagreementError, match="'seed': it is not the same on every rank"):
        checkpoint.save({"x": x, "seed": rank}, directory, step=1)
    with pytest.raises(RankDisagreementError, match="load with different directories, steps or verify: rank"):
        checkpoint.load({"x": x}, directory / "elsewhere" if rank == 1 else directory)
    with pytest.raises(RankDisagreementError, match="different directories, steps or keep"):
        checkpoint.save({"x": x}, directory, step=rank)
    saved = checkpoint.save({"x": x, f"of rank {rank}": rank}, directory, step=1)
    seen = []
    for state in ({"x": x, "y" if rank == 2 else "x": x}, {"x": torch.zeros(3) if rank == 3 else x}):
        with pytest.raises(CheckpointError) as raised:
            checkpoint.load(state, directory)
        seen.append((type(raised.value), str(raised.value)))
    real = dcp.FileSystemWriter.write_data
    if rank == 1:
        dcp.FileSystemWriter.write_data = full_disk
    try:
        with pytest.raises(CheckpointError, match="rank 1 raised OSError: no space left") as raised:
            checkpoint.save({"x": x}, directory, step=2)
    finally:
        dcp.FileSystemWriter.write_data = real
    assert checkpoint.latest(directory) == saved
    return [*seen, str(raised.value)]


def full_disk(self, plan, planner):
    raise OSError("no space left on device")


def test_all_ranks_raise_what_one_rank_raises(pool, tmp_path):
    answers = pool.run(one_rank_fails, tmp_path)
    assert answers == [answers[0]] * 4
    assert [kind for kind, _ in answers[0][:2]] == [CheckpointKeyError, CheckpointShapeError]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"], "what failed leaves nothing behind"


def state_of(step):
    where = mesh((4,))
    full = torch.full((4096, 8), float(step))
    return {
        "rows": sw.distribute_tensor(full, where, [Shard(0)], src_data_rank=None),
        "columns": sw.distribute_tensor(full, where, [Shard(1)], src_data_rank=None),
        "step": step,
    }


def save_for_ever(directory, first):
    for step in range(first, first + 100_000):
        checkpoint.save(state_of(step), directory, step=step)


def killed_at(directory, where, rank):
    """Save twice; in the second save a rank kills itself at a given point."""
    checkpoint.save(state_of(1), directory, step=1)
    if dist.get_rank() == rank:
        owner, name, call = {
            "data": (dcp.FileSystemWriter, "write_data", 1),
            "metadata": (dcp.FileSystemWriter, "finish", 1),
            "contents": (folder, "_sync", 1),
            "rename": (Path, "rename", 1),
            "renamed": (folder, "_sync", 2),
        }[where]
        function = getattr(owner, name)
        calls = count(1)

        def kills(*args, **kwargs):
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        setattr(owner, name, kills)
    checkpoint.save(state_of(2), directory, step=2)


def check_last(directory):
    state = {"rows": state_of(0)["rows"], "columns": state_of(0)["columns"], "step": 0}
    loaded = checkpoint.load(state, directory)
    assert state["step"] == loaded.step
    for name in ("rows", "columns"):
        assert torch.equal(state[name].full_tensor(), torch.full((4096, 8), float(loaded.step)))
    return loaded.step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "rank", "left"),
    [
        ("data", 1, 1),
        pytest.param("metadata", 0, 1, marks=pytest.mark.sample),
        ("contents", 0, 1),
        ("rename", 0, 1),
        ("renamed", 0, 2),
    ],
)
def test_a_rank_killed_at_a_point_of_a_save(pool_of, tmp_path, where, rank, left):
    workers = pool_of(4)
    workers.run(time.sleep, 0)
    with pytest.raises(WorkerError, match="SIGKILL"):
        workers.run(killed_at, tmp_path, where, rank)
    assert workers.run(check_last, tmp_path) == [left] * 4
    workers.run(save_next, tmp_path, left + 1)
    assert not list(tmp_path.glob(".*")), "what was left behind is removed by the next save"


def save_next(directory, step):
    checkpoint.save(state_of(step), directory, step=step)


@pytest.mark.slow
def test_ranks_killed_at_any_moment_of_saving(tmp_path):
    last = 0
    with WorkerPool(4) as workers:
        for attempt in range(4):
            workers.run(save_next, tmp_path, last + 1)  # and everything is imported
            victim = workers.pids[attempt]
            killer = threading.Timer(0.7 + 0.13 * attempt, os.kill, (victim, signal.SIGKILL))
            killer.start()
            with pytest.raises(WorkerError, match="SIGKILL"):
                workers.run(save_for_ever, tmp_path, last + 2)
            killer.join()
            answers = workers.run(check_last, tmp_path)
            assert len(set(answers)) == 1
            assert answers[0] > last
            last = answers[0]
    assert last > 0
    assert json.loads((folder.newest(tmp_path).path / "checkpoint.json").read_text())["step"] == last


# -- the decisions of a learned program --------------------------------------------------------------------------


class Learner:
    """A small program that learns: its model and data on a mesh, and how many collectives each step sends."""

    def __init__(self, mesh_shape=(2,), layout=("tp",)):
        m = mesh(mesh_shape, layout)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 5)).double()
        sw.distribute_module(self.model, m, {"0.*": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        whole = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        self.x = sw.distribute_tensor(whole, m, [Replicate()] * m.ndim)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def steps(self, count):
        losses, sent = [], []
        for _ in range(count):
            with observe(sent.append):
                self.optimizer.zero_grad()
                loss = self.model(self.x).square().mean()
                loss.backward()
                self.optimizer.step()
            losses.append((loss.item(), len(sent)))
            sent.clear()
        return losses


def learned_and_saved(directory):
    run = Learner()
    with sw.learn():
        first = run.steps(4)
        checkpoint.save(run.state, directory, step=4)
        return first, run.steps(2)


def resumed(directory, mesh_shape=(2,), layout=("tp",), learns=True):
    in_force = decided.in_force  # that of the rank
    run = Learner(mesh_shape, layout)
    with sw.learn(learns) as learning:
        checkpoint.load(run.state, directory)
        taken = None if in_force.decisions is None else in_force.decisions.fingerprint
        losses = run.steps(1)
        after_one = learning.rounds, in_force.known
        losses += run.steps(1)
    assert in_force.decisions is None
    assert in_force.learner is None
    return taken, losses, after_one


@pytest.mark.slow
@pytest.mark.sample
def test_a_resumed_run_goes_on_by_the_decisions_of_its_checkpoint(two_ranks, tmp_path):
    first, rest = two_ranks.run(learned_and_saved, tmp_path)[0]
    (kept,) = tmp_path.glob("step-*/decisions.json")
    data = json.loads(kept.read_text())
    assert (data["format"], data["mesh"]) == (1, [2])
    for taken, losses, (rounds, known) in two_ranks.run(resumed, tmp_path):
        assert taken == Decisions.from_json(data).fingerprint
        assert [loss for loss, _ in losses] == [loss for loss, _ in rest]  # to the bit
        assert losses[0][1] < first[0][1]
        assert rounds == 0  # no step was recorded
        assert known > 0


def test_decisions_are_taken_by_a_run_that_learns_on_a_mesh_of_their_shape(two_ranks, tmp_path):
    two_ranks.run(learned_and_saved, tmp_path)
    taken, losses, _ = two_ranks.run(resumed, tmp_path, (2,), ("tp",), False)[0]
    assert taken is None
    elsewhere, on_other, (rounds, _) = two_ranks.run(resumed, tmp_path, (1, 2), ("dp", "tp"))[0]
    assert elsewhere is None
    assert rounds == 1  # it was learned anew
    assert [loss for loss, _ in on_other] == pytest.approx([loss for loss, _ in losses], rel=1e-12)


@SINGLE
def test_a_checkpoint_of_a_program_without_decisions_has_none(tmp_path):
    checkpoint.save({"a": torch.ones(2)}, tmp_path, step=1)
    assert not list(tmp_path.glob("step-*/decisions.json"))


DAMAGES = {
    "no JSON": lambda _: "{",
    "deep": lambda _: "[" * 100_000,
    "a list": lambda _: "[1]",
    "another format": lambda data: json.dumps({**data, "format": 2}),
    "no mesh": lambda data: json.dumps({**data, "mesh": []}),
    "a mesh without end": lambda data: json.dumps({**data, "mesh": [math.inf]}),
    "another mesh": lambda data: json.dumps({**data, "mesh": [2, 2]}),
    "deep tags": lambda data: json.dumps({**data, "depth": 10**9}),
    "no placement": lambda data: json.dumps(data).replace('"R"', '"open(0)"'),
    "numbers for lists": lambda data: json.dumps({**data, "exact": {"1": [[1, 1, 1, 1]]}}),
    "too few parts": lambda data: json.dumps({**data, "exact": {"1": [[["R"]]]}}),
    "no digest": lambda data: json.dumps({**data, "left": ["no digest"]}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_decisions_that_are_not_well_formed_are_an_error_with_the_files_name(tmp_path, damage):
    part = Decision(((Replicate(),), None), ((Replicate(),), None), ((Shard(0),),), ((Replicate(),),))
    data = Decisions((2,), {1: (part,)}, {2: (part,)}, 4, frozenset({3})).as_json()
    partial = tmp_path / ".step-00000001.partial"
    partial.mkdir()
    (partial / "decisions.json").write_text(DAMAGES[damage](data))
    saved = folder.commit(partial, folder.sums_of(partial, "*"), 1, 1)
    with pytest.raises(CheckpointFileError, match=r"decisions\.json cannot be read") as raised:
        read_decisions(saved)
    assert raised.value.path == str(saved.path / "decisions.json")


def by_other_decisions(directory):
    """Decisions in which results are to rest where nothing can rest: each is left out, and the numbers stay."""
    in_force = decided.in_force  # that of the rank
    run = Learner()
    with sw.learn():
        checkpoint.load(run.state, directory, verify=False)
        assert in_force.decisions is not None
        return run.steps(2)


def test_decisions_that_no_call_can_take_change_no_number(two_ranks, tmp_path):
    _, rest = two_ranks.run(learned_and_saved, tmp_path)[0]
    (kept,) = tmp_path.glob("step-*/decisions.json")
    data = json.loads(kept.read_text())
    del data["digest"]
    for table in ("exact", "loose"):
        for known in data[table].values():
            for parts in known:
                parts[3] = [None if places is None else "S(7)" for places in parts[3]]
    text = json.dumps(data)
    contents = kept.parent / "checkpoint.json"
    listed = json.loads(contents.read_text())
    listed["files"]["decisions.json"][0] = len(text)
    contents.write_text(json.dumps(listed))
    kept.write_text(text)
    for losses in two_ranks.run(by_other_decisions, tmp_path):
        assert [loss for loss, _ in losses] == pytest.approx([loss for loss, _ in rest], rel=1e-12)
