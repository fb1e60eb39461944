"""Rehearsals: what one rank of a large mesh would hold and send, against arithmetic and against real ranks."""

from __future__ import annotations

import pickle
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import flex_attention
from torch.optim.swa_utils import AveragedModel
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
import shardwise.checkpoint
from shardwise import Partial, Replicate, Shard
from shardwise.comm.events import observe
from shardwise.demo.large import LAYERS, placed_step, seven_billion
from shardwise.errors import CallError, CheckpointValueError, MeshMismatchError
from shardwise.testing import mesh
from shardwise.tools.rehearse import NO_OP, rehearse

SMALL = partial(placed_step, layers=2, width=16, heads=4, context=8, batch=8)
BIG_MESH = (8, 16, 8), ("pod", "tp", "dp")


ROWS = (Shard(0),)


@pytest.fixture(scope="module")
def small():
    return rehearse(SMALL, (2, 2), ("dp", "tp"))


def linear(mesh, rows=6, columns=10, placements=ROWS):
    model = sw.distribute_module(nn.Linear(columns, rows, bias=False), mesh, {"weight": placements}, src_data_rank=None)
    return model, sw.zeros((4, columns), device_mesh=mesh, placements=[Replicate()])


def test_what_a_rank_holds_is_its_part_of_each_tensor():
    rehearsal = rehearse(linear, (4,))
    # Six rows over four ranks: two for the first.
    assert (rehearsal.whole_parameters, rehearsal.memory.parameters) == (60, 2 * 10 * 4)
    assert rehearsal.memory.gradients == 2 * 10 * 4
    # Two moments, and a step counter that AdamW keeps in float32.
    assert rehearsal.memory.optimizer == 2 * (2 * 10 * 4) + 4


def test_the_parts_of_all_ranks_make_up_the_whole():
    parts = [rehearse(linear, (4,), rank=rank).memory.parameters for rank in range(4)]
    assert parts == [80, 80, 80, 0]
    assert sum(parts) == rehearse(linear, (4,)).whole_parameter_bytes


def test_ranks_at_different_coordinates_issue_the_same_collectives(small):
    for rank in (1, 3):
        assert rehearse(SMALL, (2, 2), ("dp", "tp"), rank=rank).counts == small.counts


def on_ranks(make, shape, names):
    """The collectives that this rank issues in a step."""
    model, inputs, optimizer = make(mesh(shape, names))
    seen: Counter[tuple[str, tuple[int, ...], int]] = Counter()
    nbytes: Counter[tuple[str, tuple[int, ...], int]] = Counter()

    def note(event):
        seen[event.kind, event.mesh_dims, event.group_size] += 1
        nbytes[event.kind, event.mesh_dims, event.group_size] += event.nbytes

    with observe(note):
        model(*inputs).backward()
        optimizer.step()
    return seen, nbytes


def test_four_real_ranks_issue_what_the_rehearsal_says(pool, small):
    times: Counter[tuple[str, tuple[int, ...], int]] = Counter()
    nbytes: Counter[tuple[str, tuple[int, ...], int]] = Counter()
    for use, count, size in small.collectives:
        times[use.kind, use.mesh_dims, use.ranks] += count
        nbytes[use.kind, use.mesh_dims, use.ranks] += size
    assert pool.run(on_ranks, SMALL, (2, 2), ("dp", "tp")) == [(times, nbytes)] * 4


def test_a_collective_is_named_by_the_op_that_needs_it():
    def step(device_mesh):
        x = sw.zeros((4, 8), device_mesh=device_mesh, placements=[Shard(1)])
        y = x.redistribute(placements=[Replicate()])
        return (x.softmax(1) + y).sum(), y

    rehearsal = rehearse(step, (4,))
    assert {use.op for use in rehearsal.counts if use.phase == "forward"} == {NO_OP, "aten._softmax.default"}
    # All four ranks' two columns of float32.
    assert [size for use, _, size in rehearsal.by_op if use.op == NO_OP] == [4 * 2 * 4]


def test_memory_is_followed_through_the_phases(small):
    memory = small.memory
    assert set(memory.peaks) == {"forward", "backward", "optimizer"}
    assert memory.peaks["forward"] >= memory.parameters + memory.kept
    assert memory.peaks["optimizer"] >= memory.parameters + memory.gradients + memory.optimizer
    assert memory.peak == max(memory.peaks.values())


def test_what_is_let_go_of_is_not_held():
    def step(device_mesh):
        x = sw.zeros((4, 256), device_mesh=device_mesh, placements=[Shard(1)])
        for _ in range(50):
            x = torch.tanh(x)

    # Two at a time: what goes in and what comes out.
    assert rehearse(step, (4,)).memory.peaks == {"forward": 2 * 4 * 64 * 4}


def test_a_program_that_runs_its_steps_itself_has_its_phases_too():
    def step(device_mesh):
        model, x = linear(device_mesh, placements=[Shard(1)])
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if loss.item() < 0:  # a number that data decides: 1 is taken
            raise AssertionError

    assert set(rehearse(step, (4,)).memory.peaks) == {"forward", "backward", "optimizer"}


def test_a_shape_that_depends_on_data_is_refused():
    with pytest.raises(CallError, match=r"aten.nonzero.default: the shape of its result depends on data"):
        rehearse(lambda m: sw.ones((4,), device_mesh=m, placements=[Replicate()]).nonzero(), (4,))


def _saved_by_shardwise(model, directory):
    sw.checkpoint.save({"model": model}, directory, step=1)


def _saved_by_dcp(model, directory):
    dcp.save(model.state_dict(), checkpoint_id=directory)


def _saved_by_torch(model, directory):
    torch.save(model.state_dict(), directory / "model.pt")


def _pickled(model, directory):
    (directory / "weight.pickle").write_bytes(pickle.dumps(model.weight))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("save", [_saved_by_shardwise, _saved_by_dcp, _saved_by_torch, _pickled])
def test_a_save_is_refused_and_leaves_nothing(save, device, tmp_path):
    """There is no data to save. Each of these would fail somewhere in torch, at whatever it meets first."""
    # torch.save has opened its file by then.
    empty = ["model.pt"] if save is _saved_by_torch else []

    def step(device_mesh):
        save(linear(device_mesh)[0], tmp_path)

    # torch.distributed.checkpoint exchanges objects first.
    with pytest.raises((CheckpointValueError, CallError), match="a rehearsal, whose tensors have no data"):
        rehearse(step, (8,), device=device)
    assert [path.name for path in tmp_path.rglob("*")] == empty


def test_objects_of_other_ranks_are_not_there():
    with pytest.raises(CallError, match="receive an object from other ranks"):
        rehearse(lambda _: dist.all_gather_object([None] * 8, {"loss": 1.0}), (8,))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_what_a_program_compiles_runs_op_by_op(fullgraph):
    def step(device_mesh):
        model, x = linear(device_mesh)
        return torch.compile(model, backend="eager", fullgraph=fullgraph)(x)

    assert rehearse(step, (4,)).ops["aten.t.default"] >= 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_copy_of_a_module_is_rehearsed_on_the_same_mesh(device):
    def step(device_mesh):
        model, x = linear(device_mesh)
        average = AveragedModel(model)
        average.update_parameters(model)
        assert average.module.weight.device_mesh is device_mesh
        return average(x)

    assert rehearse(step, (8,), device=device).ops


# Torch speaks of kernels, which do not run here.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_flex_attention_runs_and_its_memory_is_counted(device):
    nbytes = []

    def step(device_mesh):
        q, k, v = (sw.zeros((16, 2, 128, 16), device_mesh=device_mesh, placements=ROWS) for _ in range(3))
        out = flex_attention(q, k, v)
        nbytes.append(out.to_local().nbytes)

    rehearsal = rehearse(step, (8,), device=device)
    assert rehearsal.ops["shardwise.flex_attention.default"] == 1
    assert rehearsal.memory.peaks["forward"] >= 4 * nbytes[0]  # three operands and the result


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_trained_as_on_a_card():
    def step(device_mesh):
        q, k, v = (sw.zeros((16, 2, 128, 16), device_mesh=device_mesh, placements=ROWS) for _ in range(3))
        flex_attention(q.requires_grad_(), k.requires_grad_(), v.requires_grad_()).sum().backward()
        assert q.grad.placements == k.grad.placements == v.grad.placements == ROWS

    assert rehearse(step, (8,), device="cuda").ops["shardwise.flex_attention_backward.default"] == 1


def test_a_module_without_inputs_is_refused():
    with pytest.raises(CallError, match="a module without inputs"):
        rehearse(lambda _: nn.Linear(2, 2), (4,))


def test_a_process_with_ranks_of_its_own_is_refused():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(MeshMismatchError, match="process group of its own"):
            rehearse(linear, (4,))
    finally:
        dist.destroy_process_group()


def test_nothing_stays_behind():
    rehearse(linear, (4,))
    assert not dist.is_initialized()
    # A mesh of the same shape that is not rehearsed on has real groups and plans of its own.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        device_mesh = init_device_mesh("cpu", (4,))
        x = sw.distribute_tensor(torch.ones(4, 4), device_mesh, [Partial()], src_data_rank=None)
        assert type(x.redistribute(placements=[Replicate()]).to_local()) is torch.Tensor
        assert sw.MeshTensor.sum(x).placements == (Partial(),)
    finally:
        dist.destroy_process_group()


def test_lowerings_that_ask_the_others_are_answered():
    def step(device_mesh):
        x = sw.zeros((8, 12), device_mesh=device_mesh, placements=[Replicate(), Shard(1)])
        return x.sort(1).values, x.cumsum(1), x.argmax(1), x.roll(3, 1)

    assert rehearse(step, (2, 3)).ops["aten.sort.default"] == 1


# -- 7 billion parameters on 1,024 ranks -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def big():
    return rehearse(seven_billion, *BIG_MESH)


@pytest.mark.slow
@pytest.mark.sample
def test_seven_billion_parameters_lie_in_sixteen_parts(big):
    assert big.ranks == 1024
    assert big.whole_parameters > 7e9
    assert big.whole_parameter_bytes == 4 * big.whole_parameters
    # Norms and positions are whole on each of the 16 ranks of tensor parallelism; all else is cut evenly.
    whole = 4 * (4288 * 2 * (2 * LAYERS + 1) + 4096 * 4288)
    assert 16 * (big.memory.parameters - whole) + whole == big.whole_parameter_bytes
    assert big.memory.gradients == big.memory.parameters
    counters = 4 * (9 * LAYERS - LAYERS + 2 * LAYERS + 5)
    assert abs(big.memory.optimizer - 2 * big.memory.parameters) <= counters


@pytest.mark.slow
@pytest.mark.sample
def test_seven_billion_parameters_need_two_reductions_a_layer_each_way(big):
    use = {(u.phase, u.kind, u.mesh_dims): times for u, times, _ in big.by_op if u.op == NO_OP}
    assert use["forward", "all_reduce", (1,)] == 2 * LAYERS
    # One more for what the head returns: its classes lie over tensor parallelism.
    assert use["backward", "all_reduce", (1,)] == 2 * LAYERS + 1
    # Each weight's gradient, over all ranks that share the batch.
    assert use["backward", "all_reduce", (0, 2)] >= 6 * LAYERS


@pytest.mark.slow
@pytest.mark.sample
def test_a_rank_at_the_other_end_issues_the_same(big):
    assert rehearse(seven_billion, *BIG_MESH, rank=1023).counts == big.counts


@pytest.mark.slow
def test_no_rank_holds_more_than_the_first():
    first = rehearse(partial(SMALL, width=24), (3, 2), ("dp", "tp")).memory
    for rank in range(1, 6):
        other = rehearse(partial(SMALL, width=24), (3, 2), ("dp", "tp"), rank=rank).memory
        assert other.parameters <= first.parameters
        assert other.peak <= first.peak
