"""Sample calls of the normalisations."""

import torch

from shardwise.testing.values import made

aten = torch.ops.aten
BF16, F64 = torch.bfloat16, torch.float64
MASKS = ([True, True, True], [True, False, False], [False, True, False], [True, True, False])

# (input, normalized_shape): even and uneven over 4, 2 and 3 ranks, empty shards, an empty batch
LAYERS = [
    ((8, 6), [6]),
    ((5, 7), [7]),
    ((4, 3, 6), [6]),
    ((5, 2, 3), [2, 3]),
    ((1, 4), [4]),
    ((0, 4), [4]),
    ((3, 5, 6), [6]),
]


def weights(size, seed=1):
    return made(size, seed=seed)


def layer_norms():
    samples = [((made(s), n, weights(n), weights(n, 2), 1e-5), {}) for s, n in LAYERS]
    samples += [((made(s), n, None, None, 1e-5), {}) for s, n in LAYERS[:2]]
    samples += [((made((5, 7)), [7], weights([7]), None, 1e-5), {})]
    return [*samples, ((made((7, 5)).t(), [7], weights([7]), weights([7], 2), 1e-5), {})]


def layer_norm_backwards():
    samples = []
    for i, (shape, size) in enumerate([*LAYERS, *LAYERS]):
        x, w, b = made(shape), weights(size), weights(size, 2)
        _, mean, rstd = aten.native_layer_norm(x, size, w, b, 1e-5)
        samples.append(((made(shape, seed=3), x, size, mean, rstd, w, b, MASKS[i % 4]), {}))
    x = made((5, 7))
    _, mean, rstd = aten.native_layer_norm(x, [7], None, None, 1e-5)
    return [*samples, ((made((5, 7), seed=3), x, [7], mean, rstd, None, None, [True, False, False]), {})]


def rms_norms():
    samples = [((made(s), n, weights(n), 1e-5), {}) for s, n in LAYERS]
    return [*samples, ((made((5, 7)), [7], None, None), {})]


def rms_norm_backwards():
    samples = []
    for i, (shape, size) in enumerate(LAYERS):
        x, w = made(shape), weights(size)
        _, rstd = aten._fused_rms_norm(x, size, w, 1e-5)
        samples.append(((made(shape, seed=3), x, size, rstd, w, [i % 3 != 2, i % 2 == 0]), {}))
    return samples


def rms_norm_backward(grad_out, x, normalized_shape, rstd, weight, output_mask):
    """What the fused kernel computes, for machines that lack it."""
    dims = list(range(x.ndim - len(normalized_shape), x.ndim))
    normal = x * rstd
    scaled = grad_out if weight is None else grad_out * weight
    by_input = rstd * (scaled - normal * (scaled * normal).mean(dims, keepdim=True))
    by_weight = (grad_out * normal).sum(list(range(dims[0])))
    return by_input if output_mask[0] else None, by_weight if output_mask[1] and weight is not None else None


# Inputs and their number of groups.
GROUPS = [((4, 8, 3), 4), ((5, 6, 2, 2), 2), ((3, 4, 5), 1), ((8, 12), 3), ((1, 12, 2), 3), ((2, 4, 3, 3), 4)]


def _sizes(shape, groups):
    return shape[0], shape[1], made(shape)[0, 0].numel(), groups


def group_norms():
    samples = [((made(s), weights([s[1]]), weights([s[1]], 2), *_sizes(s, g), 1e-5), {}) for s, g in GROUPS]
    return [*samples, ((made((5, 6, 4)), None, None, 5, 6, 4, 3, 1e-5), {})]


def group_norm_backwards():
    samples = []
    for i, (shape, groups) in enumerate([*GROUPS, *GROUPS]):
        x, w, b = made(shape), weights([shape[1]]), weights([shape[1]], 2)
        _, mean, rstd = aten.native_group_norm(x, w, b, *_sizes(shape, groups), 1e-5)
        samples.append(((made(shape, seed=3), x, mean, rstd, w, *_sizes(shape, groups), MASKS[i % 4]), {}))
    return samples


BATCHES = [(8, 6), (5, 3, 4), (4, 4, 3, 3), (2, 8, 5), (3, 5, 2, 2), (1, 4, 6)]


def running(channels):
    return made([channels], seed=4), made([channels], seed=5).abs() + 0.5


def batch_norms(stats=True, training=True):
    samples = []
    for i, s in enumerate(BATCHES):
        w, b = (weights([s[1]]), weights([s[1]], 2)) if i % 3 else (None, None)
        samples.append(((made(s) + 3, w, b, *(running(s[1]) if stats else ()), training, 0.1 + 0.2 * i, 1e-5), {}))
    return samples


def native_batch_norms():
    """With running statistics, which are written in training though the schema does not say so, and without."""
    hidden = [((*args[:3], None, None, *args[3:]), kwargs) for args, kwargs in batch_norms(stats=False)]
    return [*batch_norms(), *batch_norms(training=False), *hidden]


def both(calls):
    """The calls, and some of them with bf16 in place of float32."""

    def make():
        narrow = [[a.to(BF16) if isinstance(a, torch.Tensor) else a for a in args] for args, _ in calls()[:3]]
        return [*calls(), *((args, {}) for args in narrow)]

    return make


def batch_norm_backwards():
    samples = []
    for i, s in enumerate([*BATCHES, *BATCHES]):
        x, w, stats, train = made(s) + 3, weights([s[1]]), running(s[1]), i % 3 != 2
        _, mean, invstd = aten.native_batch_norm(x, w, None, *(t.clone() for t in stats), train, 0.1, 1e-5)
        mask = [*MASKS[:2], [False, True, True]][i % 3]
        samples.append(
            (
                (
                    made(s, seed=3),
                    x,
                    w if i % 4 else None,
                    *stats,
                    mean,
                    invstd,
                    train,
                    1e-5,
                    mask if i % 4 else MASKS[1],
                ),
                {},
            )
        )
    return samples


def without_flag(training):
    """Calls of the ops whose name says whether they train; torch plans them only with a weight."""
    samples = batch_norms(training=training)
    return lambda: [((*args[:5], *args[6:]), kwargs) for args, kwargs in samples if args[1] is not None]


def few_backwards():
    """With a reserve, as the newer op takes it; its weight is there always."""
    reserve = torch.empty(0, dtype=torch.uint8)
    samples = [args for args, _ in batch_norm_backwards() if args[2] is not None and args[9] == MASKS[0]]
    return [((*args, reserve), {}) for args in samples]


def cudnn_batch_norms(stats=False, training=True):
    samples = []
    for i, s in enumerate(BATCHES):
        w, b = weights([s[1]]), weights([s[1]], 2)
        both = running(s[1]) if stats else (None, None)
        samples.append(((made(s) + 3, w, b, *both, training, 0.1 + 0.2 * i, 1e-5), {}))
    return samples


def cudnn_batch_norm_backwards():
    samples = []
    for s in BATCHES:
        x, w, stats = made(s) + 3, weights([s[1]]), running(s[1])
        _, mean, invstd = aten.native_batch_norm(x, w, None, None, None, True, 0.1, 1e-5)
        reserve = torch.empty(0, dtype=torch.uint8)
        samples.append(((x, made(s, seed=3), w, *stats, mean, invstd, 1e-5, reserve), {}))
    return samples


def cudnn_batch_norm(x, weight, bias, running_mean, running_var, training, momentum, epsilon):
    """What cudnn computes, but for the reserve."""
    result = aten.native_batch_norm(x, weight, bias, running_mean, running_var, training, momentum, epsilon)
    return (*result, torch.empty(0, dtype=torch.uint8))


def cudnn_batch_norm_backward(x, grad_output, weight, running_mean, running_var, save_mean, save_var, epsilon, _):
    stats = (running_mean, running_var, save_mean, save_var)
    return aten.native_batch_norm_backward(grad_output, x, weight, *stats, True, epsilon, [True, True, True])


# A weight and its dim.
WEIGHTS = [((8, 6), 0), ((5, 3, 2), 0), ((4, 7), 1)]


def weight_norms():
    return [((made(s), made([n if d == dim else 1 for d, n in enumerate(s)], seed=1), dim), {}) for s, dim in WEIGHTS]


def weight_norm_backwards():
    samples = []
    for (v, g, dim), _ in weight_norms():
        _, norms = aten._weight_norm_interface(v, g, dim)
        samples.append(((made(v.shape, seed=3), v, g, norms, dim), {}))
    return samples


SAMPLES = {
    aten._weight_norm_interface.default: weight_norms,
    aten._weight_norm_interface_backward.default: weight_norm_backwards,
    aten.native_layer_norm.default: both(layer_norms),
    aten.native_layer_norm_backward.default: both(layer_norm_backwards),
    aten._fused_rms_norm.default: rms_norms,
    aten._fused_rms_norm_backward.default: rms_norm_backwards,
    aten.native_group_norm.default: group_norms,
    aten.native_group_norm_backward.default: group_norm_backwards,
    aten.native_batch_norm.default: both(native_batch_norms),
    aten._native_batch_norm_legit.default: lambda: [*both(batch_norms)(), *batch_norms(training=False)],
    aten._native_batch_norm_legit.no_stats: lambda: batch_norms(stats=False),
    aten._native_batch_norm_legit_functional.default: lambda: [*batch_norms()[:4], *batch_norms(training=False)[2:4]],
    aten._native_batch_norm_legit_no_training.default: without_flag(False),
    aten._batch_norm_with_update.default: without_flag(True),
    aten._batch_norm_with_update_functional.default: without_flag(True),
    aten._batch_norm_no_update.default: without_flag(False),
    aten.native_batch_norm_backward.default: batch_norm_backwards,
    aten.batch_norm_backward.default: few_backwards,
    aten.cudnn_batch_norm.default: lambda: [
        *cudnn_batch_norms(),
        *cudnn_batch_norms(stats=True),
        *cudnn_batch_norms(stats=True, training=False),
    ],
    aten.cudnn_batch_norm_backward.default: cudnn_batch_norm_backwards,
}

STAND_INS = {
    aten._fused_rms_norm_backward.default: rms_norm_backward,
    aten.cudnn_batch_norm.default: cudnn_batch_norm,
    aten.cudnn_batch_norm_backward.default: cudnn_batch_norm_backward,
}
