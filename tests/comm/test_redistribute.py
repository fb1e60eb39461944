"""Redistribution between real processes, against the same tensor on one device."""

import itertools
from contextlib import suppress

import pytest
import torch

from shardwise.comm import packing
from shardwise.comm.events import Event, observe
from shardwise.comm.redistribute import runner
from shardwise.errors import PlacementError
from shardwise.kernel.placements import REPLICATE, parse_placement, partial, shard, strided_shard
from shardwise.kernel.reductions import REDUCE_OPS, reducible
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.path import shortest_path
from shardwise.tensor.shards import scatter_local
from shardwise.testing.meshes import mesh


def numbers(shape, dtype):
    """Small whole numbers, the same on every rank: exact in every dtype and under every reduction."""
    lowest = -4 if dtype.is_signed else 0
    return torch.randint(lowest, 5, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def spec_of(full, device_mesh, text):
    return TensorSpec(device_mesh, [parse_placement(word) for word in text.split()], TensorMeta.of(full))


def possible(device_mesh, layouts, meta):
    """The layouts that a tensor can have: split factors divide it."""
    for layout in layouts:
        with suppress(PlacementError):
            yield TensorSpec(device_mesh, layout, meta)


def all_pairs(mesh_shape, shape, dtype, kinds, every=1, split_factors=()):
    """Every pair of layouts (or every n-th) there and back to replicated; how many, and what went wrong.

    With ``split_factors``, the pairs of which one layout or both have strided shards.
    """
    device_mesh, full = mesh(mesh_shape), numbers(shape, dtype)
    meta = TensorMeta.of(full)
    whole = TensorSpec(device_mesh, [REPLICATE] * len(mesh_shape), meta)
    each = [REPLICATE, *map(shard, range(full.ndim)), *(partial(k) for k in kinds if reducible(k, dtype))]
    each += [strided_shard(d, f) for d in range(full.ndim) for f in split_factors]
    layouts = list(possible(device_mesh, itertools.product(each, repeat=len(mesh_shape)), meta))
    wrong = []
    pairs = [(a, b) for a in layouts for b in layouts if not split_factors or a.is_strided or b.is_strided][::every]
    for src, dst in pairs:
        start = scatter_local(full, src)
        moved = runner(src, dst)(start)
        back = runner(dst, whole)(moved)
        kept = torch.equal(start, scatter_local(full, src))
        # A local tensor in another order of memory than the global one could not be viewed as the global one can.
        fits = tuple(moved.shape) == dst.local_shape() and moved.is_contiguous()
        if not fits or not torch.equal(back, full) or not kept:
            wrong.append(f"{src} -> {dst}: {shortest_path(src, dst)}")
    return len(pairs), wrong


@pytest.mark.parametrize("shape", [(8, 4), (5, 3), (2, 9), (1, 1), (0, 3), (7,), (4, 3, 5)])
def test_every_pair_of_layouts_on_one_mesh_dim(ranks, shape):
    for count, wrong in ranks.run(all_pairs, (ranks.world_size,), shape, torch.float64, REDUCE_OPS):
        assert count == (1 + len(shape) + 5) ** 2
        assert wrong == []


# Everyday runs take every seventh pair, in which every layout comes as source and as target; .ci/run takes all.
EVERY = [pytest.param(1, marks=[pytest.mark.slow, pytest.mark.sample]), 7]


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize(
    ("shape", "kinds"),
    [((4, 8), ("sum", "max")), ((5, 3), ("sum", "product")), ((3, 2), ("avg", "min")), ((1, 6), ("sum",))],
)
def test_every_pair_of_layouts_on_two_mesh_dims(pool, shape, kinds, every):
    for count, wrong in pool.run(all_pairs, (2, 2), shape, torch.float64, kinds, every):
        assert count == -(-((3 + len(kinds)) ** 4) // every)
        assert wrong == []


@pytest.mark.parametrize(
    ("mesh_shape", "shape", "kinds", "split_factors", "every"),
    [
        ((4,), (12,), REDUCE_OPS, (2, 3, 6, 12), 1),
        ((4,), (6, 4), ("sum", "max"), (2, 3), 1),
        ((2, 2), (8, 2), ("sum",), (2, 4), 23),
        ((2, 2), (3, 12), ("sum",), (2, 3), 31),
        ((2, 2), (2, 3, 8), (), (2,), 41),
        ((4, 1), (2, 2, 2, 6), ("avg",), (2,), 61),
        pytest.param((4, 1), (2, 2, 2, 6), ("avg",), (2,), 3, marks=pytest.mark.slow),
        pytest.param((2, 2), (12, 8), ("sum", "max"), (2, 3, 4), 1, marks=pytest.mark.slow),
        pytest.param((2, 2), (2, 2, 4, 6), ("sum",), (2,), 5, marks=pytest.mark.slow),
    ],
)
def test_every_pair_of_layouts_with_strided_shards(pool, mesh_shape, shape, kinds, split_factors, every):
    for count, wrong in pool.run(all_pairs, mesh_shape, shape, torch.float64, kinds, every, split_factors, timeout=250):
        assert count > 20
        assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "every"), [((4, 8), 1), ((5, 3), 1), ((3, 1, 7), 5), ((0, 2), 3), ((), 1)])
def test_every_pair_of_layouts_and_kinds_on_two_mesh_dims(pool, shape, every):
    for _, wrong in pool.run(all_pairs, (2, 2), shape, torch.float64, REDUCE_OPS, every, timeout=250):
        assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "kinds"), [((8, 9), ("sum",)), ((5, 3), ("max",))])
def test_pairs_of_layouts_on_three_mesh_dims(pool_of, shape, kinds):
    for count, wrong in pool_of(8).run(all_pairs, (2, 2, 2), shape, torch.float64, kinds, 11, timeout=250):
        assert count == -(-(4**6) // 11)
        assert wrong == []


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("mesh_shape", [(1, 4), pytest.param((4, 1), marks=[pytest.mark.slow, pytest.mark.sample])])
def test_a_mesh_dim_of_one_rank(pool, mesh_shape, every):
    for _, wrong in pool.run(all_pairs, mesh_shape, (5, 3), torch.float64, ("sum", "min"), every):
        assert wrong == []


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.complex64,
    ],
)
@pytest.mark.parametrize("shape", [(5, 3), ()])
def test_every_dtype(ranks, dtype, shape):
    for _, wrong in ranks.run(all_pairs, (ranks.world_size,), shape, dtype, REDUCE_OPS):
        assert wrong == []


def random_moves(seed, count):
    """A walk over random layouts of a random tensor of real-valued partial parts, against the first reduction."""
    draw = torch.Generator().manual_seed(seed)

    def pick(options):
        return options[int(torch.randint(len(options), (), generator=draw))]

    wrong = []
    for _ in range(count):
        device_mesh = mesh(pick([(4,), (2, 2), (1, 4), (4, 1)]))
        shape = [pick([0, 1, 2, 3, 4, 5, 8, 13]) for _ in range(pick([0, 1, 2, 3]))]
        full = torch.randn(shape, generator=draw, dtype=torch.float64)
        each = [REPLICATE, *map(shard, range(len(shape))), *map(partial, REDUCE_OPS)]
        each += [strided_shard(d, f) for d in range(len(shape)) for f in (2, 4)]
        drawn = ([pick(each) for _ in device_mesh.shape] for _ in itertools.count())
        path = list(itertools.islice(possible(device_mesh, drawn, TensorMeta.of(full)), 4))
        local = scatter_local(full, path[0])
        for src, dst in itertools.pairwise(path):
            local = runner(src, dst)(local)
        whole = path[0].with_placements([REPLICATE] * device_mesh.ndim)
        if not torch.allclose(runner(path[-1], whole)(local), full):
            wrong.append(" -> ".join(map(str, path)))
    return wrong


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(n, marks=[pytest.mark.slow, pytest.mark.sample]) for n in (2, 3))]
)
def test_random_walks_come_back_to_the_tensor(pool, seed):
    assert pool.run(random_moves, seed, 40) == [[]] * 4


def test_partial_parts_that_differ_are_reduced(pool):
    def reduced(kind, mesh_shape, shape, text):
        device_mesh = mesh(mesh_shape)
        ranks = [torch.randn(shape, generator=torch.Generator().manual_seed(r)) for r in range(4)]
        src = TensorSpec(device_mesh, [partial(kind)] * len(mesh_shape), TensorMeta.of(ranks[0]))
        dst = spec_of(ranks[0], device_mesh, text)
        stacked = torch.stack(ranks)
        expected = {
            "sum": lambda: stacked.sum(0),
            "avg": lambda: stacked.mean(0),
            "max": lambda: stacked.amax(0),
            "min": lambda: stacked.amin(0),
            "product": lambda: stacked.prod(0),
        }[kind]()
        mine = ranks[torch.distributed.get_rank()]
        torch.testing.assert_close(runner(src, dst)(mine), scatter_local(expected, dst))

    for kind in REDUCE_OPS:
        pool.run(reduced, kind, (4,), (6, 5), "R")
        pool.run(reduced, kind, (4,), (6, 5), "S(1)")
        pool.run(reduced, kind, (4,), (200, 200), "R")
        pool.run(reduced, kind, (2, 2), (8, 5), "R R")
        pool.run(reduced, kind, (2, 2), (8, 5), "S(0) R")


@pytest.mark.parametrize("shape", [(3,), (70_001,)])
def test_nan_survives_max_and_min_wherever_it_is(pool, shape):
    def survives(kind, text):
        device_mesh = mesh((4,))
        for holder in range(4):
            local = torch.zeros(shape)
            local[0] = float("nan") if torch.distributed.get_rank() == holder else 1.0
            src = TensorSpec(device_mesh, [partial(kind)], TensorMeta.of(local))
            moved = runner(src, spec_of(local, device_mesh, text))(local)
            whole = runner(spec_of(local, device_mesh, text), spec_of(local, device_mesh, "R"))(moved)
            assert whole[0].isnan()
            assert not whole[1:].isnan().any()

    for kind, text in itertools.product(("max", "min"), ("R", "S(0)")):
        pool.run(survives, kind, text)


def test_an_integer_dtype_that_no_backend_adds_up(pool):
    def added(shape):
        local = torch.full(shape, torch.distributed.get_rank() + 1, dtype=torch.int16)
        src, dst = (spec_of(local, mesh((4,)), text) for text in ("P(sum)", "R"))
        assert torch.equal(runner(src, dst)(local), torch.full(shape, 10, dtype=torch.int16))

    pool.run(added, (3, 2))
    pool.run(added, (101, 333))


# -- memory -----------------------------------------------------------------------------------------------------------


def test_the_result_owns_its_memory_and_the_input_is_left_alone(pool):
    def apart(src_text, dst_text):
        full = numbers((4, 4), torch.float64)
        src, dst = (spec_of(full, mesh((4,)), text) for text in (src_text, dst_text))
        local = scatter_local(full, src)
        kept = local.clone()
        moved = runner(src, dst)(local)
        moved.fill_(77)
        assert torch.equal(local, kept)
        assert runner(src, src)(local) is local

    for pair in itertools.permutations(("R", "S(0)", "S(1)", "P(sum)", "P(max)"), 2):
        pool.run(apart, *pair)


def test_locals_may_have_any_strides(pool):
    def strided(src_text, dst_text):
        full = numbers((6, 7), torch.float64)
        src, dst = (spec_of(full, mesh((4,)), text) for text in (src_text, dst_text))
        local = scatter_local(full, src).t().contiguous().t()
        assert torch.equal(runner(src, dst)(local), scatter_local(full, dst))

    for pair in itertools.permutations(("R", "S(0)", "S(1)"), 2):
        pool.run(strided, *pair)


def test_a_lazily_conjugated_local_is_sent_as_what_it_is(pool):
    def conjugated(src_text, dst_text):
        full = numbers((4, 6), torch.complex64) * (1 + 2j)
        src, dst = (spec_of(full, mesh((4,)), text) for text in (src_text, dst_text))
        moved = runner(src, dst)(scatter_local(full, src).conj())
        assert torch.equal(moved, scatter_local(full.conj(), dst))

    for pair in itertools.permutations(("R", "S(0)", "S(1)"), 2):
        pool.run(conjugated, *pair)


def test_a_transposed_tensor_stays_transposed(pool):
    def transposed(src_text, dst_text):
        full = numbers((4, 8, 3), torch.float64).permute(2, 0, 1)
        src, dst = (spec_of(full, mesh((4,)), text) for text in (src_text, dst_text))
        moved = runner(src, dst)(scatter_local(full, src))
        assert torch.equal(runner(dst, spec_of(full, mesh((4,)), "R"))(moved), full)
        assert moved.permute(1, 2, 0).is_contiguous()

    for pair in itertools.permutations(("R", "S(0)", "S(1)", "S(2)", "P(sum)"), 2):
        pool.run(transposed, *pair)


def test_an_expanded_tensor_is_written_out(pool):
    def expanded():
        full = numbers((1, 3), torch.float64).expand(4, 3)
        src, dst = (spec_of(full, mesh((4,)), text) for text in ("S(0)", "R"))
        assert torch.equal(runner(src, dst)(full[:1]), full)

    pool.run(expanded)


def test_packed_pieces_come_back_in_whatever_order_they_lie():
    whole = torch.arange(24.0).reshape(4, 6)
    quarters = [(row, column) for row in (0, 2) for column in (0, 3)]
    for order in itertools.permutations(quarters):
        packed = torch.cat([whole[r : r + 2, c : c + 3].flatten() for r, c in order])
        pieces = [packing.Piece((2, 3), r * 6 + c, i * 6) for i, (r, c) in enumerate(order)]
        blocks = packing.copies_of(pieces, (4, 6))
        assert torch.equal(packing.unpack(packed, torch.empty(4, 6), blocks), whole)
    in_order = [packing.Piece((2, 3), r * 6 + c, i * 6) for i, (r, c) in enumerate(quarters)]
    assert len(packing.copies_of(in_order, (4, 6))) == 2, "two pieces side by side are one copy"


# -- groups and movers ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sample
def test_a_mesh_may_count_its_ranks_in_any_order(pool):
    def shuffled(kinds):
        from torch.distributed.device_mesh import DeviceMesh

        device_mesh = DeviceMesh("cpu", torch.tensor([[3, 1], [2, 0]]))
        full = numbers((5, 7), torch.float64)
        meta = TensorMeta.of(full)
        layouts = list(itertools.product([REPLICATE, shard(0), shard(1), *map(partial, kinds)], repeat=2))
        for a, b in itertools.product(layouts, layouts):
            src, dst = TensorSpec(device_mesh, a, meta), TensorSpec(device_mesh, b, meta)
            moved = runner(src, dst)(scatter_local(full, src))
            whole = runner(dst, TensorSpec(device_mesh, [REPLICATE] * 2, meta))(moved)
            assert torch.equal(whole, full), f"{src} -> {dst}"

    pool.run(shuffled, ("sum",))


def staged_pairs(kinds):
    """As on a GPU through gloo: what is sent and received lies in other memory than the tensors."""
    from shardwise.comm.group import Group

    kept, Group._stages = Group._stages, lambda _, __: True
    try:
        for dtype in (torch.float64, torch.complex64, torch.int16):
            for shape in ((8, 4), (5, 3)) if dtype == torch.float64 else ((5, 3),):
                assert all_pairs((4,), shape, dtype, kinds)[1] == []
    finally:
        Group._stages = kept


def test_tensors_that_travel_through_other_memory(pool):
    pool.run(staged_pairs, REDUCE_OPS)


def test_observers_see_each_collective_and_no_local_step(pool):
    def seen(src_text, dst_text):
        full = numbers((8, 4), torch.float32)
        src, dst = (spec_of(full, mesh((2, 2)), text) for text in (src_text, dst_text))
        events = []
        local = scatter_local(full, src)
        with observe(events.append):
            runner(src, dst)(local)
        runner(src, dst)(local)
        return events

    assert pool.run(seen, "R R", "S(0) P(sum)") == [[]] * 4
    assert pool.run(seen, "S(0) R", "R R") == [[Event("all_gather", 64, 2, (0,))]] * 4
    assert pool.run(seen, "P(sum) P(sum)", "R R") == [[Event("all_reduce", 128, 4, (0, 1))]] * 4
    assert pool.run(seen, "P(max) R", "S(1) R") == [[Event("reduce_scatter", 128, 2, (0,))]] * 4
    assert pool.run(seen, "R S(1)", "R S(0)") == [[Event("all_to_all", 64, 2, (1,))]] * 4


def test_runners_are_built_once_and_not_kept_past_their_process_group(pool):
    def made():
        from shardwise.comm import groups

        full = numbers((8, 4), torch.float32)
        src, dst = (spec_of(full, mesh((2, 2)), text) for text in ("S(0) S(0)", "R R"))
        first, group = runner(src, dst), groups.group_of(src.mesh, (0, 1))
        assert runner(src, dst) is first
        assert groups.group_of(src.mesh, (0, 1)) is group
        # As if the default process group had been another one until now.
        groups._per_world._group = lambda: None
        assert groups.group_of(src.mesh, (0, 1)) is not group

    pool.run(made)


def test_a_refused_move_raises_on_every_rank_before_anything_is_sent(pool):
    def refused():
        from shardwise.errors import LayoutError

        full = torch.ones(4, dtype=torch.bool)
        src, dst = (spec_of(full, mesh((4,)), text) for text in ("P(avg)", "R"))
        with pytest.raises(LayoutError, match="avg"):
            runner(src, dst)(full)
        return runner(spec_of(full, mesh((4,)), "P(max)"), dst)(full).tolist()

    assert pool.run(refused) == [[True] * 4] * 4


# -- accelerators -----------------------------------------------------------------------------------------------------


def cuda_pairs(shape, dtype, kinds):
    device_mesh = mesh((torch.distributed.get_world_size(),), device_type="cuda")
    full = numbers(shape, dtype).cuda()
    meta = TensorMeta.of(full)
    each = [REPLICATE, *map(shard, range(full.ndim)), *map(partial, kinds)]
    whole = TensorSpec(device_mesh, [REPLICATE], meta)
    for a, b in itertools.product(each, each):
        src, dst = TensorSpec(device_mesh, [a], meta), TensorSpec(device_mesh, [b], meta)
        moved = runner(src, dst)(scatter_local(full, src))
        assert moved.is_cuda
        assert torch.equal(runner(dst, whole)(moved), full), f"{src} -> {dst}"


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(8, 4), (5, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16])
def test_several_ranks_share_a_gpu_through_gloo(pool, shape, dtype):
    pool.run(cuda_pairs, shape, dtype, REDUCE_OPS)


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(8, 4), (5, 3)])
def test_one_rank_per_gpu_through_nccl(pool_of, shape):
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than two CUDA devices")
    ranks = min(4, torch.cuda.device_count())
    pool_of(ranks, "nccl").run(cuda_pairs, shape, torch.float32, REDUCE_OPS)
