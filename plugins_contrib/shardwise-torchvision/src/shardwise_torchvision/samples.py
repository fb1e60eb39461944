"""Sample calls for the oracle: regions of all pictures and none, whole grids of channels, groups of both kinds."""

from functools import partial

import torch

from shardwise.testing.samples import made

try:
    import torchvision  # noqa: F401  defines the operators
except RuntimeError as error:  # what it raises where its library does not load
    raise ImportError(
        "torchvision is installed, and its operators do not load: it was built for another torch, or for a CUDA that "
        "is not here. Install the torchvision that goes with this torch, from the same index."
    ) from error

vision = torch.ops.torchvision

# Pictures: (n, h, w), with channels besides.
PICTURES = [(8, 6, 5), (5, 4, 7), (1, 8, 8), (2, 3, 3)]


def regions(count, pictures, height, width, seed=0, dtype=torch.float32):
    """Regions inside the pictures, and beyond their edges, in any order."""
    generator = torch.Generator().manual_seed(seed)
    picture = torch.randint(0, pictures, (count, 1), generator=generator)
    corner = torch.rand(count, 2, generator=generator) * torch.tensor([width, height]) * 2 - 1
    size = torch.rand(count, 2, generator=generator) * torch.tensor([width, height]) * 2
    return torch.cat([picture.float(), corner, corner + size], 1).to(dtype)


def boxes(count, seed=0):
    return regions(count, 1, 16, 16, seed)[:, 1:]


def scores(count):
    # No two are equal: torchvision does not say which of equal scores goes first.
    return torch.randperm(count, generator=torch.Generator().manual_seed(3)).float() / max(count, 1)


def nms():
    return [([boxes(count), scores(count), threshold], {}) for count in (16, 9, 1, 0) for threshold in (0.3, 0.7)]


def rotated(count, seed):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(count, 5, generator=generator)
    return numbers * torch.tensor([4.0, 4.0, 3.0, 3.0, 180.0]) + torch.tensor([0.0, 0.0, 0.5, 0.5, -90.0])


def box_iou_rotated():
    return [([rotated(n, 0), rotated(m, 1)], {}) for n, m in ((8, 5), (4, 4), (1, 7), (3, 1), (0, 4), (2, 0))]


def pooled(settings, channels, dtypes=(torch.float32, torch.float64)):
    """Pictures, their regions, and settings in turn."""
    calls = []
    for i, (n, height, width) in enumerate(PICTURES):
        for count in (12, 7, 1, 0)[i % 2 :: 2]:
            setting = settings[len(calls) % len(settings)]
            dtype = dtypes[i % len(dtypes)]
            found = regions(count, n, height, width, i, dtype)
            calls.append(([made((n, channels(setting), height, width), dtype), found, *setting], {}))
    return calls


ALIGNED = [(0.5, 2, 2, 2, True), (1.0, 2, 3, -1, False), (0.25, 1, 1, 0, True)]
POOLED = [(0.5, 2, 2), (1.0, 2, 3), (0.25, 1, 1)]
PS_ALIGNED = [(0.5, 2, 2, 2), (1.0, 1, 3, -1), (0.25, 1, 1, 0)]


def grids(setting):
    """Channels of whole grids: the grid of the setting, twelve times, which two, three and four ranks divide."""
    return 12 * setting[1] * setting[2]


def roi_align():
    return pooled(ALIGNED, lambda _: 6)


def roi_pool():
    return pooled(POOLED, lambda _: 6)


def ps_roi_align():
    return pooled(PS_ALIGNED, grids)


def ps_roi_pool():
    return pooled(POOLED, grids)


def backward(op, forward):
    """The gradients of the same calls. Sizes stand behind all settings, and those of ``roi_align`` behind the third."""

    def calls():
        found = []
        for (pictures, rois, *settings), _ in forward():
            results = op(pictures, rois, *settings)
            result, *numbers = (results,) if isinstance(results, torch.Tensor) else results
            first = settings[:3] if op == vision.roi_align.default else settings
            rest = settings[len(first) :]
            grad = made(tuple(result.shape), result.dtype, seed=5)
            found.append(([grad, rois, *numbers, *first, *pictures.shape, *rest], {}))
        return found

    return calls


# (n, channels in and out, height, width, kernel, groups of the weight and of the offsets, with a mask).
CONVOLUTIONS = [
    (4, 6, 8, 5, 4, (3, 3), 1, 1, True),
    (5, 4, 3, 4, 5, (2, 3), 1, 1, False),
    (2, 8, 8, 4, 4, (3, 3), 4, 1, True),
    (3, 8, 4, 4, 3, (1, 2), 4, 2, True),
    (2, 8, 6, 3, 4, (2, 2), 1, 4, True),
    (2, 8, 6, 3, 4, (2, 2), 1, 4, False),
    (1, 12, 12, 4, 4, (3, 1), 6, 4, False),
    (2, 6, 4, 3, 3, (2, 2), 2, 3, True),
    (0, 4, 6, 4, 4, (3, 3), 1, 1, True),
]


def deform_conv2d():
    calls = []
    for i, (n, into, out, height, width, kernel, groups, offset_groups, masked) in enumerate(CONVOLUTIONS):
        for stride, padding, dilation in (((1, 1), (1, 1), (1, 1)), ((2, 1), (2, 1), (1, 2))):
            sizes = zip((height, width), kernel, stride, padding, dilation, strict=True)
            places = [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sizes]
            each = offset_groups * kernel[0] * kernel[1]
            dtype = (torch.float64, torch.float32)[i % 2]
            x, weight = made((n, into, height, width), dtype), made((out, into // groups, *kernel), dtype, seed=1)
            offset = made((n, 2 * each, *places), dtype, seed=2)
            mask = made((n, each, *places), dtype, seed=3) if masked else torch.zeros(n, 1, dtype=dtype)
            settings = (*stride, *padding, *dilation, groups, offset_groups, masked)
            calls.append(([x, weight, offset, mask, made((out,), dtype, seed=4), *settings], {}))
    return calls


def deform_conv2d_backward():
    calls = []
    for args, _ in deform_conv2d():
        result = vision.deform_conv2d.default(*args)
        calls.append(([made(tuple(result.shape), result.dtype, seed=6), *args], {}))
    return calls


SAMPLES = {
    vision.nms.default: nms,
    vision.box_iou_rotated.default: box_iou_rotated,
    vision.roi_align.default: roi_align,
    vision._roi_align_backward.default: backward(vision.roi_align.default, roi_align),
    vision.roi_pool.default: roi_pool,
    vision._roi_pool_backward.default: backward(vision.roi_pool.default, roi_pool),
    vision.ps_roi_align.default: ps_roi_align,
    vision._ps_roi_align_backward.default: backward(vision.ps_roi_align.default, ps_roi_align),
    vision.ps_roi_pool.default: ps_roi_pool,
    vision._ps_roi_pool_backward.default: backward(vision.ps_roi_pool.default, ps_roi_pool),
    vision.deform_conv2d.default: deform_conv2d,
    vision._deform_conv2d_backward.default: deform_conv2d_backward,
}


# -- what torchvision does not check -------------------------------------------------------------------------------

# The oracle also tries infinities and NaN. torchvision's kernels take regions and offsets for places in memory as they
# are, and read anywhere. So such calls are refused here, where the oracle passes them over.


FAR = 1e6


def checked(op, *args):
    named = dict(zip((arg.name for arg in op._schema.arguments), args, strict=True))
    places = named.get("rois", named.get("offset"))
    if not places.isfinite().all() or (places.abs() > FAR).any():
        raise ValueError(f"{op} reads places that are {places}")
    if "rois" in named:
        pictures = named["input"].shape[0] if "input" in named else named["batch_size"]
        if not ((places[:, 0] >= 0) & (places[:, 0] < pictures)).all():
            raise ValueError(f"{op} reads pictures {places[:, 0]} of {pictures}")
    return op(*args)


STAND_INS = {op: partial(checked, op) for op in SAMPLES if {a.name for a in op._schema.arguments} & {"rois", "offset"}}
