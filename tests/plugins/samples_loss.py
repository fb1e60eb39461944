"""Sample calls of softmax and losses: every reduction, ignored targets, class weights, uneven and empty batches."""

import torch

from shardwise.testing.values import made

aten = torch.ops.aten
BF16 = torch.bfloat16
NONE, MEAN, SUM = 0, 1, 2
REDUCTIONS = (NONE, MEAN, SUM)

SOFTMAX = [
    ((8, 6), 1),
    ((5, 7), -1),
    ((5, 7), 0),
    ((4, 1, 3), 2),
    ((3, 5, 6), 1),
    ((9,), 0),
    ((), 0),
    ((0, 3), 1),
    ((1, 2), 0),
]


def softmaxes(*more):
    samples = [((made(s), d, *more), {}) for s, d in SOFTMAX]
    low = torch.tensor([[1.0, -float("inf"), 2.0], [-1.0, 0.0, 3.0], [5.0, 5.0, -float("inf")]])
    return [*samples, ((made((5, 7), BF16), 1, *more), {}), ((made((7, 5)).t(), 1, *more), {}), ((low, 1, *more), {})]


def softmax_backwards(op):
    def make():
        samples = []
        for shape, dim in SOFTMAX:
            output = op(made(shape), dim, False)
            samples.append(((made(shape, seed=1), output, dim, torch.float32), {}))
        narrow = op(made((5, 7), BF16), 1, False)
        return [*samples, ((made((5, 7), BF16, 1), narrow, 1, BF16), {})]

    return make


# Scores; the classes are dim 1. Batches over 4, 2 and 3 ranks: even, uneven, with empty shards, of size 1 and 0.
SCORES = [(8, 6), (5, 7), (9, 3), (2, 4), (1, 3), (0, 4)]
PICTURES = [(4, 3, 2, 2), (5, 3, 3, 2), (2, 4, 5, 1), (1, 3, 2, 3)]


def targets(shape, classes):
    """Classes, some of them negative: the ignored ones."""
    generator = torch.Generator().manual_seed(7)
    result = torch.randint(classes, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.3, -100, result)


def _one_dim(shape):
    return targets((shape[0], *shape[2:]), shape[1])


def likelihoods(shapes):
    def make():
        samples = []
        for i, shape in enumerate(shapes):
            for r in REDUCTIONS:
                weight = made((shape[1],), seed=2).abs() + 0.1 if (i + r) % 2 else None
                samples.append(((made(shape), _one_dim(shape), weight, r, -100), {}))
        shape = shapes[1]
        everything = torch.full((shape[0], *shape[2:]), -100)
        clean = _one_dim(shape).clamp(min=0)
        samples += [((made(shape), everything, None, r, -100), {}) for r in REDUCTIONS]
        samples += [((made(shape), clean, None, r, 1), {}) for r in REDUCTIONS]
        # The ignored samples are all on some ranks and none on others.
        lopsided = clean.clone()
        lopsided[: shape[0] // 2 + 1] = -100
        samples += [((made(shape), lopsided, None, r, -100), {}) for r in REDUCTIONS]
        return [*samples, ((made(shape, BF16), clean, None, MEAN, -100), {})]

    return make


def likelihood_backwards(shapes, forward):
    def make():
        samples = []
        for (scores, target, weight, r, ignored), _ in likelihoods(shapes)():
            output, total = forward(scores, target, weight, r, ignored)
            gradient = made(output.shape, scores.dtype, seed=3)
            samples.append(((gradient, scores, target, weight, r, ignored, total), {}))
        return samples

    return make


def single():
    """Scores of one sample, without a batch."""
    return [((made((4,)), torch.tensor(2), None, r, -100), {}) for r in REDUCTIONS]


SHAPES = [(8, 6), (5, 7), (4, 1, 3), (9,), (1, 2), (), (0, 3)]


def pairs(signs=False, unit=False, named=True):
    """(self, target) for each reduction."""
    samples = []
    for shape in SHAPES:
        x, y = made(shape), made(shape, seed=1)
        if unit:
            x, y = x.sigmoid(), y.sigmoid()
        y = y.sign() if signs else y
        samples += [((x, y), {"reduction": r}) if named else (x, y, r) for r in REDUCTIONS]
    turned = (made((6, 8)).t().sigmoid(), made((8, 6), seed=1).sigmoid())
    return [*samples, (turned, {"reduction": MEAN}) if named else (*turned, MEAN)]


def narrow_pairs():
    x, y = made((5, 7), BF16), made((5, 7), BF16, 1)
    return [((x, y), {"reduction": r}) for r in REDUCTIONS]


def plain():
    # Of two shapes: torch.nn.functional broadcasts before it calls, a direct call may not.
    return [*pairs(), *narrow_pairs(), ((made((5, 7)), made((7,))), {"reduction": MEAN})]


def weighted(logits=False):
    samples = []
    for (x, y), options in pairs(unit=True):
        samples.append(((x, y), options))
        weights = [made(x.shape, seed=2).abs()]
        weights += [weights[0][:1]] if x.ndim > 1 else []
        samples += [((x, y, w), options) for w in weights]
        if logits and x.ndim:
            samples.append(((x, y, None, made(x.shape[-1:], seed=4).abs()), options))
    return samples


def backwards(calls, *more):
    """The backward of each forward call, with a gradient of the result's shape."""

    def make():
        samples = []
        for (x, y, *rest), options in calls():
            r = options["reduction"]
            gradient = made(x.shape if r == NONE else (), x.dtype, seed=5)
            # On the meta device the mean over nothing divides by zero.
            if x.shape == y.shape and x.numel():
                samples.append(((gradient, x, y, *rest, r, *more), {}))
        return samples

    return make


def weighted_backwards():
    samples = []
    for (x, y, *weight), options in weighted():
        if not x.numel():
            continue
        r = options["reduction"]
        gradient = made(x.shape if r == NONE else (), seed=5)
        samples.append(((gradient, x, y, *(weight or [None]), r), {}))
    return samples


def multi_margins():
    samples = []
    for shape in [*SCORES[:5], (4,)]:
        target = targets((shape[0],), shape[1]).clamp(min=0) if len(shape) > 1 else torch.tensor([1])
        samples += [((made(shape), target, 1, 1.0, None, r), {}) for r in REDUCTIONS]
    weight = made((7,), seed=2).abs()
    return [*samples, ((made((5, 7)), targets((5,), 7).clamp(min=0), 2, 0.5, weight, MEAN), {})]


def multi_margin_backwards():
    samples = []
    for (x, target, p, margin, weight, r), _ in multi_margins():
        gradient = made(aten.multi_margin_loss(x, target, p, margin, weight, r).shape, seed=5)
        samples.append(((gradient, x, target, p, margin, weight, r), {}))
    return samples


def multilabel_margins():
    samples = []
    for shape in SCORES[:5]:
        rows = torch.arange(shape[-1]).expand(shape).clone()
        rows[..., shape[-1] // 2 :] = -1
        samples += [((made(shape), rows, r), {}) for r in REDUCTIONS]
    return samples


def multilabel_margin_backwards():
    samples = []
    for (x, target, r), _ in multilabel_margins():
        output, is_target = aten.multilabel_margin_loss_forward(x, target, r)
        samples.append(((made(output.shape, seed=5), x, target, r, is_target), {}))
    return samples


def with_out(calls, name, result):
    """The calls with an ``out=`` tensor of the right shape, which these kernels do not resize."""
    return lambda: [(args, {**kwargs, name: torch.full_like(result(*args, **kwargs), 3)}) for args, kwargs in calls()]


# Samples, steps, symbols, length of each target. Tables are filled up to the lengths only, so all are of full length.
ALIGNED = [(4, 6, 5, 2), (5, 7, 4, 3), (2, 5, 3, 1)]


def alignments():
    samples = []
    for count, steps, symbols, length in ALIGNED:
        scores = made((steps, count, symbols)).log_softmax(2)
        targets = (torch.arange(count * length) % (symbols - 1) + 1).view(count, length)
        lengths = [steps] * count, [length] * count
        samples.append(((scores, targets, *lengths, 0, False), {}))
        samples.append(((scores, targets.flatten(), *lengths, 0, True), {}))
    return samples


def alignment_backwards():
    samples = []
    for (scores, targets, inputs, lengths, blank, zero), _ in alignments():
        losses, table = aten._ctc_loss(scores, targets, inputs, lengths, blank, zero)
        gradient = made(losses.shape, seed=5)
        samples.append(((gradient, scores, targets, inputs, lengths, losses, table, blank, zero), {}))
    return samples


def in_tensors(calls):
    """The calls with their lengths in tensors."""

    def make():
        samples = [[torch.tensor(a) if isinstance(a, list) else a for a in args] for args, _ in calls()[:2]]
        return [(tuple(args), {}) for args in samples]

    return make


def projected(reductions):
    samples = []
    for count, width, classes in ((8, 3, 5), (5, 4, 7)):
        x, table, target = made((count, width)), made((classes, width), seed=1), targets((count,), classes)
        for i, reduction in enumerate(reductions):
            bias, weight = made((classes,), seed=2) if i % 2 else None, made((classes,), seed=3).abs() + 0.1
            common = (x, table, target, bias, weight if count == 5 else None)
            wanted = (i != 1, True, bias is not None)
            more = (reduction, -100, 0.0, 2, "keep", torch.float32, True, *wanted)
            samples.append(((*common, *(more if reduction else (-100, 2, "keep", torch.float32))), {}))
    return samples


def masked_softmaxes():
    mask = torch.tensor([[[False, True, False, False]]]).expand(5, 3, 4).contiguous()
    return [((made((5, 3, 4)), mask, dim, 2), {}) for dim in (2, 1, None)]


def masked_softmax_backwards():
    samples = []
    for (x, mask, dim, _), _ in masked_softmaxes():
        samples.append(((made(x.shape, seed=5), aten._masked_softmax(x, mask, dim, 2), mask, dim), {}))
    return samples


SAMPLES = {
    aten._masked_softmax.default: masked_softmaxes,
    aten._masked_softmax_backward.default: masked_softmax_backwards,
    aten._softmax.default: lambda: softmaxes(False),
    aten._log_softmax.default: lambda: softmaxes(False),
    aten._safe_softmax.default: softmaxes,
    aten._softmax_backward_data.default: softmax_backwards(aten._softmax),
    aten._log_softmax_backward_data.default: softmax_backwards(aten._log_softmax),
    aten.nll_loss_forward.default: lambda: [*likelihoods(SCORES)(), *single()],
    aten.nll_loss_backward.default: likelihood_backwards(SCORES, aten.nll_loss_forward),
    aten.nll_loss2d_forward.default: likelihoods(PICTURES),
    aten.nll_loss2d_backward.default: likelihood_backwards(PICTURES, aten.nll_loss2d_forward),
    aten._ctc_loss.default: alignments,
    aten._ctc_loss.Tensor: in_tensors(alignments),
    aten._ctc_loss_backward.default: alignment_backwards,
    aten._ctc_loss_backward.Tensor: in_tensors(alignment_backwards),
    aten.mse_loss.default: plain,
    aten.mse_loss_backward.default: backwards(plain),
    aten.smooth_l1_loss.default: plain,
    aten.smooth_l1_loss_backward.default: backwards(plain, 0.5),
    aten.huber_loss.default: plain,
    aten.huber_loss_backward.default: backwards(plain, 0.5),
    aten.soft_margin_loss.default: lambda: pairs(signs=True),
    aten.soft_margin_loss_backward.default: backwards(lambda: pairs(signs=True)),
    aten.binary_cross_entropy.default: weighted,
    aten.binary_cross_entropy_backward.default: weighted_backwards,
    aten.binary_cross_entropy_backward.grad_input: with_out(
        weighted_backwards, "grad_input", aten.binary_cross_entropy_backward
    ),
    aten.binary_cross_entropy_with_logits.default: lambda: weighted(logits=True),
    aten.multi_margin_loss.default: multi_margins,
    aten.multi_margin_loss_backward.default: multi_margin_backwards,
    aten.multilabel_margin_loss_forward.default: multilabel_margins,
    aten.multilabel_margin_loss_backward.default: multilabel_margin_backwards,
}

PROJECTED = "_linear_cross_entropy_batch_chunked"
for name, reductions in ((PROJECTED, ("sum", "mean", "mean", "sum")), (f"{PROJECTED}_no_reduction", (None, None))):
    if hasattr(torch.ops.torch_nn, name):
        SAMPLES[getattr(torch.ops.torch_nn, name).default] = lambda reductions=reductions: projected(reductions)
