"""Sample calls of convolution, pooling, interpolation, padding and shuffles."""

from itertools import cycle

import torch

from shardwise.testing.values import made

aten = torch.ops.aten
BF16, U8 = torch.bfloat16, torch.uint8
MASKS = ([True, True, True], [True, False, False], [False, True, True], [False, True, False])

# (input, weight, bias, stride, padding, dilation, transposed, output padding, groups)
CONVOLUTIONS = [
    ((4, 6, 5, 5), (8, 6, 3, 3), True, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    ((5, 3, 6, 4), (5, 3, 3, 1), True, [2, 1], [1, 0], [1, 1], False, [0, 0], 1),
    ((3, 8, 4, 4), (8, 2, 2, 2), True, [1, 1], [1, 1], [1, 1], False, [0, 0], 4),
    ((2, 6, 7), (6, 1, 3), False, [1], [1], [2], False, [0], 6),
    ((4, 6, 7), (4, 6, 1), False, [1], [0], [1], False, [0], 1),
    ((2, 4, 4, 4), (4, 3, 2, 2), True, [2, 2], [0, 0], [1, 1], True, [1, 1], 1),
    ((5, 8, 3), (8, 3, 2), True, [2], [0], [1], True, [0], 4),
    ((1, 2, 3, 3, 3), (4, 2, 2, 2, 2), True, [1, 1, 1], [0, 0, 0], [1, 1, 1], False, [0, 0, 0], 1),
    ((8, 12, 4), (6, 6, 2), True, [1], [0], [1], False, [0], 2),
    # Windows that reach past the neighbours, leave positions out, or lie in the padding altogether.
    ((2, 3, 11, 2), (4, 3, 3, 1), True, [3, 1], [2, 0], [2, 1], False, [0, 0], 1),
    ((2, 2, 5), (3, 2, 4), True, [2], [6], [1], False, [0], 1),
    ((2, 4, 5, 3), (4, 2, 3, 2), True, [3, 1], [1, 0], [2, 1], True, [2, 0], 1),
    ((1, 4, 9), (4, 1, 2), True, [3], [2], [1], True, [1], 2),
]


def _made(x, w, bias, *rest, dtype=torch.float32):
    transposed, groups = rest[3], rest[5]
    channels = w[1] * groups if transposed else w[0]
    return made(x, dtype), made(w, dtype, 1), made((channels,), dtype, 2) if bias else None, rest


def convolutions():
    samples = []
    for setting in CONVOLUTIONS:
        x, w, b, rest = _made(*setting)
        samples.append(((x, w, b, *rest), {}))
    x, w, b, rest = _made(*CONVOLUTIONS[1], dtype=BF16)
    wide = made((5, 3, 6, 4)).contiguous(memory_format=torch.channels_last)
    return [*samples, ((x, w, b, *rest), {}), ((wide, *samples[1][0][1:]), {})]


def convolution_backwards():
    samples = []
    for setting, mask in zip([*CONVOLUTIONS, *CONVOLUTIONS], cycle(MASKS), strict=False):
        x, w, b, rest = _made(*setting)
        result = aten.convolution(x, w, b, *rest)
        sizes = [result.shape[1]]
        wanted = mask if b is not None else [*mask[:2], False]
        samples.append(((made(result.shape, seed=3), x, w, sizes if b is not None else None, *rest, wanted), {}))
    return samples


PLANES = {
    1: [(4, 6, 8), (5, 3, 9), (3, 8)],
    2: [(4, 6, 6, 8), (5, 3, 7, 6), (3, 6, 6)],
    3: [(4, 3, 4, 6, 4), (2, 4, 3, 4, 4), (3, 5, 4, 5)],
}


def over(positions, *settings, dtypes=(torch.float32,), unbatched=True):
    """Calls on planes of so many positions, with each of the settings."""

    def make():
        shapes = PLANES[positions] if unbatched else [s for s in PLANES[positions] if len(s) == positions + 2]
        samples = [((made(s, d), *args), {}) for s in shapes for args in settings for d in dtypes]
        if positions == 2:
            samples += [
                ((made((4, 6, 6, 8)).contiguous(memory_format=torch.channels_last), *args), {}) for args in settings
            ]
        return samples

    return make


def after(forward, calls, *, keeps_input=True, indices=False):
    """The backward of each call: gradient, the input where it is an operand, the settings, then the indices."""

    def make():
        samples = []
        for (x, *args), _ in calls():
            result = forward(x, *args)
            output = result[0] if indices else result
            tail = [result[1]] if indices else []
            operands = [made(output.shape, x.dtype, 5), *([x] if keeps_input else [])]
            samples.append(((*operands, *args, *tail), {}))
        return samples

    return make


def max_pools(n):
    settings = (
        ([2] * n, [2] * n, [0] * n, [1] * n, False),
        ([3] * n, [1] * n, [1] * n, [1] * n, True),
        ([2] * n, [1, 2, 1][:n], [1] * n, [2] * n, False),
    )
    calls = over(n, *settings)

    def make():
        # A maximum of nothing but minus infinities, some of it padding.
        low = made(PLANES[n][-1])
        low[..., :3] = float("-inf")
        return [*calls(), ((low, *settings[-1]), {})]

    return make


def average_pools(n):
    return over(
        n,
        ([2] * n, [2] * n, [0] * n, False, True, None),
        ([3] * n, [2] * n, [1] * n, True, False, None),
        ([2] * n, [3] * n, [1] * n, True, True, None),
        ([2] * n, [1] * n, [1] * n, False, True, 3),
    )


def interpolated(forward, backward, n, *corners):
    """Samples of an interpolation and of its backward, which is told the input's size."""
    size = [5, 9, 4][:n]
    scales = [None] * n

    def forwards():
        shapes = [s for s in PLANES[n] if len(s) == n + 2]
        return [((made(s), size, *corner, *scales), {}) for s, corner in zip(shapes, cycle(corners), strict=False)]

    def backwards():
        samples = []
        for (x, *args), _ in forwards():
            gradient = made(forward(x, *args).shape, seed=5)
            samples.append(((gradient, args[0], list(x.shape), *args[1:]), {}))
        return samples

    return {forward.default: forwards, backward.default: backwards}


def named(name):
    return getattr(aten, name)


def padded(kind, n):
    forward, backward = named(f"{kind}_pad{n}d"), named(f"{kind}_pad{n}d_backward")
    calls = over(n, ([1, 2] * n,), ([0, 1] * n,))
    return {forward.default: calls, backward.default: after(forward, calls)}


def points(n):
    """Pictures and grids of points in them, and a little outside."""
    shapes = PLANES[n][:2] if n == 2 else PLANES[n][:1]
    samples = []
    for s in shapes:
        grid = made((s[0], *(4, 5, 3)[:n], n), seed=2).tanh() * 1.2
        samples += [((made(s), grid, mode, pad, False), {}) for mode, pad in ((0, 0), (1, 1), (0, 2))]
    return samples


def points_back(n, forward):
    samples = []
    for (x, grid, *modes), _ in points(n):
        output = forward(x, grid, *modes)
        samples.append(((made(output.shape, seed=5), x, grid, *modes, [True, True]), {}))
        samples.append(((made(output.shape, seed=5), x, grid, *modes, [False, True]), {}))
    return samples


def shuffles():
    return [((made(s), 2), {}) for s in ((3, 16, 4, 5), (5, 4, 6, 3), (8, 2, 2), (2, 3, 12, 1, 1))]


def unshuffles():
    return [((made(s), 2), {}) for s in ((3, 4, 4, 6), (5, 1, 12, 2), (4, 6, 8))]


def channel_shuffles():
    return [((made(s), g), {}) for s, g in (((4, 6, 5, 4), 2), ((5, 8, 3, 3), 4))]


WINDOWS = (([2, 2], [1, 1], [0, 0], [1, 1]), ([3, 2], [1, 2], [1, 1], [2, 1]))


def unfolds():
    return [((made(s), *w), {}) for s in PLANES[2] for w in WINDOWS]


def folds():
    samples = []
    for (x, *window), _ in unfolds():
        columns = aten.im2col(x, *window)
        samples.append(((made(columns.shape, seed=1), list(x.shape[-2:]), *window), {}))
    return samples


def unpools(n):
    """Values and their places in larger planes."""
    pool = (aten.max_pool2d_with_indices, aten.max_pool3d_with_indices)[n - 2]
    samples = []
    for shape in PLANES[n]:
        values, places = pool(made(shape), [2] * n, [2] * n)
        samples.append(((values, places, list(shape[-n:]), *([[2] * n, [0] * n] if n > 2 else [])), {}))
    return samples


def fractional(n):
    """Two places a line at random, with random numbers for each channel of each picture."""
    samples = []
    for shape in PLANES[n]:
        batch = shape[0] if len(shape) == n + 2 else 1
        numbers = made((batch, shape[-n - 1], n), seed=6).sigmoid()
        samples.append(((made(shape), [1] * n if n > 2 else [2] * n, [2] * n, numbers), {}))
    return samples


def fractional_backs(n):
    pool = (aten.fractional_max_pool2d, aten.fractional_max_pool3d)[n - 2]
    samples = []
    for (x, window, size, numbers), _ in fractional(n):
        values, places = pool(x, window, size, numbers)
        samples.append(((made(values.shape, seed=5), x, window, size, places), {}))
    return samples


MAX_2, MAX_3, MEAN_2, MEAN_3 = max_pools(2), max_pools(3), average_pools(2), average_pools(3)
ADAPT_2, ADAPT_3 = over(2, ([3, 2],), ([1, 5],)), over(3, ([3, 2, 2],))


def size_only(calls):
    """Backwards of adaptive pools take no size."""
    return lambda: [(tuple(a for a in args if not isinstance(a, list)), kwargs) for args, kwargs in calls()]


SAMPLES = {
    aten.convolution.default: convolutions,
    aten.convolution_backward.default: convolution_backwards,
    aten.max_pool2d_with_indices.default: MAX_2,
    aten.max_pool3d_with_indices.default: MAX_3,
    aten.max_pool2d_with_indices_backward.default: after(aten.max_pool2d_with_indices, MAX_2, indices=True),
    aten.max_pool3d_with_indices_backward.default: after(aten.max_pool3d_with_indices, MAX_3, indices=True),
    aten.adaptive_max_pool2d.default: ADAPT_2,
    aten.adaptive_max_pool3d.default: ADAPT_3,
    aten.adaptive_max_pool2d_backward.default: size_only(after(aten.adaptive_max_pool2d, ADAPT_2, indices=True)),
    aten.adaptive_max_pool3d_backward.default: size_only(after(aten.adaptive_max_pool3d, ADAPT_3, indices=True)),
    aten.avg_pool2d.default: MEAN_2,
    aten.avg_pool3d.default: MEAN_3,
    aten.avg_pool2d_backward.default: after(aten.avg_pool2d, MEAN_2),
    aten.avg_pool3d_backward.default: after(aten.avg_pool3d, MEAN_3),
    aten._adaptive_avg_pool2d.default: ADAPT_2,
    aten._adaptive_avg_pool3d.default: ADAPT_3,
    aten._adaptive_avg_pool2d_backward.default: size_only(after(aten._adaptive_avg_pool2d, ADAPT_2)),
    aten._adaptive_avg_pool3d_backward.default: size_only(after(aten._adaptive_avg_pool3d, ADAPT_3)),
    aten.grid_sampler_2d.default: lambda: points(2),
    aten.grid_sampler_3d.default: lambda: points(3),
    aten.grid_sampler_2d_backward.default: lambda: points_back(2, aten.grid_sampler_2d),
    aten.grid_sampler_3d_backward.default: lambda: points_back(3, aten.grid_sampler_3d),
    aten.pixel_shuffle.default: shuffles,
    aten.pixel_unshuffle.default: unshuffles,
    aten.channel_shuffle.default: channel_shuffles,
    aten.max_unpool2d.default: lambda: unpools(2),
    aten.max_unpool3d.default: lambda: unpools(3),
    aten.fractional_max_pool2d.default: lambda: fractional(2),
    aten.fractional_max_pool3d.default: lambda: fractional(3),
    aten.fractional_max_pool2d_backward.default: lambda: fractional_backs(2),
    aten.fractional_max_pool3d_backward.default: lambda: fractional_backs(3),
    aten.im2col.default: unfolds,
    aten.col2im.default: folds,
}
for dims in (1, 2, 3):
    for kind in ("upsample_nearest", "_upsample_nearest_exact"):
        SAMPLES |= interpolated(named(f"{kind}{dims}d"), named(f"{kind}{dims}d_backward"), dims, ())
    for kind in ("reflection", "replication"):
        SAMPLES |= padded(kind, dims)
SAMPLES |= interpolated(aten.upsample_linear1d, aten.upsample_linear1d_backward, 1, (False,), (True,))
SAMPLES |= interpolated(aten.upsample_trilinear3d, aten.upsample_trilinear3d_backward, 3, (False,), (True,))
for name in (
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
    "_upsample_lanczos2d_aa",
):
    if not hasattr(aten, name):
        continue
    SAMPLES |= interpolated(named(name), named(f"{name}_backward"), 2, (False,), (True,))
