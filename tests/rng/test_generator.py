"""The state of the generator: seeds, ways, saving and loading, recomputation, and ranks that come apart."""

import io
import os
import warnings

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.comm import events
from shardwise.errors import DifferentSeedsWarning, LayoutError, RankDisagreementError, SettingsError, TracingError
from shardwise.rng import generator as draws
from shardwise.testing import mesh

UNSEEDED = torch.tensor([1, 0, 0, 0])


@pytest.fixture(autouse=True)
def unseeded():
    sw.random.set_state(UNSEEDED)
    yield
    sw.random.set_state(UNSEEDED)


def one_device(count=3):
    with sw.random.on_one_device():
        return torch.rand(count)


def test_a_seed_gives_the_same_numbers_again_and_torchs_too():
    sw.manual_seed(7)
    first, plain = one_device(), torch.rand(3)
    sw.manual_seed(7)
    assert torch.equal(one_device(), first)
    assert torch.equal(torch.rand(3), plain)
    assert not torch.equal(one_device(), first)


@pytest.mark.parametrize("seed", [0, -1, (1 << 63) - 1, (1 << 64) - 1])
def test_the_state_saves_and_loads(seed, tmp_path):
    sw.manual_seed(seed)
    one_device()
    saved = io.BytesIO()
    torch.save(sw.random.get_state(), saved)
    expected = one_device()
    sw.manual_seed(5)
    saved.seek(0)
    sw.random.set_state(torch.load(saved, weights_only=True))
    assert torch.equal(one_device(), expected)
    torch.save(sw.random.state_dict(), tmp_path / "state.pt")
    expected = one_device()
    sw.random.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(one_device(), expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_takes_the_module_itself(tmp_path):
    sw.manual_seed(3)
    one_device()
    dcp.save({"random": sw.random}, checkpoint_id=tmp_path, no_dist=True)
    expected = one_device()
    dcp.load({"random": sw.random}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(one_device(), expected)


def test_a_state_before_any_seed_is_one_too():
    assert sw.random.get_state().tolist() == UNSEEDED.tolist()
    assert sw.random.mode() == "torch"
    sw.manual_seed(0)
    assert sw.random.mode() == "counter"
    sw.random.set_state(UNSEEDED)
    assert sw.random.mode() == "torch"


@pytest.mark.parametrize("wrong", [torch.zeros(4, dtype=torch.int64), torch.zeros(3), torch.get_rng_state()])
def test_what_is_no_state_is_refused(wrong):
    with pytest.raises(LayoutError, match="is not one of its states"):
        sw.random.set_state(wrong)


def test_ways_are_chosen_for_a_while_or_by_a_setting(monkeypatch):
    with sw.random.using("counter"):
        assert sw.random.mode() == "counter"
        with sw.random.using("local"):
            assert sw.random.mode() == "local"
    with pytest.raises(SettingsError, match="'fast'"), sw.random.using("fast"):
        pass
    monkeypatch.setitem(os.environ, "SHARDWISE_RANDOM", "local")
    draws._mode_of_settings.cache_clear()
    try:
        assert sw.random.mode() == "local"
    finally:
        monkeypatch.undo()
        draws._mode_of_settings.cache_clear()


def test_without_a_seed_torchs_generator_seeds():
    drawn = []
    for _ in range(2):
        sw.random.set_state(UNSEEDED)
        torch.manual_seed(4)
        drawn.append(one_device())
    assert torch.equal(*drawn)


def test_a_draw_in_another_way_does_not_change_the_way_of_later_ones():
    sw.random.set_state(UNSEEDED)
    with sw.random.using("counter"):
        one_device()
    assert sw.random.mode() == "torch"
    agreed = sw.random.get_state()
    sw.manual_seed(1)
    sw.random.set_state(agreed)
    assert sw.random.mode() == "torch"


# -- recomputation ---------------------------------------------------------------------------------------------------


def block(a, b):
    return functional.dropout(torch.relu(a @ b), 0.5) @ functional.dropout(b, 0.3)


def step(a, b, use):
    """Two blocks, the results and gradients, and a number drawn afterwards."""
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    y = a
    for _ in range(2):
        y = block(y, b) if use is None else checkpoint(block, y, b, use_reentrant=use)
    y.square().sum().backward()
    return y.detach(), a.grad, b.grad, torch.rand_like(a)


def seeded_step(*operands, use=None, alone=False):
    sw.manual_seed(3)
    if alone:
        torch.rand(5)
    return step(*operands, use)


def given():
    draw = torch.Generator().manual_seed(0)
    return torch.randn(5, 6, generator=draw, dtype=torch.float64), torch.randn(
        6, 6, generator=draw, dtype=torch.float64
    )


@pytest.mark.parametrize("use", [False, True])
def test_checkpointing_recomputes_the_same_numbers_on_one_device(use):
    with sw.random.on_one_device():
        plain, recomputed = (seeded_step(*given(), use=u) for u in (None, use))
    torch.testing.assert_close(recomputed, plain)


def recomputed(mesh_shape, layout):
    with sw.random.on_one_device():
        expected = seeded_step(*given())
    m = mesh(mesh_shape)
    x, w = given()
    operands = sw.distribute_tensor(x, m, layout), sw.distribute_tensor(w, m, [Replicate()] * (m.ndim - 1) + [Shard(1)])
    for use in (None, False, True):
        # What a rank draws alone from torch's generator does not matter.
        drawn = seeded_step(*operands, use=use, alone=torch.distributed.get_rank() == 1)
        torch.testing.assert_close(tuple(t.full_tensor() for t in drawn), expected)


@pytest.mark.parametrize(("mesh_shape", "layout"), [((4,), [Shard(0)]), ((2, 2), [Shard(1), Replicate()])])
def test_checkpointing_recomputes_the_same_numbers_on_meshes(pool, mesh_shape, layout):
    pool.run(recomputed, mesh_shape, layout)


# -- ranks -----------------------------------------------------------------------------------------------------------


def drawn_alone():
    rank = torch.distributed.get_rank()
    world = {"device_mesh": mesh((4,)), "placements": [Shard(0)]}
    sw.manual_seed(1)
    expected = one_device(9)
    sw.manual_seed(1)
    if rank == 2:
        torch.rand(3)
    assert torch.equal(sw.rand(9, **world).full_tensor(), expected)
    if rank == 2:
        one_device()
    with pytest.raises(RankDisagreementError, match=r"rank 2: has draw 2 of seed 1"):
        sw.rand(9, **world)
    sw.manual_seed(rank)
    with pytest.raises(RankDisagreementError, match=f"draw 0 of seed {rank}"):
        functional.dropout(sw.ones(4, **world))
    sw.random.set_state(torch.tensor([1, 0, 0, 0]))


def test_ranks_that_drew_alone_are_found_out(pool):
    pool.run(drawn_alone)


def first_draw_agrees():
    """A mesh's first draw takes the state of its first rank, whatever others have drawn before."""
    rank = torch.distributed.get_rank()
    sw.manual_seed(12)
    for _ in range(1 + rank):
        one_device()
    turned = torch.distributed.device_mesh.DeviceMesh("cpu", [[2, 3], [1, 0]])
    result = sw.rand(9, device_mesh=turned, placements=[Shard(0), Shard(0)]).full_tensor()
    sw.manual_seed(12)
    for _ in range(3):
        one_device()
    assert torch.equal(result, one_device(9))
    sw.random.set_state(torch.tensor([1, 0, 0, 0]))


def test_the_first_draw_of_a_mesh_makes_its_ranks_alike(pool):
    pool.run(first_draw_agrees)


def another_mesh(*ranks):
    """One that no test has drawn on: a first draw is compared once for all equal meshes."""
    return torch.distributed.device_mesh.DeviceMesh("cpu", ranks)


def seeds_of_each_rank(who):
    """``manual_seed(rank)``: every rank raises before it draws, and draws when the seeds are one."""
    rank = torch.distributed.get_rank()
    world = another_mesh(1, 3, 0, 2) if who == "all" else another_mesh(3, 1, 2, 0)
    if who == "all" or rank == 0:
        sw.manual_seed(10 + rank)
    for _ in range(2):
        with pytest.raises(RankDisagreementError) as refused:
            sw.rand(9, device_mesh=world, placements=[Shard(0)])
    sw.manual_seed(5)
    drawn = sw.rand(9, device_mesh=world, placements=[Shard(0)]).full_tensor()
    sw.manual_seed(5)
    assert torch.equal(drawn, one_device(9))
    sw.random.set_state(torch.tensor([1, 0, 0, 0]))
    return refused.value.found


def test_manual_seed_with_a_seed_for_each_rank_is_refused(pool):
    found = pool.run(seeds_of_each_rank, "all")
    assert len(set(found)) == 1
    assert "different seeds: 10 on rank 0, 11 on rank 1, 12 on rank 2, 13 on rank 3. All ranks draw" in found[0]
    assert "that of rank 1 would do so silently" in found[0]


def test_manual_seed_on_one_rank_alone_is_refused(pool):
    found = pool.run(seeds_of_each_rank, "one")
    assert len(set(found)) == 1
    assert "10 on rank 0, not called on rank 1" in found[0]


def other_modes():
    rank = torch.distributed.get_rank()
    world = another_mesh(2, 3, 0, 1)
    with (
        sw.random.using("local" if rank == 1 else "torch"),
        pytest.raises(RankDisagreementError, match="local on rank 1"),
    ):
        sw.rand(9, device_mesh=world, placements=[Shard(0)])


def test_ranks_in_different_modes_are_refused(pool):
    pool.run(other_modes)


def torch_seeded_by_rank():
    """Plain draws of a rank's own stay its own, until a draw on the mesh: then every rank is told, once."""
    rank = torch.distributed.get_rank()
    world = another_mesh(3, 2, 1, 0)
    torch.manual_seed(rank)
    mine = torch.rand(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x = sw.distribute_tensor(torch.ones(4), world, [Shard(0)])
        (x * 2).full_tensor()
        assert not caught
        drawn = sw.rand(9, device_mesh=world, placements=[Shard(0)]).full_tensor()
        told = [str(one.message) for one in caught if one.category is DifferentSeedsWarning]
        assert {one.filename for one in caught} == {__file__}
        sw.rand(9, device_mesh=world, placements=[Shard(0)])
        assert len([one for one in caught if one.category is DifferentSeedsWarning]) == len(told) == 1
    torch.manual_seed(3)
    torch.rand(3)
    assert torch.equal(drawn, torch.rand(9))
    return mine.tolist(), told[0]


def test_torch_seeded_by_rank_is_told_at_the_first_draw_on_a_mesh(pool):
    own, told = zip(*pool.run(torch_seeded_by_rank), strict=True)
    assert len({tuple(numbers) for numbers in own}) == 4
    assert len(set(told)) == 1
    assert (
        "0 on rank 0, 1 on rank 1, 2 on rank 2, 3 on rank 3. Tensors on a mesh are drawn from the generator" in told[0]
    )
    assert "all ranks have the state of rank 3" in told[0]


def no_more_collectives():
    """The comparison costs a small all-reduce before the first draw, and nothing at later ones."""
    world = another_mesh(0, 2, 1, 3)
    counts = []
    for _ in range(4):
        sent = []
        sw.manual_seed(1)
        with events.observe(sent.append), sw.random.using("local"):
            sw.rand(9, device_mesh=world, placements=[Shard(0)])
        counts.append(len(sent))
    sw.random.set_state(torch.tensor([1, 0, 0, 0]))
    return counts


def test_later_draws_send_no_more_than_before(pool):
    for counts in pool.run(no_more_collectives):
        assert counts[2] == 0


def torchs_generators_apart():
    world = mesh((4,))

    def draw(times):
        for _ in range(times):
            torch.nn.init.uniform_(sw.zeros(4, device_mesh=world, placements=[Shard(0)]))

    draw(2)
    torch.manual_seed(torch.distributed.get_rank())
    with pytest.raises(RankDisagreementError, match="torch's generator"):
        draw(16)


def test_torchs_generators_that_came_apart_are_found_out(pool):
    pool.run(torchs_generators_apart)


# -- the fast way ----------------------------------------------------------------------------------------------------


def fast():
    m = mesh((2, 2))
    with sw.random.using("local"):
        sw.manual_seed(1)
        drawn = sw.rand(8, 6, device_mesh=m, placements=[Shard(0), Replicate()])
        dropped = functional.dropout(sw.ones(8, 6, device_mesh=m, placements=[Replicate(), Shard(1)]))
        sampled = torch.multinomial(drawn, 2)
        normal = torch.normal(drawn, drawn)
        order = sw.randperm(9, device_mesh=m, placements=[Shard(0), Replicate()])
        sw.manual_seed(1)
        again = sw.rand(8, 6, device_mesh=m, placements=[Shard(0), Replicate()])
    assert torch.equal(again.to_local(), drawn.to_local())
    assert sorted(order.full_tensor().tolist()) == list(range(9))
    for tensor in (drawn, dropped, sampled, normal):
        # Ranks that hold the same part drew the same values, and other ranks drew others.
        sw.MeshTensor.from_local(tensor.to_local(), m, tensor.placements, shape=tensor.shape, run_check=True)
        full = tensor.full_tensor()
        dim = next(p.dim for p in tensor.placements if isinstance(p, Shard))
        first, second = full.chunk(2, dim)
        assert not torch.equal(first, second)
    sw.random.set_state(torch.tensor([1, 0, 0, 0]))


def test_the_fast_way_draws_each_part_by_itself(pool):
    pool.run(fast)


# -- graphs ----------------------------------------------------------------------------------------------------------


def test_a_traced_draw_is_refused():
    sw.manual_seed(0)
    with torch._subclasses.FakeTensorMode(), pytest.raises(TracingError, match="a graph is being traced"):
        draws.next_draw(lambda seed, number: (seed, number))
    assert sw.random.get_state().tolist() == [1, 1, 0, 0]


def compiled():
    x = sw.ones(8, 4, device_mesh=mesh((4,)), placements=[Shard(0)])
    programs = {
        "op": lambda x: functional.dropout(x, 0.5) * 2,
        "factory": lambda x: x + sw.rand(8, 4, device_mesh=x.device_mesh, placements=x.placements),
    }
    for program in programs.values():
        torch._dynamo.reset()
        sw.manual_seed(0)
        with pytest.raises(TracingError, match="a graph is being traced"):
            torch.compile(program, backend="aot_eager", fullgraph=True)(x)
        with sw.random.using("torch"):
            torch._dynamo.reset()
            result = torch.compile(program, backend="aot_eager", fullgraph=True)
            assert not torch.equal(result(x).full_tensor(), result(x).full_tensor())
    sw.random.set_state(torch.tensor([1, 0, 0, 0]))


@pytest.mark.slow
@pytest.mark.sample
def test_compiled_code_refuses_to_draw_by_place(pool):
    pool.run(compiled)
