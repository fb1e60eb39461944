"""MeshTensor on real ranks: in and out, layouts, copies, and what it shares with DTensor."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

import shardwise as sw
from shardwise import MeshTensor, Partial, Replicate, Shard
from shardwise.comm.mesh_comm import MeshComm
from shardwise.errors import RankDisagreementError
from shardwise.testing import mesh

MESHES = [(4,), (2, 2)]
LAYOUTS = {
    (4,): [[Shard(0)], [Shard(1)], [Replicate()]],
    (2, 2): [list(pair) for pair in itertools.product([Shard(0), Shard(1), Replicate()], repeat=2)],
}
CASES = [(shape, layout) for shape in MESHES for layout in LAYOUTS[shape]]


def whole(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def round_trip(mesh_shape, layout):
    full = whole(5, 7)
    x = sw.distribute_tensor(full, mesh(mesh_shape), layout)
    assert x.shape == full.shape
    assert x.stride() == full.stride()
    assert x.placements == tuple(layout)
    assert tuple(x.to_local().shape) == x.spec.local_shape()
    assert torch.equal(x.full_tensor(), full)
    again = MeshTensor.from_local(x.to_local(), x.device_mesh, layout, shape=full.shape, run_check=True)
    assert torch.equal(again.full_tensor(), full)
    assert again.to_local().data_ptr() == x.to_local().data_ptr()


@pytest.mark.parametrize(("mesh_shape", "layout"), CASES)
def test_a_whole_tensor_goes_in_and_comes_out(pool, mesh_shape, layout):
    pool.run(round_trip, mesh_shape, layout)


def distribute_own_values():
    x = sw.distribute_tensor(torch.full((4, 2), float(torch.distributed.get_rank())), mesh((4,)), [Shard(0)])
    assert torch.equal(x.full_tensor(), torch.zeros(4, 2))
    mine = sw.distribute_tensor(
        torch.full((4, 2), float(torch.distributed.get_rank())), mesh((4,)), [Shard(0)], src_data_rank=None
    )
    assert torch.equal(mine.full_tensor(), torch.arange(4.0)[:, None].expand(4, 2))


def test_the_values_are_the_first_ranks_unless_asked_otherwise(pool):
    pool.run(distribute_own_values)


def values_of_the_first_coordinate():
    """On a mesh whose ranks do not ascend, a process group's first rank is not the mesh's."""
    rank = torch.distributed.get_rank()
    turned = DeviceMesh("cpu", [[3, 2], [0, 1]])
    mine = torch.full((4, 2), float(rank))
    assert torch.equal(sw.distribute_tensor(mine, turned, [Shard(0), Shard(1)]).full_tensor(), torch.full((4, 2), 3.0))
    torch.manual_seed(rank)
    drawn = sw.rand(4, 2, device_mesh=turned, placements=[Shard(0), Replicate()]).full_tensor()
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(4, 2))
    ring = MeshComm(DeviceMesh("cpu", [3, 1, 0, 2]))
    assert ring.shift(torch.tensor([rank]), 0).tolist() == [{3: 2, 1: 3, 0: 1, 2: 0}[rank]]


def test_the_first_rank_is_the_meshs_own_whatever_the_order_of_its_ranks(pool):
    pool.run(values_of_the_first_coordinate)


def every_dtype():
    for dtype in (torch.int16, torch.bool, torch.uint16, torch.complex64, torch.bfloat16):
        given = torch.tensor([[0, 1], [1, 0]]).to(dtype)
        mine = given if torch.distributed.get_rank() == 0 else torch.zeros_like(given)
        assert torch.equal(sw.distribute_tensor(mine, mesh((4,)), [Shard(0)]).full_tensor(), given), dtype


def test_values_of_every_dtype_are_broadcast(pool):
    pool.run(every_dtype)


def matches_dtensor(mesh_shape, shape, layout):
    full = whole(*shape)
    m = mesh(mesh_shape)
    ours = sw.distribute_tensor(full, m, layout)
    theirs = torch_distribute_tensor(full, m, layout)
    assert torch.equal(ours.to_local(), theirs.to_local()), (ours, theirs)
    back = MeshTensor.from_dtensor(theirs)
    assert back.spec is ours.spec
    assert back.to_local().data_ptr() == theirs.to_local().data_ptr()
    over = ours.to_dtensor()
    assert type(over) is DTensor
    assert over.to_local().data_ptr() == ours.to_local().data_ptr()
    assert (over.placements, over.shape, over.stride()) == (theirs.placements, theirs.shape, theirs.stride())
    assert torch.equal(over.full_tensor(), full)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_layouts_are_dtensors_for_random_shapes_meshes_and_placements(pool, data):
    mesh_shape = data.draw(st.sampled_from([(4,), (2, 2), (4, 1), (1, 2, 2)]))
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    choice = st.sampled_from([Replicate(), *(Shard(d) for d in range(len(shape)))])
    layout = data.draw(st.lists(choice, min_size=len(mesh_shape), max_size=len(mesh_shape)))
    pool.run(matches_dtensor, mesh_shape, shape, layout)


def keeps_a_parameter():
    linear = nn.Linear(6, 4)
    module = sw.distribute_module(linear, mesh((2, 2), ("dp", "tp")), {"weight": {"tp": Shard(0)}})
    assert module is linear
    assert isinstance(linear.weight, nn.Parameter)
    assert isinstance(linear.weight, MeshTensor)
    assert linear.weight.placements == (Replicate(), Shard(0))
    assert linear.bias.placements == (Replicate(), Replicate())
    assert linear.weight.requires_grad
    assert len(list(linear.parameters())) == 2


def test_a_modules_parameters_stay_parameters(pool):
    pool.run(keeps_a_parameter)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(4))


def keeps_ties():
    module = sw.distribute_module(Tied(), mesh((4,)), {"*.weight": [Shard(0)]})
    assert module.head.weight is module.embed.weight
    assert isinstance(module.scale, MeshTensor)


def test_tied_parameters_stay_tied(pool):
    pool.run(keeps_ties)


def partition_like_torch():
    def shard_linear(name, submodule, m):
        if isinstance(submodule, nn.Linear):
            weight = nn.Parameter(sw.distribute_tensor(submodule.weight, m, [Shard(0)]))
            submodule.register_parameter("weight", weight)

    def shard_input(module, inputs, m):
        return tuple(sw.distribute_tensor(t, m, [Replicate()]) for t in inputs)

    def gather_output(module, outputs, m):
        return outputs.full_tensor()

    torch.manual_seed(0)
    module, x = nn.Linear(6, 4), torch.randn(3, 6)
    expected = module(x)
    spread = sw.distribute_module(copy.deepcopy(module), mesh((4,)), shard_linear, shard_input, gather_output)
    torch.testing.assert_close(spread(x), expected)

    # Torch's older form has no module.
    def put_input(inputs, m):
        return tuple(sw.distribute_tensor(t, m, [Replicate()]) for t in inputs)

    older = sw.distribute_module(
        copy.deepcopy(module), mesh((4,)), shard_linear, put_input, lambda outputs, _: outputs.full_tensor()
    )
    torch.testing.assert_close(older(x), expected)


def test_torchs_partition_functions_work(pool):
    pool.run(partition_like_torch)


def copies(mesh_shape, layout):
    x = sw.distribute_tensor(whole(5, 7), mesh(mesh_shape), layout).requires_grad_()
    twin = copy.deepcopy(x)
    assert twin.spec is x.spec
    assert twin.requires_grad
    assert twin.to_local().data_ptr() != x.to_local().data_ptr() or x.to_local().numel() == 0
    parameter = copy.deepcopy(nn.Parameter(x.detach()))
    assert isinstance(parameter, nn.Parameter)
    assert parameter.requires_grad
    buffer = io.BytesIO()
    torch.save({"x": x}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)["x"]
    assert type(loaded) is MeshTensor
    assert loaded.spec is x.spec
    assert loaded.requires_grad
    assert torch.equal(loaded.full_tensor(), x.full_tensor())


@pytest.mark.parametrize(("mesh_shape", "layout"), CASES[:3] + CASES[-2:])
def test_deepcopy_and_save(pool, mesh_shape, layout):
    pool.run(copies, mesh_shape, layout)


def shown():
    x = sw.distribute_tensor(whole(8, 6), mesh((2, 2), ("dp", "tp")), [Shard(0), Partial()])
    return repr(x), repr(nn.Parameter(x.detach()))


def test_repr_shows_spec_and_local_shape(pool):
    assert pool.run(shown)[0] == (
        "MeshTensor(f32[8,6], [S(0), P(sum)], mesh=2x2 (dp, tp), local=(4, 6) on cpu)",
        "MeshTensor(f32[8,6], [S(0), P(sum)], mesh=2x2 (dp, tp), local=(4, 6) on cpu, requires_grad=True)",
    )


def factories(mesh_shape, layout):
    m = mesh(mesh_shape)
    for name, args in (("zeros", ()), ("ones", ()), ("full", (2.5,))):
        size = ((5, 7), *args) if args else (5, 7)
        made = getattr(sw, name)(*size, device_mesh=m, placements=layout)
        assert torch.equal(made.full_tensor(), getattr(torch, name)(*size))
        assert tuple(made.to_local().shape) == made.spec.local_shape()
    assert sw.empty((5, 7), device_mesh=m, placements=layout).shape == (5, 7)
    for name in ("rand", "randn"):
        torch.manual_seed(7)
        expected = getattr(torch, name)(5, 7)
        torch.manual_seed(7)
        made = getattr(sw, name)(5, 7, device_mesh=m, placements=layout, requires_grad=True)
        assert made.requires_grad
        assert torch.equal(made.full_tensor(), expected)


@pytest.mark.parametrize(("mesh_shape", "layout"), [*CASES, ((2, 2), [Partial(), Shard(1)])])
def test_factories_give_what_one_device_gives(pool, mesh_shape, layout):
    pool.run(factories, mesh_shape, layout)


def items():
    x = sw.distribute_tensor(whole(4, 3), mesh((4,)), [Shard(0)])
    total = x.sum()
    assert total.item() == float(total) == 66.0
    assert int(total) == 66
    assert bool(total)
    assert f"{total:.1f}" == "66.0"
    assert f"expert_{total.redistribute(placements=[Replicate()]).long()}" == "expert_66"
    assert f"{x.sum()}".startswith("MeshTensor(")  # a partial number is not fetched for this
    assert x.tolist() == whole(4, 3).tolist()


def test_one_element_comes_out_alike_on_every_rank(pool):
    pool.run(items)


def views_share():
    full = whole(6, 8)
    x = sw.distribute_tensor(full.clone(), mesh((2, 2)), [Replicate(), Shard(1)])
    x.t()[:, 2].add_(100)
    x[1:3].mul_(2)
    full.t()[:, 2].add_(100)
    full[1:3].mul_(2)
    assert torch.equal(x.full_tensor(), full)
    rows = sw.distribute_tensor(full.clone(), mesh((4,)), [Shard(0)])[1:3]
    assert torch.equal(rows.full_tensor(), full[1:3])
    windows = sw.distribute_tensor(full.clone(), mesh((4,)), [Shard(0)]).unfold(0, 3, 1)
    assert torch.equal(windows.full_tensor(), full.unfold(0, 3, 1))
    try:
        windows.add_(1)
    except sw.ShardingError as error:
        return type(error).__name__, str(error)
    raise AssertionError("writing to a gathered view that overlaps itself was not refused")


def test_views_share_memory_and_a_gathered_view_that_overlaps_is_not_written(pool):
    name, message = pool.run(views_share)[0]
    assert name == "InPlaceError"
    assert "nothing says how a write gets back" in message


def mixes():
    x = sw.distribute_tensor(whole(4, 3), mesh((4,)), [Shard(0)])
    y = x * torch.tensor(2.0) + 1
    assert torch.equal(y.full_tensor(), whole(4, 3) * 2 + 1)
    assert y.placements == (Shard(0),)


def test_scalars_and_zero_dim_tensors_are_taken_as_replicated(pool):
    pool.run(mixes)


def out_argument():
    x = sw.distribute_tensor(whole(4, 3), mesh((4,)), [Shard(0)])
    out = sw.zeros(4, 3, device_mesh=mesh((4,)), placements=[Shard(1)])
    found = torch.add(x, x, out=out)
    assert found is out
    assert out.placements == (Shard(1),)
    assert torch.equal(out.full_tensor(), whole(4, 3) * 2)


def test_out_keeps_its_placements(pool):
    pool.run(out_argument)


def modes():
    x = sw.distribute_tensor(whole(4, 3), mesh((4,)), [Shard(0)])
    w = sw.distribute_tensor(whole(2, 3), mesh((4,)), [Replicate()])
    with torch.inference_mode():
        y = torch.nn.functional.linear(x, w)
        assert y.is_inference()
    assert torch.equal(y.full_tensor(), whole(4, 3) @ whole(2, 3).t())
    with torch.no_grad():
        assert not (x * w.requires_grad_()[:1]).requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = x @ w.t()
    assert z.dtype is torch.bfloat16


def test_inference_mode_no_grad_and_autocast(pool):
    pool.run(modes)


def reshapes():
    full = whole(7, 2, 3)
    x = sw.distribute_tensor(full, mesh((4,)), [Shard(0)])
    assert torch.equal(x.reshape(14, 3).full_tensor(), full.reshape(14, 3))
    inner = sw.distribute_tensor(whole(4, 6), mesh((4,)), [Shard(1)])
    assert torch.equal(inner.flatten().full_tensor(), whole(24))
    seen = []
    for call in (lambda: inner.view(3, 8), lambda: x.view(-1, 3)):
        assert call().spec.is_copy
        try:
            with sw.sharing_views():
                with sw.sharing_views(False):
                    call()
                call()
        except sw.ShardingError as error:
            seen.append(type(error).__name__)
    copied = inner.view(3, 8)
    assert copied.spec.is_copy
    seen_again = copied.view(3, 4, 2)  # nothing moves any more
    assert seen_again.to_local().data_ptr() == copied.to_local().data_ptr()
    even = sw.distribute_tensor(whole(4, 6), mesh((4,)), [Shard(0)])
    flat = even.view(24)
    assert flat.placements == (Shard(0),)
    assert flat.to_local().data_ptr() == even.to_local().data_ptr()
    return seen


def test_reshape_and_view_may_copy_unless_views_must_share(pool):
    assert pool.run(reshapes)[0] == ["ViewError", "ViewError"]


def inference_on_normal_tensors():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    x = torch.randn(3, 5, 6)
    expected = module(x)
    sw.distribute_module(module, mesh((4,)), {"0.*": [Shard(0)], "2.weight": [Shard(1)]})
    spread = sw.distribute_tensor(x, mesh((4,)), [Replicate()])
    with torch.inference_mode():
        found = module(spread)
        seen = [spread.transpose(0, 1), spread[0], *spread.split(2), spread.unsqueeze(0), spread.view(15, 6)]
        assert not any(v.is_inference() for v in seen)
        assert spread.clone()[0].is_inference()
    torch.testing.assert_close(found.full_tensor(), expected)


def test_a_module_made_outside_runs_in_inference_mode(pool):
    pool.run(inference_on_normal_tensors)


def starts_anew():
    """The default process group is replaced; meshes, specs and plans of the old one must not be used again."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    found = []
    for _ in range(2):
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        x = sw.distribute_tensor(whole(4, 3), init_device_mesh("cpu", (1,)), [Shard(0)])
        found.append((x + x).spec)
        dist.destroy_process_group()
    return found


def test_a_new_process_group_takes_new_specs():
    first, second = starts_anew()
    assert first is not second


def index_by_lists():
    full = whole(6, 4, 5)
    for layout in ([Shard(0)], [Shard(2)], [Replicate()]):
        x = sw.distribute_tensor(full, mesh((4,)), layout)
        for index in (
            [0, 2],
            ([[0, 5], [1, 1]],),
            (slice(1, 5), [3, 0]),
            ([1, 2], [0, 3]),
            range(2, 5),
            [],
            [True] * 6,
        ):
            kept = list(index) if type(index) is range else index
            assert torch.equal(x[index].full_tensor(), full[kept]), index
        written, expected = x.clone(), full.clone()
        written[[4, 1]] = 7.0
        expected[[4, 1]] = 7.0
        assert torch.equal(written.full_tensor(), expected)


def test_lists_of_numbers_index_as_on_one_device(pool):
    pool.run(index_by_lists)


def checked_parts():
    first = torch.distributed.get_rank() == 0
    for part in (torch.ones(2, 3, requires_grad=first), torch.ones(3, 2).t() if first else torch.ones(2, 3)):
        with pytest.raises(RankDisagreementError, match=f"requires_grad={part.requires_grad}"):
            MeshTensor.from_local(part, mesh((4,)), [Shard(0)], run_check=True)


def test_run_check_compares_strides_and_whether_a_gradient_is_required(pool):
    pool.run(checked_parts)
