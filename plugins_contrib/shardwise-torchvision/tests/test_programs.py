"""Programs with torchvision's functions and modules on four ranks, beside one device: results and gradients."""

from collections import OrderedDict

import pytest
import torch
import torchvision

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.testing import mesh

ops = torchvision.ops


def made(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def boxes(count, size=32.0, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=generator) * size * 0.7
    return torch.cat([corner, corner + torch.rand(count, 2, generator=generator) * size * 0.3 + 1], 1).to(dtype)


def regions(count, pictures, **made_with):
    numbers = torch.arange(count) % pictures
    found = boxes(count, **made_with)
    return torch.cat([numbers[:, None].to(found.dtype), found], 1)


def step(run, operands, layouts, on):
    """The result and the gradients of a program on one device, and on the mesh."""
    found = []
    for placed in (False, True):
        given = [
            (sw.distribute_tensor(whole, mesh(on), layout) if placed else whole.clone()).requires_grad_(grad)
            for (whole, grad), layout in zip(operands, layouts, strict=True)
        ]
        result = run(*given)
        result.square().sum().backward()
        found.append([result.detach(), *(x.grad for x in given if x.grad is not None)])
    return found


def same(found):
    expected, got = found
    return len(got) == len(expected) and all(
        torch.allclose(ours.full_tensor(), theirs, rtol=1e-9, atol=1e-9)
        for ours, theirs in zip(got, expected, strict=True)
    )


# -- pooling of regions ------------------------------------------------------------------------------------------

POOLS = {
    "roi_align": lambda x, rois: ops.roi_align(x, rois, (3, 2), 0.5, 2, aligned=True),
    "roi_align, samples by size": lambda x, rois: ops.roi_align(x, rois, 2, 0.5),
    "roi_pool": lambda x, rois: ops.roi_pool(x, rois, (3, 2), 0.5),
    "ps_roi_align": lambda x, rois: ops.ps_roi_align(x, rois, (2, 1), 0.5, 2),
    "ps_roi_pool": lambda x, rois: ops.ps_roi_pool(x, rois, (2, 1), 0.5),
}
POOL_LAYOUTS = {
    "regions": ((4,), [Replicate()], [Shard(0)]),
    "channels": ((4,), [Shard(1)], [Replicate()]),
    "pictures": ((4,), [Shard(0)], [Replicate()]),
    "pictures and regions": ((4,), [Shard(0)], [Shard(0)]),
    "pictures by channels": ((2, 2), [Shard(0), Shard(1)], [Replicate(), Replicate()]),
    "regions by channels": ((2, 2), [Replicate(), Shard(1)], [Shard(0), Replicate()]),
}


def pools():
    operands = [(made(5, 8, 16, 16), True), (regions(7, 5), False)]
    return {
        (name, layout): same(step(pool, operands, placements, on))
        for name, pool in POOLS.items()
        for layout, (on, *placements) in POOL_LAYOUTS.items()
    }


def test_regions_are_pooled_in_every_layout(pool):
    for found in pool.run(pools):
        assert len(found) == 30
        assert [where for where, right in found.items() if not right] == []


def multi_scale(on, features, of_boxes):
    pooler = ops.MultiScaleRoIAlign(["0", "1", "2"], output_size=3, sampling_ratio=2)
    sizes = [(64, 64), (64, 48)]
    maps = [made(2, 8, 16 // scale, 16 // scale, seed=scale) for scale in (1, 2, 4)]
    per_picture = [boxes(9, 60.0), boxes(4, 40.0, seed=1)]
    found = []
    for placed in (False, True):
        lay = (lambda x, p: sw.distribute_tensor(x, mesh(on), p)) if placed else lambda x, _: x.clone()
        levels = [lay(m, features).requires_grad_() for m in maps]
        named = OrderedDict((str(i), level) for i, level in enumerate(levels))
        # Outside of a module that distribute_module placed, sw.on says where tensors that torchvision makes lie.
        with sw.on(mesh(on) if placed else None):
            result = pooler(named, [lay(b, of_boxes) for b in per_picture], sizes)
        result.square().sum().backward()
        found.append([result.detach(), *(level.grad for level in levels)])
    return same(found)


@pytest.mark.parametrize(
    ("on", "features", "of_boxes"),
    [
        ((4,), [Replicate()], [Replicate()]),
        ((4,), [Shard(0)], [Replicate()]),
        ((2, 2), [Shard(0), Shard(1)], [Replicate(), Replicate()]),
        ((2, 2), [Replicate(), Shard(1)], [Shard(0), Replicate()]),
    ],
)
def test_regions_of_several_scales(pool, on, features, of_boxes):
    assert pool.run(multi_scale, on, features, of_boxes) == [True] * 4


# -- deformable convolution --------------------------------------------------------------------------------------

LAYER_LAYOUTS = {
    "batch": ((4,), {}, [Shard(0)]),
    "output channels": ((4,), {"weight": [Shard(0)], "bias": [Shard(0)]}, [Replicate()]),
    "input channels": ((4,), {"weight": [Shard(1)], "bias": [Replicate()]}, [Shard(1)]),
    "batch by output channels": (
        (2, 2),
        {"weight": [Replicate(), Shard(0)], "bias": [Replicate(), Shard(0)]},
        [Shard(0), Replicate()],
    ),
}


class Deformed(torch.nn.Module):
    """The usual block: convolutions say where the deformable one looks, and how much that counts."""

    def __init__(self, *, groups=1, offset_groups=1, masked=True, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.where = torch.nn.Conv2d(8, 18 * offset_groups, 3, padding=1)
        self.much = torch.nn.Conv2d(8, 9 * offset_groups, 3, padding=1) if masked else None
        self.layer = ops.DeformConv2d(8, 12, 3, padding=1, groups=groups, bias=bias)
        self.double()

    def forward(self, x):
        mask = None if self.much is None else self.much(x).sigmoid()
        return self.layer(x, self.where(x), mask)


def deformed(on, layout, of_input, options):
    model, x = Deformed(**options), made(4, 8, 6, 5)
    expected = model(x.requires_grad_())
    expected.square().sum().backward()
    reference = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    plan = {f"layer.{name}": placements for name, placements in layout.items() if hasattr(model.layer, name)}
    sw.distribute_module(model, mesh(on), plan)
    placed = sw.distribute_tensor(x.detach(), mesh(on), of_input).requires_grad_()
    result = model(placed)
    result.square().sum().backward()
    got = {name: p.grad for name, p in model.named_parameters()}
    return same(([expected, x.grad, *reference.values()], [result, placed.grad, *(got[n] for n in reference)]))


def all_deformed():
    options = {
        "one group": {},
        "groups": {"groups": 4, "offset_groups": 2},
        "groups of offsets, no mask": {"offset_groups": 4, "masked": False},
        "no bias": {"bias": False},
    }
    found = {}
    for name, (on, layout, of_input) in LAYER_LAYOUTS.items():
        for group, settings in options.items():
            if settings.get("bias") is False and "bias" in layout:
                layout = {"weight": layout["weight"]}  # noqa: PLW2901  of the layer that is
            found[name, group] = deformed(on, layout, of_input, settings)
    return found


def test_deformable_convolution_trains_in_every_layout(pool):
    for found in pool.run(all_deformed):
        assert len(found) == 16
        assert [where for where, right in found.items() if not right] == []


# -- boxes -------------------------------------------------------------------------------------------------------


def kept():
    whole, scores = boxes(40, dtype=torch.float32), torch.randperm(40, generator=torch.Generator().manual_seed(1)) / 40
    classes = torch.arange(40) % 3
    found = []
    for layout in ([Shard(0)], [Replicate()]):
        lay = lambda x: sw.distribute_tensor(x, mesh((4,)), layout)  # noqa: B023  used in the same turn
        found += [
            torch.equal(
                ops.nms(lay(whole), lay(scores), 0.3).full_tensor(),
                ops.nms(whole, scores, 0.3),
            ),
            torch.equal(
                ops.batched_nms(lay(whole), lay(scores), lay(classes), 0.3).full_tensor(),
                ops.batched_nms(whole, scores, classes, 0.3),
            ),
        ]
    return found, len(ops.nms(whole, scores, 0.3)) < 40


def test_boxes_that_are_kept(pool):
    assert pool.run(kept) == [([True] * 4, True)] * 4


UTILITIES = {
    "box_area": lambda a, _: ops.box_area(a),
    "box_iou": ops.box_iou,
    "generalized_box_iou": ops.generalized_box_iou,
    "complete_box_iou": ops.complete_box_iou,
    "distance_box_iou": ops.distance_box_iou,
    "box_convert": lambda a, _: ops.box_convert(a, "xyxy", "cxcywh"),
    "clip_boxes_to_image": lambda a, _: ops.clip_boxes_to_image(a, (20, 24)),
    "remove_small_boxes": lambda a, _: ops.remove_small_boxes(a, 4.0),
    "generalized_box_iou_loss": lambda a, _: ops.generalized_box_iou_loss(a, a.flip(0), reduction="none"),
    "complete_box_iou_loss": lambda a, _: ops.complete_box_iou_loss(a, a.flip(0), reduction="mean"),
    "sigmoid_focal_loss": lambda a, _: ops.sigmoid_focal_loss(a, (a > 5).to(a.dtype), reduction="mean"),
    "masks_to_boxes": lambda a, _: ops.masks_to_boxes(a[:, None, :] > a[:, :, None] - 3),
}


def utilities():
    a, b = boxes(12), boxes(7, seed=1)
    found = {}
    for name, function in UTILITIES.items():
        for layout in (Shard(0), Replicate()):
            given = [sw.distribute_tensor(x, mesh((4,)), [layout]) for x in (a, b)]
            result = function(*given)
            result = result.full_tensor() if isinstance(result, sw.MeshTensor) else result
            found[name, str(layout)] = torch.allclose(result, function(a, b))
    return found


def test_utilities_of_boxes(pool):
    for found in pool.run(utilities):
        assert len(found) == 24
        assert [where for where, right in found.items() if not right] == []


def partial_features():
    whole, rois = made(3, 4, 8, 8), regions(5, 3)
    x = sw.MeshTensor.from_local(whole / 4, mesh((4,)), [Partial("sum")])
    pooled = ops.roi_align(x, sw.distribute_tensor(rois, mesh((4,)), [Replicate()]), 2)
    return pooled.placements == (Partial("sum"),) and torch.allclose(
        pooled.full_tensor(), ops.roi_align(whole, rois, 2)
    )


def test_features_that_are_partial_sums_stay_so(pool):
    assert pool.run(partial_features) == [True] * 4


def compiled():
    whole, rois = made(5, 8, 8, 8), regions(7, 5, size=8.0)
    loss = lambda x, boxes: ops.roi_align(x, boxes, 2, 1.0, 2).square().sum()
    found = []
    for layout in ([Shard(0)], [Shard(1)]):
        torch._dynamo.reset()
        expected, x = whole.clone().requires_grad_(), sw.distribute_tensor(whole, mesh((4,)), layout).requires_grad_()
        value = torch.compile(loss, backend="aot_eager", fullgraph=True)(x, sw.distribute_tensor(rois, mesh((4,))))
        value.backward()
        one = loss(expected, rois)
        one.backward()
        found.append(same(([one.detach(), expected.grad], [value.detach(), x.grad])))
    return found


def test_pooling_compiles_by_pictures_and_by_channels(pool):
    assert pool.run(compiled, timeout=240) == [[True, True]] * 4
