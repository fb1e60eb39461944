"""Rules for convolutions and ops on planes: what they say, the traps, and nets and their gradients on real ranks."""

import pytest
import torch
from torch.nn import functional

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.discovery.process import default_registry
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import show_all
from shardwise.kernel.schema import OpSchema
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.results import output_metas
from shardwise.planning.strategies import make_call
from shardwise.testing import mesh

aten = torch.ops.aten
PLAIN = ([1, 1], [1, 1], [1, 1], False, [0, 0])
TURNED = ([1, 1], [1, 1], [1, 1], True, [0, 0])


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def legal_rows(op, *args):
    on = AbstractMesh((2,))
    entry = default_registry().lookup(op)
    specs = [TensorSpec(on, [Replicate()], TensorMeta.of(a)) if isinstance(a, torch.Tensor) else a for a in args]
    schema = OpSchema.of(op, *specs, static=entry.rule.static)
    return entry.rule.rows(make_call(entry.rule, schema, output_metas(op, schema.values)))


def sharded(op, *args):
    """The placements of the rows that shard an operand, without their names."""
    legal = [row for row in legal_rows(op, *args) if any(isinstance(p, Shard) for p in row.inputs)]
    return [f"{show_all(row.inputs)} -> {show_all(row.outputs)}" for row in legal]


def partials(op, *args):
    """The kinds in which the first operand may be partial."""
    return {row.inputs[0].reduce_op for row in legal_rows(op, *args) if isinstance(row.inputs[0], Partial)}


# -- what rules say ----------------------------------------------------------------------------------------------


def test_rows_of_a_convolution_without_bias():
    assert set(sharded(aten.convolution.default, empty(4, 6, 5, 5), empty(8, 6, 3, 3), None, *PLAIN, 1)) == {
        "[S(0), R, -] -> [S(0)]",
        "[S(1), S(1), -] -> [P(sum)]",
        "[R, S(0), -] -> [S(1)]",
        "[S(2), R, -] -> [S(2)]",
        "[S(3), R, -] -> [S(3)]",
    }


def test_rows_of_a_transposed_convolution_without_bias():
    assert set(sharded(aten.convolution.default, empty(4, 6, 5, 5), empty(6, 8, 3, 3), None, *TURNED, 1)) == {
        "[S(0), R, -] -> [S(0)]",
        "[S(1), S(0), -] -> [P(sum)]",
        "[R, S(1), -] -> [S(1)]",
        "[S(2), R, -] -> [S(2)]",
        "[S(3), R, -] -> [S(3)]",
    }


@pytest.mark.parametrize(("kernel", "how"), [((8, 3, 3, 3), PLAIN), ((6, 4, 3, 3), TURNED)])
def test_groups_are_sharded_whole(kernel, how):
    args = (empty(4, 6, 5, 5), empty(*kernel), empty(8), *how, 2)
    assert set(sharded(aten.convolution.default, *args)) == {
        "[S(0), R, R] -> [S(0)]",
        "[S(1), S(0), S(0)] -> [S(1)]",
        "[S(2), R, R] -> [S(2)]",
        "[S(3), R, R] -> [S(3)]",
    }
    by_group = next(row for row in legal_rows(aten.convolution.default, *args) if row.inputs[0] == Shard(1))
    assert {size for _, _, size in by_group.divides} == {2}


def test_rows_of_the_gradients_of_a_convolution():
    args = (empty(4, 8, 5, 5), empty(4, 6, 5, 5), empty(8, 6, 3, 3), [8], *PLAIN, 1)
    assert set(sharded(aten.convolution_backward.default, *args, [True, True, True])) == {
        "[S(0), S(0), R] -> [S(0), P(sum), P(sum)]",
        "[S(1), R, S(0)] -> [P(sum), S(0), S(0)]",
        "[R, S(1), S(1)] -> [S(1), S(1), R]",
        "[S(2), S(2), R] -> [S(2), P(sum), P(sum)]",
        "[S(3), S(3), R] -> [S(3), P(sum), P(sum)]",
    }


def test_adaptive_pooling_keeps_positions_whole():
    rows = ["[S(0)] -> [S(0)]", "[S(1)] -> [S(1)]"]
    assert sharded(aten._adaptive_avg_pool2d.default, empty(4, 6, 8, 8), [2, 2]) == rows
    assert sharded(aten.avg_pool2d.default, empty(4, 6, 8, 8), [2, 2])[2:] == ["[S(2)] -> [S(2)]", "[S(3)] -> [S(3)]"]
    assert sharded(aten._adaptive_avg_pool2d.default, empty(6, 8, 8), [2, 2]) == ["[S(0)] -> [S(0)]"]


# -- traps -------------------------------------------------------------------------------------------------------


def test_a_whole_bias_is_no_plain_addend_of_a_partial_sum():
    rows = legal_rows(aten.convolution.default, empty(4, 6, 5, 5), empty(8, 6, 3, 3), empty(8), *PLAIN, 1)
    plain = [row for row in rows if row.outputs[0] == Partial("sum") and not row.lowered]
    assert [row for row in plain if row.inputs[2] == Replicate()] == []


def test_a_pooled_maximum_has_positions_that_no_partial_tensor_has():
    assert partials(aten.max_pool2d_with_indices.default, empty(4, 6, 8, 8), [2, 2]) == set()


def test_an_average_of_integers_rounds():
    assert partials(aten.avg_pool2d.default, empty(4, 6, 8, 8), [2, 2]) == {"sum", "avg"}
    assert partials(aten.avg_pool2d.default, empty(4, 6, 8, 8, dtype=torch.int64), [2, 2]) == set()


def test_copies_pass_any_reduction_and_their_gradients_only_linear_ones():
    assert partials(aten.upsample_nearest2d.default, empty(4, 6, 8, 8), [16, 16]) >= {
        "sum",
        "avg",
        "max",
        "min",
        "product",
    }
    assert partials(aten.upsample_nearest2d_backward.default, empty(4, 6, 16, 16), [16, 16], [4, 6, 8, 8]) == {
        "sum",
        "avg",
    }


# -- on real ranks -----------------------------------------------------------------------------------------------


def made(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def differentiated(call, tensors, on=None, placements=None):
    """The result and the gradients of a call, whole; on a mesh when one is given."""
    if on is not None:
        tensors = [sw.distribute_tensor(t, on, p) for t, p in zip(tensors, placements, strict=True)]
    leaves = [t.detach().requires_grad_() for t in tensors]
    result = call(*leaves)
    (result * result).sum().backward()
    results = [result, *(leaf.grad for leaf in leaves)]
    return results if on is None else [t.full_tensor() for t in results]


def compare(call, tensors, shape, placements):
    expected = differentiated(call, tensors)
    results = differentiated(call, tensors, mesh(shape), placements)
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


R, S = Replicate(), Shard
# Of input, weight and bias.
CONVOLUTION_LAYOUTS = {
    "batch": ([S(0)], [R], [R]),
    "channels made": ([R], [S(0)], [S(0)]),
    "channels taken": ([S(1)], [S(1)], [R]),
    "positions": ([S(2)], [R], [R]),
}


def refuses_other_channels(layout):
    x, weight = torch.ones(1, 6, 2, 3), torch.ones(4, 2, 2, 3)
    refusal = "to have 4 channels, but got 6 channels instead"
    with pytest.raises(RuntimeError, match=refusal):
        functional.conv_transpose2d(x, weight)
    placed = sw.distribute_tensor(x, mesh((4,)), layout)
    with pytest.raises(RuntimeError, match=refusal):
        functional.conv_transpose2d(placed, sw.distribute_tensor(weight, mesh((4,)), [Replicate()]))
    assert placed.sum().item() == 36


@pytest.mark.parametrize("layout", [[Shard(0)], [Shard(1)], [Shard(3)]])
def test_a_transposed_convolution_of_other_channels_is_refused_on_every_rank(pool, layout):
    pool.run(refuses_other_channels, layout)


@pytest.mark.parametrize("layout", CONVOLUTION_LAYOUTS)
def test_a_convolution_and_its_gradients(pool, layout):
    def call(x, weight, bias):
        return functional.conv2d(x, weight, bias, stride=2, padding=1)

    pool.run(compare, call, [made(5, 6, 7, 6), made(7, 6, 3, 3), made(7)], (4,), CONVOLUTION_LAYOUTS[layout])


@pytest.mark.parametrize("layout", [([S(0), R], [R, S(1)], [R, S(0)]), ([S(0), S(1)], [R, S(0)], [R, R])])
def test_a_transposed_convolution_and_its_gradients(pool, layout):
    tensors = [made(5, 6, 4, 5), made(6, 4, 3, 2), made(4)]
    pool.run(compare, functional.conv_transpose2d, tensors, (2, 2), layout)


@pytest.mark.parametrize(("groups", "shape"), [(4, (4,)), (4, (2, 2)), (2, (4,))])
def test_a_grouped_convolution_and_its_gradients(pool, groups, shape):
    """Two groups do not fill four ranks."""

    def call(x, weight, bias):
        return functional.conv1d(x, weight, bias, groups=groups)

    by_group = [[S(1)] * len(shape), [S(0)] * len(shape), [S(0)] * len(shape)]
    pool.run(compare, call, [made(3, 8, 6), made(12, 8 // groups, 3), made(12)], shape, by_group)


def max_pooled(x):
    return functional.max_pool2d(x, 3, stride=2, padding=1)


def average_pooled(x):
    return functional.adaptive_avg_pool2d(functional.avg_pool2d(x, 2), (2, 3))


def line_pooled(x):
    return functional.max_pool1d(functional.avg_pool1d(x.flatten(2), 2), 3)


def resampled(x):
    wide = functional.interpolate(x, scale_factor=2, mode="nearest")
    return functional.interpolate(wide, size=(5, 9), mode="bilinear", align_corners=False)


def padded(x):
    return functional.pad(functional.pad(x, (1, 2, 0, 1), mode="reflect"), (2, 1, 1, 1), mode="replicate")


def shuffled(x):
    return functional.pixel_unshuffle(functional.pixel_shuffle(x, 2), 2) + x


def folded(x):
    return functional.fold(functional.unfold(x, 2, padding=1), tuple(x.shape[-2:]), 2, padding=1)


CALLS = [max_pooled, average_pooled, line_pooled, resampled, padded, shuffled, folded]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_ops_on_planes_and_their_gradients(pool, call):
    for layout in ([S(0), S(1)], [S(1), S(1)], [S(0), S(0)], [R, S(2)]):
        pool.run(compare, call, [made(5, 8, 6, 8)], (2, 2), [layout])


def without_gradients():
    x, weight = made(5, 6, 7, 6), made(8, 6, 3, 3)
    on = mesh((4,))
    with torch.inference_mode():
        expected = functional.max_pool2d(functional.conv2d(x, weight, padding="same"), 2)
        operands = sw.distribute_tensor(x, on, [Shard(0)]), sw.distribute_tensor(weight, on, [Replicate()])
        result = functional.max_pool2d(functional.conv2d(*operands, padding="same"), 2)
        torch.testing.assert_close(result.full_tensor(), expected)
        assert result.placements == (Shard(0),)


def test_in_inference_mode_composite_ops_come_apart(pool):
    pool.run(without_gradients)
