"""Kernels that return other strides than torch's meta device says: values and gradients are one device's."""

from __future__ import annotations

import os
from itertools import permutations, product

import pytest
import torch
from torch import nn
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional

import shardwise as sw
from shardwise import MeshTensor, Partial, Replicate, Shard
from shardwise.engine.first_run import CHECK_STRIDES
from shardwise.kernel.dispatcher import clear_plans
from shardwise.kernel.local_strides import in_order, lies_as
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.testing import mesh

SAMPLE = [pytest.mark.slow, pytest.mark.sample]
LAYOUTS = [
    pytest.param((4,), [Replicate()], marks=SAMPLE),
    pytest.param((4,), [Shard(0)], marks=SAMPLE),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [Shard(0), Shard(2)]),
]
AFTER = "group norm", "batch norm", "instance norm", "flatten", "pool", "interpolation"


def layer(name):
    match name:
        case "group norm":
            return nn.GroupNorm(2, 8)
        case "batch norm":
            return nn.BatchNorm2d(8)
        case "instance norm":
            return nn.InstanceNorm2d(8, affine=True)
        case "flatten":
            return nn.Flatten()
        case "pool":
            return nn.MaxPool2d(2)
        case "interpolation":
            return nn.Upsample(scale_factor=2, mode="bilinear")


def after_a_convolution(name, dtype, mesh_shape, layout, channels_last, checked):
    clear_plans()
    before = os.environ.pop(CHECK_STRIDES, None)
    if checked:
        os.environ[CHECK_STRIDES] = "1"
    try:
        compare_after_a_convolution(name, dtype, mesh_shape, layout, channels_last)
    finally:
        clear_plans()
        os.environ.pop(CHECK_STRIDES, None)
        if before is not None:
            os.environ[CHECK_STRIDES] = before


def compare_after_a_convolution(name, dtype, mesh_shape, layout, channels_last):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), layer(name), nn.GELU()).to(dtype)
    x = torch.randn(8, 4, 6, 6, dtype=dtype)
    if channels_last == "weight":
        net = net.to(memory_format=torch.channels_last)
    else:
        x = x.contiguous(memory_format=torch.channels_last)
    m = mesh(mesh_shape)
    sharded = sw.distribute_tensor(x, m, layout).requires_grad_()
    x.requires_grad_()
    whole = net(x)
    torch.manual_seed(1)
    direction = torch.randn(whole.shape, dtype=dtype)
    (whole * direction).sum().backward()
    expected = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    sw.distribute_module(net, m)
    result = net(sharded)
    torch.testing.assert_close(result.full_tensor(), whole, rtol=1e-4, atol=1e-4)
    assert result.stride() == whole.stride()
    (result * sw.distribute_tensor(direction, m)).sum().backward()
    close = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(sharded.grad.full_tensor(), x.grad, **close)
    for parameter, p in net.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), expected[parameter], **close)


# Every day sharded channels are in the layers that compute over them; the others take each channel by itself.
SHARDED_CHANNELS = ((2, 2), [Shard(0), Shard(1)])
CELLS = [
    *(pytest.param(name, *layout.values, marks=SAMPLE) for name in AFTER for layout in LAYOUTS[:2]),
    *(pytest.param(name, *SHARDED_CHANNELS, marks=() if "norm" in name else SAMPLE) for name in AFTER),
    *((name, *LAYOUTS[3]) for name in AFTER),
]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=SAMPLE)])
@pytest.mark.parametrize(("name", "mesh_shape", "layout"), CELLS)
def test_what_follows_a_convolution_of_channels_last(pool, name, mesh_shape, layout, dtype):
    for channels_last, checked in (("input", False), ("weight", True)):
        pool.run(after_a_convolution, name, dtype, mesh_shape, layout, channels_last, checked)


def norm_of_one_image_on_each_rank():
    """Attention over the points of an image, as U-Nets have it: torch's kernels lay one image as (16, 1, 64, 16)."""
    m = mesh((4,))
    generator = torch.Generator().manual_seed(0)
    points, image = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((4, 16, 16), (4, 16, 4, 4)))
    norm = nn.GroupNorm(4, 16).double()

    def block(points, image):
        attended = points.transpose(1, 2).reshape(4, 16, 4, 4)
        return norm((attended + image) / 1.5)

    parts = [sw.distribute_tensor(t, m, [Shard(0)]).requires_grad_() for t in (points, image)]
    wholes = [t.requires_grad_() for t in (points, image)]
    whole = block(*wholes)
    whole.square().sum().backward()
    sw.distribute_module(norm, m)
    result = block(*parts)
    result.square().sum().backward()
    torch.testing.assert_close(result.full_tensor(), whole, rtol=1e-9, atol=1e-9)
    for part, one in zip(parts, wholes, strict=True):
        torch.testing.assert_close(part.grad.full_tensor(), one.grad, rtol=1e-9, atol=1e-9)


def test_a_norm_of_one_image_on_each_rank(pool):
    pool.run(norm_of_one_image_on_each_rank)


@pytest.mark.parametrize(
    ("shape", "given", "expected"),
    [
        ((1, 16, 4, 4), (16, 1, 64, 16), (256, 1, 64, 16)),
        ((1, 16, 4, 4), (256, 1, 64, 16), (256, 1, 64, 16)),
        ((4, 16, 1, 4), (64, 1, 1, 16), (64, 1, 64, 16)),
        ((1, 16, 4, 4), (7, 16, 4, 1), (256, 1, 64, 16)),  # another order: a copy
        ((4, 1, 4, 4), (16, 1, 4, 1), (16, 1, 4, 1)),  # row-major, whatever the one channel has
    ],
)
def test_strides_of_dims_of_one_element(shape, given, expected):
    meta = TensorMeta((8, 16, 4, 4), (256, 1, 64, 16), torch.float32)
    memory = torch.arange(256.0)
    part = memory.as_strided(shape, given)
    put = in_order(part, meta)
    assert put.stride() == expected
    assert torch.equal(put, part)
    assert lies_as(meta, put.shape, put.stride())
    layout = torch._prims_common.suggest_memory_format(put)
    assert put.is_contiguous(memory_format=layout)


def test_a_whole_tensor_lies_as_torch_has_it():
    meta = TensorMeta((1, 2, 3, 3, 3), (2, 1, 2, 18, 6), torch.float32)
    assert lies_as(meta, meta.shape, meta.stride)
    assert not lies_as(meta, (1, 1, 3, 3, 3), (2, 1, 2, 18, 6))


def handed_out():
    m = mesh((4,))
    whole = torch.arange(4 * 3 * 7 * 8.0).as_strided((4, 3, 7, 8), (168, 8, 24, 1))
    x = sw.distribute_tensor(whole, m, [Shard(0)])
    inner = x._local_tensor
    y = x.redistribute(placements=[Shard(0)])
    with torch.no_grad():
        parts = [x.to_local(), y.to_local()]
    for part in [x.to_local(), x.clone().to_local(), y.to_local(), *parts]:
        assert part is not inner
        assert part.shape == (1, 3, 7, 8)
        assert lies_as(x.spec.tensor_meta, part.shape, part.stride()), part.stride()
    assert x.to_local().data_ptr() == inner.data_ptr()


def test_a_part_that_is_handed_out_keeps_the_strides_of_its_one_element(pool):
    pool.run(handed_out)


def parts_with_a_shape(strides_given):
    m = mesh((4,))
    rank = m.get_coordinate()[0]
    whole = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    sizes = [2, 2, 2, 0]
    part = whole.split([2, 2, 2, 0])[rank]
    turned = part.t().contiguous().t()
    assert sizes[rank] == len(part)
    x = MeshTensor.from_local(turned, m, [Shard(0)], shape=(6, 4), stride=(1, 6) if strides_given else None)
    assert x.stride() == ((1, 6) if strides_given else (4, 1))
    torch.testing.assert_close(x.reshape(24).full_tensor(), whole.reshape(24))
    torch.testing.assert_close(x.contiguous().full_tensor(), whole)
    assert (x.to_local().data_ptr() == turned.data_ptr()) is strides_given or not len(part)


@pytest.mark.parametrize("strides_given", [True, False])
def test_parts_that_are_not_contiguous_with_a_global_shape(pool, strides_given):
    pool.run(parts_with_a_shape, strides_given)


def expanded():
    whole = torch.arange(3.0)[:, None].expand(3, 8)
    device_mesh = mesh((4,))
    distributed = sw.distribute_tensor(whole, device_mesh, [Shard(1)])
    expanded_here = sw.distribute_tensor(whole[:, :1], device_mesh, [Replicate()]).expand(3, 8)
    assert (expanded_here.stride(), expanded_here.to_local().stride()) == ((1, 0), (1, 0))
    given = sw.MeshTensor.from_local(torch.ones(3, 2), device_mesh, [Shard(1)], shape=(3, 8), stride=(1, 0))
    for x in (distributed, given, expanded_here.redistribute(placements=[Shard(1)])):
        assert x.stride() == (8, 1)
        column = x.redistribute(placements=[Replicate()]).unbind(1)[3]
        assert column.stride() == column.to_local().stride() == (8,)
        assert not column.is_contiguous()


def test_a_copy_of_an_expanded_tensor_is_not_expanded(pool):
    pool.run(expanded)


def moved():
    device_mesh = mesh((4,))
    inside = [_StridedShard(dim, split_factor=2) for dim in range(4)]
    layouts = [Replicate(), Partial(), *(Shard(dim) for dim in range(4)), *inside]
    for shape, order in product([(4, 4, 4, 4), (1, 4, 8, 4)], [(0, 2, 3, 1), (3, 2, 1, 0)]):
        whole = torch.randn([shape[d] for d in order]).permute([order.index(d) for d in range(4)])
        for source, target in permutations(layouts, 2):
            strided = [p for p in (source, target) if isinstance(p, _StridedShard)]
            if not strided or any(shape[p.dim] % 4 for p in strided):
                continue  # a layout whose pieces have several sizes is refused
            x = sw.distribute_tensor(whole, device_mesh, [source]).redistribute(placements=[target])
            local = x.to_local()
            assert lies_as(x.spec.tensor_meta, local.shape, local.stride()), (
                x.spec,
                x.stride(),
                local.stride(),
                source,
            )


def test_a_part_that_was_moved_lies_as_the_whole(pool):
    """Pieces of one element along a dim too, from dims that are sharded inside: torch tells memory formats by these."""
    pool.run(moved)


VIEWS = {
    "view": lambda x: x.view(x.shape),
    "unflatten": lambda x: x.unflatten(1, (2, -1)),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "transpose": lambda x: x.transpose(0, 1),
}


def viewed(view):
    device_mesh = mesh((4,))
    for dim, order in product(range(4), [(0, 2, 3, 1), (0, 1, 2, 3), (3, 2, 1, 0)]):
        shape = [4, 4, 6, 8] if dim == 0 else [2, 4, 4, 4]
        whole = torch.randn([shape[d] for d in order]).permute([order.index(d) for d in range(4)])
        x = sw.distribute_tensor(whole, device_mesh, [Shard(dim)])
        for _ in range(2):  # the first call of a plan, and a later one
            result, expected = VIEWS[view](x), VIEWS[view](whole)
            local = result.to_local()
            assert result.stride() == expected.stride()
            assert lies_as(result.spec.tensor_meta, local.shape, local.stride()), (dim, order, local.stride())
            assert torch.equal(result.full_tensor(), expected)
            result.mul_(2)
            whole = whole * 2
            assert torch.equal(x.full_tensor(), whole)


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_with_one_element_on_each_rank(pool, view):
    """One image of channels_last on each rank: torch's view gives its dim another stride, and no memory format."""
    pool.run(viewed, view)


def to_channels_last(x):
    return x.contiguous(memory_format=torch.channels_last)


# What torch's kernels return row-major, or channels last, whatever the strides of their operands are.
PACKED = {
    "batch norm in training": lambda x, _: functional.batch_norm(x.mT, None, None, training=True).view(8, -1),
    "batch norm": lambda x, place: functional.batch_norm(x.mT, place(ZEROS), place(ONES)).view(8, -1),
    "loss of each position": lambda x, _: functional.cross_entropy(
        x, (x[:, 0] > 0).long().mT.contiguous().mT, reduction="none"
    ).view(-1),
    "angles": lambda x, _: torch.complex(x, x).mT.angle().view(-1),
    "membership": lambda x, place: torch.isin(x.mT, place(ZEROS)).view(-1),
    "membership of a number": lambda x, _: torch.isin(x.mT, 0.0).view(-1),
    "weight norm": lambda x, place: torch._weight_norm(x[0].transpose(0, 2), place(ONES)[:2].view(2, 1, 1), 0).view(-1),
    "padding": lambda x, _: (
        functional.pad(to_channels_last(x), (1, 1, 1, 1), mode="reflect").permute(0, 2, 3, 1).view(-1)
    ),
    "pixels": lambda x, _: functional.pixel_shuffle(to_channels_last(x), 2).permute(0, 2, 3, 1).view(-1),
    "channels": lambda x, _: functional.channel_shuffle(to_channels_last(x), 2).permute(0, 2, 3, 1).view(-1),
    "unpooled": lambda x, _: (
        functional.max_unpool2d(*functional.max_pool2d(to_channels_last(x), 2, return_indices=True), 2)
        .permute(0, 2, 3, 1)
        .view(-1)
    ),
}
ZEROS, ONES = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)


def viewed_as_on_one_device(name, mesh_shape, layout):
    device_mesh = mesh(mesh_shape)
    torch.manual_seed(0)
    values = torch.randn(8, 4, 6, 2, dtype=torch.float64)

    def place(tensor):
        return sw.distribute_tensor(tensor, device_mesh)

    with torch.no_grad():
        expected = PACKED[name](values, torch.clone)
        found = PACKED[name](sw.distribute_tensor(values, device_mesh, layout), place)
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found.full_tensor(), expected)


@pytest.mark.parametrize(("mesh_shape", "layout"), [((4,), [Shard(0)]), ((2, 2), [Shard(0), Shard(1)])])
@pytest.mark.parametrize("name", PACKED)
def test_results_that_torch_packs_can_be_viewed(pool, name, mesh_shape, layout):
    pool.run(viewed_as_on_one_device, name, mesh_shape, layout)
