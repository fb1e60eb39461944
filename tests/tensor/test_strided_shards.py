"""Dims that are sharded inside: a view that needs no data sends none, and everything else holds as for other shards."""

from __future__ import annotations

import copy
import io
from collections import Counter

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional

import shardwise as sw
from shardwise import MeshTensor, Partial, Replicate, Shard
from shardwise.comm.events import observe
from shardwise.errors import PlacementError
from shardwise.kernel.placements import strided_shard
from shardwise.rng.generator import preserved_state
from shardwise.testing import mesh

BATCH, SEQUENCE, WIDTH, CLASSES = 4, 8, 6, 5


def sums(values):
    """Something to call backward of in which no element's gradient is like another's."""
    whole = values * torch.linspace(1, 2, values.shape[-1], dtype=values.dtype) if values.ndim else values
    return whole.sum()


# -- a view that needs no data from elsewhere sends none ---------------------------------------------------------------

PROGRAMS = {
    "flatten": lambda x, *_: x.flatten(0, 1) * 2,
    "flatten and back": lambda x, *_: functional.gelu(x.flatten(0, 1)).unflatten(0, (BATCH, SEQUENCE)).softmax(-1),
    "view": lambda x, *_: x.view(BATCH * SEQUENCE, 2, WIDTH // 2).transpose(0, 1),
    "linear": lambda x, w, *_: functional.linear(x, w),
    "linear with a bias": lambda x, w, b, _: functional.linear(x, w, b),
    "matmul": lambda x, w, *_: x @ w.t(),
    "einsum": lambda x, w, *_: torch.einsum("bsd,od->bso", x, w),
    "layer norm of rows": lambda x, *_: functional.layer_norm(x.flatten(0, 1), (WIDTH,)),
    "sum over each row": lambda x, *_: x.flatten(0, 1).sum(1),
    "mean over all rows": lambda x, *_: x.flatten(0, 1).mean(0),
    "cross entropy": lambda x, w, _, t: functional.cross_entropy((x @ w.t()).view(-1, CLASSES), t.view(-1)),
}
#: Programs whose result is one number over all ranks.
REDUCED = {"mean over all rows", "cross entropy"}
PLACES = {"batch": Shard(0), "sequence": Shard(1), "whole": Replicate()}


def leaves(put, layout):
    generator = torch.Generator().manual_seed(3)
    x, w, b = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((BATCH, SEQUENCE, WIDTH), (CLASSES, WIDTH), (CLASSES,))
    )
    t = torch.randint(0, CLASSES, (BATCH, SEQUENCE), generator=generator)
    t[1, 2] = -100  # a row that is ignored, on one rank alone
    whole = [Replicate()] * len(layout)
    placed = [put(x, layout), put(w, whole), put(b, whole)]
    return [*(one.requires_grad_() for one in placed), put(t, layout)]


def programs_on(mesh_shape, names):
    """Results and gradients are those of one device; nothing is sent but what sums over ranks, as in DTensor."""
    where, layout = mesh(mesh_shape), [PLACES[name] for name in names]
    for name, program in PROGRAMS.items():
        forward, backward = [], []
        ours = leaves(lambda t, p: sw.distribute_tensor(t, where, p), layout)
        with observe(forward.append):
            result = program(*ours)
        alone = leaves(lambda t, _: t.clone(), layout)
        expected = program(*alone)
        torch.testing.assert_close(result.full_tensor(), expected, msg=lambda m, name=name: f"{name}: {m}")
        loss = sums(result)
        with observe(backward.append):
            loss.backward()
        sums(expected).backward()
        for mine, one in zip(ours[:3], alone[:3], strict=True):
            if one.grad is not None:
                assert mine.grad.placements == mine.placements, name
                torch.testing.assert_close(mine.grad.full_tensor(), one.grad, msg=lambda m, name=name: f"{name}: {m}")

        sent = Counter(e.kind for e in forward)
        assert set(sent) <= ({"all_reduce"} if name in REDUCED else set()), (name, sent)
        # The gradients of whole leaves are sums over the ranks.
        assert {e.kind for e in backward} <= {"all_reduce"}, (name, backward)
        assert len(backward) <= sum(one.grad is not None for one in alone[1:3]), (name, backward)


SAMPLE = [pytest.mark.slow, pytest.mark.sample]


@pytest.mark.parametrize(
    ("mesh_shape", "names"),
    [
        ((4,), ["sequence"]),
        ((2, 2), ["batch", "sequence"]),
        pytest.param((2, 2), ["sequence", "batch"], marks=SAMPLE),
        pytest.param((2, 2), ["sequence", "sequence"], marks=SAMPLE),
        pytest.param((2, 2), ["whole", "sequence"], marks=SAMPLE),
    ],
    ids=str,
)
def test_linear_maps_and_views_of_a_sharded_sequence_send_nothing(pool, mesh_shape, names):
    pool.run(programs_on, mesh_shape, names)


# -- placed, converted, moved, copied ----------------------------------------------------------------------------------

LAYOUTS = [
    ((4,), [strided_shard(0, 2)]),
    ((2, 2), [strided_shard(0, 2), Shard(0)]),  # as FSDP over tensor parallelism
    ((2, 2), [Shard(0), strided_shard(0, 2)]),
    ((2, 2), [strided_shard(1, 3), strided_shard(0, 4)]),
    ((2, 2), [Partial(), strided_shard(0, 2)]),
]


def ways_in_and_out(mesh_shape, layout):
    where = mesh(mesh_shape)
    whole = torch.arange(96.0).view(16, 6)
    placed = sw.distribute_tensor(whole, where, layout)
    assert placed.placements == tuple(layout)
    assert torch.equal(placed.full_tensor(), whole)

    # To torch, where the parts lie the same way, and back.
    theirs = placed.to_dtensor()
    assert isinstance(theirs, DTensor)
    if not any(isinstance(p, Partial) for p in layout):
        if torch.__version__ >= "2.12":  # before, DTensor cannot make every layout of its own whole
            assert torch.equal(theirs.full_tensor(), whole)
        as_torch_does = DTensor.from_local(theirs.to_local(), where, layout, run_check=False)
        assert as_torch_does.shape == whole.shape
        assert MeshTensor.from_local(placed.to_local(), where, layout).shape == whole.shape
    again = MeshTensor.from_dtensor(theirs)
    assert again.placements == placed.placements
    assert torch.equal(again.full_tensor(), whole)

    # The gradient of a part is the part of the gradient.
    leaf = sw.distribute_tensor(whole, where, layout).requires_grad_()
    leaf.to_local().square().sum().backward()
    assert leaf.grad.placements == tuple(Replicate() if isinstance(p, Partial) else p for p in layout) or (
        leaf.grad.placements == leaf.placements
    )
    if not any(isinstance(p, Partial) for p in layout):
        assert torch.equal(leaf.grad.full_tensor(), 2 * whole)

    # Every other layout and back, with gradients.
    for target in (
        [Replicate()] * len(layout),
        [Shard(1), *[Replicate()] * (len(layout) - 1)],
        [Shard(0)] * len(layout),
    ):
        leaf = sw.distribute_tensor(whole, where, layout).requires_grad_()
        moved = leaf.redistribute(placements=target)
        assert moved.placements == tuple(target)
        assert torch.equal(moved.full_tensor(), whole)
        back = moved.redistribute(placements=[Replicate() if isinstance(p, Partial) else p for p in layout])
        assert torch.equal(back.full_tensor(), whole)
        (moved * moved).sum().backward()
        assert torch.equal(leaf.grad.full_tensor(), 2 * whole)

    assert torch.equal(copy.deepcopy(placed).full_tensor(), whole)
    file = io.BytesIO()
    torch.save(placed, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.placements == placed.placements
    assert torch.equal(loaded.full_tensor(), whole)


@pytest.mark.parametrize(("mesh_shape", "layout"), LAYOUTS, ids=str)
def test_placed_converted_moved_and_copied(pool, mesh_shape, layout):
    pool.run(ways_in_and_out, mesh_shape, layout)


def made_alike(mesh_shape, layout):
    """What factories draw and fill does not depend on the layout."""
    where = mesh(mesh_shape)
    for make in (
        lambda p: sw.zeros(16, 6, device_mesh=where, placements=p) + sw.ones(16, 6, device_mesh=where, placements=p),
        lambda p: sw.full((16, 6), 3.5, device_mesh=where, placements=p),
    ):
        whole, inside = make([Replicate()] * len(layout)), make(layout)
        assert inside.placements == tuple(layout)
        assert torch.equal(inside.full_tensor(), whole.full_tensor())
    with preserved_state(), sw.random.using("counter"):
        sw.manual_seed(5)
        whole = sw.randn(16, 6, device_mesh=where, placements=[Replicate()] * len(layout))
        sw.manual_seed(5)
        inside = sw.randn(16, 6, device_mesh=where, placements=layout)
        assert torch.equal(inside.full_tensor(), whole.full_tensor())


def test_factories_fill_and_draw_as_in_any_layout(pool):
    for mesh_shape, layout in LAYOUTS[:4]:
        pool.run(made_alike, mesh_shape, layout)


# -- views and writes --------------------------------------------------------------------------------------------------


def writes():
    where = mesh((2, 2))
    whole = torch.arange(float(BATCH * SEQUENCE * WIDTH)).view(BATCH, SEQUENCE, WIDTH).sin()
    programs = {
        "a row of the flat view": lambda x: x.flatten(0, 1)[5].fill_(7),
        "the base": lambda x: (x.flatten(0, 1), x.mul_(3))[0],
        "a view of the view": lambda x: x.view(BATCH * SEQUENCE, WIDTH)[:, 1:3].add_(1),
        "back again": lambda x: x.flatten(0, 1).unflatten(0, (BATCH, SEQUENCE))[:, 0].zero_(),
        "all of it": lambda x: x.flatten(0, 1).copy_(torch.ones(WIDTH)),
        "by an index": lambda x: x.flatten(0, 1).index_fill_(0, torch.tensor([1, 9]), 4.0),
        "drawn": lambda x: x.flatten(0, 1).uniform_(0, 0),
    }
    for layout in ([Shard(1), Shard(1)], [Shard(0), Shard(1)], [Shard(1), Replicate()]):
        for name, program in programs.items():
            alone, ours = whole.clone(), sw.distribute_tensor(whole, where, layout)
            with sw.on(where):
                found = program(ours)
            wanted = program(alone)
            torch.testing.assert_close(found.full_tensor(), wanted, msg=lambda m, name=name: f"{name}: {m}")
            torch.testing.assert_close(ours.full_tensor(), alone, msg=lambda m, name=name: f"{name}, base: {m}")


def test_writes_to_flat_views_reach_the_base(pool):
    pool.run(writes)


def trained(compiled):
    """Two steps of a block between flat views, beside one device; the same sends compiled as in eager mode."""
    where = mesh((2, 2))
    sends = []

    def block(x, first, second, t):
        rows = functional.relu(functional.linear(x.flatten(0, 1), first))
        return functional.cross_entropy(functional.linear(rows, second), t.flatten())

    run = torch.compile(block, backend="aot_eager", fullgraph=True) if compiled else block
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(n, m, generator=generator, dtype=torch.float64) / 3 for n, m in ((7, WIDTH), (CLASSES, 7))]
    ours = [sw.distribute_tensor(w, where).requires_grad_() for w in weights]
    alone = [w.clone().requires_grad_() for w in weights]
    for batch in (BATCH, BATCH, 2 * BATCH):
        x = torch.randn(batch, SEQUENCE, WIDTH, generator=generator, dtype=torch.float64)
        t = torch.randint(0, CLASSES, (batch, SEQUENCE), generator=generator)
        placed = [sw.distribute_tensor(v, where, [Shard(0), Shard(1)]) for v in (x, t)]
        with observe(sends.append):
            loss = run(placed[0], *ours, placed[1])
        wanted = block(x, *alone, t)
        torch.testing.assert_close(loss.full_tensor(), wanted)
        for params, value in ((ours, loss), (alone, wanted)):
            for param, grad in zip(params, torch.autograd.grad(value, params), strict=True):
                with torch.no_grad():
                    param.sub_(grad, alpha=0.1)
    for mine, one in zip(ours, alone, strict=True):
        torch.testing.assert_close(mine.full_tensor(), one)
    assert not [e for e in sends if e.nbytes > 16], sends  # what a mean needs is all that is sent


@pytest.mark.parametrize(
    "compiled",
    [pytest.param(False, id="eager"), pytest.param(True, marks=[pytest.mark.slow, pytest.mark.sample], id="compiled")],
)
def test_a_block_between_flat_views_trains(pool, compiled):
    pool.run(trained, compiled)


# -- refusals ----------------------------------------------------------------------------------------------------------


def refusals():
    where = mesh((4,))
    with pytest.raises(PlacementError, match="pieces of dim 0 would not have one size"):
        sw.distribute_tensor(torch.zeros(10, 2), where, [strided_shard(0, 4)])
    with pytest.raises(PlacementError, match="there is no dim 2"):
        sw.distribute_tensor(torch.zeros(8, 2), where, [strided_shard(2, 4)])
    with pytest.raises(PlacementError):
        sw.distribute_tensor(torch.zeros(8, 8), where).redistribute(placements=[strided_shard(1, 3)])


def test_a_layout_whose_pieces_have_several_sizes_is_refused(pool):
    pool.run(refusals)
