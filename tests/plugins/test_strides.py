"""The strides of results, as rules say them, are those that the kernels of the CPU give: for every rule's samples, with
their operands transposed, with channels last, expanded, and with gaps.
"""

from itertools import islice

import oracle_rules
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from test_oracle import RULES

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.schema import OpSchema
from shardwise.kernel.signature import op_name, signature
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.results import output_metas
from shardwise.planning.strategies import make_call
from shardwise.private_torch.ops import draws
from shardwise.testing import mesh
from shardwise.testing.samples import by_op, samples_of
from shardwise.testing.trial import flat_operands, split_results, with_operands

# Calls of each op.
MOST = 6

# Kernels that go through a result of another kernel, or an empty one.
INEXACT = (
    "_conj_physical",
    "_fake_quantize",
    "_prelu_kernel",
    "conj_physical",
    "deg2rad",
    "fake_quantize",
    "frexp",
    "glu",
    "hardtanh",
    "ldexp",
    "log_sigmoid",
    "nan_to_num",
    "rad2deg",
    "relu6",
)
# Their strides differ still: those of indices by an index that is transposed, second derivatives, fused cells.
LEFT = ("_thnn_fused", "glu_backward_jvp", "index.Tensor", "resize_as")


def in_order(order):
    def lay(x):
        if x.ndim < 2:
            return None
        dims = [order(x.ndim).index(d) for d in range(x.ndim)]
        return x.permute(order(x.ndim)).clone(memory_format=torch.contiguous_format).permute(dims)

    return lay


def with_gaps(x):
    return x.repeat_interleave(2, -1)[..., ::2] if x.ndim else None


def expanded(dim):
    return lambda x: x.narrow(dim, 0, 1).clone().expand(x.shape) if x.ndim and x.shape[dim] > 1 else None


LAYOUTS = {
    "transposed": in_order(lambda n: (n - 1, *range(1, n - 1), 0)),
    "channels last": in_order(lambda n: (0, *range(2, n), 1)),
    "rolled": in_order(lambda n: (n - 1, *range(n - 1))),
    "gaps": with_gaps,
    "first expanded": expanded(0),
    "last expanded": expanded(-1),
}


def arranged(op, values, lay, which):
    """The arguments with some of their tensors laid out, or None if that changes none."""
    operands = [None if t is None else t.clone() for t in flat_operands(op, values)]
    written = [a.written for a in signature(op).args]
    chosen = [i for i, t in enumerate(operands) if t is not None]
    chosen = {"all": chosen, "first": chosen[:1], "rest": chosen[1:]}[which] if len(chosen) > 1 else chosen
    laid = {i: lay(operands[i]) for i in chosen if operands[i].layout is torch.strided}
    if any(written) or all(x is None for x in laid.values()):
        return None
    return with_operands(op, values, [t if laid.get(i) is None else laid[i] for i, t in enumerate(operands)])


def said(rule, op, values):
    """What the rule says of the results of a call on one device."""

    def spec(value):
        if isinstance(value, torch.Tensor):
            return TensorSpec(AbstractMesh(()), (), TensorMeta.of(value))
        return tuple(map(spec, value)) if isinstance(value, (list, tuple)) else value

    args, kwargs = signature(op).unbind(values)
    named = {name: spec(value) for name, value in kwargs.items()}
    schema = OpSchema.of(op, *map(spec, args), static=rule.static, **named)
    metas = output_metas(op, schema.values, rule.meta)
    return None if metas is None else make_call(rule, schema, metas).outputs


def strides(meta, *, exact):
    """Without ``exact`` of dims of several elements: what the others have is never multiplied by anything but 0."""
    several = [exact or (n > 1 and meta.numel > 0) for n in meta.shape]
    return [step for step, counts in zip(meta.stride, several, strict=True) if counts]


def differences(rule, op, samples, *, exact):
    for args, kwargs in islice(samples, MOST):
        for layout, lay in LAYOUTS.items():
            for which in ("all", "first", "rest"):
                values = arranged(op, signature(op).bind(args, kwargs), lay, which)
                if values is None:
                    continue
                given, named = signature(op).unbind(values)
                try:
                    results, _ = split_results(op, op(*given, **named))
                except Exception:  # noqa: BLE001, S112  the op refuses the call
                    continue
                expected = said(rule, op, values)
                for result, meta in zip(results, expected or (), strict=False):
                    if result is None or meta is None:
                        continue
                    if strides(TensorMeta.of(result), exact=exact) != strides(meta, exact=exact):
                        shapes = [(tuple(t.shape), t.stride()) for t in flat_operands(op, values) if t is not None]
                        yield f"{op_name(op)} of {shapes} ({layout}, {which}): {result.stride()}, not {meta.stride}"


def is_exact(plugin, op):
    """Whether the rule has the strides of dims of one element, and of tensors without elements, right as well."""
    return plugin == "shardwise-pointwise" and not op.__name__.startswith(INEXACT)


def judged_ops(rule):
    for op in rule.ops:
        results = signature(op).results
        if not draws(op) and any(r.is_tensor for r in results) and all(r.alias is None for r in results):
            yield op


# Other kernels read memory by indices and lengths, and crash where these are laid out in another way.
PLUGINS = ("pointwise", "views", "spectral", "random")
NAMED = (
    "conv-re",
    "loss-mse_loss",
    "loss-_log_softmax",
    "loss-_softmax",
    "norm-native_layer_norm",
    "tensor-flip",
    "tensor-roll",
    "tensor-rot90",
    "tensor-cat",
    "tensor-clone",
    "matmul-mm",
    "matmul-bmm",
    "matmul-addmm",
    "reduce-",
)


@pytest.mark.parametrize(("plugin", "rule"), [p for p in RULES if p.id.startswith((*PLUGINS, *NAMED))])
def test_results_have_the_strides_of_the_kernel(plugin, rule):
    samples, stand_ins = (oracle_rules.declared(plugin, what) for what in ("SAMPLES", "STAND_INS"))
    given, instead = by_op(samples), by_op(stand_ins)
    with torch.no_grad():
        wrong = [
            text
            for op in judged_ops(rule)
            if op not in instead and op.namespace == "aten" and not op.__name__.startswith(LEFT)
            for text in differences(rule, op, samples_of(op, given), exact=is_exact(plugin, op))
        ]
    assert not wrong, f"{len(wrong)}: " + "\n".join(wrong[:4])


def compared_with_one_device():
    device_mesh = mesh((4,))
    images = torch.arange(480.0).view(4, 3, 5, 8).contiguous(memory_format=torch.channels_last)
    rows, columns = torch.arange(1.0, 49.0).view(8, 6), torch.arange(1.0, 49.0).view(6, 8).t()

    def calls(images, rows, columns):
        yield torch.roll(images, 1, 2)
        yield torch.roll(images, (1, 2), (0, 2))
        yield torch.roll(images, 1)
        for function in (torch.ldexp, torch.xlogy, torch.copysign, torch.floor_divide, torch.sub, torch.rsub):
            yield from (function(rows, columns), function(columns, rows), function(columns, columns[:, 0:1]))
        for function in (torch.xlogy, torch.copysign, torch.floor_divide):
            yield function(columns, 2.0)
        yield 2.0**columns
        yield F.mse_loss(rows, columns, reduction="none")

    for placement in (Replicate(), Shard(0), Shard(1)):
        parts = [sw.distribute_tensor(x, device_mesh, [placement]) for x in (images, rows, columns)]
        for ours, single in zip(calls(*parts), calls(images, rows, columns), strict=True):
            assert ours.stride() == single.stride()
            assert torch.equal(ours.full_tensor(), single)


def test_results_on_ranks_have_the_strides_of_one_device(pool):
    pool.run(compared_with_one_device)
